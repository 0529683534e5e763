"""The C kernels compiled for ARM and run in an emulator, as a library for cpu.CpuKernels. A process of emulated.c makes the
calls. The memory that their arguments point to is sent to it, and what it wrote is copied back.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from forerun.kernels import cpu
from forerun.models.blocks import FORMATS, row_bytes

Numbers = ctypes.Array[ctypes.c_int64]

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def build(isa: str, folder: Path) -> Path:
    """The program for an instruction set of ARM."""
    program = folder / f"emulated-{isa}"
    flags = ["-O2", *(flag for flag in cpu.FLAGS if flag not in ("-O3", "-shared", "-fPIC"))]  # -O3 takes long to compile
    source = Path(__file__).with_name("emulated.c")
    command = (COMPILER, *flags, *cpu.ISAS[isa].values(), "-static", f"-I{cpu.SOURCE.parent}", str(source), "-o", str(program))
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


@dataclass
class Memory:
    """Memory that an argument points to. back: it is written. holds: the memory whose address is at these offsets."""

    at: int
    size: int
    back: bool = False
    holds: dict[int, Memory] = field(default_factory=dict)


def words(at: int, count: int, kind: type = ctypes.c_int64) -> list[int]:
    return list((kind * count).from_address(at)) if at else []  # type: ignore[operator]


def some(at: int | None, size: int, back: bool = False) -> Memory | None:
    return Memory(at, size, back) if at else None


class Emulated:
    """The functions of cpu.c with the arguments that CpuKernels gives them."""

    def __init__(self, program: Path) -> None:
        command = (EMULATOR, "-cpu", "max", str(program))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def call(self, function: int, *given: int | float | Memory | None) -> None:
        buffers: list[Memory] = []

        def place(memory: Memory) -> int:
            inner = {offset: place(other) for offset, other in memory.holds.items()}
            pack(memory.size, memory.back, len(inner))
            parts.append(ctypes.string_at(memory.at, memory.size))
            for pair in inner.items():
                pack(*pair)
            buffers.append(memory)
            return len(buffers) - 1

        def pack(*numbers: int) -> None:
            parts.append(struct.pack(f"<{len(numbers)}q", *numbers))

        parts: list[bytes] = []
        numbers = [place(one) if isinstance(one, Memory) else -1 if one is None else one for one in given]
        arguments = b"".join(struct.pack("<d" if isinstance(n, float) else "<q", n) for n in numbers)
        head = struct.pack("<2q", function, len(buffers))
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"".join((head, *parts, arguments, bytes(8 * (16 - len(numbers))))))
        self.process.stdin.flush()
        for memory in buffers:
            if memory.back:
                content = self.process.stdout.read(memory.size)
                assert len(content) == memory.size, "the emulated program has ended"
                ctypes.memmove(memory.at, content, memory.size)

    def fr_isa(self) -> bytes:
        name = ctypes.create_string_buffer(16)
        self.call(0, Memory(ctypes.addressof(name), 16, back=True))
        return name.value

    def fr_linear(
        self, wide: int, kind: int, x: int, tokens: int, k: int, norm: int | None, eps: float, matrix: Numbers,
        bias: int | None, outs: int, residual: int | None, y: int, threads: int,
    ) -> None:  # fmt: skip
        item = 4 if wide else 2
        result = Memory(y, tokens * outs * (4 if kind == cpu.LOGITS else item), back=True)
        before = some(residual, tokens * outs * item)
        self.call(
            1, wide, kind, Memory(x, tokens * k * item), tokens, k, some(norm, k * item), eps,
            Memory(ctypes.addressof(matrix), ctypes.sizeof(matrix), holds=self._matrix(list(matrix), k, item)),
            some(bias, outs * item), outs, before, result, threads,
        )  # fmt: skip

    def fr_join(self, wide: int, parts: bytes, count: int, tokens: int, outs: int, eps: float, y: int, threads: int) -> None:
        item, holds = 4 if wide else 2, {}
        given = ctypes.create_string_buffer(parts, len(parts))
        for part, (x, norm, width, stride) in enumerate(struct.iter_unpack("4q", parts)):
            holds[32 * part] = Memory(x, ((tokens - 1) * stride + width) * item)
            if norm:
                holds[32 * part + 8] = Memory(norm, width * item)
        memory = Memory(ctypes.addressof(given), len(parts), holds=holds)
        self.call(2, wide, memory, count, tokens, outs, eps, Memory(y, tokens * outs * item, back=True), threads)

    def fr_best(self, logits: int, rows: int, count: int, ids: int, chances: int, threads: int) -> None:
        found = Memory(ids, rows * 8, back=True), Memory(chances, rows * 4, back=True)
        self.call(6, Memory(logits, rows * count * 4), rows, count, *found, threads)

    def fr_store(
        self, wide: int, kv: int, stride: int, shape: Numbers, eps: float, cos: int, sin: int, k_norm: int | None, keys: int,
        values: int, positions: int, row_start: int, table: int, threads: int,
    ) -> None:  # fmt: skip
        tokens, _, _, _, _, kv_heads, dim, *_ = shape
        item = 4 if wide else 2
        pages, *batch = self._batch(list(shape), item, cos, sin, positions, row_start, table)
        given = Memory(kv, ((tokens - 1) * stride + 2 * kv_heads * dim) * item)
        self.call(
            7, wide, given, stride, self._numbers(shape), eps, *batch[:2], some(k_norm, dim * item),
            Memory(keys, pages, back=True), Memory(values, pages, back=True), *batch[2:], threads,
        )  # fmt: skip

    def fr_attend(
        self, wide: int, qkv: int, shape: Numbers, eps: float, cos: int, sin: int, q_norm: int | None,
        k_norm: int | None, keys: int, values: int, positions: int, row_start: int, table: int, y: int, threads: int,
    ) -> None:  # fmt: skip
        tokens, _, _, _, heads, kv_heads, dim, *_ = shape
        item = 4 if wide else 2
        pages, *batch = self._batch(list(shape), item, cos, sin, positions, row_start, table)
        self.call(
            3, wide, Memory(qkv, tokens * (heads + 2 * kv_heads) * dim * item), self._numbers(shape), eps, *batch[:2],
            some(q_norm, dim * item), some(k_norm, dim * item), Memory(keys, pages, back=True),
            Memory(values, pages, back=True), *batch[2:], Memory(y, tokens * heads * dim * item, back=True), threads,
        )  # fmt: skip

    def fr_layers(
        self, wide: int, layers: int, count: int, x: int, hidden: int, inner: int, shape: Numbers,
        eps: float, head_eps: float, cos: int, sin: int, positions: int, row_start: int, table: int, threads: int,
    ) -> None:  # fmt: skip
        tokens, _, _, _, heads, kv_heads, dim, *_ = shape
        item = 4 if wide else 2
        pages, *batch = self._batch(list(shape), item, cos, sin, positions, row_start, table)
        holds: dict[int, Memory] = {}
        ins, sizes = (hidden, heads * dim, hidden, inner), (hidden, (heads + 2 * kv_heads) * dim, dim, dim, hidden, hidden)
        each = cpu.LAYER_BYTES // 8
        for layer in range(count):
            at, first = words(layers, count * each)[layer * each : (layer + 1) * each], layer * each * 8
            of_matrix = 1 + 3 * cpu.PARTS
            for number, k in enumerate(ins):
                begin = number * of_matrix
                found = self._matrix(at[begin : begin + of_matrix], k, item)
                holds |= {first + 8 * begin + offset: memory for offset, memory in found.items()}
            for number, size in enumerate((*(s * item for s in sizes), pages, pages), 4 * of_matrix):
                if at[number]:
                    holds[first + 8 * number] = Memory(at[number], size, back=number >= 4 * of_matrix + len(sizes))
        self.call(
            4, wide, Memory(layers, count * cpu.LAYER_BYTES, holds=holds), count, Memory(x, tokens * hidden * item, back=True),
            hidden, inner, self._numbers(shape), eps, head_eps, *batch, threads,
        )  # fmt: skip

    def fr_embed(self, wide: int, part: Numbers, k: int, ids: int, count: int, y: int, threads: int) -> None:
        item = 4 if wide else 2
        held = {16: self._part(*part, k, item)}
        matrix = Memory(ctypes.addressof(part), ctypes.sizeof(part), holds=held)
        self.call(5, wide, matrix, k, Memory(ids, count * 8), count, Memory(y, count * k * item, back=True), threads)

    def _part(self, format: int, rows: int, data: int, k: int, item: int) -> Memory:
        return Memory(data, rows * (row_bytes(list(FORMATS)[format - 1], k) if format else k * item))

    def _matrix(self, numbers: list[int], k: int, item: int) -> dict[int, Memory]:
        """The memory of the parts, by the offsets of their addresses."""
        parts = (numbers[1 + 3 * i : 4 + 3 * i] for i in range(numbers[0]))
        return {8 * (3 + 3 * i): self._part(*part, k, item) for i, part in enumerate(parts)}

    def _numbers(self, shape: Numbers) -> Memory:
        return Memory(ctypes.addressof(shape), ctypes.sizeof(shape))

    def _batch(
        self, shape: list[int], item: int, cos: int, sin: int, positions: int, row_start: int, table: int
    ) -> tuple[int, Memory, Memory, Memory, Memory, Memory]:
        """The bytes of the pages up to the last one in the table, and the memory of the other arguments."""
        tokens, rows, width, block, _, kv_heads, dim, *_ = shape
        last = max(words(table, rows * width, ctypes.c_int32))
        angles = (max(words(positions, tokens)) + 1) * dim // 2 * 4
        pages = (last + 1) * kv_heads * block * dim * item
        return (
            pages, Memory(cos, angles), Memory(sin, angles), Memory(positions, tokens * 8), Memory(row_start, (rows + 1) * 4),
            Memory(table, rows * width * 4),
        )  # fmt: skip
