"""Rotary position embedding [Su et al. 2104.09864] as tables: the cosine and sine of every position's angles, with the
ways of stretching the context that checkpoints ask for. Computed once, in float32 as transformers does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.models.config import Rope


def tables(rope: Rope, head_dim: int, positions: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of positions 0 .. positions-1, scaled by the attention factor.
    Two tensors [positions, head_dim/2] float32."""
    angles = torch.arange(positions).float()[:, None] * frequencies(rope, head_dim)  # [positions, D/2]
    return (angles.cos() * rope.attention_factor).to(device), (angles.sin() * rope.attention_factor).to(device)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position for each pair of dimensions.  [head_dim/2] float32"""
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
    """How much of the stretching each frequency gets: none where the original context holds high_freq_factor turns or
    more, all of it below low_freq_factor turns, a straight line between (Llama 3.1)."""
    turns = rope.original_positions * plain / (2 * math.pi)
    return ((rope.high_freq_factor - turns) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def _yarn_share(rope: Rope, head_dim: int) -> Tensor:
    """The same for YaRN [Peng et al. 2309.00071, section 3.2]: a straight line over the index of the dimension, between
    those that make beta_fast and beta_slow turns in the original context."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a step, where both ends fall together
    return ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
