"""Drafters with a head draft what the head would draft from scratch: after 0 .. k accepted tokens, over prompt chunks, prefix
hits, preemption and batches, on both layouts and in graphs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Drafter, Observed, Rows
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.engine import Engine
from forerun.engine.state import RowState
from forerun.heads.block import Block
from forerun.heads.chain import Chain
from forerun.llm import LLM
from forerun.models.decoder import KVCache, Target
from forerun.models.files import MANIFEST
from forerun.types import Draft, LoadError, Request, SamplingParams, SettingError
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


class Helped:
    """Lets the drafter draft, keeps its drafts, and puts the known answer in place of 0 .. K tokens, so that these are
    accepted."""

    def __init__(self, it: Engine) -> None:
        assert it.drafter is not None
        self.state, self.inner, self.known = it.state, it.drafter, dict[str, list[int]]()
        self.answer = torch.zeros_like(it.state.tokens)
        self.drafts = torch.zeros_like(it.state.draft)
        self.propose, self.admit = it.drafter.propose, it.drafter.admit
        it.drafter.propose, it.drafter.admit = self.proposed, self.admitted  # type: ignore[method-assign]

    def admitted(self, slot: int, request: Request) -> None:
        self.admit(slot, request)
        ids = [*request.prompt_ids, *self.known.get(request.id, ())]
        self.answer[slot, : len(ids)] = torch.tensor(ids).to(self.answer.device)

    def proposed(self, rows: Rows) -> Draft:
        draft = self.propose(rows)
        length, width = self.state.length[rows.slot], draft.tokens.shape[1]
        self.drafts[rows.slot, :width] = draft.tokens
        at = torch.arange(width, device=length.device)
        right = at < ((length + length // 3 + rows.slot) % (K + 1))[:, None]
        answer = self.answer[rows.slot].gather(1, (length[:, None] + at).clamp(max=self.answer.shape[1] - 1))
        return draft._replace(tokens=torch.where(right, answer, draft.tokens))


def differing(it: Engine, target: Target, head: Chain | Block, helped: Helped, seen: Counter[str]) -> int:
    """Drafts at hand, of all rows, that differ from those from scratch."""
    wrong = 0
    for sequence in it.scheduler.running:
        slot, length = sequence.slot, int(it.state.length[sequence.slot])
        size = int(it.state.draft_size[slot])
        if not bool(it.state.active[slot]) or not size or length < 2:
            continue
        if (length - 1 + K) // 8 >= len(sequence.pages):  # no free page for the drafter's entries of drafts
            seen["no page"] += 1
            continue
        want = drafts_from_scratch(target, head, it.state.tokens[slot, :length].tolist(), K)
        got = helped.drafts[slot, :size].tolist()
        seen[f"draft of {size}"] += 1
        wrong += got != want[:size]
    return wrong


Check = Callable[[Engine, Target, Chain | Block, Helped, Counter[str]], int]


def lived(it: Engine, target: Target, head: Chain | Block, seen: Counter[str], check: Check = differing) -> int:
    """Serve chats of several turns on few small pages. Return how many drafts were wrong. check: finds those at hand."""
    plain = Engine(target, EngineConfig(max_model_len=120, kv_cache_tokens=512), lambda *_: None, NoText, it._step.lag > 0)
    helped = Helped(it)
    rng, texts, wrong = random.Random(3), prompts(4, 3, 260), 0

    def answers(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
        nonlocal wrong
        got: dict[str, list[int]] = {one.id: [] for one in requests}
        for one in requests:
            engine.add(one)
        while engine.has_work:
            for event in engine.step():
                got[event.request_id] += event.tokens
                if engine is it and event.counts is not None:
                    seen[f"{event.counts[1]} of {event.counts[0]}"] += 1
            if engine is it:
                wrong += check(it, target, head, helped, seen)
        return got

    for turn in range(3):
        asked = [request(f"{turn}.{i}", text, rng.randint(10, 16)) for i, text in enumerate(texts)]
        helped.known = answers(plain, asked)
        got = answers(it, asked)
        texts = [text + got[f"{turn}.{i}"] + [7 + turn, 9] for i, text in enumerate(texts)]
    seen += Counter(preempted=it.stats.preemptions, cached=it.stats.cached_tokens)
    return wrong


CASES = ("preempted", "cached", f"draft of {K}", *(f"{n} of {K}" for n in range(K + 1)))


@DEVICES
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_from_scratch(tmp_path: Path, kind: str, padded: bool, device: str) -> None:
    if device == "cuda" and not padded:
        pytest.skip("the exact layout is for the CPU")
    target = Target.load(tiny_model(tmp_path / "tiny", **SHAPE), torch.float32, device)
    head = random_head(target, kind)
    seen = Counter[str]()
    wrong = lived(engine(target, head, padded), target, head, seen)
    assert wrong == 0 and all(seen[case] for case in CASES), seen


@DEVICES
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_draft_too(tmp_path: Path, kind: str, device: str) -> None:
    """In bfloat16, which is captured on CUDA. Rounding differs between the shapes of launches, so some drafts may differ."""
    target = Target.load(tiny_model(tmp_path / "tiny", **SHAPE), torch.bfloat16, device)
    head = random_head(target, kind)
    seen = Counter[str]()
    wrong = lived(engine(target, head, True), target, head, seen)
    assert wrong < 0.15 * sum(n for case, n in seen.items() if case.startswith("draft of")), (wrong, seen)


@pytest.mark.parametrize("fault", ["states of the token before", "drafts are not overwritten"])
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_wrong_states_are_noticed(tmp_path: Path, kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.load(tiny_model(tmp_path / "tiny", **SHAPE), torch.float32)
    head = random_head(target, kind)
    it = engine(target, head, False)
    assert it.drafter is not None
    observe = it.drafter.observe

    def wrong_observe(seen: Observed) -> None:
        if fault == "states of the token before":
            observe(seen._replace(hidden=tuple(state.roll(1, 0) for state in seen.hidden)))
        elif seen.pending is not None:  # only the last position of each row
            observe(seen._replace(committed=seen.committed.clamp(max=1)))

    monkeypatch.setattr(it.drafter, "observe", wrong_observe)
    assert lived(it, target, head, Counter()) > 0


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
    in_gguf = tmp_path / "gguf"
    in_gguf.mkdir()
    (in_gguf / MANIFEST).write_text("{}")
    with pytest.raises(SettingError, match="gguf file holds no MTP"):
        LLM(model._replace(folder=in_gguf), speculative_config="mtp", **small)
