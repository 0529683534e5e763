"""What heads of all kinds share: what they are made of, what memory they take, and how they join the target's states."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from forerun.heads.config import HeadConfig
from forerun.kernels import Kernels
from forerun.models.weights import Matrix, stored_bytes


class HeadWeights(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...

    def own(self, config: HeadConfig) -> Iterator[Tensor]:
        """The tensors that are not the target's."""


W = TypeVar("W", bound=HeadWeights)


class Head(Generic[W]):
    """A head with the kernels that compute it. It holds no state: keys and values are in the pages that are given."""

    def __init__(self, config: HeadConfig, weights: W, kernels: Kernels, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: the rotation tables of config.decoder.rope, up to the longest position."""
        self.config, self.weights, self.kernels = config, weights, kernels
        self._cos, self._sin = cos, sin

    @property
    def bytes(self) -> int:
        """The memory of the weights that are not the target's."""
        return stored_bytes(self.weights.own(self.config))

    @property
    def kv_bytes_per_token(self) -> int:
        """The memory of one position's keys and values, in all layers."""
        return self.config.decoder.kv_values_per_token * self.weights.dtype.itemsize

    def with_kernels(self, kernels: Kernels) -> Self:
        """The same head, computed with other kernels."""
        if kernels is self.kernels:
            return self
        other = copy.copy(self)
        other.kernels = kernels
        return other

    def _joined(self, states: tuple[Tensor, ...], norms: tuple[Tensor, ...], fc: Matrix) -> Tensor:
        """The target's states behind their norms, as config.state_norms says, and fc.  [T,target_hidden] each -> [T,H]"""
        run, eps = self.kernels, self.config.decoder.eps
        if self.config.state_norms == "all":
            joined = run.rms_norm(run.join(states, (None,) * len(states), eps), norms[0], eps)
        else:
            joined = run.join(states, norms or (None,) * len(states), eps)
        return run.linear(joined, fc, None)
