"""Paired ratios and the verdict: known answers, simulations with a known effect, and controls without one."""

from __future__ import annotations

import math
import random

import pytest

from forerun.bench.statistics import MINIMUM_PAIRS, Ratio, median, paired_ratio, pairs_needed, verdict

SIMULATIONS, PAIRS, NOISE = 20, 10, 0.015


def simulate(seed: int, effect: float, pairs: int = PAIRS, noise: float = NOISE) -> Ratio:
    """Speeds of two arms on the same prompts: prompts differ by a factor of up to 2 and the machine drifts by 20 %, both of
    which hit a pair alike; each measurement has noise of its own. effect: candidate over reference in truth."""
    draw = random.Random(seed)
    reference, candidate = [], []
    for i in range(pairs):
        common = 80 * draw.uniform(1, 2) * (1 - 0.2 * i / pairs)
        reference.append(common * math.exp(draw.gauss(0, noise)))
        candidate.append(common * effect * math.exp(draw.gauss(0, noise)))
    ratio = paired_ratio(reference, candidate)
    assert ratio is not None
    return ratio


def calls(effect: float, **how: float) -> list[str]:
    return [verdict(simulate(seed, effect, **how)) for seed in range(SIMULATIONS)]  # type: ignore[arg-type]


def test_an_arm_slowed_by_five_percent_is_called_slower() -> None:
    assert calls(1 / 1.05).count("slower") >= 19


def test_an_identical_arm_is_called_no_difference() -> None:
    assert calls(1.0).count("no difference") >= 19


def test_an_arm_sped_up_by_five_percent_is_called_faster() -> None:
    assert calls(1.05).count("faster") >= 19


def test_unpaired_figures_could_not_have_told() -> None:
    """The simulation's prompts and drift are large against the effect: shuffling the pairs must lose it."""
    found = []
    for seed in range(SIMULATIONS):
        draw = random.Random(seed)
        common = [80 * draw.uniform(1, 2) for _ in range(PAIRS)]
        shuffled = draw.sample(common, PAIRS)
        found.append(verdict(paired_ratio(common, [c / 1.05 for c in shuffled])))
    assert found.count("slower") <= 2


def test_too_few_pairs_are_not_enough_data_whatever_they_say() -> None:
    for pairs in range(1, MINIMUM_PAIRS):
        assert set(calls(2.0, pairs=pairs)) == {"not enough data"}
    assert calls(2.0, pairs=MINIMUM_PAIRS).count("faster") >= 19


def test_noise_that_would_hide_a_difference_is_not_called_no_difference() -> None:
    assert "no difference" not in calls(1.0, pairs=5, noise=0.2)


def test_the_interval_holds_the_truth_as_often_as_it_claims() -> None:
    """1000 simulations at 95 %: 950 expected, standard deviation 7."""
    held = sum(r.low <= 1.1 <= r.high for seed in range(1000) if (r := simulate(seed, 1.1, pairs=5)) and r.low and r.high)
    assert 925 <= held <= 975


def test_ratio_of_known_figures() -> None:
    """Ratios 2 and 8: geometric mean 4; log ratios ln 2 and ln 8, deviation ln 4 / sqrt 2, t(1) = 12.7062."""
    ratio = paired_ratio([1.0, 1.0], [2.0, 8.0])
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    assert ratio.pairs == 2 and ratio.mean == pytest.approx(4.0)
    half = 12.7062047 * (math.log(4) / math.sqrt(2)) / math.sqrt(2)
    assert math.log(ratio.high / ratio.mean) == pytest.approx(half) and math.log(ratio.mean / ratio.low) == pytest.approx(half)


def test_swapping_the_arms_inverts_the_ratio() -> None:
    one, other = paired_ratio([3.0, 4.0, 5.0], [4.0, 4.5, 7.0]), paired_ratio([4.0, 4.5, 7.0], [3.0, 4.0, 5.0])
    assert one and other and one.low and one.high
    assert other.mean == pytest.approx(1 / one.mean) and other.low == pytest.approx(1 / one.high)


def test_nothing_and_one_pair() -> None:
    assert paired_ratio([], []) is None and verdict(None) == "not enough data"
    assert paired_ratio([2.0], [3.0]) == Ratio(1, pytest.approx(1.5), None, None)


@pytest.mark.parametrize("reference, candidate", [([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0]), ([math.nan], [1.0])])
def test_figures_that_cannot_be_compared(reference: list[float], candidate: list[float]) -> None:
    with pytest.raises(ValueError):
        paired_ratio(reference, candidate)


@pytest.mark.parametrize(
    "low, high, margin, expected",
    [
        (1.02, 1.04, 0.01, "faster"),
        (1.005, 1.04, 0.01, "no difference"),  # might be less than the margin
        (0.90, 0.98, 0.01, "slower"),
        (0.97, 1.02, 0.01, "no difference"),
        (0.90, 1.12, 0.01, "not enough data"),
        (1.02, 1.04, 0.03, "no difference"),  # inside what the baseline differs from itself
        (0.95, 1.06, 0.08, "no difference"),
    ],
)
def test_verdict_of_an_interval(low: float, high: float, margin: float, expected: str) -> None:
    assert verdict(Ratio(10, math.sqrt(low * high), low, high), margin=margin) == expected


def test_pairs_needed() -> None:
    wide = Ratio(5, 1.0, 1 / 1.1, 1.1)  # to be as narrow as the resolution: (ln 1.1 / ln 1.05)^2 = 3.82 times the pairs
    assert pairs_needed(wide) == 20
    unclear = Ratio(5, 1.5, 1.5 / 1.6, 1.5 * 1.6)  # to be clear of 1.01: (ln 1.6 / ln (1.5 / 1.01))^2 = 1.41 times the pairs
    assert pairs_needed(unclear) == 8
    assert pairs_needed(Ratio(5, 1 / 1.5, 1 / 2.4, 1.6 / 1.5)) == 8, "slower by as much needs as many"
    assert pairs_needed(Ratio(5, 1.0, 0.99, 1.01)) == 5
    assert pairs_needed(Ratio(1, 1.0, None, None)) is None


def test_median() -> None:
    assert median([]) is None and median([3.0, 1.0, 2.0]) == 2.0 and median([4.0, 1.0]) == 2.5
