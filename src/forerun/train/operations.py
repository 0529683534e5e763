"""The kernels with which a head or a decoder is trained: the operations of forerun.kernels with gradients, over the packs of
packing.py in place of pages. Attention is what differs between methods, so it is given as an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Kernels, Layers, RunLayers, one_by_one, reference
from forerun.models.weights import Dense, Matrix
from forerun.train import plain
from forerun.train.plain import Extra


class Learned(Dense):
    """A matrix that is trained. master: [rows, columns] float32, which gets the gradient; values: the same in the compute
    dtype, kept up to date by the optimiser."""

    kind = "learned"

    def __init__(self, master: Tensor, values: Tensor, first: int = 0) -> None:
        """first: where the matrix begins in the master, which may have more rows."""
        super().__init__(values)
        self._master, self._first = master, first

    @property
    def master(self) -> Tensor:
        """Cut anew each time: a view that autograd knows must not outlive a step of the optimiser."""
        whole = len(self._master) == self.rows
        return self._master if whole else self._master[self._first : self._first + self.rows]

    def narrow(self, first: int, count: int) -> Learned:
        return Learned(self._master, self.values[first : first + count], self._first + first)


class Attention(Protocol):
    """How the tokens of a pass attend. q: [N,heads,D]; k, v: [T,kv_heads,D], rotated."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N,heads,D]"""

    def store(self, k: Tensor, v: Tensor) -> None:
        """Keep keys and values for a later pass."""


class Causal:
    """Every token attends to the tokens of its sample up to itself. begin: [T], where the samples begin; padding: T. The keys
    and values of the first layer are kept for `Behind`."""

    def __init__(self, operations: ModuleType, begin: Tensor) -> None:
        self._operations, self._begin = operations, begin
        place = torch.arange(len(begin), device=begin.device)
        self._end = torch.where(begin < len(begin), place + 1, len(begin))
        self.kept: tuple[Tensor, Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = k, v
        return self._operations.attend(q, k, v, self._begin, self._end, None)

    def store(self, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError("a causal pass stores nothing of its own")


class Behind:
    """Later steps of training-time test (EAGLE-3): an entry attends to what the first pass kept, below its own place, and to
    the entries that later steps made for the same base. lo, hi: [N], the range in the first pass."""

    def __init__(self, operations: ModuleType, first: Causal, lo: Tensor, hi: Tensor) -> None:
        assert first.kept is not None
        self._operations, self._first, self._lo, self._hi = operations, first.kept, lo, hi
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys.append(k)
        self._values.append(v)
        extra = Extra(torch.stack(self._keys, 1), torch.stack(self._values, 1))
        return self._operations.attend(q, *self._first, self._lo, self._hi, extra)

    def store(self, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError("a step behind the first stores nothing of its own")


class Blocks:
    """DFlash: a block of `size` tokens attends to the context below its anchor, layer by layer in the order in which these were
    stored, and to itself in both directions. lo, hi: [N], the context of each token."""

    def __init__(self, operations: ModuleType, lo: Tensor, hi: Tensor, size: int) -> None:
        self._operations, self._lo, self._hi, self._size = operations, lo, hi, size
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._layer = 0

    def store(self, k: Tensor, v: Tensor) -> None:
        self._kept.append((k, v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = self._kept[self._layer]
        self._layer += 1

        def shared(x: Tensor) -> Tensor:
            """[N,kv_heads,D] -> [N,size,kv_heads,D], those of its block for each token"""
            blocks = x.unflatten(0, (-1, self._size))
            return blocks[:, None].expand(-1, self._size, *blocks.shape[1:]).flatten(0, 1)

        return self._operations.attend(q, *context, self._lo, self._hi, Extra(shared(k), shared(v)))


class TrainingKernels:
    """A set of kernels. operations: the module plain or fused; attention: that of the pass. Pages are not read."""

    def __init__(self, operations: ModuleType = plain, attention: Attention | None = None) -> None:
        self.operations, self._attention = operations, attention

    def attending(self, attention: Attention) -> TrainingKernels:
        """The same kernels for a pass with this attention."""
        return TrainingKernels(self.operations, attention)

    def multiplies(self, kind: str) -> bool:
        return True

    def embed(self, ids: Tensor, weight: Matrix) -> Tensor:
        if isinstance(weight, Learned):
            return F.embedding(ids, weight.master).to(weight.dtype)
        return weight.embed(ids)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Learned):
            out = self.operations.product(x, weight.master, weight.values)
        else:
            out = F.linear(x, weight.dense())
        return out if bias is None else out + bias.to(out.dtype)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix, bias: Tensor | None) -> Tensor:
        return self.linear(self.rms_norm(x, norm, eps), weight, bias)

    def join(self, parts: Sequence[Tensor], norms: Sequence[Tensor | None], eps: float) -> Tensor:
        pairs = zip(parts, norms, strict=True)
        return torch.cat([part if norm is None else self.rms_norm(part, norm, eps) for part, norm in pairs], -1)

    def attend(
        self, qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
        key_pages: Tensor, value_pages: Tensor, batch: Batch,
    ) -> Tensor:
        assert self._attention is not None
        heads = qkv.unflatten(-1, (-1, shape.head_dim))
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        if q_norm is not None and k_norm is not None:
            q, k = self.rms_norm(q, q_norm, shape.eps), self.rms_norm(k, k_norm, shape.eps)
        q, k = (self.operations.rotate(x, batch.positions, cos, sin) for x in (q, k))
        return self._attention.attend(q, k, v).flatten(1)

    def store(
        self, kv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, k_norm: Tensor | None, key_pages: Tensor,
        value_pages: Tensor, batch: Batch,
    ) -> None:
        assert self._attention is not None
        k, v = kv.unflatten(-1, (2, shape.kv_heads, shape.head_dim)).unbind(1)
        k = k if k_norm is None else self.rms_norm(k, k_norm, shape.eps)
        self._attention.store(self.operations.rotate(k, batch.positions, cos, sin), v)

    def linear_add(self, x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor) -> Tensor:
        return residual + self.linear(x, weight, bias)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        return self.operations.silu_mul(self.norm_linear(x, norm, eps, weight, None))

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        return self.norm_linear(x, norm, eps, weight, None).float()

    def logits(self, x: Tensor, weight: Matrix) -> Tensor:
        return self.linear(x, weight, None).float()

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return reference.best(logits)

    def rms_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.operations.rms_norm(x, norm, eps)

    def bounded(self, width: int, context: int, ragged: bool = False) -> Kernels:
        return self

    def bind(self, layers: Layers) -> RunLayers:
        def run(x: Tensor, batch: Batch, first: int, last: int) -> Tensor:
            return one_by_one(self, layers, x, batch, first, last)

        return run
