"""Are the tokens of two arms drawn from the same distribution? Knows tokens and counts; nothing of engines or of text.

Sampled answers cannot be compared token by token. What can be compared is how often each token comes first, given the same
prompt many times: a verify rule that favours the draft shows there. One prompt is one stratum; the evidence of several
prompts is added up, never their counts, for each prompt has a distribution of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Finding = Literal["same", "different", "not enough data"]

LEVEL = 0.001  # of a false alarm: once in a thousand comparisons of arms that draw alike
EXPECTED = 5.0  # the least expected count of a cell, below which Pearson's statistic does not follow chi-square (Cochran 1954)
POWER = 0.9  # how surely a shift of `visible` would have been found


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pearson's statistic over all strata, its degrees of freedom, and p: how often arms that draw alike differ this much.

    samples: of both arms together. visible: the shift w = sqrt(sum (p-q)^2 / p) that would have been found with 90 %
    certainty; for a token of probability 1/2 it is twice the change of that probability. None where nothing can be compared.
    """

    samples: int
    cells: int
    statistic: float
    freedom: int
    p: float | None
    visible: float | None

    @property
    def finding(self) -> Finding:
        """different: p is below LEVEL. same: it is not. not enough data: no two cells were large enough to compare."""
        if self.p is None:
            return "not enough data"
        return "different" if self.p < LEVEL else "same"


def two_samples(strata: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> Comparison:
    """Whether both sides of each stratum (the tokens that two arms drew there, by id or by text) come from one distribution.

    Tokens that are too rare for an expected count of 5 on either side are counted as one cell; if even together they
    are too rare, they join the rarest cell that is large enough.
    """
    statistic, freedom, cells, samples = 0.0, 0, 0, 0
    for ours, theirs in strata:
        if not ours or not theirs:
            continue
        samples += len(ours) + len(theirs)
        a, b = Counter(ours), Counter(theirs)
        share = min(len(ours), len(theirs)) / (len(ours) + len(theirs))
        groups = _pooled({token: (a[token] + b[token]) * share for token in a.keys() | b.keys()})
        cells += len(groups)
        freedom += len(groups) - 1
        for group in groups:
            seen = sum(a[token] for token in group), sum(b[token] for token in group)
            for count, size in zip(seen, (len(ours), len(theirs)), strict=True):
                expected = sum(seen) * size / (len(ours) + len(theirs))
                statistic += (count - expected) ** 2 / expected
    harmonic = sum(len(a) * len(b) / (len(a) + len(b)) for a, b in strata if a and b)
    return _judged(samples, cells, statistic, freedom, harmonic)


def one_sample(strata: Sequence[tuple[Mapping[Any, float], Sequence[Hashable]]]) -> Comparison:
    """Whether the tokens of each stratum come from the distribution given there as {token: probability}, for instance the
    baseline's logprobs at that position. What the probabilities leave to 1 stands for all other tokens.

    Raises ValueError for probabilities that are none, or that sum to more than 1.
    """
    statistic, freedom, cells, samples = 0.0, 0, 0, 0
    for given, drawn in strata:
        total = math.fsum(given.values())
        if any(not 0 <= p <= 1 for p in given.values()) or total > 1 + 1e-6:
            raise ValueError(f"no distribution: its probabilities sum to {total:.6f}")
        if not drawn:
            continue
        other = None  # a key that no token equals
        expected: dict[Hashable, float] = {token: p * len(drawn) for token, p in given.items() if p > 0}
        expected[other] = max(0.0, 1 - total) * len(drawn)
        seen: Counter[Hashable] = Counter(token if given.get(token, 0) > 0 else other for token in drawn)
        groups = _pooled(expected)
        samples += len(drawn)
        cells += len(groups)
        freedom += len(groups) - 1
        for group in groups:
            e = math.fsum(expected[token] for token in group)
            statistic += (sum(seen[token] for token in group) - e) ** 2 / e
    return _judged(samples, cells, statistic, freedom, float(samples))


def _pooled(expected: Mapping[Any, float]) -> list[list[Any]]:
    """The keys in groups of an expected count of at least 5, one group for each that reaches it alone."""
    ordered = sorted(expected, key=lambda key: (-expected[key], str(key)))  # the same groups whatever the order of a set
    groups = [[key] for key in ordered if expected[key] >= EXPECTED]
    rest = [key for key in ordered if expected[key] < EXPECTED]
    if rest and groups and math.fsum(expected[key] for key in rest) < EXPECTED:
        groups[-1].extend(rest)
    elif rest:
        groups.append(rest)
    return groups


def _judged(samples: int, cells: int, statistic: float, freedom: int, weight: float) -> Comparison:
    """weight: what multiplies the squared shift in the statistic's expectation."""
    if freedom < 1:
        return Comparison(samples, cells, statistic, freedom, None, None)
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    edge = float(chi2.isf(LEVEL, freedom))
    shift = float(brentq(lambda x: float(ncx2.sf(edge, freedom, x)) - POWER, 1e-6, 100 * (edge + freedom)))
    return Comparison(samples, cells, statistic, freedom, float(chi2.sf(statistic, freedom)), math.sqrt(shift / weight))
