"""The parameters of a head as one tensor: float32 masters, their copies in the compute dtype, and the optimiser's means. So a
step of the optimiser, the norm of the gradient and a checkpoint are each a few operations, whatever the head consists of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from forerun.models.loading import Place
from forerun.models.weights import Dense, Matrix
from forerun.train.operations import Learned

ALIGNED = 64  # parameters begin at multiples of this


class Parameters:
    """masters: a tensor float32 for each place, in the order of the places; all are parts of `master`."""

    def __init__(self, places: Iterable[Place], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._where: dict[tuple[str, ...], tuple[int, tuple[int, ...]]] = {}
        size = 0
        for place in places:
            shape = (sum(place.rows),) if place.columns is None else (sum(place.rows), place.columns)
            self._where[place.names] = size, shape
            size += -(-math.prod(shape) // ALIGNED) * ALIGNED
        self.master = torch.zeros(size, device=device)
        self.values = self.master if dtype == torch.float32 else torch.zeros(size, dtype=dtype, device=device)
        self.grad, self.mean, self.square = (torch.zeros_like(self.master) for _ in range(3))
        self._masters = {names: self._part(self.master, names).requires_grad_() for names in self._where}

    def _part(self, flat: Tensor, names: tuple[str, ...]) -> Tensor:
        begin, shape = self._where[names]
        return flat[begin : begin + math.prod(shape)].view(shape)

    @property
    def names(self) -> list[tuple[str, ...]]:
        """The tensors of each place."""
        return list(self._where)

    def gradient(self, names: tuple[str, ...]) -> Tensor:
        """That of a place in the last step."""
        return self._part(self.grad, names)

    @property
    def masters(self) -> list[Tensor]:
        return list(self._masters.values())

    @property
    def count(self) -> int:
        """How many numbers are trained."""
        return sum(math.prod(shape) for _, shape in self._where.values())

    def learned(self, place: Place) -> Matrix | Tensor:
        """What a forward pass with gradients uses for a place."""
        master = self._masters[place.names]
        if place.columns is None:
            return master
        return Learned(master, master if self.values is self.master else self._part(self.values, place.names))

    def finished(self, place: Place) -> Matrix | Tensor:
        """A copy for the engine, in the compute dtype."""
        values = self._part(self.master, place.names).to(self.dtype, copy=True)
        return values if place.columns is None else Dense(values)

    def fill(self, place: Place, values: Tensor) -> None:
        """Set a place."""
        self._part(self.master, place.names).copy_(values)
        self._part(self.values, place.names).copy_(values)

    def collect(self, grads: Sequence[Tensor | None]) -> None:
        """Put gradients, in the order of the masters, into `grad`. None: zeros."""
        parts = [self._part(self.grad, names) for names in self._where]
        given = [(part, grad) for part, grad in zip(parts, grads, strict=True) if grad is not None]
        for part, grad in zip(parts, grads, strict=True):
            if grad is None:
                part.zero_()
        torch._foreach_copy_([part for part, _ in given], [grad for _, grad in given])

    def update(self, operations: ModuleType, now: Tensor, betas: tuple[float, float], eps: float, decay: float) -> None:
        """A step of AdamW with `grad`; now: see plain.adamw."""
        operations.adamw(self.master, self.values, self.grad, self.mean, self.square, now, betas, eps, decay)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the tensors themselves, not copies."""
        return {"master": self.master, "mean": self.mean, "square": self.square}

    def set_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.values.copy_(self.master)
