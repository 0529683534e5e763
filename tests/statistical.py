"""The chi-square test that all statistical tests share. A wrong variant must fail the same test that the right one passes."""

from __future__ import annotations

import numpy as np
from scipy import stats

PASS = 1e-3  # the least p-value of a right rule; seeds are fixed, so the result is always the same
REJECT = 1e-9  # the largest p-value of a wrong rule


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of counts against probabilities of the same shape. Cells with fewer than 5 expected counts are pooled. A
    count where the probability is zero gives 0."""
    counts, probs = np.ravel(counts).astype(float), np.ravel(expected).astype(float)
    assert abs(probs.sum() - 1) < 1e-6, "not a distribution"
    if counts[probs == 0].sum() > 0:
        return 0.0
    want = probs * counts.sum()
    small = want < 5
    counts = np.append(counts[~small], counts[small].sum())
    want = np.append(want[~small], want[small].sum())
    counts, want = counts[want > 0], want[want > 0]
    if len(want) < 2:
        return 1.0
    return float(stats.chi2.sf(((counts - want) ** 2 / want).sum(), len(want) - 1))


def tally(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """The count of each token, [vocab]."""
    return np.bincount(np.asarray(tokens), minlength=vocab)
