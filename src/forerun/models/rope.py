"""Rotary position embedding [Su et al. 2104.09864] as tables: the cosine and sine of every position's angles, with the kinds of
context scaling that checkpoints use. Computed once, in float32, as transformers does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.models.config import Rope


def tables(rope: Rope, head_dim: int, positions: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of positions 0 .. positions-1, times the attention factor.
    Two tensors [positions, head_dim/2] float32"""
    angles = torch.arange(positions).float()[:, None] * frequencies(rope, head_dim)  # [positions, D/2]
    return (angles.cos() * rope.attention_factor).to(device), (angles.sin() * rope.attention_factor).to(device)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle of one position, in radians, for each pair of dimensions.  [head_dim/2] float32"""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    stretched = plain / rope.factor
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return stretched
    if rope.kind == "llama3":
        return plain + _llama3_share(rope, plain) * (stretched - plain)
    return plain + _yarn_share(rope, head_dim) * (stretched - plain)


def _llama3_share(rope: Rope, plain: Tensor) -> Tensor:
    """How far each frequency is scaled, 0 to 1, as in Llama 3.1: 0 where the original context has high_freq_factor periods or
    more, 1 where it has low_freq_factor or fewer, linear between them.  [head_dim/2]"""
    periods = rope.original_positions * plain / (2 * math.pi)
    return ((rope.high_freq_factor - periods) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def _yarn_share(rope: Rope, head_dim: int) -> Tensor:
    """How far YaRN scales each frequency, 0 to 1 [Peng et al. 2309.00071, section 3.2]: linear in the index of the dimension,
    between those with beta_fast and beta_slow periods in the original context.  [head_dim/2]"""

    def dimension(periods: float) -> float:
        return head_dim * math.log(rope.original_positions / (periods * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # equal ends: a step
    return ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
