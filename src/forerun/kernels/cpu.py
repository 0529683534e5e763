"""The kernels on the CPU. cpu.c is compiled when it is first needed, for the instruction set that is asked for, and kept in the
cache folder. It has threads of its own (cpu_threads.py, cpu_team.h). reference.py shows what the kernels compute; the code is
in cpu.c and cpu_*.h.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import struct
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Kernels, Layers, RunLayers, cpu_threads, reference
from forerun.models.blocks import FORMATS, Blocks, Part
from forerun.models.weights import Dense, Layer, Matrix
from forerun.types import require

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ("-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-w")
AVX2 = {"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c"}
AVX512 = AVX2 | {name: f"-m{name}" for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl")}
AVX512_VNNI = AVX512 | {"avx512_vnni": "-mavx512vnni"}
AVX512_BF16 = AVX512_VNNI | {"avx512_bf16": "-mavx512bf16"}
# The instruction sets, the best first. What a processor must have for each, in the words of /proc/cpuinfo, and the flags that
# let the compiler use it; cpu_vectors.h chooses its code by them.
ISAS: dict[str, dict[str, str]] = {
    "amx": AVX512_BF16 | {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16"},
    "avx512bf16": AVX512_BF16,
    "avx512vnni": AVX512_VNNI,
    "avx512": AVX512,
    "avxvnni": AVX2 | {"avx_vnni": "-mavxvnni"},
    "avx2": AVX2,
    "neon": {"asimddp": "-march=armv8.2-a+dotprod"},
    "portable": {},
}
SETTING = "FORERUN_CPU_ISA"

PLAIN, ADD, GATE_UP, LOGITS = range(4)  # the same enum as in cpu_linear.h
PARTS = 3  # of struct Matrix in cpu_blocks.h
LAYER_BYTES = (4 * (1 + 3 * PARTS) + 9) * 8  # the size of struct Layer in cpu.c


def cache_folder() -> Path:
    """FORERUN_CACHE, or ~/.cache/forerun."""
    return Path(os.environ.get("FORERUN_CACHE") or Path.home() / ".cache" / "forerun").expanduser()


def processor() -> str:
    """The processor's name and instruction sets, as text."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("vendor_id", "model", "flags", "CPU ", "Features")))
    except OSError:
        return platform.machine() + platform.processor()


def amx_allowed() -> bool:
    """Whether Linux lets this process use AMX. It must be asked."""
    ask, permission, tile_data = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM
    return bool(ctypes.CDLL(None).syscall(ask, permission, tile_data) == 0)


def isas() -> tuple[str, ...]:
    """The instruction sets in ISAS that this processor has, the best first."""
    has = set(processor().split())
    return tuple(name for name, needs in ISAS.items() if has.issuperset(needs) and (name != "amx" or amx_allowed()))


def wanted_isas() -> tuple[str, ...]:
    """The instruction sets to try, the best first: the one that FORERUN_CPU_ISA names, else all that the processor has.
    Raises SettingError."""
    given, known = os.environ.get(SETTING) or "auto", isas()
    one_of = f"give auto or an instruction set that this processor has: {', '.join(known)}"
    require(given == "auto" or given in known, SETTING, given, one_of)
    return known if given == "auto" else (given,)


def build(isa: str, source: Path = SOURCE) -> Path:
    """The file of the kernels compiled for an instruction set. It is taken from the cache folder, or made there, which takes
    some seconds. Raises OSError or subprocess.CalledProcessError if there is no working compiler."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = (*compiler, *FLAGS, *ISAS[isa].values())
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("cpu_*.h")))]
    key = hashlib.sha256(b"\0".join((*texts, " ".join(command).encode(), processor().encode()))).hexdigest()[:16]
    target = cache_folder() / f"cpu-{isa}-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "cpu.so"
        subprocess.run((*command, str(source), "-o", str(made)), check=True, capture_output=True, text=True)
        os.replace(made, target)  # atomic: another process may be doing the same
    return target


@cache
def library(isa: str) -> ctypes.CDLL:
    """The kernels for an instruction set that this processor has, compiled and loaded. Raises as `build` does."""
    lib = ctypes.CDLL(str(build(isa)))
    p, i, n, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    lib.fr_linear.argtypes = (i, i, p, n, n, p, f, p, p, n, p, p, i)
    lib.fr_join.argtypes = (i, p, n, n, n, f, p, i)
    lib.fr_best.argtypes = (p, n, n, p, p, i)
    lib.fr_store.argtypes = (i, p, n, p, f, p, p, p, p, p, p, p, p, i)
    lib.fr_attend.argtypes = (i, p, p, f, p, p, p, p, p, p, p, p, p, p, i)
    lib.fr_embed.argtypes = (i, p, n, p, n, p, i)
    lib.fr_layers.argtypes = (i, p, n, p, n, n, p, f, f, p, p, p, p, p, i)
    for function in (lib.fr_layers, lib.fr_embed, lib.fr_linear, lib.fr_join, lib.fr_best, lib.fr_store, lib.fr_attend):
        function.restype = None
    lib.fr_isa.restype = ctypes.c_char_p
    return lib


def described(matrix: Matrix, dtype: torch.dtype, parts: int = 1) -> list[int]:
    """The numbers of struct Matrix in cpu_blocks.h. parts: equal parts in which the kernels want a matrix that is in blocks.
    Raises TypeError for values that the kernels do not read."""
    if matrix.kind == Dense.kind:
        values = matrix.values
        if values.dtype != dtype or not values.is_contiguous():
            raise TypeError(f"weight must be contiguous {dtype}, not {values.dtype} with strides {values.stride()}")
        found = [(0, matrix.rows, values.data_ptr())]
    else:
        if not isinstance(matrix, Blocks):
            raise TypeError(f"the kernels do not read matrices of kind {matrix.kind}")
        pieces = (matrix,) if parts == 1 else matrix.split((matrix.rows // parts,) * parts)
        cut = [part for piece in pieces for part in piece.parts]
        if len(cut) > PARTS or (parts > 1 and len(cut) != parts) or not all(part.data.is_contiguous() for part in cut):
            raise TypeError(f"the kernels take at most {PARTS} contiguous parts, {parts} of equal size: {matrix.parts}")
        found = [(1 + list(FORMATS).index(part.format), len(part.data), part.data.data_ptr()) for part in cut]
    found += [(0, 0, 0)] * (PARTS - len(found))
    return [sum(1 for part in found if part[1]), *(number for part in found for number in part)]


def address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


class CpuKernels:
    """The kernels for activations in bfloat16 or float32, and weights in the same dtype or in blocks. isa: the instruction
    set; threads: how many they use, None: cpu_threads.threads(). They are batch-invariant: a token's result does not depend on
    the other tokens of the batch, bit for bit. So a verify step rounds as plain decoding does, and a prompt in chunks as in one
    piece."""

    def __init__(self, lib: ctypes.CDLL, dtype: torch.dtype, threads: int | None = None) -> None:
        self.lib, self.dtype = lib, dtype
        self.threads = threads or cpu_threads.threads()
        self.wide = int(dtype == torch.float32)
        self.isa = lib.fr_isa().decode()
        self._described: WeakKeyDictionary[Matrix, dict[int, ctypes.Array[ctypes.c_int64]]] = WeakKeyDictionary()

    def _struct(self, matrix: Matrix, parts: int = 1) -> ctypes.Array[ctypes.c_int64]:
        """struct Matrix, as `described` gives it, made once for each matrix: its memory must not move."""
        found = self._described.get(matrix)
        if found is None:
            found = self._described[matrix] = {}
        if parts not in found:
            numbers = described(matrix, self.dtype, parts)
            found[parts] = (ctypes.c_int64 * len(numbers))(*numbers)
        return found[parts]

    def multiplies(self, kind: str) -> bool:
        return kind in (Dense.kind, Blocks.kind)

    def embed(self, ids: Tensor, weight: Matrix) -> Tensor:
        if not isinstance(weight, Blocks) or len(weight.parts) != 1 or not ids.is_contiguous():
            return weight.embed(ids)
        y = torch.empty(len(ids), weight.columns, dtype=self.dtype)
        part = (ctypes.c_int64 * 3).from_buffer(self._struct(weight), 8)  # the first of struct Matrix
        self.lib.fr_embed(self.wide, part, weight.columns, ids.data_ptr(), len(ids), y.data_ptr(), self.threads)
        return y

    def _linear(
        self, kind: int, x: Tensor, norm: Tensor | None, eps: float, weight: Matrix, bias: Tensor | None, outs: int,
        residual: Tensor | None,
    ) -> Tensor:
        tokens, k = x.shape
        y = torch.empty(tokens, outs, dtype=torch.float32 if kind == LOGITS else self.dtype)
        matrix = self._struct(weight, 2 if kind == GATE_UP else 1)
        for name, t in (("x", x), ("norm", norm), ("bias", bias), ("residual", residual)):
            if t is not None and (t.dtype != self.dtype or not t.is_contiguous()):
                raise TypeError(f"{name} must be contiguous {self.dtype}, not {t.dtype} with strides {t.stride()}")
        self.lib.fr_linear(
            self.wide, kind, x.data_ptr(), tokens, k, address(norm), eps, matrix,
            address(bias), outs, address(residual), y.data_ptr(), self.threads,
        )
        return y

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix, bias: Tensor | None) -> Tensor:
        return self._linear(PLAIN, x, norm, eps, weight, bias, weight.rows, None)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        return self._linear(PLAIN, x, None, 0.0, weight, bias, weight.rows, None)

    def join(self, parts: Sequence[Tensor], norms: Sequence[Tensor | None], eps: float) -> Tensor:
        if all(norm is None for norm in norms):
            return torch.cat(tuple(parts), -1)  # the quickest for few tokens
        tokens, outs = len(parts[0]), 0
        numbers: list[int] = []
        for part, norm in zip(parts, norms, strict=True):
            (rows, width), (stride, step) = part.shape, part.stride()
            if part.dtype != self.dtype or step != 1 or rows != tokens:
                raise TypeError(f"a part must be {tokens} rows of {self.dtype}, not {part.dtype} {tuple(part.shape)}")
            if norm is not None and (norm.dtype != self.dtype or not norm.is_contiguous()):
                raise TypeError(f"norm must be contiguous {self.dtype}, not {norm.dtype} with strides {norm.stride()}")
            numbers += (part.data_ptr(), address(norm) or 0, width, stride)
            outs += width
        y = parts[0].new_empty(tokens, outs)
        given = struct.pack(f"{len(numbers)}q", *numbers)
        self.lib.fr_join(self.wide, given, len(parts), tokens, outs, eps, y.data_ptr(), self.threads)
        return y

    def linear_add(self, x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor) -> Tensor:
        return self._linear(ADD, x, None, 0.0, weight, bias, weight.rows, residual)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        return self._linear(GATE_UP, x, norm, eps, weight, None, weight.rows // 2, None)

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        return self._linear(LOGITS, x, norm, eps, weight, None, weight.rows, None)

    def logits(self, x: Tensor, weight: Matrix) -> Tensor:
        return self._linear(LOGITS, x, None, 0.0, weight, None, weight.rows, None)

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, count = logits.shape
        logits = logits.contiguous()
        if logits.dtype != torch.float32:
            raise TypeError(f"logits must be float32, not {logits.dtype}")
        ids, chances = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self.lib.fr_best(logits.data_ptr(), rows, count, ids.data_ptr(), chances.data_ptr(), self.threads)
        return ids, chances

    def store(
        self, kv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, k_norm: Tensor | None, key_pages: Tensor,
        value_pages: Tensor, batch: Batch,
    ) -> None:
        if kv.stride(1) != 1:
            raise ValueError("the heads of a token of kv must be contiguous")
        numbers = self._attention(kv, shape._replace(heads=0), cos, key_pages, value_pages, batch)
        self.lib.fr_store(
            self.wide, kv.data_ptr(), kv.stride(0), numbers, shape.eps, cos.data_ptr(), sin.data_ptr(), address(k_norm),
            key_pages.data_ptr(), value_pages.data_ptr(), batch.positions.data_ptr(), batch.row_start.data_ptr(),
            batch.block_table.data_ptr(), self.threads,
        )

    def rms_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        tokens, k = x.shape
        part = struct.pack("4q", x.data_ptr(), norm.data_ptr(), k, k)
        self.lib.fr_join(self.wide, part, 1, tokens, k, eps, y.data_ptr(), self.threads)
        return y

    def bounded(self, width: int, context: int, ragged: bool = False) -> Kernels:
        return self

    def bind(self, layers: Layers) -> RunLayers:
        stack = Stack(self, layers.weights, layers.shapes, layers.eps, layers.key_pages, layers.value_pages)

        def run(x: Tensor, batch: Batch, first: int, last: int) -> Tensor:
            return stack(x, layers.cos, layers.sin, batch, first, last)

        return run

    def attend(
        self, qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
        key_pages: Tensor, value_pages: Tensor, batch: Batch,
    ) -> Tensor:
        if not qkv.is_contiguous():
            raise ValueError("qkv must be contiguous")
        numbers = self._attention(qkv, shape, cos, key_pages, value_pages, batch)
        y = torch.empty(qkv.shape[0], shape.heads * shape.head_dim, dtype=self.dtype)
        self.lib.fr_attend(
            self.wide, qkv.data_ptr(), numbers, shape.eps, cos.data_ptr(), sin.data_ptr(), address(q_norm), address(k_norm),
            key_pages.data_ptr(), value_pages.data_ptr(), batch.positions.data_ptr(), batch.row_start.data_ptr(),
            batch.block_table.data_ptr(), y.data_ptr(), self.threads,
        )
        return y

    def _attention(
        self, x: Tensor, shape: AttentionShape, cos: Tensor, key_pages: Tensor, value_pages: Tensor, batch: Batch
    ) -> ctypes.Array[ctypes.c_int64]:
        """The numbers that fr_attend takes. x: qkv or kv."""
        table = batch.block_table
        if not (key_pages.is_contiguous() and value_pages.is_contiguous() and table.is_contiguous()):
            raise ValueError("pages and block table must be contiguous")
        if x.dtype != self.dtype or key_pages.dtype != self.dtype or table.dtype != torch.int32 or cos.dtype != torch.float32:
            raise TypeError(f"qkv is {x.dtype}, pages {key_pages.dtype}, block table {table.dtype}, cos {cos.dtype}")
        heads, kv_heads, dim, window, _, interleaved, both = shape
        sizes = (x.shape[0], *table.shape, key_pages.shape[2], heads, kv_heads, dim, interleaved, both, window)
        return (ctypes.c_int64 * len(sizes))(*sizes)


class Stack:
    """Consecutive decoder layers with their pages, run by one call into C. The results are those of `one_by_one`, bit for bit.

    layers, shapes, keys, values: one of each for every layer. Their addresses are read here, once, so they must not move.
    """

    def __init__(
        self, kernels: CpuKernels, layers: Sequence[Layer], shapes: Sequence[AttentionShape], eps: float,
        keys: Sequence[Tensor], values: Sequence[Tensor],
    ) -> None:
        pointers = []
        for layer, shape, k, v in zip(layers, shapes, keys, values, strict=True):
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                pointers += described(matrix, kernels.dtype, 2 if matrix is layer.gate_up else 1)
            tensors = (layer.attention_norm, layer.qkv_bias, layer.q_norm, layer.k_norm, layer.out_bias, layer.mlp_norm, k, v)
            for t in tensors:
                if t is not None and (t.dtype != kernels.dtype or not t.is_contiguous()):
                    raise TypeError(f"weights and pages must be contiguous {kernels.dtype}, not {t.dtype}")
            pointers += [address(t) or 0 for t in tensors] + [shape.window]
        self.kept = (layers, keys, values)  # so that they live as long as their addresses are used
        self.count, self.shape, self.eps = len(layers), shapes[0], eps
        self.block, self.inner = keys[0].shape[2], layers[0].gate_up.rows // 2
        self.table = (ctypes.c_int64 * len(pointers))(*pointers)
        self.run, self.wide, self.dtype, self.threads = kernels.lib.fr_layers, kernels.wide, kernels.dtype, kernels.threads

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, first: int = 0, last: int | None = None) -> Tensor:
        """x after the layers first .. last - 1, a new tensor. last None: all layers from first on.  [T,H] -> [T,H]"""
        x = x.clone(memory_format=torch.contiguous_format)
        heads, kv_heads, dim, _, head_eps, interleaved, both = self.shape
        table = batch.block_table
        if x.dtype != self.dtype or table.dtype != torch.int32 or not table.is_contiguous():
            raise TypeError(f"x is {x.dtype}, block table {table.dtype}")
        numbers = (ctypes.c_int64 * 9)(x.shape[0], *table.shape, self.block, heads, kv_heads, dim, interleaved, both)
        self.run(
            self.wide, ctypes.addressof(self.table) + first * LAYER_BYTES, (self.count if last is None else last) - first,
            x.data_ptr(), x.shape[1], self.inner, numbers, self.eps, head_eps, cos.data_ptr(), sin.data_ptr(),
            batch.positions.data_ptr(), batch.row_start.data_ptr(), table.data_ptr(), self.threads,
        )
        return x


@cache
def _compiled(isas: tuple[str, ...]) -> ctypes.CDLL | None:
    problem = ""
    for isa in isas:
        try:
            return library(isa)
        except subprocess.CalledProcessError as error:  # an old compiler may not know the instruction set
            problem = f"the C kernels did not compile ({(error.stderr or str(error)).strip().splitlines()[-1]})"
        except OSError as error:
            problem = f"the C kernels cannot be used ({error})"
    warnings.warn(f"{problem}: decoding on the CPU will be slow; install gcc, or set CC to a working C compiler", stacklevel=4)
    return None


def compiled() -> ctypes.CDLL | None:
    """The library for the best of `wanted_isas`. None, with a warning, where none can be compiled. Raises SettingError for an
    instruction set that the processor does not have."""
    return _compiled(wanted_isas())


def kernels(dtype: torch.dtype) -> Kernels:
    """The fastest kernels of this machine for a dtype: C for bfloat16 and float32; plain torch for other dtypes, and, with a
    warning, where there is no compiler."""
    lib = compiled() if dtype in (torch.bfloat16, torch.float32) else None
    return reference if lib is None else CpuKernels(lib, dtype)


def expand(rows: Part, order: Tensor, out: Tensor) -> bool:
    """Write row order[i] of these rows as numbers to out[i]. out: [rows, columns], contiguous, on the CPU. The values are those
    of rows.dense(), bit for bit; bfloat16 is rounded from them. Returns False, and writes nothing, for other dtypes, where the
    kernels are not compiled, and for neon and portable, which take infinite scales for finite ones."""
    lib = compiled() if out.dtype in (torch.bfloat16, torch.float32) else None
    if lib is None or lib.fr_isa().decode() in ("neon", "portable") or not rows.data.is_contiguous():
        return False
    kernels = CpuKernels(lib, out.dtype)
    matrix = (ctypes.c_int64 * 3)(*described(Blocks([rows], out.dtype), out.dtype)[1:4])
    lib.fr_embed(kernels.wide, matrix, rows.columns, order.data_ptr(), len(order), out.data_ptr(), kernels.threads)
    return True


def isa_of(kernels: Kernels) -> str | None:
    """The instruction set of CpuKernels; None for other kernels."""
    return kernels.isa if isinstance(kernels, CpuKernels) else None


def threads_of(kernels: Kernels) -> int:
    """The threads that compute the products: those of CpuKernels, else torch's."""
    return kernels.threads if isinstance(kernels, CpuKernels) else torch.get_num_threads()


def build_of(kernels: Kernels) -> str:
    """A name of the build: kernels of different names may differ in speed."""
    return Path(kernels.lib._name).stem if isinstance(kernels, CpuKernels) else "torch"


def best_dtype() -> tuple[torch.dtype, str]:
    """The faster of bfloat16 and float32 for a checkpoint of 16 bits, and the reason in words."""
    lib = compiled()
    isa = lib.fr_isa().decode() if lib is not None else None
    if isa == "portable":
        return torch.float32, "bfloat16 is fast from AVX2 on"
    if isa is None and not torch.cpu._is_avx512_bf16_supported():
        return torch.float32, "without a C compiler bfloat16 is slow on this processor"
    return torch.bfloat16, "half as many bytes to read as float32"
