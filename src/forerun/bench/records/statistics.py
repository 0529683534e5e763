"""Ratios of paired and of unpaired figures with their confidence intervals, verdicts, and quantiles. Knows numbers only.

Ratios are averaged as logarithms, so that "twice as fast" and "half as fast" are equally far from no change. Paired figures
are compared pair by pair: what differs between prompts, and drift during a run, affects both sides of a pair and cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

import numpy as np

Call = Literal["faster", "slower", "no difference", "not enough data"]

CONFIDENCE = 0.95
MINIMUM_PAIRS = 4  # with fewer, Student's t is wide and the spread poorly known, so no verdict is given
MARGIN = 0.01  # a change of 1 % or less is not worth a setting
RESOLUTION = 0.05  # "no difference" is the verdict only where a difference of 5 % would have been seen


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of n values. p95 and p99 are None where there are too few values for them."""

    n: int
    least: float
    lower: float  # the 25th percentile
    median: float
    upper: float  # the 75th percentile
    p95: float | None
    p99: float | None
    largest: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Candidate over reference: the geometric mean, and its confidence interval. low and high are None with fewer than two
    figures on a side, whose uncertainty is unknown. pairs: the number of pairs, or of figures on the smaller side."""

    pairs: int
    mean: float
    low: float | None
    high: float | None


def paired_ratio(reference: Sequence[float], candidate: Sequence[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """candidate / reference of figures paired by position, with Student's t interval of the mean log ratio.

    None without pairs. Raises ValueError if the lengths differ or a figure is not finite and above 0.
    """
    if len(reference) != len(candidate):
        raise ValueError(f"{len(reference)} figures cannot be paired with {len(candidate)}")
    logs = [c - r for r, c in zip(_logs(reference), _logs(candidate), strict=True)]
    if len(logs) < 2:
        return Ratio(1, math.exp(logs[0]), None, None) if logs else None
    return _ratio(len(logs), fmean(logs), variance(logs) / len(logs), len(logs) - 1, confidence)


def unpaired_ratio(reference: Sequence[float], candidate: Sequence[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """The ratio of the geometric means of unpaired figures, with Welch's t interval of the difference of the mean logs, which
    allows the two sides different spreads. Welch, The generalization of Student's problem (1947).

    None if a side is empty. Raises ValueError if a figure is not finite and above 0.
    """
    sides = [_logs(reference), _logs(candidate)]
    least = min(map(len, sides))
    if not least:
        return None
    mean = fmean(sides[1]) - fmean(sides[0])
    if least < 2:
        return Ratio(least, math.exp(mean), None, None)
    parts = [variance(side) / len(side) for side in sides]
    total = sum(parts)
    freedom = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, sides, strict=True)) if total else 1
    return _ratio(least, mean, total, freedom, confidence)


def _logs(figures: Sequence[float]) -> list[float]:
    if any(not (x > 0 and math.isfinite(x)) for x in figures):
        raise ValueError("a ratio needs finite figures above 0")
    return [math.log(x) for x in figures]


def _ratio(pairs: int, mean: float, variance_of_mean: float, freedom: float, confidence: float) -> Ratio:
    """mean and its variance: of the log ratio."""
    from scipy.stats import t  # its import takes longer than the rest of this module

    half = float(t.ppf(0.5 + confidence / 2, freedom)) * math.sqrt(variance_of_mean)
    return Ratio(pairs, math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def verdict(
    ratio: Ratio | None, margin: float = MARGIN, resolution: float = RESOLUTION, minimum_pairs: int = MINIMUM_PAIRS
) -> Call:
    """The verdict on a ratio of speeds (higher is better).

    faster, slower: the whole interval lies more than `margin` beyond 1. no difference: it does not, and either its half-width
    is at most `resolution` or all of it lies within the margin. not enough data: everything else, and fewer than
    `minimum_pairs` pairs.
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
    """About how many pairs give a verdict if ratio and spread stay the same: until the interval is clear of the margin or as
    narrow as `resolution`, whichever comes first. None where the spread is unknown.

    The interval shrinks with the square root of the pairs. The smaller t of more pairs is neglected, so the number is high
    rather than low.
    """
    if ratio.low is None or ratio.high is None:
        return None
    half = (math.log(ratio.high) - math.log(ratio.low)) / 2
    enough = max(math.log1p(resolution), abs(math.log(ratio.mean)) - math.log1p(margin))
    return max(ratio.pairs, MINIMUM_PAIRS, math.ceil(ratio.pairs * (half / enough) ** 2))


def quantile(values: Sequence[float], q: float) -> float | None:
    """The quantile at q (0 to 1), interpolated linearly.

    None without values, and for a quantile above the median with less than one value beyond it: the 95th percentile of 19
    values would be the largest under another name.
    """
    if not len(values) or (q > 0.5 and len(values) * (1 - q) < 1 - 1e-9):
        return None
    return float(np.quantile(values, q))


def spread(values: Sequence[float]) -> Spread | None:
    """None without values."""
    if not values:
        return None
    least, lower, middle, upper, largest = map(float, np.quantile(values, (0, 0.25, 0.5, 0.75, 1)))
    return Spread(len(values), least, lower, middle, upper, quantile(values, 0.95), quantile(values, 0.99), largest)
