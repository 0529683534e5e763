"""The policy: the goodput rule against an exhaustive search, and the acceptance history of a row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from math import nan

import numpy as np
import pytest

from forerun.config import Speculation
from forerun.engine.layouts import step_widths
from forerun.engine.policy import LEVELS, PATIENCE, PRIOR, AcceptanceHistory, Offers, Policy, Usual


def rows(*rates: float, at_hand: Sequence[int | None] = ()) -> list[AcceptanceHistory]:
    made = [AcceptanceHistory() for _ in rates]
    for row, rate in zip(made, rates, strict=True):
        row.rate, row.idle = rate, 0
    for row, n in zip(made, at_hand, strict=False):
        row.at_hand = n
    return made


def exact(
    histories: Sequence[AcceptanceHistory], most: list[int], cost: Callable[[int], float] | None, k: int = 4
) -> list[int]:
    """Drafts of each row if any number of drafts is a shape. cost(n): of a step with n drafts; None: unknown."""
    survival = Policy.survival(histories, most)
    number = range(sum(map(len, survival)) + 1)
    seconds = [nan if cost is None else cost(n) for n in number]
    return Policy(Speculation("ngram", k)).choose(Offers([k] * len(number), number, seconds), survival, most).drafts


@pytest.mark.parametrize("seed", range(20))
def test_the_drafts_are_the_best_there_are(seed: int) -> None:
    rng = random.Random(seed)
    rates = [rng.random() for _ in range(3)]
    slope = [rng.random() * 3, rng.random() * 4]

    def cost(n: int) -> float:
        return 10 + slope[0] * min(n, 3) + slope[1] * max(n - 3, 0)

    def goodput(shares: Sequence[int]) -> float:
        tokens = sum(1 + sum(rate**i for i in range(1, n + 1)) for rate, n in zip(rates, shares, strict=True))
        return tokens / cost(sum(shares))

    best = max(goodput(shares) for shares in itertools.product(range(4), repeat=3))
    assert goodput(exact(rows(*rates), [3, 3, 3], cost)) == pytest.approx(best)


def test_free_positions_verify_all_drafts_and_dear_ones_none() -> None:
    histories = rows(0.9, 0.5, 0.1)
    assert exact(histories, [4, 2, 0], lambda n: 10.0) == [4, 2, 0]
    assert exact(rows(0.3, 0.3, 0.3), [4, 4, 4], lambda n: 3.0 + n) == [0, 0, 0]
    some = exact(histories, [4, 4, 4], lambda n: 10.0 + 0.5 * n)
    assert some[0] > some[2] and sum(some) < 12
    assert exact(rows(1.0, 1.0, 1.0), [4, 4, 4], lambda n: 10.0 if n <= 7 else 100.0) == [4, 3, 0], "equals: the first rows"


def test_without_costs_all_is_verified() -> None:
    assert exact(rows(0.01, 0.01), [4, 1], None) == [4, 1]


def test_a_drafts_confidence_comes_before_the_rows_history() -> None:
    sure, unsure = rows(0.1, 0.9, at_hand=(3, 3))
    sure.confidence, unsure.confidence = [0.99, 0.95, 0.9], [0.5, 0.1, 0.01]
    assert Policy.survival([sure, unsure], [4, 2]) == [[0.99, 0.95, 0.9], [0.5, 0.1]]
    assert exact([sure, unsure], [4, 4], lambda n: 10.0 + 3 * n) == [3, 0]
    broken = AcceptanceHistory()
    broken.confidence, broken.at_hand = [float("nan"), float("inf")], 2
    assert Policy.survival([broken], [2]) == [[0.0, 0.0]]
    unsure.learn(2, 0, 3)
    assert unsure.confidence is None, "it was another draft's"


def test_a_history_follows_acceptance_and_returns_to_the_prior() -> None:
    row = AcceptanceHistory()
    assert row.rate == PRIOR
    for _ in range(10):
        row.learn(4, 0, 3)
    assert row.rate < 0.02 and row.optimistic_rate == row.rate
    low = row.rate
    row.learn(0, 0, 0)  # the draft at hand was not verified
    assert low < row.rate < PRIOR
    before = row.rate
    row.learn(0, 0, 0)  # there was no draft
    assert row.rate == before and Policy.survival([row], [4]) == [[]]
    for _ in range(12):
        row.learn(2, 2, None)
    assert row.rate > 0.95


@pytest.mark.parametrize("middle,wide,width", [(1.3, 1.5, 0), (1.3, 1.2, 8), (1.1, 1.2, 4)])
def test_the_width_of_a_padded_step_is_worth_its_cost(middle: float, wide: float, width: int) -> None:
    """Two of eight rows have a draft. 1.99 accepted tokens are expected of both, 1.88 of their first four: they are worth up to
    1.25 and 1.23 plain steps."""
    histories = rows(*[0.5] * 8, at_hand=[8, 8, *[0] * 6])

    def chosen(widths: tuple[int, ...], costs: dict[int, float]) -> int:
        most = [widths[-1]] * 8
        offers = Offers(widths, [-1] * len(widths), [costs.get(width, nan) for width in widths])
        choice = Policy(Speculation("ngram", 8)).choose(offers, Policy.survival(histories, most), most)
        assert choice.drafts == most, "the device cuts its own drafts"
        return widths[choice.offer]

    cost = {0: 1.0, 4: middle, 8: wide}
    assert chosen((0, 4, 8), cost) == width
    assert chosen((0, 4, 8), {}) == 8, "it is run to be timed"
    assert chosen((0, 4, 8), {0: 1.0, 8: wide}) == (0 if wide == 1.5 else 8)  # the rest is passed over
    for row in histories:
        row.at_hand = 0
    assert chosen((0, 4, 8), {}) == 0
    assert chosen((0, 4), {0: 1.0, 4: 0.9}) == 0, "no draft can be accepted"


def test_shared_drafts_are_the_likeliest() -> None:
    histories = rows(0.2, 0.9, 0.5, 0.8, 0.99, at_hand=(4, 4, None, 2, 0))

    def shape(costs: dict[int, float], most: list[int]) -> tuple[int, int | None, list[int]]:
        """The choice if only shared drafts can pay."""
        offers = Offers([0, *[4] * (1 + len(costs))], [-1, -1, *costs], [1.0, 9.0, *costs.values()])
        choice = Policy(Speculation("ngram", 4)).choose(offers, Policy.survival(histories, most), most)
        drafts = offers.drafts[choice.offer]
        return offers.width[choice.offer], None if drafts < 0 else drafts, choice.drafts

    # in this order: 0.9, 0.81, 0.8, 0.729, 0.64, 0.5, 0.25, ..
    assert shape({3: 1.1}, [4, 3, 4, 4, 4]) == (4, 3, [0, 2, 0, 1, 0])
    assert shape({6: 1.1}, [4, 3, 4, 4, 4]) == (4, 6, [0, 3, 1, 2, 0])
    assert shape({64: 1.1}, [4, 3, 4, 4, 4]) == (4, 64, [4, 3, 4, 2, 0]), "no more than may be and than are at hand"
    assert shape({3: 1.51, 6: 1.9}, [4, 3, 4, 4, 4])[:2] == (0, None), "2.51 tokens for 5 rows are worth half a step"
    assert shape({3: 1.49, 6: 1.9}, [4, 3, 4, 4, 4])[:2] == (4, 3)
    assert shape({3: 1.49, 6: 1.7}, [4, 3, 4, 4, 4])[:2] == (4, 6), "4.38 tokens"
    for row in histories:
        row.at_hand = 0
    assert shape({3: 0.5}, [4, 3, 4, 4, 4])[:2] == (0, None), "at any cost"


def test_what_drafts_usually_bring() -> None:
    """Of one launch it is the sum of what each shape takes; launches of more rows count for more."""
    rng, usual = np.random.default_rng(0), Usual()
    assert not usual.known
    drafts = rng.random((20, 5)).cumprod(1)
    drafts[3, 2:], drafts[7] = 0, 0
    usual.learn(np.where(drafts == drafts.max(), np.nan, drafts))  # an unknown chance counts as none
    drafts[drafts == drafts.max()] = 0
    assert usual.known
    width, shared = [0, 3, 5, 9, 9], [-1, -1, -1, 12, 500]
    likeliest = np.sort(drafts.ravel())[::-1]
    want = [0.0, drafts[:, :3].sum(), drafts.sum(), likeliest[:12].sum(), drafts.sum()]
    assert usual.gains(width, shared, 20) == pytest.approx(want, abs=12 / LEVELS)
    assert usual.gains(width[:3], shared[:3], 20) == pytest.approx(want[:3])
    assert usual.gains([5, 9], [-1, 6], 10) == pytest.approx([want[2] / 2, want[3] / 2], abs=12 / LEVELS), "half the rows"
    usual.learn(np.zeros((0, 5)))
    for _ in range(3):
        usual.learn(np.zeros((1, 5)))
        assert usual.gains([5], [-1], 20)[0] == pytest.approx(want[2]), "it waits for more"
    usual.learn(np.zeros((1, 5)))
    assert usual.gains([5], [-1], 20)[0] == pytest.approx(want[2] * 12 / 16), "four more drafts"
    usual.learn(drafts[:1], 3.0)
    assert usual.gains([5], [-1], 20)[0] == pytest.approx(want[2] * 0.75 * 0.75 + 5 * drafts[:1].sum()), "a trial"
    usual.learn(np.ones((36, 5)))
    assert 3.75 < usual.gains([5], [-1], 1)[0] < 4, "36 drafts against what 12 count for"


def test_the_widths_of_steps() -> None:
    assert [step_widths(k) for k in (0, 1, 4, 8, 11)] == [(0,), (0, 1), (0, 4), (0, 4, 8), (0, 5, 11)]


def test_a_row_is_tried_at_first_and_again_after_a_while() -> None:
    """Positions cost so much that only likely drafts pay. A new row drafts, goes on while its drafts are right, and stops when
    they are wrong. It is tried again after a long idle time, and each failed trial makes that time longer."""
    row = AcceptanceHistory()

    def share() -> int:
        return exact([row], [4], lambda n: 1.0 + 0.71 * n)[0]

    assert share() >= 1
    for _ in range(3):
        row.learn(share(), share(), None)
        assert share() >= 1
    while share():
        row.learn(share(), 0, None)
    whiles = []
    for _ in range(3):
        waited = 0
        while not share():
            row.learn(0, 0, None)
            waited += 1
        whiles.append(waited)
        while share():
            row.learn(share(), 0, None)
    assert 0 < whiles[0] <= PATIENCE + 1 and whiles[0] < whiles[1] < whiles[2]
    while not share():
        row.learn(0, 0, None)
    for _ in range(4):
        row.learn(1, 1, None)
    assert row.patience == PATIENCE
