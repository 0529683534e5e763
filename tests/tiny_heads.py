"""Random heads for tiny targets, and drafts of a head from scratch, without pages that are kept, slots or batches."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.heads.block import Block, BlockWeights
from forerun.heads.chain import Chain, ChainWeights, Module
from forerun.heads.config import HeadConfig
from forerun.kernels import Batch
from forerun.models import rope
from forerun.models.config import ModelConfig
from forerun.models.decoder import KVCache, Target
from forerun.models.weights import Dense, Layer

SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate_size": 128}
KINDS = ("eagle", "eagle3", "eagle3 mapped", "mtp", "mtp of 3", "dflash")


def random_head(target: Target, kind: str, seed: int = 0) -> Chain | Block:
    """kind: one of KINDS. The target has 128 hidden numbers or more, whole heads of 64."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab, layers = target.config.hidden_size, target.vocab, target.config.layers
    method, _, rest = kind.partition(" ")
    modules = 3 if rest == "of 3" else 2 if method == "dflash" else 1
    chain3 = method == "eagle3"
    draft_vocab = vocab // 2 if rest == "mapped" else vocab

    def matrix(rows: int, columns: int, scale: float = 1.5) -> Dense:
        values = torch.randn(rows, columns, generator=generator) * scale * columns**-0.5
        return Dense(values.to(target.dtype).to(target.device))

    def norm(size: int = hidden) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(target.dtype).to(target.device)

    q = SHAPE["heads"] * SHAPE["head_dim"]
    kv = SHAPE["kv_heads"] * SHAPE["head_dim"]
    heads_normed = method == "dflash"

    def layer() -> Layer:
        return Layer(
            norm() if method in ("mtp", "dflash") else norm(0), matrix(q + 2 * kv, 2 * hidden if chain3 else hidden), None,
            norm(64) if heads_normed else None, norm(64) if heads_normed else None, matrix(hidden, q), None, norm(),
            matrix(2 * SHAPE["intermediate_size"], hidden), matrix(hidden, SHAPE["intermediate_size"]),
        )  # fmt: skip

    decoder = ModelConfig(draft_vocab, hidden, layers=modules, max_positions=512, qk_norm=heads_normed, **SHAPE)
    states = (1, layers) if method in ("eagle3", "dflash") else (layers,)
    config = HeadConfig(
        method, decoder, hidden, vocab, layers, states, normed=method in ("eagle", "mtp"), own_head=chain3,
        state_norms="each" if chain3 else "none", zero_first=method == "mtp", norm_output=method == "mtp",
        embedding_first=rest != "of 3", modules=1 if method == "dflash" else modules, block_size=5 * heads_normed, mask_id=3,
    )  # fmt: skip
    cos, sin = rope.tables(decoder.rope, decoder.head_dim, target.max_positions + 65, target.device)
    shared = target.weights
    ids = None
    if rest == "mapped":
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values.to(target.device)
    fc = matrix(hidden, len(states) * hidden) if method in ("eagle3", "dflash") else None
    if method == "dflash":
        assert fc is not None
        own = tuple(layer() for _ in range(modules))
        block = BlockWeights(target.dtype, shared.embedding, fc, norm(), own, norm(), shared.head)
        return Block(config, block, target.kernels, cos, sin)
    made = tuple(
        Module(
            *((None, None) if method == "eagle" else (norm(), norm())), None if chain3 else matrix(hidden, 2 * hidden), None,
            layer(), None if method == "eagle" else norm(),
        )
        for _ in range(modules)
    )
    weights = ChainWeights(
        target.dtype, shared.embedding, made, matrix(draft_vocab, hidden, 3.0) if chain3 else shared.head, fc,
        (norm(), norm()) if chain3 else (), shared.norm if config.normed else None, ids,
    )  # fmt: skip
    return Chain(config, weights, target.kernels, cos, sin)


def one_row(target: Target, ids: list[int], begin: int, pages: int) -> Batch:
    whole = {"dtype": torch.int64, "device": target.device}
    return Batch(
        torch.tensor(ids, **whole), torch.arange(begin, begin + len(ids), **whole),
        torch.tensor([0, len(ids)], dtype=torch.int32, device=target.device),
        torch.arange(1, pages, dtype=torch.int32, device=target.device)[None], None,
    )  # fmt: skip


@torch.inference_mode()
def drafts_from_scratch(target: Target, head: Chain | Block, ids: list[int], k: int) -> list[int]:
    """k greedy drafts after the committed tokens, at least 2, from the target's states of all of them but the last."""
    count, pages = len(ids), len(ids) // 8 + k + 4
    states = target.forward(one_row(target, ids[:-1], 0, pages), target.kv_cache(pages, 8), head.config.states).hidden
    kv = KVCache(head.config.decoder, pages, 8, target.dtype, target.device)
    if isinstance(head, Block):
        head.context(states, one_row(target, ids[:-1], 0, pages), kv.keys, kv.values)
        block = one_row(target, [ids[-1], *[head.config.mask_id] * k], count - 1, pages)
        out = head.run(target.kernels.embed(block.ids, head.weights.embedding), block, kv.keys, kv.values)
        return head.logits(out)[1:].argmax(-1).tolist()
    known = list(ids)
    feature = head.encode(states)
    for module in range(head.config.modules):
        batch = one_row(target, known[1:], 0, pages)
        embedded = head.embed(batch.ids, batch.positions)
        output = head.hand_on(module, head.run(module, embedded, feature, batch, kv.keys[module], kv.values[module]))
        draft_token(head, module, output, known)
        feature = torch.cat((torch.zeros_like(output[:1]), output))
    while len(known) < count + k:
        batch = one_row(target, known[-1:], len(known) - 2, pages)
        embedded = head.embed(batch.ids, batch.positions)
        output = head.hand_on(module, head.run(module, embedded, output[-1:], batch, kv.keys[module], kv.values[module]))
        draft_token(head, module, output, known)
    return known[count : count + k]


def draft_token(head: Chain, module: int, output: Tensor, known: list[int]) -> None:
    best = int(head.logits(module, output[-1:]).argmax())
    known.append(best if head.weights.ids is None else int(head.weights.ids[best]))
