"""Randomness without state: each number is a function of (seed, position, purpose), so that a request draws the same
numbers in any batch, on any device and after any restart. Also the draw that turns one number into one token.

The integer mix is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to the seed and purpose and then to a
Weyl sequence in the position. This module knows nothing of requests or logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# One number serves one decision; two purposes never share one.
CHOOSE = 1  # the target's own token at a position
ACCEPT = 2  # whether a drafted token with a probability is kept
REDRAW = 3  # the target's token behind the kept ones
DRAFT = 4  # the drafter's token

_MASK = (1 << 64) - 1
_STEP, _PURPOSE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_REQUEST = 0xA0761D6478BD642F  # keeps the seeds of requests apart from those of a request's sequences
_RUN = 256  # tokens that draw_row adds up before it looks at any of them
_BLOCK_BITS = 32  # a position is below this many bits; the index in a block lies above them


def signed(value: int) -> int:
    """The 64-bit two's complement of any int: seeds may be negative or wide, tensors hold int64."""
    return (value + (1 << 63) & _MASK) - (1 << 63)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right: torch's is arithmetic, so the copies of the sign are masked off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * signed(_FIRST)
    x = (x ^ _shift(x, 27)) * signed(_SECOND)
    return x ^ _shift(x, 31)


def mix_int(x: int) -> int:
    """The same mix on a Python int, 0 .. 2^64 - 1."""
    x &= _MASK
    x = (x ^ x >> 30) * _FIRST & _MASK
    x = (x ^ x >> 27) * _SECOND & _MASK
    return x ^ x >> 31


def uniform(seed: Tensor, position: Tensor, purpose: int) -> Tensor:
    """Numbers uniform in (0,1), never 0 or 1, with 52 random bits; int64 tensors that broadcast -> float64."""
    state = _mix(seed + signed(purpose * _PURPOSE))
    bits = _mix(state + (position + 1) * signed(_STEP))
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52


def block_noise(seed: Tensor, start: Tensor, width: int, purpose: int) -> Tensor:
    """Numbers for the positions of one block, [B], [B] -> [B,width], keyed by where the block starts as well.

    Drafts with probabilities need this. A position whose draft was rejected is drafted again by the next step; under
    block verification the numbers at positions past the kept ones took part in the decision, so meeting them
    again would bias what follows. start: the index of the block's first token, which no two steps of a request share.
    """
    index = torch.arange(width, dtype=torch.int64, device=seed.device)
    return uniform(seed[:, None], start[:, None] + (index << _BLOCK_BITS), purpose)


def request_seed(seed: int, number: int) -> int:
    """The seed of an engine's request number `number` (0, 1, ...) that brings none, from the engine's seed. Another
    derivation than child_seed's: child_seed(request_seed(s, a), i) and child_seed(request_seed(s, b), j) differ."""
    return mix_int(mix_int(seed + _REQUEST) + (number + 1) * _STEP) >> 1


def child_seed(seed: int, i: int) -> int:
    """The seed of the i-th of n sequences of a request. The first keeps the request's seed, so that n = 1 and the
    first of n = 4 are the same sequence."""
    return seed if i == 0 else mix_int(mix_int(seed) + i * _STEP) >> 1


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """One token of each row by inverse CDF, [N,V], [N] in (0,1) -> [N] int64.

    The first token whose cumulative sum exceeds u * total, summed in float64, so rows need not sum to one. A token of
    probability 0 is never drawn, though a parallel cumulative sum may wobble there. A row without any mass gives 0.
    """
    total = probs.cumsum(-1, dtype=torch.float64)  # [N,V]
    target = (u.double() * total[:, -1])[:, None]
    positive = probs > 0
    # 2 at the tokens past the target, 1 at any other possible one: should rounding leave none past it, a possible one wins
    rank = positive.to(torch.uint8) + (positive & (total > target)).to(torch.uint8)
    return rank.argmax(-1)


def draw_row(mass: np.ndarray, u: float) -> int:
    """The same for one row [n] float32 on the host, which must hold some mass: first a run of tokens, then a token of it."""
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
    """The target, or the last number below the total if rounding took it there."""
    return min(target, float(np.nextafter(total, 0)))
