"""Paired ratios and the verdict: known answers, simulations with a known effect, and controls without one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from forerun.bench.records.distribution import Comparison, one_sample, two_samples
from forerun.bench.records.statistics import (
    MINIMUM_PAIRS,
    Ratio,
    paired_ratio,
    pairs_needed,
    quantile,
    spread,
    unpaired_ratio,
    verdict,
)

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


def test_the_quantile_in_the_middle_is_the_median() -> None:
    assert quantile([], 0.5) is None and quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and quantile([4.0, 1.0], 0.5) == 2.5


# figures without pairs


def test_unpaired_ratio_is_welchs_interval() -> None:
    from scipy.stats import ttest_ind

    reference, candidate = [3.0, 4.0, 5.5, 3.2], [8.0, 7.0, 11.0, 9.0, 6.5, 7.7]
    ratio = unpaired_ratio(reference, candidate)
    logs = [[math.log(x) for x in side] for side in (candidate, reference)]
    held = ttest_ind(*logs, equal_var=False).confidence_interval()
    assert ratio is not None and ratio.low is not None and ratio.high is not None and ratio.pairs == 4
    assert math.log(ratio.low) == pytest.approx(held.low) and math.log(ratio.high) == pytest.approx(held.high)


def test_unpaired_ratio_of_little_and_of_nothing() -> None:
    assert unpaired_ratio([], [1.0]) is None
    assert unpaired_ratio([2.0], [3.0, 3.0]) == Ratio(1, pytest.approx(1.5), None, None)
    assert unpaired_ratio([2.0, 2.0], [3.0, 3.0]) == Ratio(2, *[pytest.approx(1.5)] * 3)
    with pytest.raises(ValueError):
        unpaired_ratio([0.0], [1.0])


def test_quantiles_lie_between_their_neighbours_and_need_values_beyond() -> None:
    values = [float(i) for i in range(101)]
    assert quantile(values, 0.5) == 50.0 and quantile(values, 0.95) == 95.0 and quantile(values, 0.99) == pytest.approx(99.0)
    assert quantile([1.0, 2.0], 0.5) == 1.5
    assert quantile(values[:19], 0.95) is None and quantile(values[:20], 0.95) == pytest.approx(18.05)
    assert quantile(values[:99], 0.99) is None and quantile(values[:100], 0.99) is not None


def test_spread() -> None:
    made = spread([4.0, 1.0, 3.0, 2.0, 0.0])
    assert made is not None and (made.n, made.least, made.lower, made.median, made.upper, made.largest) == (5, 0, 1, 2, 3, 4)
    assert made.p95 is None and spread([]) is None


# distributions

TARGET = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.06, "e": 0.03, "f": 0.01}


def sample(draw: random.Random, n: int) -> list[str]:
    return draw.choices(list(TARGET), list(TARGET.values()), k=n)


def speculative(draw: random.Random, n: int, rejected: dict[str, float], accept: float = TARGET["a"]) -> list[str]:
    """First tokens of speculative sampling: the draft a, how often it is accepted, and what a rejection draws from."""
    others = draw.choices(list(rejected), list(rejected.values()), k=n)
    return ["a" if draw.random() < accept else other for other in others]


RESIDUAL = {t: p for t, p in TARGET.items() if t != "a"}


def findings(second: Callable[[random.Random, int], list[str]], n: int) -> list[str]:
    draws = [random.Random(seed) for seed in range(SIMULATIONS)]
    return [two_samples([(sample(draw, n), second(draw, n))]).finding for draw in draws]


def test_lossless_drafts_are_drawn_from_the_same_distribution() -> None:
    assert findings(lambda d, n: speculative(d, n, RESIDUAL), 500).count("same") >= 19


def test_a_planted_bias_is_found() -> None:
    """The rejected draft is drawn again from the whole distribution, its own token included: a comes in 64 %, not 40."""
    assert findings(lambda d, n: speculative(d, n, TARGET), 500).count("different") >= 19


def test_a_small_planted_bias_is_found_with_many_samples() -> None:
    """Drafts accepted in 43 % instead of 40: too little for 500 samples, plain in 20,000."""
    lenient = lambda d, n: speculative(d, n, RESIDUAL, 0.43)  # noqa: E731
    assert findings(lenient, 20_000).count("different") >= 19
    assert findings(lenient, 500).count("different") <= 4


def test_arms_that_draw_alike_give_even_p_values() -> None:
    """400 comparisons: p below 1/2 in 200 of them, standard deviation 10."""
    found = []
    for seed in range(400):
        draw = random.Random(seed)
        found.append(two_samples([(sample(draw, 300), sample(draw, 300)), (sample(draw, 100), sample(draw, 200))]).p or 0.0)
    assert 160 <= sum(p < 0.5 for p in found) <= 240 and sum(p < 0.05 for p in found) <= 40


def test_two_samples_is_pearsons_test() -> None:
    from scipy.stats import chi2_contingency

    one, other = ["a"] * 40 + ["b"] * 30 + ["c"] * 30, ["a"] * 70 + ["b"] * 50 + ["c"] * 80
    made, known = two_samples([(one, other)]), chi2_contingency([[40, 30, 30], [70, 50, 80]])
    assert made.statistic == pytest.approx(known.statistic) and made.p == pytest.approx(known.pvalue) and made.freedom == 2


def test_rare_tokens_are_counted_together() -> None:
    common = ["a"] * 50 + ["b"] * 50
    made = two_samples([(common + [f"r{i}" for i in range(20)], common + [f"s{i}" for i in range(20)])])
    assert made.cells == 3 and made.p == pytest.approx(1.0), "twenty tokens that came once each prove nothing"
    joined = two_samples([([*common, "r"], common)])
    assert joined.cells == 2 and joined.statistic > 0, "too rare even together: with the rarest that is not"
    assert joined.statistic == pytest.approx(two_samples([([*common, "b"], common)]).statistic)


def test_each_prompt_has_a_distribution_of_its_own() -> None:
    """Two prompts with different answers, sampled in different numbers: adding up the counts would find a difference."""
    a, b = ["a"] * 90 + ["x"] * 10, ["b"] * 90 + ["x"] * 10
    assert two_samples([(a, a * 3), (b * 3, b)]).finding == "same"
    assert two_samples([(a + b * 3, a * 3 + b)]).finding == "different"


def test_samples_against_log_probabilities() -> None:
    known = {t: p for t, p in TARGET.items() if p > 0.05}  # the rest is left to 1
    good = [one_sample([(known, speculative(random.Random(s), 500, RESIDUAL))]).finding for s in range(SIMULATIONS)]
    bad = [one_sample([(known, speculative(random.Random(s), 500, TARGET))]).finding for s in range(SIMULATIONS)]
    assert good.count("same") >= 19 and bad.count("different") >= 19
    outside = one_sample([({"a": 0.5, "b": 0.3}, ["z"] * 60 + ["a"] * 100 + ["b"] * 60)])
    assert outside.finding == "same" and outside.cells == 3
    with pytest.raises(ValueError):
        one_sample([({"a": 0.7, "b": 0.7}, ["a"])])


def test_too_few_samples_are_not_enough_data() -> None:
    assert two_samples([]).finding == two_samples([([], ["a"])]).finding == "not enough data"
    assert two_samples([(["a"] * 6, ["b"] * 2)]).finding == "not enough data"
    assert two_samples([(["a"] * 100, ["a"] * 100)]) == Comparison(200, 1, 0.0, 0, None, None)


def test_a_shift_called_visible_is_found() -> None:
    """Of two tokens that are equally likely, a change of one's probability by w / 2 is found in about 90 of 100."""
    n = 1000
    w = two_samples([(["a", "b"] * (n // 2), ["a", "b"] * (n // 2))]).visible
    assert w is not None
    found = 0
    for seed in range(100):
        draw = random.Random(seed)
        one, other = (draw.choices("ab", [0.5 + s * w / 4, 0.5 - s * w / 4], k=n) for s in (1, -1))
        found += two_samples([(one, other)]).finding == "different"
    assert 80 <= found <= 98
