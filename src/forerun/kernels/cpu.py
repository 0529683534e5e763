"""The kernels on the CPU: compiles cpu.c when it is first needed, and calls it. Knows where the compiled file is kept,
that it has to share torch's OpenMP threads, and from how many tokens on torch's matrix product is the faster one; what
the kernels compute is in reference.py, how in cpu.c.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Kernels, reference

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-ffp-contract=off", "-Wno-psabi", "-w")
FEW_TOKENS = 64  # up to so many, the products that read each weight once; above, torch's

PLAIN, ADD, GATE_UP, LOGITS = range(4)


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
        for command in ([*compiler, *FLAGS, "-c", str(source), "-o", str(made)], [*compiler, "-shared", str(made), "-o", str(linked)]):
            subprocess.run(command, check=True, capture_output=True, text=True)
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
    for function in (lib.fr_linear, lib.fr_rms_norm, lib.fr_silu_mul, lib.fr_attend):
        function.restype = None
    return lib


class CpuKernels:
    """The kernels for bfloat16 or float32; `kernels` chooses. Up to FEW_TOKENS tokens, each output of a bfloat16 layer is
    rounded alike however many tokens there are, so a verify step rounds as plain decoding does; attention always."""

    def __init__(self, lib: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.lib, self.dtype = lib, dtype
        self.wide = int(dtype == torch.float32)

    def _linear(
        self, kind: int, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, outs: int, residual: Tensor | None
    ) -> Tensor:
        tokens, k = x.shape
        y = torch.empty(tokens, outs, dtype=torch.float32 if kind == LOGITS else self.dtype)
        if not (x.is_contiguous() and weight.is_contiguous()):
            raise ValueError("x and weight must be contiguous")
        if x.dtype != self.dtype or weight.dtype != self.dtype:
            raise TypeError(f"x is {x.dtype} and weight {weight.dtype}, not {self.dtype}")
        self.lib.fr_linear(
            kind, x.data_ptr(), tokens, k, None if norm is None else norm.data_ptr(), eps, weight.data_ptr(),
            None if bias is None else bias.data_ptr(), outs, None if residual is None else residual.data_ptr(), y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def _few(self, x: Tensor) -> bool:
        return not self.wide and x.shape[0] <= FEW_TOKENS

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._few(x):
            return self._linear(PLAIN, x, norm, eps, weight, bias, weight.shape[0], None)
        return F.linear(self.rms_norm(x, norm, eps), weight, bias)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if self._few(x):
            return self._linear(ADD, x, None, 0.0, weight, bias, weight.shape[0], residual)
        return F.linear(x, weight, bias).add_(residual)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        if self._few(x):
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
        if self._few(x):
            return self._linear(LOGITS, x, norm, eps, weight, None, weight.shape[0], None)
        return F.linear(self.rms_norm(x, norm, eps), weight).float()

    def rms_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        tokens, k = x.shape
        self.lib.fr_rms_norm(self.wide, x.data_ptr(), tokens, k, norm.data_ptr(), eps, y.data_ptr(), torch.get_num_threads())
        return y

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
            self.wide, qkv.data_ptr(), numbers, eps, cos.data_ptr(), sin.data_ptr(), None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(), key_pages.data_ptr(), value_pages.data_ptr(), batch.positions.data_ptr(),
            batch.row_start.data_ptr(), table.data_ptr(), y.data_ptr(), torch.get_num_threads(),
        )
        return y


@cache
def _warn(problem: str) -> None:
    warnings.warn(f"{problem}: decoding on the CPU will be slow; install gcc, or set CC to a working C compiler", stacklevel=3)


def kernels(dtype: torch.dtype) -> Kernels:
    """The fastest kernels that this machine can run for a dtype: C for bfloat16 and float32, where a compiler is found
    (otherwise a warning, once, and plain torch); plain torch for every other dtype."""
    if dtype not in (torch.bfloat16, torch.float32):
        return reference
    try:
        return CpuKernels(library(), dtype)
    except subprocess.CalledProcessError as error:
        _warn(f"the C kernels did not compile ({(error.stderr or str(error)).strip().splitlines()[-1]})")
    except OSError as error:
        _warn(f"the C kernels cannot be used ({error})")
    return reference
