"""Samples and shapes of heads for tests of training: a tiny target and its own greedy answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from forerun.heads.config import HeadConfig
from forerun.models.config import ModelConfig
from forerun.models.decoder import Target
from forerun.train.data import Samples
from tests.tiny import tiny_model
from tests.tiny_heads import one_row

HIDDEN, LAYERS, DIM = 64, 3, 32


def tiny_target(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
    return Target.load(tiny_model(folder / "target", hidden=HIDDEN, layers=LAYERS, vocab=280), dtype, device)


def samples(target: Target, count: int = 12, seed: int = 0, least: int = 3, most: int = 30) -> Samples:
    """Random prompts with the target's greedy answers, of different lengths."""
    rng = np.random.default_rng(seed)
    texts, prompts = [], []
    for _ in range(count):
        prompt = int(rng.integers(least, least + 9))
        ids = rng.integers(3, target.vocab, prompt).tolist()
        kv, pages, answer = target.kv_cache(12, 8), 12, int(rng.integers(most // 2, most))
        given, begin = ids, 0
        for _ in range(answer):
            batch = one_row(target, given, begin, pages)
            begin += len(given)
            given = [int(target.forward(batch, kv).logits[-1].argmax())]
            ids = ids + given
        texts.append(ids)
        prompts.append(prompt)
    start = np.cumsum([0, *map(len, texts)])
    return Samples(np.concatenate(texts).astype(np.int32), start.astype(np.int64), np.array(prompts, np.int32))


def head_config(target: Target, kind: str) -> HeadConfig | ModelConfig:
    """kind: eagle3, eagle3 mapped, mtp, mtp of 2, eagle, dflash, draft."""
    if kind == "draft":
        return ModelConfig(target.config.vocab_size, 48, 96, 2, 2, 1, 32, 512, tied=True, dtype="float32")
    method, _, rest = kind.partition(" ")
    modules = 2 if rest == "of 2" or method == "dflash" else 1
    vocab = 150 if rest == "mapped" else target.config.vocab_size
    decoder = ModelConfig(
        vocab, HIDDEN, 128, modules, 4, 2, DIM, 512, 1e-5, target.config.rope, qk_norm=method == "dflash", dtype="float32"
    )
    chosen = {"eagle3": (0, 2, 3), "dflash": (1, 3)}.get(method, (LAYERS,))
    return HeadConfig(
        method, decoder, HIDDEN, target.config.vocab_size, LAYERS, chosen, normed=method in ("eagle", "mtp"),
        own_head=method == "eagle3", state_norms="each" if method == "eagle3" else "none", zero_first=rest == "of 2",
        norm_output=rest == "of 2", embedding_first=rest != "of 2", modules=1 if method == "dflash" else modules,
        block_size=5 * (method == "dflash"), mask_id=0,
    )  # fmt: skip
