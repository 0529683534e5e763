"""An engine with captured launches, against its twin that runs them operation by operation. Without a GPU the kernels run under
Triton's interpreter, in float32, and a graph is replaced by the same work into the same tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions and ours are defined, at the imports below
pytest.importorskip("triton", reason="the CUDA kernels are written in Triton, which is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/test_device.py captures there", allow_module_level=True)

from forerun.config import EngineConfig, Speculation
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.ngram import DeviceNgram
from forerun.engine import engine as engines
from forerun.engine import runner
from forerun.engine.cycle import PROMPT, SHARED, UNIFORM, Cycle, Key, Report
from forerun.engine.engine import Engine
from forerun.engine.fused import FusedCycle
from forerun.engine.runner import Graphs
from forerun.kernels import reference
from forerun.kernels.cuda import CudaKernels
from forerun.models.config import ModelConfig, Rope
from forerun.models.decoder import Target
from forerun.types import Event, Request, SamplingParams
from tests.test_cuda_kernels import interpreter_that_numpy_allows  # noqa: F401  (a fixture for all tests here)
from tests.test_device import NoText

NGRAM = Speculation("ngram", 3, 1, 3)


class Again:
    """Replaces a CUDA graph: it does the work again and copies the report into the tensors of the first run."""

    def __init__(self, work: Callable[[], Report], report: Report) -> None:
        self.work, self.report = work, report

    def replay(self) -> None:
        report = self.work()
        for old, new in zip(self.report[:2], report[:2], strict=True):
            old.copy_(new)
        for old, new in zip(self.report.logprobs or (), report.logprobs or (), strict=True):
            old.copy_(new)


def copied(report: Report) -> Report:
    """A copy, as the transfer to the host makes one on a GPU."""
    logprobs = report.logprobs and tuple(part.clone() for part in report.logprobs)
    return Report(report.tokens.clone(), report.counts.clone(), logprobs)  # type: ignore[arg-type]


class Repeated(Graphs):
    def run(self, key, given):  # type: ignore[no-untyped-def]
        return copied(super().run(key, given))

    def _record(self, work):  # type: ignore[no-untyped-def]
        report = work()
        return Again(work, report), report

    def _time(self, graph: object) -> float:  # type: ignore[override]
        """While it is timed, the dummy slot is in the middle of an answer, and writes only to the dummy page."""
        state, kv, dummy = self.cycle.state, self.cycle.kv, self.cycle.state.dummy
        assert state.active[dummy] and state.length[dummy] > kv.block_size
        assert not state.block_table[dummy, (state.length[dummy] - 2) // kv.block_size :].any()
        before = [keys[1:].clone() for keys in (*kv.keys, *kv.values)], state.length[:dummy].clone()
        graph.replay()  # type: ignore[attr-defined]
        assert state.length[dummy] % kv.block_size != 1, "it has gone on"
        after = [keys[1:] for keys in (*kv.keys, *kv.values)]
        assert all(torch.equal(a, b) for a, b in zip(before[0], after, strict=True))
        assert torch.equal(state.length[:dummy], before[1])
        return 1.0


def target(captured: bool) -> Target:
    """A target with one layer and so few tokens that its text soon repeats itself."""
    shape = ModelConfig(13, 32, 48, 1, 2, 1, 16, 64, 1e-5, Rope(1e4), tied=True)
    return Target.random(shape, torch.float32, "cpu", CudaKernels("cpu") if captured else reference, seed=3)


def answers(it: Engine, requests: list[Request]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {one.id: [] for one in requests}
    for one in requests:
        it.add(one)
    while it.has_work:
        for event in it.step():
            found[event.request_id].append(event)
    return found


def captured_by(it: Engine) -> set[Key]:
    assert isinstance(it._step.runner, Graphs)
    return set(it._step.runner._graphs)


def request(name: str, prompt: list[int], tokens: int, **params: object) -> Request:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens} | params)  # type: ignore[arg-type]
    return Request(name, tuple(prompt), given, tokens, 11 + len(name), (2,))


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_captured_launches_are_those_of_the_twin(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """More requests than slots join and leave. Tokens, logprobs and drafts are the same, step by step."""
    again = [5, 6, 7, 5, 6]
    requests = [request("a", again, 8), request("bb", [9, 8, 7], 3), request("ccc", again * 2, 5, logprobs=2)]
    if kind == "sampled":
        requests = [
            request("a", again, 6, temperature=0.9, top_p=0.8),
            request("bb", again, 4, temperature=0.7, top_k=5, min_p=0.01, presence_penalty=0.3),
            request("ccc", [4] * 5, 5, temperature=1.2),
        ]
    config = EngineConfig(max_model_len=48, max_num_seqs=2, kv_cache_tokens=128, block_size=8, speculation=NGRAM)
    seen = []
    for captured in (False, True):
        monkeypatch.setattr(engines, "captures", lambda target, captured=captured: captured)
        monkeypatch.setattr(engines, "Graphs", Repeated)
        it = Engine(target(captured), config, lambda slots, *_: DeviceNgram(slots, NGRAM, 13), NoText, padded=True)
        found = answers(it, requests)
        ids = {name: [token for event in events for token in event.tokens] for name, events in found.items()}
        reasons = {name: events[-1].finish_reason for name, events in found.items()}
        drafts = it.stats.drafts
        seen.append((ids, reasons, drafts.drafted, drafts.accepted, it.stats.steps))
        assert drafts.drafted > 0
        noted = [entry for events in found.values() for event in events for entry in event.logprobs]
        assert len(noted) == (len(ids["ccc"]) if kind == "greedy" else 0)
        if captured:
            assert isinstance(it._step.cycle, FusedCycle)
            assert {key.layout for key in captured_by(it)} == {UNIFORM, PROMPT}
    assert seen[0] == seen[1]


class Sharing(Repeated):
    """A runner for which launches with shared drafts look cheapest."""

    def cost(self, keys, context):  # type: ignore[no-untyped-def]
        return [1.0 if key.layout == SHARED or key.width == 0 else 9.0 for key in keys]


@pytest.mark.parametrize("fused", [True, False])
def test_rows_that_share_their_drafts(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Launches of six rows with shared drafts give the tokens of the exact layout without drafts."""
    again = [[i, 6, 7, i, 6] for i in range(6)]
    requests = [request("x" * (i + 1), ids, 6, temperature=0.6 * (i % 2), logprobs=i or None) for i, ids in enumerate(again)]
    monkeypatch.setattr(engines, "captures", lambda target: True)
    monkeypatch.setattr(engines, "Graphs", Sharing)
    if not fused:
        monkeypatch.setattr(engines, "fused_cycle", lambda: Cycle)
    config = EngineConfig(max_model_len=24, max_num_seqs=6, kv_cache_tokens=256, block_size=8, speculation=NGRAM)
    plain = replace(config, speculation=None)
    it = Engine(target(fused), config, lambda slots, *_: DeviceNgram(slots, NGRAM, 13), NoText, padded=True)
    got, want = (answers(one, requests) for one in (it, Engine(target(False), plain, lambda *_: None, NoText, padded=False)))
    for one in requests:
        assert [t for e in got[one.id] for t in e.tokens] == [t for e in want[one.id] for t in e.tokens]
        noted, expected = ([entry for e in found[one.id] for entry in e.logprobs] for found in (got, want))
        assert [n.token for n in noted] == [n.token for n in expected]
        assert [n.logprob for n in noted] == pytest.approx([n.logprob for n in expected], abs=1e-4)
        assert [[t for t, _ in n.top] for n in noted] == [[t for t, _ in n.top] for n in expected]
    ran = {key.tokens - key.rows for key in captured_by(it) if key.layout == SHARED}
    assert 10 in ran and it.stats.drafts.accepted > 0, "16 tokens for six rows: ten drafts"


def test_warming_up_captures_what_greedy_requests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "captures", lambda target: True)
    monkeypatch.setattr(engines, "Graphs", Repeated)
    config = EngineConfig(max_model_len=24, max_num_seqs=2, kv_cache_tokens=64, block_size=8, speculation=NGRAM)
    it = Engine(target(True), config, lambda slots, *_: DeviceNgram(slots, NGRAM, 13), NoText, padded=True)
    it.warm_up()
    before = captured_by(it)
    shapes = {key[:4] for key in before if key.layout != PROMPT}
    assert any(key.layout == PROMPT for key in before)
    assert shapes == {(UNIFORM, 1, 1, 0), (UNIFORM, 1, 4, 3), (UNIFORM, 2, 2, 0), (UNIFORM, 2, 8, 3)}
    assert shapes == {key[:4] for key in it._step.runner.costs}  # type: ignore[attr-defined]
    answers(it, [request("a", [5, 6, 5, 6], 4), request("b", [7, 8, 7, 8], 3)])
    assert captured_by(it) == before


def test_captured_launches_with_drawn_drafts_are_those_of_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused cycle finds the target's filters without sorting. One request fills its pages, so another is preempted."""
    settings = {"method": "draft_model", "model": "x", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    speculation = Speculation.parse(settings | {"rejection_sample_method": "block"})
    requests = [
        request("a", [5, 6, 7], 12, temperature=0.9, top_p=0.8),
        request("bb", [4, 4], 12, temperature=0.7, top_k=5, min_p=0.01, presence_penalty=0.3),
        request("ccc", [9, 8], 5),
    ]
    config = EngineConfig(max_model_len=24, max_num_seqs=2, kv_cache_tokens=24, block_size=8, speculation=speculation)
    seen = []
    for captured in (False, True):
        monkeypatch.setattr(engines, "captures", lambda target, captured=captured: captured)
        monkeypatch.setattr(engines, "Graphs", Repeated)

        def make(slots, mirror, sampling, kv, padded, captured=captured):  # type: ignore[no-untyped-def]
            model = target(captured)
            own = model.kv_cache(kv.pages, kv.block_size)
            return DraftModel(model, own, slots, sampling, 13, True, True, 24, 64)

        it = Engine(target(captured), config, make, NoText, padded=True)
        found = answers(it, requests)
        ids = {name: [token for event in events for token in event.tokens] for name, events in found.items()}
        seen.append((ids, it.stats.drafts.drafted, it.stats.drafts.accepted, it.stats.preemptions))
        assert it.stats.drafts.accepted > 0 and it.stats.preemptions > 0
    assert seen[0] == seen[1]


def test_rare_launches_are_captured_only_if_they_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a warm engine requests with any penalties, bans, filters and logprobs cause few captures: for each shape three classes
    of sampling features and two sizes of logprobs."""
    monkeypatch.setattr(engines, "captures", lambda target: True)
    monkeypatch.setattr(engines, "Graphs", Repeated)
    monkeypatch.setattr(runner, "UNCAPTURED", 2)
    config = EngineConfig(max_model_len=40, max_num_seqs=1, kv_cache_tokens=64, block_size=8)
    it = Engine(target(True), config, lambda *_: None, NoText, padded=True)
    it.warm_up()
    before = captured_by(it)
    kinds = [
        {"temperature": 1.0, "top_p": 0.7, "min_p": 0.1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0, 4: 2.0}},
        {"logprobs": 0}, {"logprobs": 7},
    ]  # fmt: skip
    plain = Engine(target(False), config, lambda *_: None, NoText, padded=False)
    for i, params in enumerate(kinds):
        one = request("a" * (i + 1), [5, 6, 7], 4, **params)
        got, want = answers(it, [one]), answers(plain, [one])
        assert [t for e in got[one.id] for t in e.tokens] == [t for e in want[one.id] for t in e.tokens]
        if i == 0:
            assert captured_by(it) == before
    more = {(key.rows, key.features, key.top) for key in captured_by(it) - before if key.layout == UNIFORM}
    assert len(more) == 2 and {key[2] for key in more} == {-1, 20}
