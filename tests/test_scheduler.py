"""The scheduler alone: budgets, chunks, fairness, preemption. The test invents the tokens."""

import random

import pytest

from forerun.config import Speculation
from forerun.engine.pages import Pages
from forerun.engine.policy import Policy
from forerun.engine.scheduler import Plan, Scheduler, Sequence
from forerun.types import Request, SamplingParams


def request(name: str, prompt: int, max_tokens: int = 20) -> Request:
    return Request(name, tuple(range(prompt)), SamplingParams(max_tokens=max_tokens), max_tokens, 0)


def scheduler(k: int = 0, pages: int = 64, slots: int = 8, budget: int = 64, caching: bool = False) -> Scheduler:
    speculation = Speculation("ngram", k) if k else None
    return Scheduler(Pages(pages, 4, caching), Policy(speculation), slots, budget)


def advance(it: Scheduler, plan: Plan, accept: random.Random | None = None) -> None:
    """Commit a step as the engine would, accepting a random share of the drafts."""
    it.launch(plan.rows)
    for row in plan.rows:
        taken = (accept.randint(0, row.k) if accept else row.k) if row.commits else -1
        it.commit(row, [7] * (taken + 1))
        if row.sequence.remaining == 0:
            it.finish(row.sequence)


def tokens(plan: Plan) -> int:
    return sum(row.pending + row.k for row in plan.rows)


def test_a_prompt_is_cut_into_chunks_and_the_last_one_commits() -> None:
    it = scheduler(budget=8)
    it.add(request("a", 19))
    seen = []
    for _ in range(3):
        plan = it.plan()
        seen.append([(row.pending, row.commits) for row in plan.rows])
        advance(it, plan)
    assert seen == [[(8, False)], [(8, False)], [(3, True)]]


def test_drafts_stay_below_the_remaining_tokens() -> None:
    it = scheduler(k=4)
    sequence = it.add(request("a", 3, max_tokens=7))
    advance(it, it.plan())
    ks = []
    while sequence.remaining:
        plan = it.plan()
        ks.append(plan.rows[0].k)
        advance(it, plan)
    assert ks == [4, 0] and sequence.generated == 7  # 1 with the prompt, then 4 + 1, then the last one alone


@pytest.mark.parametrize("k", [1, 4])
def test_a_tight_budget_is_kept_and_no_request_starves(k: int) -> None:
    """The budget is rows * (k + 1) - 1 tokens, and a prompt joins: every step keeps the budget, and the prompt is computed."""
    slots = 4
    it = scheduler(k=k, slots=slots + 1, budget=slots * (k + 1) - 1, pages=200)
    it.budget = max(it.budget, slots + 1)
    rows = [it.add(request(str(i), 2, max_tokens=60)) for i in range(slots)]
    for _ in range(3):
        advance(it, it.plan(), random.Random(0))
    joining = it.add(request("joining", 30, max_tokens=2))
    before = [row.generated for row in rows]
    for _ in range(40):
        plan = it.plan()
        assert tokens(plan) <= it.budget
        advance(it, plan, random.Random(1))
    assert joining.remaining == 0
    assert all(row.generated > b for row, b in zip(rows, before, strict=True))


def test_the_last_admitted_is_preempted_and_resumes() -> None:
    it = scheduler(pages=6, budget=64)
    first, second = it.add(request("first", 7, 12)), it.add(request("second", 7, 12))
    preempted = 0
    for _ in range(60):
        plan = it.plan()
        preempted += len(plan.preempted)
        assert all(row.sequence.slot >= 0 for row in plan.rows)
        advance(it, plan)
        if not it.running and not it.waiting:
            break
    assert preempted > 0 and first.generated == second.generated == 12
    assert it.pages.free == 6


def test_drafts_do_not_preempt() -> None:
    it = scheduler(k=8, pages=4)
    a, b = it.add(request("a", 7, 9)), it.add(request("b", 7, 9))
    advance(it, it.plan())
    plan = it.plan()
    assert not plan.preempted and [row.k for row in plan.rows] == [0, 0]  # both pages of each are full with the eighth token
    assert {a.slot, b.slot} == {row.sequence.slot for row in plan.rows}


def test_a_shared_prefix_is_computed_once() -> None:
    it = scheduler(caching=True)
    it.add(request("a", 19))
    advance(it, it.plan())
    it.add(request("b", 19))
    plan = it.plan()
    assert [(row.sequence.request.id, row.pending) for row in plan.rows] == [("a", 1), ("b", 3)]


@pytest.mark.parametrize("seed", range(6))
def test_random_life_leaks_nothing(seed: int) -> None:
    """Requests join, end and are aborted at random, with drafts and prefix caching. At the end all pages are free."""
    rng = random.Random(seed)
    it = scheduler(k=rng.choice([0, 3, 8]), pages=12, slots=4, budget=rng.choice([8, 13, 40]), caching=True)
    live: list[Sequence] = []
    for step in range(400):
        if step < 250 and rng.random() < 0.3:
            live.append(it.add(request(str(step), rng.randint(1, 20), rng.randint(1, 20))))
        live = [s for s in live if s.remaining]
        if live and rng.random() < 0.05:
            it.finish(live.pop(rng.randrange(len(live))))
        plan = it.plan()
        assert tokens(plan) <= it.budget
        for row in plan.rows:
            held = len(row.sequence.pages) * 4
            assert held >= row.sequence.computed + row.pending + row.k
        advance(it, plan, rng)
    for _ in range(2000):
        if not it.running and not it.waiting:
            break
        advance(it, it.plan(), rng)
    assert not it.running and not it.waiting
    assert it.pages.free == 12 and len(it._slots) == 4
    assert all(count == 0 for count in it.pages._holders)
