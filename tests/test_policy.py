"""How much is drafted: the goodput rule against trying everything, and what becomes of a row's chances."""

from __future__ import annotations

import itertools
import random

import pytest

from forerun.config import Speculation
from forerun.engine.policy import PRIOR, Chances, Costs, Policy, step_widths


def rows(*rates: float) -> list[Chances]:
    made = [Chances() for _ in rates]
    for row, rate in zip(made, rates, strict=True):
        row.rate, row.idle = rate, 0
    return made


def policy(points: list[tuple[int, float]] | None, k: int = 4) -> Policy:
    made = Policy(Speculation("ngram", k))
    made.costs = Costs(points) if points else None
    return made


def test_costs_lie_on_straight_lines_and_never_fall() -> None:
    costs = Costs([(1, 10.0), (4, 13.0), (8, 12.0), (16, 29.0)])
    assert [costs(n) for n in (1, 2, 4, 6, 8)] == [10, 11, 13, 13, 13]
    assert costs(12) == 21 and costs(32) == pytest.approx(61)


@pytest.mark.parametrize("seed", range(20))
def test_the_shares_are_the_best_there_are(seed: int) -> None:
    rng = random.Random(seed)
    chances = rows(*(rng.random() for _ in range(3)))
    points = [(1, 10.0), (4, 10.0 + rng.random() * 3), (9, 12.0 + rng.random() * 20), (20, 40.0)]
    points = [(n, max(s for _, s in points[: i + 1])) for i, (n, _) in enumerate(points)]
    it = policy(points, 3)

    def goodput(shares: tuple[int, ...]) -> float:
        tokens = sum(1 + sum(c.rate**i for i in range(1, n + 1)) for c, n in zip(chances, shares, strict=True))
        return tokens / it.costs(3 + sum(shares))  # type: ignore[misc]

    best = max(goodput(shares) for shares in itertools.product(range(4), repeat=3))
    assert goodput(tuple(it.share_out([3, 3, 3], chances, 3))) == pytest.approx(best)


def test_where_positions_are_free_all_is_drafted_and_where_they_are_dear_nothing() -> None:
    chances = rows(0.9, 0.5, 0.1)
    assert policy([(1, 10.0), (64, 10.0)]).share_out([4, 2, 0], chances, 3) == [4, 2, 0]
    assert policy([(1, 1.0), (64, 64.0)]).share_out([4, 4, 4], rows(0.3, 0.3, 0.3), 3) == [0, 0, 0]
    some = policy([(1, 10.0), (64, 40.0)]).share_out([4, 4, 4], chances, 3)
    assert some[0] > some[2] and sum(some) < 12


def test_without_costs_drafts_are_as_long_as_they_may_be() -> None:
    assert policy(None).share_out([4, 1], rows(0.0, 0.0), 2) == [4, 1]


def test_chances_follow_what_became_of_the_drafts_and_come_back() -> None:
    row = Chances()
    assert row.rate == PRIOR and row.expected(2) == pytest.approx(0.75)
    for _ in range(10):
        row.learn(4, 0, 3)
    assert row.rate < 0.02 and row.expected(4) < 0.03 and row.hoped == row.rate
    low = row.rate
    row.learn(0, 0, 0)  # the draft that waited was left alone
    assert low < row.rate < PRIOR
    before = row.rate
    row.learn(0, 0, 0)  # there was none to leave alone
    assert row.rate == before and row.expected(4) == 0
    for _ in range(12):
        row.learn(2, 2, None)
    assert row.rate > 0.95


@pytest.mark.parametrize("middle,wide,width", [(1.3, 1.5, 0), (1.3, 1.2, 8), (1.1, 1.2, 4)])
def test_the_width_of_a_step_is_worth_its_cost(middle: float, wide: float, width: int) -> None:
    """Two of eight rows have a draft, of which 1.99 tokens are expected in all, and 1.88 of its first four: worth up to 1.25
    and 1.23 plain steps."""
    chances = [Chances() for _ in range(8)]
    for i, row in enumerate(chances):
        row.found = 8 if i < 2 else 0
        row.rate = 0.5

    def chosen(widths: tuple[int, ...], costs: dict[int, float]) -> int:
        return Policy.step_shape(widths, (), chances, [widths[-1]] * 8, lambda width, _: costs.get(width))[0]

    cost = {0: 1.0, 4: middle, 8: wide}
    assert chosen((0, 4, 8), cost) == width
    assert chosen((0, 4, 8), {}) == 8
    assert chosen((0, 4, 8), {0: 1.0, 8: wide}) == (0 if wide == 1.5 else 8)  # the rest is passed over
    assert chosen((0,), cost) == 0
    for row in chances:
        row.found = 0
    assert chosen((0, 4, 8), {}) == 0
    assert chosen((0, 4), {0: 1.0, 4: 0.9}) == 0, "a figure that cannot be right"


def test_shared_drafts_are_the_likeliest() -> None:
    chances = [Chances() for _ in range(5)]
    for row, rate, found in zip(chances, (0.2, 0.9, 0.5, 0.8, 0.99), (4, 4, None, 2, 0), strict=True):
        row.rate, row.found = rate, found

    def shape(costs: dict[int, float], most: list[int]) -> tuple[int, int | None, list[int]]:
        """Where nothing but sharing pays."""
        return Policy.step_shape(
            (0, 4), tuple(costs), chances, most, lambda width, drafts: 1.0 if width == 0 else costs.get(drafts or 0, 9.0)
        )

    # in this order: 0.9, 0.81, 0.8, 0.729, 0.64, 0.5, 0.25, ..
    assert shape({3: 1.1}, [4, 3, 4, 4, 4]) == (4, 3, [0, 2, 0, 1, 0])
    assert shape({6: 1.1}, [4, 3, 4, 4, 4]) == (4, 6, [0, 3, 1, 2, 0])
    assert shape({64: 1.1}, [4, 3, 4, 4, 4]) == (4, 64, [4, 3, 4, 2, 0]), "no more than may be and than were found"
    assert shape({3: 1.51, 6: 1.9}, [4, 3, 4, 4, 4])[:2] == (0, None), "2.51 tokens for 5 rows are worth half a step"
    assert shape({3: 1.49, 6: 1.9}, [4, 3, 4, 4, 4])[:2] == (4, 3)
    assert shape({3: 1.49, 6: 1.7}, [4, 3, 4, 4, 4])[:2] == (4, 6), "4.38 tokens"
    for row in chances:
        row.found = 0
    assert shape({3: 0.5}, [4, 3, 4, 4, 4])[:2] == (0, None), "whatever it is said to cost"


def test_the_widths_of_steps() -> None:
    assert [step_widths(k) for k in (0, 1, 4, 8, 11)] == [(0,), (0, 1), (0, 4), (0, 4, 8), (0, 5, 11)]


def test_a_row_is_tried_at_first_and_again_after_a_while() -> None:
    """Positions cost so much that only likely drafts pay: a new row gets one, goes on while it is right, stops when it is
    wrong, and is tried again once it has been idle for long."""
    it, row = policy([(1, 1.0), (8, 6.0)]), Chances()

    def share() -> int:
        return it.share_out([4], [row], 1)[0]

    assert share() >= 1
    for _ in range(3):
        row.learn(share(), share(), None)
        assert share() >= 1
    while share():
        row.learn(share(), 0, None)
    waited = 0
    while not share():
        row.learn(0, 0, None)
        waited += 1
    assert 0 < waited <= 40
