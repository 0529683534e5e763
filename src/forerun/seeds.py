"""Seeds: whole numbers from which all random numbers of a request follow (verify/noise.py). Does not use torch.

The mix is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_REQUEST = 0xA0761D6478BD642F  # keeps the seeds of requests apart from those of a request's sequences


def mix_int(x: int) -> int:
    """The mix of a Python int, 0 .. 2^64 - 1."""
    x &= MASK
    x = (x ^ x >> 30) * FIRST & MASK
    x = (x ^ x >> 27) * SECOND & MASK
    return x ^ x >> 31


def request_seed(seed: int, number: int) -> int:
    """The seed of the request with this number (0, 1, ...) if it gives none, from the engine's seed. It is derived in another
    way than child_seed, so that child_seed(request_seed(s, a), i) and child_seed(request_seed(s, b), j) differ."""
    return mix_int(mix_int(seed + _REQUEST) + (number + 1) * STEP) >> 1


def child_seed(seed: int, i: int) -> int:
    """The seed of sequence i of a request's n sequences. Sequence 0 has the request's seed, so it is the same for any n."""
    return seed if i == 0 else mix_int(mix_int(seed) + i * STEP) >> 1
