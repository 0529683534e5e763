"""The weights of a decoder. Every matrix is a Matrix, in whatever format it is stored; norms and biases are plain tensors.
Kernels multiply by matrices (kernels/__init__.py); loading.py fills them. docs/models.md lists what a new kind of matrix must
provide.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor


class Matrix(ABC):
    """A weight matrix [rows, columns]: `columns` inputs, `rows` outputs.

    kind: the name of the storage format; a set of kernels says which kinds it multiplies. dtype: the model's compute dtype,
    in which `dense` and `embed` give values. stored: the tensors that hold the matrix, by the last part of their names in a
    checkpoint ("weight").
    """

    kind: ClassVar[str]
    rows: int
    columns: int
    dtype: torch.dtype
    stored: dict[str, Tensor]

    @classmethod
    @abstractmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str) -> Self:
        """An uninitialised matrix. On device "meta" it takes no memory."""

    @abstractmethod
    def dense(self) -> Tensor:
        """All values, [rows, columns] in dtype. A dense matrix gives its stored tensor, other kinds a new one."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """The rows of these ids. It must not wait for the device.  [T] int64 -> [T, columns] in dtype"""

    @abstractmethod
    def narrow(self, first: int, count: int) -> Self:
        """Rows first .. first + count - 1, as a view: the memory is shared. Raises ValueError if the kind cannot be split
        there."""

    @property
    def values(self) -> Tensor:
        """The stored tensor [rows, columns] of a dense matrix, for kernels that read it in place. Raises TypeError for other
        kinds."""
        raise TypeError(f"a matrix of kind {self.kind} is not stored as [rows, columns]; use dense(), or kernels for this kind")

    def split(self, counts: tuple[int, ...]) -> Iterator[Self]:
        """Consecutive parts with these numbers of rows, as views."""
        for end, count in zip(accumulate(counts), counts, strict=True):
            yield self.narrow(end - count, count)


class Dense(Matrix):
    """A matrix stored as one contiguous tensor [rows, columns] in the compute dtype."""

    kind = "dense"

    def __init__(self, values: Tensor) -> None:
        self.rows, self.columns = values.shape
        self.dtype = values.dtype
        self.stored = {"weight": values}
        self._values = values

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str) -> Dense:
        return cls(torch.empty(rows, columns, dtype=dtype, device=device))

    @property
    def values(self) -> Tensor:
        return self._values

    def dense(self) -> Tensor:
        return self._values

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._values)

    def narrow(self, first: int, count: int) -> Dense:
        return Dense(self._values[first : first + count])


class Layer(NamedTuple):
    """One decoder layer; matrices are [out,in]. qkv stacks q over k over v, gate_up gate over up."""

    attention_norm: Tensor  # [H]
    qkv: Matrix  # [(heads + 2 kv_heads) * D, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    out: Matrix  # [H, heads * D]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [H]
    gate_up: Matrix  # [2 I, H]
    down: Matrix  # [H, I]

    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def vectors(self) -> tuple[Tensor, ...]:
        """The norm weights and biases that the layer has."""
        given = (self.attention_norm, self.qkv_bias, self.q_norm, self.k_norm, self.out_bias, self.mlp_norm)
        return tuple(t for t in given if t is not None)


class Weights(NamedTuple):
    """All weights of a decoder. dtype: the compute dtype, in which activations, norms, biases and the KV cache are. head: the
    embedding itself if the two are tied, or a view of its first rows (Target.keep_vocabulary). interleaved: the rows of q and k
    lie in the order of llama.cpp (see AttentionShape)."""

    dtype: torch.dtype
    embedding: Matrix  # [V,H]
    layers: tuple[Layer, ...]
    norm: Tensor  # [H]
    head: Matrix  # [V,H]
    interleaved: bool = False

    def matrices(self) -> Iterator[Matrix]:
        """Every matrix, once."""
        yield self.embedding
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            yield from layer.matrices()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that the weights are stored in. Views of the same memory may both be among them."""
        for matrix in self.matrices():
            yield from matrix.stored.values()
        yield self.norm
        for layer in self.layers:
            yield from layer.vectors()

    @property
    def bytes(self) -> int:
        """The memory that the weights take. Memory that tensors share counts once."""
        return stored_bytes(self.tensors())


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that tensors take. Memory that they share counts once."""
    storages = (t.untyped_storage() for t in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
