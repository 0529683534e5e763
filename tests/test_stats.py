"""What requests and the engine report: counts, times, the KV cache's use, and the estimated speed-up."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Sequence
from dataclasses import asdict
from math import nan
from pathlib import Path

import pytest

from forerun.engine.cycle import EXACT, Key, Times, decode_key
from forerun.engine.engine import Engine
from forerun.engine.owner import Owner
from forerun.engine.speedup import FEWEST, Decoded, Speedup
from forerun.engine.stats import DraftStats, RequestStats, prediction_counts
from forerun.models.decoder import Target
from tests.test_engine import LAYOUTS, engine, prompts, request, run, speculative
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder, "float32")


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common subsequence, by its definition."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for i, y in enumerate(b):
            row.append(before[i] + 1 if x == y else max(row[i], before[i + 1]))
    return row[-1]


@pytest.mark.parametrize("seed", range(6))
def test_prediction_counts_are_those_of_the_longest_common_subsequence(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        a, b = ([rng.randrange(rng.choice((2, 5, 40))) for _ in range(rng.randrange(0, 90))] for _ in range(2))
        if rng.random() < 0.5:
            b = [token for token in a if rng.random() < 0.8]
        accepted, rejected = prediction_counts(a, b)
        assert accepted == common(a, b) and accepted + rejected == len(a)


def test_accepted_lengths_are_a_histogram() -> None:
    stats, rng = DraftStats(), random.Random(0)
    assert stats.accepted_lengths == []
    steps = [(drafted := rng.randint(0, 4), rng.randint(0, drafted)) for _ in range(200)]
    for step in steps:
        stats.count(*step)
    drafting = [accepted for drafted, accepted in steps if drafted]
    assert stats.accepted_lengths == [drafting.count(n) for n in range(5)] and sum(stats.accepted_lengths) == len(drafting)


def all_events(it: Engine) -> list:
    events = []
    while it.has_work:
        events += it.step()
    return events


@LAYOUTS
def test_the_last_event_has_the_requests_counts_and_times(folder: Path, target: Target, padded: bool) -> None:
    """Two requests share a prompt; there are pages for few of them, so that some are preempted."""
    texts = prompts(4, 4)
    requests = [request(str(i), (p * 9)[:33], max_tokens=20 + i, stop_ids=()) for i, p in enumerate([*texts, texts[0]])]
    plain = run(engine(folder, target), requests)
    rng = random.Random(1)
    settings = {"kv_cache_tokens": 208, "max_num_seqs": 4}
    it = speculative(folder, target, plain, 4, lambda: rng.randint(0, 4), padded=padded, **settings)
    sequences = {one.id: it.add(one) for one in requests}
    events = all_events(it)
    last = {e.request_id: e.stats for e in events if e.finish_reason is not None}
    assert all((e.stats is not None) == (e.finish_reason is not None) for e in events) and set(last) == set(sequences)
    for name, sequence in sequences.items():
        stats = last[name]
        assert stats == sequence.report() and pickle.loads(pickle.dumps(stats)) == stats
        assert stats.prompt_tokens == 33 and stats.output_tokens == len(plain[name].ids)
        assert stats.output_tokens == 1 + stats.drafts.steps + stats.drafts.accepted
        assert stats.queued_s > 0 and stats.prefill_s > 0 and stats.decode_s > 0
        whole = sequence.ended_at - sequence.arrived_at
        assert stats.queued_s + stats.prefill_s + stats.decode_s == pytest.approx(whole)
    assert last["4"].queued_s > last["0"].queued_s  # it waited for a slot
    assert sum(one.preemptions for one in last.values()) == it.stats.preemptions > 0
    cached = {name: one.cached_tokens for name, one in last.items()}
    assert cached["4"] == 32 and not any(cached[name] for name in "0123")
    json.dumps(asdict(last["0"]))


@LAYOUTS
def test_an_aborted_request_reports_what_it_reached(folder: Path, target: Target, padded: bool) -> None:
    owner = Owner(engine(folder, target, max_num_seqs=1, padded=padded))
    stream = owner.submit([request(name, [5, 6, 7], stop_ids=()) for name in ("runs", "waits")])
    for _ in range(4):
        owner.advance()
    assert owner.abort("runs") and owner.abort("waits") and not owner.abort("waits")
    last = {e.request_id: e.stats for _, e in stream.take() if e.finish_reason == "abort"}
    runs, waits = last["runs"], last["waits"]
    assert isinstance(runs, RequestStats) and isinstance(waits, RequestStats)
    assert runs.output_tokens > 0 and runs.decode_s > 0
    assert waits.output_tokens == 0 and waits.queued_s > 0 and waits.prefill_s == waits.decode_s == 0
    assert owner.stats().finished == {"abort": 2}


@LAYOUTS
def test_a_snapshot_shows_load_and_totals(folder: Path, target: Target, padded: bool) -> None:
    requests = [request(str(i), p, max_tokens=30, stop_ids=()) for i, p in enumerate([*prompts(3, 3), [9] * 40, [9] * 40])]
    plain = run(engine(folder, target), requests)
    it = speculative(folder, target, plain, 3, lambda: 2, padded=padded, max_num_seqs=2)
    for one in requests:
        it.add(one)
    before = it.snapshot()
    assert (before.running, before.waiting, before.kv_used, before.speedup) == (0, 5, 0, None)
    it.step(), it.step()
    during = it.snapshot()
    held = sum(len(s.pages) for s in it.scheduler.running) * 16
    assert (during.running, during.waiting, during.kv_used) == (2, 3, held) and during.kv_tokens == 2048
    steps = during.totals.steps
    all_events(it)
    assert during.totals.steps == steps < it.stats.steps, "a snapshot may not change"
    after = it.snapshot()
    assert (after.running, after.waiting, after.kv_used) == (0, 0, 0)
    assert after.totals.finished == {"length": 5} and after.totals.output_tokens == 150
    assert after.totals.queried_tokens == sum(len(one.prompt_ids) for one in requests)
    assert after.totals.cached_tokens == 32  # of the last prompt
    assert after.totals.prompt_tokens + after.totals.cached_tokens == after.totals.queried_tokens
    assert after.divided == (padded is False) and pickle.loads(pickle.dumps(after)) == after
    json.dumps(asdict(after))


class Priced:
    """A runner whose steps cost 1 and 0.1 for each position."""

    def __init__(self, known: bool = True) -> None:
        self.known = known

    def cost(self, keys: Sequence[Key], context: float) -> list[float]:
        return [1 + 0.1 * key.tokens if self.known else nan for key in keys]


def exact(seconds: float, tokens: int, drafts: int, times: Times) -> Decoded:
    return Decoded(seconds, times, tokens, Key(EXACT, 2, 2 + drafts, 0), 2, 10.0)


def test_the_speed_up_of_steps_that_are_known() -> None:
    it = Speedup(Priced(), lambda key: Key(EXACT, key.rows, key.rows, 0))  # type: ignore[arg-type]
    plain = exact(2.0, 2, 0, Times(0.0, 1.2, 0.1))
    for _ in range(FEWEST - 1):
        it.record(plain)
    assert it.estimate() is None
    it.record(plain)
    assert it.estimate() == pytest.approx(1.0)
    # 8 drafts for 2 rows: the forward pass takes 4 instead of 4 * 1.2 / 2.0, verification 0.5 instead of 0.1, drafting 1
    for _ in range(200):
        it.record(exact(6.0, 8, 8, Times(1.0, 4.0, 0.5)))
    assert it.estimate() == pytest.approx(4 * (6.0 - 1.0 - 1.6 - 0.4) / 6.0)
    # the launches of the padded layout are priced whole; two rows are padded to four
    it = Speedup(Priced(), lambda key: decode_key(key.rows, 0))  # type: ignore[arg-type]
    for _ in range(FEWEST):
        it.record(Decoded(3.0, Times(0.2, 0.1, 0.0), 5, decode_key(4, 3), 2, 10.0))
    assert it.estimate() == pytest.approx(2.5 * (3.0 - 0.2 - 1.2) / 3.0)


@pytest.mark.parametrize("known,plain", [(False, decode_key(2, 0)), (True, None)])
def test_the_speed_up_is_not_known_without_costs(known: bool, plain: Key | None) -> None:
    it = Speedup(Priced(known), lambda key: plain)  # type: ignore[arg-type]
    for _ in range(50):
        it.record(exact(2.0, 2, 0, Times(0.0, 1.2, 0.1)))
    assert it.estimate() is None


def priced(positions, rows: int, context: float):  # type: ignore[no-untyped-def]
    return 1 + 0.01 * positions


def test_an_engine_estimates_its_speed_up(folder: Path, target: Target) -> None:
    requests = [request("a", prompts(1)[0], max_tokens=200, stop_ids=())]
    plain = engine(folder, target)
    answers = run(plain, requests)
    assert plain.snapshot().speedup is None
    found = {}
    for good in (0, 4):
        it = speculative(folder, target, answers, 4, lambda good=good: good, adaptive_drafts=False)
        it._step.runner._measure = lambda: (priced, None)  # type: ignore[attr-defined]
        it.warm_up()
        run(it, requests)
        found[good] = it.snapshot().speedup
        assert sum(s.seconds for s in it._speedup._steps) < 60  # type: ignore[union-attr]
    assert found[0] is not None and found[4] is not None
    assert found[0] <= 1 < found[4] <= 5, found
