"""The kernels on the CPU: compiles cpu.c when it is first needed, and calls it. Knows where the compiled file is kept,
that it has to share torch's OpenMP threads, and when torch's matrix product is the faster one; what the
kernels compute is in reference.py, how in cpu.c.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Kernels, Layers, RunLayers, one_by_one, reference

if TYPE_CHECKING:
    from forerun.models.loading import Layer

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-ffp-contract=off", "-Wno-psabi", "-w")
FEW_TOKENS = 64  # on processors that do not multiply bfloat16: from more tokens on torch's products are faster

PLAIN, ADD, GATE_UP, LOGITS = range(4)
LAYER_BYTES = 13 * 8  # of struct Layer in cpu.c


def cache_folder() -> Path:
    """FORERUN_CACHE, or ~/.cache/forerun."""
    return Path(os.environ.get("FORERUN_CACHE") or Path.home() / ".cache" / "forerun")


def processor() -> str:
    """What -march=native depends on: the processor's name and abilities."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("vendor_id", "model", "flags", "CPU ", "Features")))
    except OSError:
        return platform.machine() + platform.processor()


def build(source: Path = SOURCE) -> Path:
    """The compiled kernels, from the cache folder or made there (about 3 s). Raises OSError or
    subprocess.CalledProcessError when there is no working compiler."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    text = source.read_bytes()
    key = hashlib.sha256(b"\0".join((text, " ".join((*compiler, *FLAGS)).encode(), processor().encode()))).hexdigest()[:16]
    target = cache_folder() / f"cpu-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, linked = Path(folder) / "cpu.o", Path(folder) / "cpu.so"
        # linked without -fopenmp: the OpenMP functions are to be torch's, two runtimes would fight for the cores
        for arguments in ((*FLAGS, "-c", str(source), "-o", str(made)), ("-shared", str(made), "-o", str(linked))):
            subprocess.run([*compiler, *arguments], check=True, capture_output=True, text=True)
        os.replace(linked, target)  # whole or not at all, for processes that start together
    return target


def share_openmp() -> None:
    """Make the OpenMP runtime that torch uses visible to what is loaded next."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    beside_torch = str(Path(torch.__file__).parent)
    runtimes = [path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp5", "libomp."))]
    runtimes.sort(key=lambda path: (not path.startswith(beside_torch), path))
    if not runtimes:
        raise OSError("torch has no OpenMP runtime loaded")
    ctypes.CDLL(runtimes[0], mode=ctypes.RTLD_GLOBAL)


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels, loaded. Raises as `build` does."""
    path = build()
    share_openmp()
    lib = ctypes.CDLL(str(path))
    p, i, n, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    lib.fr_linear.argtypes = (i, p, n, n, p, f, p, p, n, p, p, i)
    lib.fr_rms_norm.argtypes = (i, p, n, n, p, f, p, i)
    lib.fr_silu_mul.argtypes = (p, n, n, p, i)
    lib.fr_attend.argtypes = (i, p, p, f, p, p, p, p, p, p, p, p, p, p, i)
    lib.fr_layers.argtypes = (p, n, p, n, n, p, f, f, p, p, p, p, p, i)
    for function in (lib.fr_layers, lib.fr_linear, lib.fr_rms_norm, lib.fr_silu_mul, lib.fr_attend):
        function.restype = None
    return lib


def address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


class CpuKernels:
    """The kernels for bfloat16 or float32; `kernels` chooses. Each output of a bfloat16 layer and of attention is rounded
    alike whatever the other tokens of a batch, so a verify step rounds as plain decoding does, and a prompt in chunks as
    in one piece. (Layers of more than FEW_TOKENS tokens are torch's, and so rounded otherwise, where the processor does
    not multiply bfloat16. float32 layers always are.)

    most: up to so many tokens the layers are computed here."""

    def __init__(self, lib: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.lib, self.dtype = lib, dtype
        self.wide = int(dtype == torch.float32)
        self.most = 0 if self.wide else sys.maxsize if lib.fr_native() else FEW_TOKENS

    def _linear(
        self, kind: int, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, outs: int,
        residual: Tensor | None,
    ) -> Tensor:
        tokens, k = x.shape
        y = torch.empty(tokens, outs, dtype=torch.float32 if kind == LOGITS else self.dtype)
        if not (x.is_contiguous() and weight.is_contiguous()):
            raise ValueError("x and weight must be contiguous")
        if x.dtype != self.dtype or weight.dtype != self.dtype:
            raise TypeError(f"x is {x.dtype} and weight {weight.dtype}, not {self.dtype}")
        self.lib.fr_linear(
            kind, x.data_ptr(), tokens, k, address(norm), eps, weight.data_ptr(), address(bias), outs, address(residual),
            y.data_ptr(), torch.get_num_threads(),
        )
        return y

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] <= self.most:
            return self._linear(PLAIN, x, norm, eps, weight, bias, weight.shape[0], None)
        return F.linear(self.rms_norm(x, norm, eps), weight, bias)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if x.shape[0] <= self.most:
            return self._linear(ADD, x, None, 0.0, weight, bias, weight.shape[0], residual)
        return F.linear(x, weight, bias).add_(residual)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        if x.shape[0] <= self.most:
            return self._linear(GATE_UP, x, norm, eps, weight, None, weight.shape[0] // 2, None)
        gate_up = F.linear(self.rms_norm(x, norm, eps), weight)
        if self.wide:
            gate, up = gate_up.chunk(2, -1)
            return F.silu(gate).mul_(up)
        tokens, outs = x.shape[0], weight.shape[0] // 2
        y = torch.empty(tokens, outs, dtype=self.dtype)
        self.lib.fr_silu_mul(gate_up.data_ptr(), tokens, outs, y.data_ptr(), torch.get_num_threads())
        return y

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        if x.shape[0] <= self.most:
            return self._linear(LOGITS, x, norm, eps, weight, None, weight.shape[0], None)
        return F.linear(self.rms_norm(x, norm, eps), weight).float()

    def rms_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        tokens, k = x.shape
        self.lib.fr_rms_norm(self.wide, x.data_ptr(), tokens, k, norm.data_ptr(), eps, y.data_ptr(), torch.get_num_threads())
        return y

    def bounded(self, width: int, context: int, ragged: bool = False) -> Kernels:
        return self

    def bind(self, layers: Layers) -> RunLayers:
        if self.most == 0:
            return partial(one_by_one, self, layers)
        stack = Stack(self, layers.weights, layers.shapes, layers.eps, layers.key_pages, layers.value_pages)

        def run(x: Tensor, batch: Batch, first: int, last: int) -> Tensor:
            if x.shape[0] > self.most:
                return one_by_one(self, layers, x, batch, first, last)
            return stack(x, layers.cos, layers.sin, batch, first, last)

        return run

    def attend(
        self, qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
        key_pages: Tensor, value_pages: Tensor, batch: Batch,
    ) -> Tensor:
        heads, kv_heads, dim, window, eps = shape
        tokens = qkv.shape[0]
        y = torch.empty(tokens, heads * dim, dtype=self.dtype)
        table = batch.block_table
        if not (qkv.is_contiguous() and key_pages.is_contiguous() and value_pages.is_contiguous() and table.is_contiguous()):
            raise ValueError("qkv, pages and block table must be contiguous")
        if qkv.dtype != self.dtype or key_pages.dtype != self.dtype or table.dtype != torch.int32 or cos.dtype != torch.float32:
            raise TypeError(f"qkv is {qkv.dtype}, pages {key_pages.dtype}, block table {table.dtype}, cos {cos.dtype}")
        numbers = (ctypes.c_int64 * 8)(tokens, table.shape[0], table.shape[1], key_pages.shape[2], heads, kv_heads, dim, window)
        self.lib.fr_attend(
            self.wide, qkv.data_ptr(), numbers, eps, cos.data_ptr(), sin.data_ptr(), address(q_norm), address(k_norm),
            key_pages.data_ptr(), value_pages.data_ptr(), batch.positions.data_ptr(), batch.row_start.data_ptr(),
            table.data_ptr(), y.data_ptr(), torch.get_num_threads(),
        )
        return y


class Stack:
    """Consecutive decoder layers with their pages, run by one call: what the kernels do one by one, bit for bit (where
    they take no product of torch's), without going back to Python between them. bfloat16 only.

    layers, shapes, keys, values: one of each for every layer; what they point at must stay where it is.
    """

    def __init__(
        self, kernels: CpuKernels, layers: Sequence[Layer], shapes: Sequence[AttentionShape], eps: float,
        keys: Sequence[Tensor], values: Sequence[Tensor],
    ) -> None:
        pointers = []
        for layer, shape, k, v in zip(layers, shapes, keys, values, strict=True):
            tensors = (layer.attention_norm, layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, layer.out, layer.out_bias,
                       layer.mlp_norm, layer.gate_up, layer.down, k, v)
            for t in tensors:
                if t is not None and (t.dtype != torch.bfloat16 or not t.is_contiguous()):
                    raise TypeError(f"weights and pages must be contiguous bfloat16, not {t.dtype}")
            pointers += [address(t) or 0 for t in tensors] + [shape.window]
        self.kept = (layers, keys, values)  # alive as long as their addresses are used
        self.count, self.shape, self.eps = len(layers), shapes[0], eps
        self.block, self.inner = keys[0].shape[2], layers[0].gate_up.shape[0] // 2
        self.table = (ctypes.c_int64 * len(pointers))(*pointers)
        self.run = kernels.lib.fr_layers

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, first: int = 0, last: int | None = None) -> Tensor:
        """x after the layers first .. last (not included; None: all).  [T,H] -> [T,H]"""
        x = x.clone(memory_format=torch.contiguous_format)
        heads, kv_heads, dim, _, head_eps = self.shape
        table = batch.block_table
        if x.dtype != torch.bfloat16 or table.dtype != torch.int32 or not table.is_contiguous():
            raise TypeError(f"x is {x.dtype}, block table {table.dtype}")
        numbers = (ctypes.c_int64 * 7)(x.shape[0], table.shape[0], table.shape[1], self.block, heads, kv_heads, dim)
        self.run(
            ctypes.addressof(self.table) + first * LAYER_BYTES, (self.count if last is None else last) - first, x.data_ptr(),
            x.shape[1], self.inner, numbers, self.eps, head_eps, cos.data_ptr(), sin.data_ptr(), batch.positions.data_ptr(),
            batch.row_start.data_ptr(), table.data_ptr(), torch.get_num_threads(),
        )
        return x


@cache
def compiled() -> ctypes.CDLL | None:
    """The library, or None, with a warning, where there is no compiler to make it."""
    try:
        return library()
    except subprocess.CalledProcessError as error:
        problem = f"the C kernels did not compile ({(error.stderr or str(error)).strip().splitlines()[-1]})"
    except OSError as error:
        problem = f"the C kernels cannot be used ({error})"
    warnings.warn(f"{problem}: decoding on the CPU will be slow; install gcc, or set CC to a working C compiler", stacklevel=3)
    return None


def kernels(dtype: torch.dtype) -> Kernels:
    """The fastest kernels that this machine can run for a dtype: C for bfloat16 and float32, where a compiler is found
    (otherwise a warning, once, and plain torch); plain torch for every other dtype."""
    lib = compiled() if dtype in (torch.bfloat16, torch.float32) else None
    return reference if lib is None else CpuKernels(lib, dtype)


def describe(kernels: Kernels) -> str:
    """A name that is another for kernels that may take another time."""
    return Path(kernels.lib._name).stem if isinstance(kernels, CpuKernels) else "torch"
