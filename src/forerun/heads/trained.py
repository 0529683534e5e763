"""Whether a vocabulary head or an embedding is trained. Its space is its own, so its rows cannot be compared with the target's.
But tokens that are alike for the target are alike for every trained head, whatever the basis: the similarities of its rows
agree with those of the target's (representational similarity analysis, Kriegeskorte et al. 2008). Those of random rows do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 2048  # how many tokens are compared
FEWEST = 64  # with fewer, chance is too large
CHANCE = 6.0  # standard deviations; random rows stay below, trained ones are far above
STRUCTURED = 1.5  # the spread of similarities relative to that of random rows; a random target has about 1


def agreement(rows: Tensor, of_target: Tensor) -> float | None:
    """How far the similarities of rows agree with those of the target's rows of the same tokens: their correlation, in standard
    deviations of what random rows give. For these the similarities of two pairs are uncorrelated, so the deviation is one over
    the root of the number of pairs. None if that says nothing: too few tokens, or a target that is random itself.
    [N,H], [N,H of the target] -> about 0 for random rows, more than CHANCE for trained ones"""
    count = len(rows)
    if count < FEWEST:
        return None
    pairs = count * (count - 1) / 2
    ours, theirs = _similarities(rows), _similarities(of_target)
    spread = float(theirs.norm()) / (2 * pairs) ** 0.5
    if spread * of_target.shape[1] ** 0.5 < STRUCTURED:
        return None
    return float((ours * theirs).sum() / (ours.norm() * theirs.norm()).clamp(min=1e-30)) * pairs**0.5


def sample(count: int) -> Tensor:
    """At most ROWS of `count` rows, evenly spread."""
    return torch.linspace(0, count - 1, min(count, ROWS), dtype=torch.float64).round().long()


def _similarities(rows: Tensor) -> Tensor:
    """The cosines of different rows, around 0: 0 on the diagonal, and on average.  [N,H] -> [N,N]"""
    rows = rows.float()
    unit = F.normalize(rows - rows.mean(0), dim=1)
    cosines = unit @ unit.T
    other = 1 - torch.eye(len(rows), device=rows.device)
    return (cosines - (cosines * other).sum() / other.sum()) * other
