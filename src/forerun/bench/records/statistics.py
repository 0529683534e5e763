"""From paired figures of two arms to a ratio with its uncertainty and a verdict. Knows numbers only: nothing of engines,
tasks or time units.

The ratio is looked at on a log scale, where "twice as fast" and "half as fast" are equally far from no change, and pair
by pair, so that what differs between prompts or drifts during the run hits both sides of a pair alike and cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Call = Literal["faster", "slower", "no difference", "not enough data"]

CONFIDENCE = 0.95
MINIMUM_PAIRS = 4  # with fewer, Student's t is so wide and the spread so poorly known that no call is made
MARGIN = 0.01  # a change of 1 % or less, however certain, is not worth a setting
RESOLUTION = 0.05  # "no difference" is only said where a difference of 5 % would have been seen


@dataclass(frozen=True, slots=True)
class Spread:
    """How so many values lie. p95 and p99 are None where there are too few values for them to be more than the largest."""

    n: int
    least: float
    lower: float  # the 25th percentile
    median: float
    upper: float  # the 75th
    p95: float | None
    p99: float | None
    largest: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of candidate to reference: the geometric mean of the pairs' ratios, and its confidence interval.

    low and high are None with fewer than two pairs: one pair says nothing about its own uncertainty.
    """

    pairs: int
    mean: float
    low: float | None
    high: float | None


def paired_ratio(reference: Sequence[float], candidate: Sequence[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """The ratio candidate / reference of figures paired by position, with Student's t interval of the mean log ratio.

    All figures must be above 0. None without pairs. Raises ValueError if the lengths differ or a figure is 0 or less.
    """
    if len(reference) != len(candidate):
        raise ValueError(f"{len(reference)} figures cannot be paired with {len(candidate)}")
    if any(not (x > 0 and math.isfinite(x)) for x in (*reference, *candidate)):
        raise ValueError("a ratio needs finite figures above 0")
    n = len(reference)
    if not n:
        return None
    logs = [math.log(c / r) for r, c in zip(reference, candidate, strict=True)]
    mean = math.fsum(logs) / n
    if n < 2:
        return Ratio(n, math.exp(mean), None, None)
    from scipy.stats import t  # here, because importing it takes longer than everything else this module does

    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (n - 1))
    half = float(t.ppf(0.5 + confidence / 2, n - 1)) * deviation / math.sqrt(n)
    return Ratio(n, math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def verdict(
    ratio: Ratio | None, margin: float = MARGIN, resolution: float = RESOLUTION, minimum_pairs: int = MINIMUM_PAIRS
) -> Call:
    """What the ratio of two speeds (higher is better) allows to be said.

    faster or slower: the whole interval lies more than `margin` beyond 1. no difference: it does not, and it is narrow
    enough to say so (no further than `resolution` from its middle, or all of it within the margin). Anything else is
    not enough data, as are fewer than `minimum_pairs` pairs.
    """
    if ratio is None or ratio.pairs < minimum_pairs or ratio.low is None or ratio.high is None:
        return "not enough data"
    low, high, edge = math.log(ratio.low), math.log(ratio.high), math.log1p(margin)
    if low > edge:
        return "faster"
    if high < -edge:
        return "slower"
    if (high - low) / 2 <= math.log1p(resolution) or max(-low, high) <= edge:
        return "no difference"
    return "not enough data"


def pairs_needed(ratio: Ratio, margin: float = MARGIN, resolution: float = RESOLUTION) -> int | None:
    """About how many pairs would give a verdict, ratio and spread staying what they are: until the interval is clear of the
    margin, or as narrow as `resolution`, whichever comes first.

    None where the spread is unknown. The interval shrinks with the square root of the pairs; the smaller t of more pairs
    is left out, which errs on the side of more.
    """
    if ratio.low is None or ratio.high is None:
        return None
    half = (math.log(ratio.high) - math.log(ratio.low)) / 2
    enough = max(math.log1p(resolution), abs(math.log(ratio.mean)) - math.log1p(margin))
    return max(ratio.pairs, MINIMUM_PAIRS, math.ceil(ratio.pairs * (half / enough) ** 2))


def unpaired_ratio(reference: Sequence[float], candidate: Sequence[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """The ratio of the geometric means of figures that belong to no pairs, with Welch's t interval of the difference of the
    mean logs, which allows the two sides different spreads.

    pairs is the smaller side's number. None if a side is empty; no interval if one has fewer than two figures. Raises
    ValueError if a figure is 0 or less. Welch, The generalization of Student's problem (1947).
    """
    if any(not (x > 0 and math.isfinite(x)) for x in (*reference, *candidate)):
        raise ValueError("a ratio needs finite figures above 0")
    if not reference or not candidate:
        return None
    sides = [[math.log(x) for x in reference], [math.log(x) for x in candidate]]
    means = [math.fsum(side) / len(side) for side in sides]
    difference, least = means[1] - means[0], min(len(side) for side in sides)
    if least < 2:
        return Ratio(least, math.exp(difference), None, None)
    of_mean = [
        math.fsum((x - mean) ** 2 for x in side) / (len(side) - 1) / len(side) for side, mean in zip(sides, means, strict=True)
    ]
    spread = math.fsum(of_mean)
    if spread == 0:
        return Ratio(least, math.exp(difference), math.exp(difference), math.exp(difference))
    from scipy.stats import t

    freedom = spread**2 / math.fsum(v**2 / (len(side) - 1) for v, side in zip(of_mean, sides, strict=True))
    half = float(t.ppf(0.5 + confidence / 2, freedom)) * math.sqrt(spread)
    return Ratio(least, math.exp(difference), math.exp(difference - half), math.exp(difference + half))


def median(values: Sequence[float]) -> float | None:
    """The middle figure, None of nothing."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], q: float) -> float | None:
    """The figure that a share q (0 to 1) of the values does not exceed, straight between its neighbours.

    None of nothing, and where a quantile above the median would have less than one value beyond it: the 95th of 19 values or
    the 99th of 99 would be another name for the largest.
    """
    ordered = sorted(values)
    if not ordered or (q > 0.5 and len(ordered) * (1 - q) < 1 - 1e-9):
        return None
    return _at(ordered, q)


def _at(ordered: Sequence[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> Spread | None:
    """None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    lower, middle, upper = (_at(ordered, q) for q in (0.25, 0.5, 0.75))
    beyond = quantile(ordered, 0.95), quantile(ordered, 0.99)
    return Spread(len(ordered), ordered[0], lower, middle, upper, *beyond, ordered[-1])
