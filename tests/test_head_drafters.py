"""Drafters with a head draft what the head would draft from scratch: after 0 .. k accepted tokens, over prompt chunks, prefix
hits, preemption and batches, on both layouts and in graphs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Drafter
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.engine import Engine
from forerun.engine.state import RowState
from forerun.heads.block import Block
from forerun.heads.chain import Chain
from forerun.llm import LLM
from forerun.models.decoder import KVCache, Target
from forerun.types import LoadError, Request, SamplingParams, SettingError
from forerun.verify.sampling import SamplingState
from tests import test_heads
from tests.test_device import DEVICES, NoText, prompts
from tests.test_observe import SHAPE
from tests.tiny import tiny_model
from tests.tiny_heads import KINDS, drafts_from_scratch, random_head

K = 4


def engine(
    target: Target, head: Chain | Block, padded: bool, drawn: bool = False, k: int = K, **settings: Any
) -> Engine:
    method = head.config.method
    speculation = Speculation(method, k, model="given", draft_sample_method="probabilistic" if drawn else "greedy")
    given: dict[str, Any] = {
        "max_model_len": 120, "max_num_seqs": 3, "kv_cache_tokens": 104, "block_size": 8, "max_num_batched_tokens": 20,
        "adaptive_drafts": False,
    } | settings  # fmt: skip
    config = EngineConfig(speculation=speculation, **given)

    def make(state: RowState, mirror: RowState, sampling: SamplingState, kv: KVCache, padded: bool) -> Drafter:
        return TABLE[method](speculation, DrafterContext(state, mirror, sampling, kv, config, padded, target.vocab, None, head))

    return Engine(target, config, make, NoText, padded)


def request(name: str, prompt: list[int], tokens: int, **params: Any) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": tokens} | params), tokens, 0)


def differing(it: Engine, target: Target, head: Chain | Block, seen: set[str]) -> int:
    """Drafts at hand, of all rows, that differ from those from scratch."""
    wrong = 0
    for sequence in it.scheduler.running:
        slot, length = sequence.slot, int(it.state.length[sequence.slot])
        size = int(it.state.draft_size[slot])
        if not bool(it.state.active[slot]) or not size or length < 2:
            continue
        if (length - 1 + K) // 8 >= len(sequence.pages):  # no free page for the drafter's entries of drafts
            seen.add("no page")
            continue
        want = drafts_from_scratch(target, head, it.state.tokens[slot, :length].tolist(), K)
        got = it.state.draft[slot, :size].tolist()
        seen.add(f"draft of {size}")
        wrong += got != want[:size]
    return wrong


def lived(it: Engine, target: Target, head: Chain | Block, seen: set[str]) -> int:
    """Serve chats of several turns on few small pages. Return how many drafts were wrong."""
    rng, texts, wrong = random.Random(3), prompts(4, 3, 260), 0
    for turn in range(3):
        got: dict[str, list[int]] = {}
        for i, text in enumerate(texts):
            it.add(request(f"{turn}.{i}", text, rng.randint(10, 16)))
            got[f"{turn}.{i}"] = []
        while it.has_work:
            for event in it.step():
                got[event.request_id] += event.tokens
                if event.counts is not None:
                    seen.add(f"{event.counts[1]} of {event.counts[0]}")
            wrong += differing(it, target, head, seen)
        texts = [text + got[f"{turn}.{i}"] + [7 + turn, 9] for i, text in enumerate(texts)]
    seen |= {"preempted"} if it.stats.preemptions else set()
    seen |= {"cached"} if it.stats.cached_tokens else set()
    return wrong


@DEVICES
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_from_scratch(tmp_path: Path, kind: str, padded: bool, device: str) -> None:
    if device == "cuda" and not padded:
        pytest.skip("the exact layout is for the CPU")
    target = Target.load(tiny_model(tmp_path / "tiny", **SHAPE), torch.float32, device)
    head = random_head(target, kind)
    seen: set[str] = set()
    wrong = lived(engine(target, head, padded), target, head, seen)
    assert wrong == 0 and seen >= {"preempted", "cached", f"draft of {K}"}, seen


def test_an_llm_drafts_with_a_head_from_a_folder(tmp_path: Path) -> None:
    """Greedy answers are those without drafts, and the head's drafts are verified."""
    sizes: dict[str, Any] = {"hidden": test_heads.H, "layers": test_heads.LAYERS}
    model = LLM.load(tiny_model(tmp_path / "tiny", **sizes), "float32")
    head = test_heads.eagle3_folder(tmp_path / "head", test_heads.Eagle3().tensors())
    prompts, params = [[5, 6, 7, 8, 9], list(range(20, 60))], SamplingParams(temperature=0, max_tokens=24)
    small: dict[str, Any] = {"kv_cache_tokens": 512, "max_model_len": 128, "adaptive_drafts": False}
    plain = LLM(model, **small).generate(prompts, params)
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    llm = LLM(model, speculative_config=config, **small)
    assert [o.token_ids for o in llm.generate(prompts, params)] == [o.token_ids for o in plain]
    assert llm.stats.drafts.drafted > 30
    with pytest.raises(LoadError, match="mtp"):
        LLM(model, speculative_config="mtp", **small)
    with pytest.raises(SettingError, match="gguf file holds no MTP"):
        LLM(None, speculative_config="mtp", **small)
