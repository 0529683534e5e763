"""Randomness without state: each number is a function of (seed, position, purpose). So a request draws the same numbers in any
batch, on any device and after any restart. Also the draw: one number gives one token of a distribution.

The integer mix is the finaliser of SplitMix64 (Steele, Lea, Flood 2014). It is applied to the seed and purpose, and then to a
Weyl sequence in the position. This module knows nothing of requests or logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.seeds import FIRST, MASK, SECOND, STEP
from forerun.seeds import child_seed as child_seed
from forerun.seeds import mix_int as mix_int
from forerun.seeds import request_seed as request_seed

# Each number serves one decision: different purposes have different numbers.
CHOOSE = 1  # the target's own token at a position
ACCEPT = 2  # whether a drafted token with a probability is kept
REDRAW = 3  # the target's token behind the kept ones
DRAFT = 4  # the drafter's token

_PURPOSE = 0xD1342543DE82EF95
_RUN = 256  # tokens in a run: draw_row first finds a run by the sums of runs, then a token in it
_BLOCK_BITS = 32  # a position is below this many bits; the index in a block lies above them


def signed(value: int) -> int:
    """The 64-bit two's complement of any int. Seeds may be negative or have more bits; tensors hold int64."""
    return (value + (1 << 63) & MASK) - (1 << 63)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right. torch's shift is arithmetic, so the copies of the sign bit are masked off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * signed(FIRST)
    x = (x ^ _shift(x, 27)) * signed(SECOND)
    return x ^ _shift(x, 31)


def uniform(seed: Tensor, position: Tensor, purpose: int) -> Tensor:
    """Numbers uniform in (0,1), never 0 or 1, with 52 random bits; int64 tensors that broadcast -> float64."""
    state = _mix(seed + signed(purpose * _PURPOSE))
    bits = _mix(state + (position + 1) * signed(STEP))
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52


def block_noise(seed: Tensor, start: Tensor, width: int, purpose: int) -> Tensor:
    """Numbers for the positions of one block, [B], [B] -> [B,width], which also depend on where the block starts.

    Drafts with probabilities need this. A position whose draft was rejected is drafted again by the next step. Under block
    verification the numbers of positions past the accepted ones took part in the decision, so using them again would bias the
    output. start: the index of the block's first token; no two steps of a request have the same.
    """
    index = torch.arange(width, dtype=torch.int64, device=seed.device)
    return uniform(seed[:, None], start[:, None] + (index << _BLOCK_BITS), purpose)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """One token of each row by inverse CDF, [N,V], [N] in (0,1) -> [N] int64.

    It is the first token whose cumulative sum, in float64, exceeds u times the row's sum, so rows need not sum to one. A token
    of probability 0 is never drawn, even if rounding makes a parallel cumulative sum grow there. A row of zeros gives token 0.
    """
    total = probs.cumsum(-1, dtype=torch.float64)  # [N,V]
    target = (u.double() * total[:, -1])[:, None]
    positive = probs > 0
    # 2 at tokens past the target, 1 at other possible ones: if rounding leaves none past it, a possible one is taken
    rank = positive.to(torch.uint8) + (positive & (total > target)).to(torch.uint8)
    return rank.argmax(-1)


def draw_row(mass: np.ndarray, u: float) -> int:
    """The same for one row [n] float32 on the host, whose sum must be above 0."""
    start = 0
    if len(mass) > 8 * _RUN:
        total = np.add.reduceat(mass, np.arange(0, len(mass), _RUN), dtype=np.float64).cumsum()
        target = _below(u * total[-1], total[-1])
        run = int(total.searchsorted(target, "right"))
        start, target = run * _RUN, target - (total[run - 1] if run else 0.0)
        total = mass[start : start + _RUN].cumsum(dtype=np.float64)
    else:
        total = mass.cumsum(dtype=np.float64)
        target = u * total[-1]
    return start + int(total.searchsorted(_below(target, total[-1]), "right"))


def _below(target: float, total: float) -> float:
    """The target, or the largest number below the total if rounding has made it as large."""
    return min(target, float(np.nextafter(total, 0)))
