"""A test whether two arms draw their tokens from the same distribution. Knows tokens and counts only.

Sampled answers cannot be compared token by token. The frequencies of the first token, for the same prompt sampled many times,
can: a verify rule that favours the draft shifts them. Each prompt is a stratum with a distribution of its own, so the evidence
of the strata is added, never their counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Finding = Literal["same", "different", "not enough data"]

LEVEL = 0.001  # the rate of false alarms, for each comparison of arms that draw alike
EXPECTED = 5.0  # the least expected count for which Pearson's statistic follows chi-square (Cochran 1954)
POWER = 0.9  # the chance of finding a shift of `visible`


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pearson's statistic over all strata, its degrees of freedom, and p: how often arms that draw alike differ this much.

    samples: of both sides. visible: the shift w = sqrt(sum (p-q)^2 / p) that is found with 90 % certainty; for a token of
    probability 1/2, w is twice the change of that probability. p and visible are None where nothing can be compared.
    """

    samples: int
    cells: int
    statistic: float
    freedom: int
    p: float | None
    visible: float | None

    @property
    def finding(self) -> Finding:
        """different: p is below LEVEL. not enough data: no two cells were large enough to compare."""
        if self.p is None:
            return "not enough data"
        return "different" if self.p < LEVEL else "same"


def two_samples(strata: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> Comparison:
    """Whether both sides of each stratum (the tokens that two arms drew there, as ids or texts) come from one distribution.

    Tokens whose expected count is below 5 on a side are counted as one cell. If even that cell is too small, it joins the
    smallest cell that is large enough.
    """
    tables, weight = [], 0.0
    for ours, theirs in strata:
        if not ours or not theirs:
            continue
        a, b, n = Counter(ours), Counter(theirs), len(ours) + len(theirs)
        groups = _pooled({token: (a[token] + b[token]) * min(len(ours), len(theirs)) / n for token in a.keys() | b.keys()})
        seen = [[sum(side[token] for token in group) for group in groups] for side in (a, b)]
        both = [sum(pair) for pair in zip(*seen, strict=True)]
        tables.append(([*seen[0], *seen[1]], [total * len(side) / n for side in (ours, theirs) for total in both], len(groups)))
        weight += len(ours) * len(theirs) / n
    return _judged(tables, sum(len(a) + len(b) for a, b in strata if a and b), weight)


def one_sample(strata: Sequence[tuple[Mapping[Any, float], Sequence[Hashable]]]) -> Comparison:
    """Whether the tokens of each stratum come from the given distribution {token: probability}, for instance the baseline's
    log-probabilities at that position. The probability missing to 1 stands for all other tokens.

    Raises ValueError for values that are not probabilities, or that sum to more than 1.
    """
    tables, samples = [], 0
    for given, drawn in strata:
        total = math.fsum(given.values())
        if any(not 0 <= p <= 1 for p in given.values()) or total > 1 + 1e-6:
            raise ValueError(f"not a distribution: its probabilities sum to {total:.6f}")
        if not drawn:
            continue
        other = None  # a key that equals no token
        expected: dict[Hashable, float] = {token: p * len(drawn) for token, p in given.items() if p > 0}
        expected[other] = max(0.0, 1 - total) * len(drawn)
        seen: Counter[Hashable] = Counter(token if given.get(token, 0) > 0 else other for token in drawn)
        groups = _pooled(expected)
        counts = [sum(seen[token] for token in group) for group in groups]
        tables.append((counts, [math.fsum(expected[token] for token in group) for group in groups], len(groups)))
        samples += len(drawn)
    return _judged(tables, samples, float(samples))


def _pooled(expected: Mapping[Any, float]) -> list[list[Any]]:
    """The keys in groups of an expected count of at least 5, one group for each key that reaches it alone."""
    ordered = sorted(expected, key=lambda key: (-expected[key], str(key)))  # groups must not depend on the order of a set
    groups = [[key] for key in ordered if expected[key] >= EXPECTED]
    rest = [key for key in ordered if expected[key] < EXPECTED]
    if rest and groups and math.fsum(expected[key] for key in rest) < EXPECTED:
        groups[-1].extend(rest)
    elif rest:
        groups.append(rest)
    return groups


def _judged(tables: Sequence[tuple[list[int], list[float], int]], samples: int, weight: float) -> Comparison:
    """tables: for each stratum the observed counts, the expected counts, and the number of groups. weight: the factor of the
    squared shift in the statistic's expectation."""
    statistic = math.fsum((o - e) ** 2 / e for seen, expected, _ in tables for o, e in zip(seen, expected, strict=True))
    cells = sum(groups for _, _, groups in tables)
    freedom = cells - len(tables)
    if freedom < 1:
        return Comparison(samples, cells, statistic, freedom, None, None)
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    edge = float(chi2.isf(LEVEL, freedom))
    shift = float(brentq(lambda x: float(ncx2.sf(edge, freedom, x)) - POWER, 1e-6, 100 * (edge + freedom)))
    return Comparison(samples, cells, statistic, freedom, float(chi2.sf(statistic, freedom)), math.sqrt(shift / weight))
