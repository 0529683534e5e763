"""Matrices in the block formats of GGUF files, as the file stores them. A row is a sequence of blocks of 32 or 256 values. Each
block holds integers of 4 to 8 bits and one or more scales (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.models.weights import Matrix, Weights

# the formats that kernels multiply by, in the order of the enum in kernels/cpu_blocks.h: values and bytes of a block
FORMATS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip


class Part(NamedTuple):
    """Rows in one format. format: one of FORMATS; data: [rows, bytes of a row] uint8, contiguous."""

    format: str
    data: Tensor

    @property
    def columns(self) -> int:
        values, size = FORMATS[self.format]
        return self.data.shape[1] // size * values

    def dense(self) -> Tensor:
        """The values, [rows, columns] float32."""
        return dequantized(self.data, self.format)


class Blocks(Matrix):
    """A matrix in blocks. parts: the rows, one part after the other. Parts may have different formats: a file stores q, k and v
    apart, and often in different formats."""

    kind = "blocks"

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        """All parts have the same number of columns. dtype: the model's compute dtype."""
        self.parts = tuple(parts)
        self.rows = sum(len(part.data) for part in self.parts)
        self.columns, self.dtype = self.parts[0].columns, dtype
        self.stored = {f"{part.format}.{i}": part.data for i, part in enumerate(self.parts)}

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str) -> Blocks:
        """An uninitialised matrix in Q8_0. columns: a multiple of 32."""
        return cls([Part("Q8_0", torch.empty(rows, columns // 32 * 34, dtype=torch.uint8, device=device))], dtype)

    @classmethod
    def quantize(cls, values: Tensor, format: str, dtype: torch.dtype) -> Blocks:
        """From values [rows, columns] on the CPU. format: Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0; columns: a multiple of 32."""
        return cls([Part(format, quantized(values, format))], dtype)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts]).to(self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        (part,) = self.parts
        return Part(part.format, part.data[ids]).dense().to(self.dtype)

    def narrow(self, first: int, count: int) -> Blocks:
        kept, begin = [], 0
        for part in self.parts:
            low, high = max(first - begin, 0), min(first + count - begin, len(part.data))
            if low < high:
                kept.append(Part(part.format, part.data[low:high]))
            begin += len(part.data)
        return Blocks(kept, self.dtype)


def stack(matrices: Sequence[Blocks]) -> Blocks:
    """The rows of these matrices, one after the other. Their memory is shared."""
    return Blocks([part for matrix in matrices for part in matrix.parts], matrices[0].dtype)


def row_bytes(format: str, columns: int) -> int:
    """The bytes of a row. Raises ValueError if the columns are not a multiple of the block's values."""
    values, size = FORMATS[format]
    if columns % values:
        raise ValueError(f"{format} has blocks of {values} values; {columns} columns are not a multiple")
    return columns // values * size


def dequantized(data: Tensor, format: str) -> Tensor:
    """The values of rows [rows, bytes of a row] uint8 in any format that the gguf package expands, F16, BF16 and F32 included.
    [rows, columns] float32"""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # imported where it is needed, since it takes a while
    from gguf.quants import dequantize

    kind, flat = GGMLQuantizationType[format], data.numpy().reshape(1, -1)
    values, size = GGML_QUANT_SIZES[kind]
    step = 65536 // size * size  # as much as fits in a processor's cache with what is computed from it
    found = torch.empty(flat.size // size * values)
    for begin in range(0, flat.size, step):
        piece = dequantize(flat[:, begin : begin + step], kind).reshape(-1)
        at = begin // size * values
        found.numpy()[at : at + len(piece)] = piece
    return found.view(len(data), -1)


def quantized(values: Tensor, format: str) -> Tensor:
    """The blocks of values [rows, columns] on the CPU: [rows, bytes of a row] uint8. format: as in Blocks.quantize."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return torch.from_numpy(quantize(values.float().numpy(), GGMLQuantizationType[format]))


def formats(weights: Weights) -> str | None:
    """The formats of the matrices with their share of the values, the largest first: "Q4_1 97 %, Q8_0 3 %". None if none is in
    blocks."""
    counts = Counter[str]()
    for matrix in weights.matrices():
        if isinstance(matrix, Blocks):
            for part in matrix.parts:
                counts[part.format] += len(part.data) * part.columns
        else:
            counts[str(matrix.dtype).removeprefix("torch.")] += matrix.rows * matrix.columns
    if not set(counts) & set(FORMATS):
        return None
    return ", ".join(f"{name} {100 * count / counts.total():.0f} %" for name, count in counts.most_common())


__all__ = ["FORMATS", "Blocks", "Part", "dequantized", "formats", "quantized", "row_bytes", "stack"]
