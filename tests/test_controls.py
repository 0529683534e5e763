"""What a request steers for itself: its cache salt, its priority, its drafts, and its end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Drafter
from forerun.drafters.measured import Found
from forerun.drafters.suffix import SharedTree, SharedTrees
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.engine import Engine
from forerun.engine.pages import Pages
from forerun.engine.state import RowState
from forerun.engine.stats import DraftStats
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Request, SamplingParams, SettingError
from forerun.verify.sampling import SamplingState
from tests.test_device import METHODS, SHAPE, NoText
from tests.test_measured import candidates
from tests.test_scheduler import advance, scheduler
from tests.test_scheduler import request as planned
from tests.tiny import tiny_model
from tests.tiny_heads import random_head

K = 4
LAYOUTS = pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
BOTH = Speculation("eagle3", K, 1, 3, model="given")
DRAWN = replace(BOTH, draft_sample_method="probabilistic")
DRAFTERS: dict[str, Speculation | None] = {**METHODS, "eagle3 and ngram": BOTH, "eagle3 and ngram, drawn": DRAWN}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(tiny_model(tmp_path_factory.mktemp("tiny"), **SHAPE), torch.float32)


def engine(target: Target, name: str, padded: bool, **settings: Any) -> Engine:
    speculation = DRAFTERS[name]
    given: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 4, "kv_cache_tokens": 1024, "block_size": 8}
    config = EngineConfig(speculation=speculation, **(given | {"adaptive_drafts": False} | settings))

    def make(state: RowState, mirror: RowState, sampling: SamplingState, kv: KVCache, padded: bool) -> Drafter | None:
        if speculation is None:
            return None
        method = speculation.method
        model = target if method == "draft_model" else None
        head = random_head(target, method) if model is None and speculation.model else None
        given = DrafterContext(state, mirror, sampling, kv, config, padded, target.vocab, model, head)
        return TABLE[method](speculation, given)

    return Engine(target, config, make, NoText, padded)


def request(name: str, prompt: Sequence[int], tokens: int = 30, prediction: Sequence[int] = (), **params: Any) -> Request:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens} | params)
    return Request(name, tuple(prompt), given, tokens, given.seed or 0, (), (), tuple(prediction))


def served(it: Engine, *requests: Request) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        it.add(one)
    while it.has_work:
        for event in it.step():
            found[event.request_id] += event.tokens
    return found


def texts(count: int, seed: int = 0, low: int = 4, high: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 40) for _ in range(rng.randint(low, high))] for _ in range(count)]


# Cache salts


def test_pages_are_found_with_their_salt_only() -> None:
    pages, ids = Pages(8, 4), list(range(9))
    for salt in (None, "a", "b"):
        assert pages.match(ids, salt=salt).pages == []
        held, serial = pages.allocate(2), pages.match(ids, salt=salt).serial
        for i, page in enumerate(held):
            serial = pages.publish(page, serial, ids[4 * i : 4 * i + 4])
        assert pages.match(ids, salt=salt).pages == held
        pages.release(held)
    found = [tuple(pages.match(ids, salt=salt).pages) for salt in (None, "a", "b", "c")]
    assert len(set(found)) == 4 and found[3] == ()
    pages.clear()
    assert not any(pages.match(ids, salt=salt).pages for salt in (None, "a", "b"))


@LAYOUTS
@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_prefix_hits_do_not_cross_salts(target: Target, drafter: str, padded: bool) -> None:
    it, prompt = engine(target, drafter, padded), texts(1, 2, 40, 40)[0]
    first = served(it, request("first", prompt, cache_salt="a"))["first"]
    cached = {}
    for name, salt in (("other", "b"), ("none", None), ("same", "a"), ("other again", "b")):
        before = it.stats.cached_tokens
        assert served(it, request(name, prompt, cache_salt=salt))[name] == first
        cached[name] = it.stats.cached_tokens - before
    assert cached["other"] == cached["none"] == 0 and cached["same"] == cached["other again"] > 0


@LAYOUTS
def test_a_preempted_request_finds_its_own_pages_with_its_salt(target: Target, padded: bool) -> None:
    asked = [request(str(i), one, 40, cache_salt=str(i)) for i, one in enumerate(texts(3, 3, 20, 20))]
    alone = {one.id: served(engine(target, "none", padded), one)[one.id] for one in asked}
    it = engine(target, "none", padded, kv_cache_tokens=112)
    assert served(it, *asked) == alone
    assert it.stats.preemptions > 0 and it.stats.cached_tokens > 0


@LAYOUTS
def test_drafts_do_not_cross_salts(target: Target, padded: bool) -> None:
    """The same request three times. The first and the second have nothing to draft from but their own text; the third finds
    the answer of the first."""
    it, prompt = engine(target, "suffix", padded), texts(1, 5)[0]
    counts, answers = {}, set()
    for name, salt in (("a", "a"), ("b", "b"), ("none", None), ("a again", "a")):
        it.stats.drafts.drafted = it.stats.drafts.accepted = 0
        answers.add(tuple(served(it, request(name, prompt, 40, cache_salt=salt))[name]))
        counts[name] = (it.stats.drafts.drafted, it.stats.drafts.accepted)
    assert len(answers) == 1
    assert counts["a"] == counts["b"] == counts["none"]
    assert counts["a again"][1] > counts["a"][1] + 10


def test_the_trees_of_all_salts_hold_so_many_texts_together() -> None:
    rng, trees = random.Random(0), SharedTrees(6, 12)
    added: list[tuple[str | None, list[int]]] = []
    for _ in range(150):
        salt, text = rng.choice((None, "a", "b", "c", "d")), [rng.randrange(4) for _ in range(rng.randint(1, 20))]
        trees.add(text, salt)
        added.append((salt, text))
        kept = added[-12:]
        for one in (None, "a", "b", "c", "d"):
            tree, fresh = trees.tree(one), SharedTree(6, 12)
            for of, held in kept:
                if of == one:
                    fresh.add(held)
            assert (tree is None) == (not fresh.texts)
            if tree is not None:
                assert [list(t) for t in tree.texts.values()] == [list(t) for t in fresh.texts.values()]
                context = [rng.randrange(4) for _ in range(5)]
                assert len(tree.matches(context)) == len(fresh.matches(context))


# Priorities


def test_the_lowest_priority_number_is_admitted_first() -> None:
    it = scheduler(slots=1)
    order = [5, 0, 5, -3, 0]
    for i, priority in enumerate(order):
        it.add(ranked(f"{priority}.{i}", priority))
    done = []
    for _ in range(60):
        plan = it.plan()
        done += [s.request.id for s in plan.admitted]
        advance(it, plan)
    assert done == ["-3.3", "0.1", "0.4", "5.0", "5.2"]


def ranked(name: str, priority: int, prompt: int = 7, tokens: int = 12) -> Request:
    return Request(name, tuple(range(prompt)), SamplingParams(max_tokens=tokens, priority=priority), tokens, 0)


def test_the_last_rank_is_preempted_though_it_was_admitted_first() -> None:
    it = scheduler(pages=6, budget=64)
    late, early = it.add(ranked("late", 1)), it.add(ranked("early", 0))
    lost = []
    for _ in range(60):
        plan = it.plan()
        lost += [sequence for sequence, _ in plan.preempted]
        advance(it, plan)
        if not it.running and not it.waiting:
            break
    assert lost and set(lost) == {late}
    assert early.generated == late.generated == 12 and it.pages.free == 6


def test_the_first_of_equals_is_never_preempted() -> None:
    """Many requests on pages for two, with two priorities. A sequence loses its slot only to one of a better rank, that is,
    of a better priority or of the same one and earlier."""
    rng = random.Random(1)
    it = scheduler(pages=8, slots=4, budget=32)
    seen = 0
    for step in range(400):
        if step < 200 and rng.random() < 0.3:
            it.add(ranked(str(step), rng.randrange(2), rng.randint(3, 9), rng.randint(6, 16)))
        before = list(it.running)
        plan = it.plan()
        for sequence, _ in plan.preempted:
            seen += 1
            better = [s for s in before if s.rank < sequence.rank]
            assert better, "the best of all was preempted"
        advance(it, plan)
    assert seen > 10 and not it.running and not it.waiting and it.pages.free == 8
    assert planned("x", 3).params.priority == 0


@LAYOUTS
def test_answers_do_not_depend_on_priorities(target: Target, padded: bool) -> None:
    prompts = texts(6, 7)
    alone = [served(engine(target, "none", padded), request("x", one))["x"] for one in prompts]
    it = engine(target, "ngram", padded, max_num_seqs=3, kv_cache_tokens=96)
    asked = [request(str(i), one, priority=-i) for i, one in enumerate(prompts)]
    assert list(served(it, *asked).values()) == alone and it.stats.preemptions > 0


# Drafts


def counted(it: Engine, *requests: Request) -> tuple[dict[str, list[int]], dict[str, DraftStats]]:
    """The tokens and the counts of these requests."""
    live = [it.add(one) for one in requests]
    found: dict[str, list[int]] = {one.id: [] for one in requests}
    while it.has_work:
        for event in it.step():
            found[event.request_id] += event.tokens
    return found, {one.request.id: one.stats for one in live}


def repeating(count: int, seed: int) -> list[list[int]]:
    """Prompts of which each repeats a few tokens."""
    return [one * 5 for one in texts(count, seed, 3, 6)]


LIMITED = [*((name, False) for name in DRAFTERS if name != "none"), ("ngram", True), ("eagle3 and ngram", True)]


@LAYOUTS
@pytest.mark.parametrize("drafter,adaptive", LIMITED, ids=str)
def test_a_request_limits_its_drafts_and_no_others(target: Target, drafter: str, adaptive: bool, padded: bool) -> None:
    """Requests with the limits 0 .. K and none share batches. All answers are those of plain decoding. Sampled ones too where
    drafts are point masses; drawn drafts change which tokens a seed gives."""
    drawn = DRAFTERS[drafter].draft_sample_method == "probabilistic"  # type: ignore[union-attr]
    limits = [None, 0, 1, 3, 100, 2]
    params = [{"temperature": float(i % 2 and not drawn), "seed": i} for i in range(len(limits))]
    prompts = repeating(len(limits), 11)
    plain = [
        served(engine(target, "none", padded), request("x", prompt, 30, **given))["x"]
        for prompt, given in zip(prompts, params, strict=True)
    ]  # fmt: skip
    asked = [
        request(f"{i}: {limit}", prompts[i], 30, plain[i], num_speculative_tokens=limit, **params[i])
        for i, limit in enumerate(limits)
    ]  # fmt: skip
    it = engine(target, drafter, padded, kv_cache_tokens=152, adaptive_drafts=adaptive)
    it.warm_up()
    found, counts = counted(it, *asked)
    assert list(found.values()) == plain
    for (name, stats), limit in zip(counts.items(), limits, strict=True):
        assert len(stats.drafted_at) <= (K if limit is None else limit), name
        assert len(stats.accepted_lengths) <= 1 + len(stats.drafted_at)
        if not adaptive and limit != 0:
            assert stats.drafted > 0, name
    assert it.stats.preemptions > 0


@LAYOUTS
def test_a_request_without_drafts_takes_as_many_steps_as_tokens(target: Target, padded: bool) -> None:
    """It shares its batch with one whose drafts are always accepted, and which is as fast as alone."""
    prompts = texts(2, 12)
    plain = [served(engine(target, "none", padded), request("x", one, 41))["x"] for one in prompts]
    quick = request("quick", prompts[0], 41, plain[0])
    _, alone = counted(engine(target, "prediction", padded), quick)
    it = engine(target, "prediction", padded)
    found, counts = counted(it, quick, request("off", prompts[1], 41, plain[1], num_speculative_tokens=0))
    assert [found["quick"], found["off"]] == plain
    assert counts["quick"] == alone["quick"] and counts["quick"].acceptance_length == 5.0  # type: ignore[comparison-overlap]
    assert counts["off"] == DraftStats(steps=40)


def chosen(it: Engine, *requests: Request) -> tuple[dict[str, list[int]], dict[str, set[str]]]:
    """The tokens of these requests, and for each one which candidates its drafts had."""
    found: dict[str, list[int]] = {one.id: [] for one in requests}
    kinds: dict[str, set[str]] = {one.id: set() for one in requests}
    for one in requests:
        it.add(one)
    while it.has_work:
        for event in it.step():
            found[event.request_id] += event.tokens
        for sequence in it.scheduler.running:
            slot, ids = sequence.slot, sequence.ids
            size = int(it.state.draft_size[slot])
            if not size or not bool(it.state.active[slot]) or len(ids) == sequence.prompt:
                continue
            own, looked_up = candidates(it, slot)
            kinds[sequence.request.id] |= {name for name, there in (("eagle3", own), ("ngram", looked_up)) if there}
    return found, kinds


CHOICES = pytest.mark.parametrize("adaptive", [False, True], ids=["full", "adaptive"])


@LAYOUTS
@CHOICES
def test_a_request_chooses_among_the_drafters(target: Target, adaptive: bool, padded: bool) -> None:
    """Rows that let the head, the look-up or both draft share batches. A row that lets one draft has no candidate of the
    other."""
    wanted: list[tuple[str, ...]] = [(), ("ngram",), ("eagle3",), ("ngram", "eagle3"), ("ngram",), ("eagle3",)]
    prompts = repeating(len(wanted), 13)
    params = [{"temperature": float(i % 2), "seed": i} for i in range(len(wanted))]
    plain = [
        served(engine(target, "none", padded), request("x", prompt, 40, **given))["x"]
        for prompt, given in zip(prompts, params, strict=True)
    ]  # fmt: skip
    asked = [request(str(i), prompts[i], 40, drafters=names, **params[i]) for i, names in enumerate(wanted)]
    it = engine(target, "eagle3 and ngram", padded, max_num_seqs=3, adaptive_drafts=adaptive)
    it.warm_up()
    found, kinds = chosen(it, *asked)
    assert list(found.values()) == plain
    for one, names in zip(asked, wanted, strict=True):
        assert kinds[one.id] <= set(names or ("eagle3", "ngram")), one.id
        if not adaptive:
            assert kinds[one.id] == set(names or ("eagle3", "ngram")), one.id


@LAYOUTS
@pytest.mark.parametrize("names", [("ngram",), ("eagle3",)])
def test_drawn_drafts_obey_the_choice(target: Target, names: tuple[str, ...], padded: bool) -> None:
    """Greedy answers are those of plain decoding, and a seed repeats its tokens, whoever shares the batch."""
    prompts = repeating(4, 14)
    plain = [served(engine(target, "none", padded), request("x", one, 40))["x"] for one in prompts]
    it = engine(target, "eagle3 and ngram, drawn", padded)
    taken = []
    by_rule = it.drafter._by_rule  # type: ignore[union-attr]

    def spied(draft: Draft, found: Found) -> Draft:
        taken.append((int(draft.size.sum()), int(found.size.sum())))
        return by_rule(draft, found)

    it.drafter._by_rule = spied  # type: ignore[union-attr]
    assert list(served(it, *(request(str(i), one, 40, drafters=names) for i, one in enumerate(prompts))).values()) == plain
    own, looked_up = map(sum, zip(*taken, strict=True))
    assert (own > 0, looked_up > 0) == ("eagle3" in names, "ngram" in names)
    one = request("a", prompts[0], 40, drafters=names, temperature=1.0, seed=3)
    first = served(it, one)
    others = [request(str(i), text, 20, temperature=1.0, seed=i) for i, text in enumerate(prompts)]
    assert served(it, one, *others)["a"] == first["a"]


@pytest.mark.parametrize(
    "drafter,names,words",
    [
        ("none", ("ngram",), "no drafter"),
        ("ngram", ("suffix",), "has loaded ngram"),
        ("eagle3", ("eagle3", "ngram"), r"drafters=\['ngram'\].*has loaded eagle3;"),
        ("eagle3 and ngram", ("mtp",), "eagle3 and ngram"),
    ],
)
def test_a_drafter_that_is_not_loaded_is_refused(target: Target, drafter: str, names: tuple[str, ...], words: str) -> None:
    it = engine(target, drafter, False)
    with pytest.raises(SettingError, match=words):
        it.add(request("a", [5, 6], drafters=names))
    assert not it.has_work


# The end of a request before its time


@LAYOUTS
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_aborted_request_leaves_its_pages_within_two_steps(target: Target, drafter: str, padded: bool) -> None:
    """It is aborted in the queue, while its prompt is computed, and while it decodes, with another request beside it."""
    prompts = texts(3, 9, 60, 70)
    keeps = served(engine(target, "none", padded), request("keeps", prompts[0][:20], 60))["keeps"]
    it = engine(target, drafter, padded, max_num_seqs=2, max_num_batched_tokens=20, enable_prefix_caching=False)
    found: list[int] = []

    def step() -> None:
        found.extend(token for event in it.step() if event.request_id == "keeps" for token in event.tokens)

    it.add(request("keeps", prompts[0][:20], 60, prediction=keeps))
    while not found:
        step()
    for state in ("queued", "prefill", "decode"):
        it.add(request("goes", prompts[1], 50))
        it.add(request("waits", prompts[2], 50))
        step()
        if state == "decode":
            while not it._live["goes"].generated:
                step()
        goes = it._live["goes"]
        assert goes.slot >= 0 and (goes.computed < goes.prompt or state == "decode")
        if state == "queued":
            assert it._live["waits"].slot < 0 and it.abort("waits")
            assert it._live.keys() == {"keeps", "goes"} and [s.request.id for s in it.scheduler.waiting] == []
        assert it.abort("goes")
        if state != "queued":
            assert it.abort("waits")
        step(), step()
        keeping = it._live.get("keeps")
        held = it.scheduler.pages.count - it.scheduler.pages.free
        assert held == (len(keeping.pages) if keeping is not None else 0)
        assert len(it._step.state.active.nonzero()) <= 1
    while it.has_work:
        step()
    assert found == keeps and it.scheduler.pages.free == it.scheduler.pages.count
