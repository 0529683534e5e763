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
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of the odd polynomial that takes singular values to about 1
ROUNDS = 5
UPDATE_SIZE = 0.2  # root mean square of an update of AdamW, which Muon's is scaled to


def _of_a_layer(place: Place) -> bool:
    return place.columns is not None and not any("embed_tokens" in name or "lm_head" in name for name in place.names)


def muon(
    master: Sequence[Tensor], values: Sequence[Tensor], grad: Sequence[Tensor], mean: Sequence[Tensor], now: Tensor,
    decay: float,
) -> None:
    """One step of Muon [Jordan 2024; scaled as in 2502.16982] in place, for matrices of one shape: the direction is the
    gradient's running mean with its singular values set to about 1. master, mean: [R,C] float32; values: get the masters in
    their own dtype; now: see plain.adamw. A factor of 0 leaves everything as it is."""
    rate, factor, _ = now.unbind()
    on = factor > 0
    m, p = torch.stack(list(mean)), torch.stack(list(master))
    g = torch.where(on, torch.stack(list(grad)) * factor, m)
    m = MOMENTUM * m + (1 - MOMENTUM) * g
    ahead = orthogonal(MOMENTUM * m + (1 - MOMENTUM) * g, values[0].dtype)
    rows, columns = master[0].shape
    p -= torch.where(on, rate, 0.0) * (ahead.float() * UPDATE_SIZE * max(rows, columns) ** 0.5 + decay * p)
    torch._foreach_copy_(list(mean), list(m.unbind()))
    torch._foreach_copy_(list(master), list(p.unbind()))
    if values[0] is not master[0]:
        torch._foreach_copy_(list(values), list(p.unbind()))


def orthogonal(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices with the same singular vectors and singular values of about 1 (0.7 to 1.2), by Newton and Schulz's iteration.
    x: [B,R,C] float32 -> [B,R,C] in dtype, in which it computes"""
    a, b, c = NEWTON_SCHULZ
    wide = x.shape[1] <= x.shape[2]
    y = x if wide else x.mT
    y = (y / (torch.linalg.matrix_norm(y, keepdim=True) + 1e-7)).to(dtype)
    for _ in range(ROUNDS):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y if wide else y.mT


class Parameters:
    """masters: a tensor float32 for each place, all parts of `master`. With `muon` the matrices of layers come first."""

    def __init__(self, places: Iterable[Place], dtype: torch.dtype, device: torch.device, muon: bool = False) -> None:
        """muon: matrices are updated by Muon, all else by AdamW: vectors, and the rows of a vocabulary."""
        self.dtype, self.device = dtype, device
        self._where: dict[tuple[str, ...], tuple[int, tuple[int, ...]]] = {}
        self._matrices: dict[tuple[int, int], list[int]] = {}  # shape: where those of this shape begin
        self._muon = size = 0  # where what Muon updates ends
        for place in sorted(places, key=lambda place: not _of_a_layer(place)) if muon else places:
            shape = (sum(place.rows),) if place.columns is None else (sum(place.rows), place.columns)
            self._where[place.names] = begin, _ = size, shape
            size += -(-math.prod(shape) // ALIGNED) * ALIGNED
            if muon and place.columns is not None and _of_a_layer(place):
                for rows in place.rows:
                    self._matrices.setdefault((rows, place.columns), []).append(begin)
                    begin += rows * place.columns
                self._muon = size
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
        """A step of the optimiser with `grad`; now: see plain.adamw."""
        for (rows, columns), begins in self._matrices.items():
            parts = [slice(begin, begin + rows * columns) for begin in begins]
            flat = [[tensor[part] for part in parts] for tensor in (self.master, self.values, self.grad, self.mean)]
            master, values, grad, mean = ([x.view(rows, columns) for x in tensors] for tensors in flat)
            muon(master, values, grad, mean, now, decay)
        rest = [tensor[self._muon :] for tensor in (self.master, self.values, self.grad, self.mean, self.square)]
        if self.values is self.master:
            rest[1] = rest[0]
        operations.adamw(*rest, now, betas, eps, decay)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the tensors themselves, not copies."""
        return {"master": self.master, "mean": self.mean, "square": self.square}

    def set_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.values.copy_(self.master)
