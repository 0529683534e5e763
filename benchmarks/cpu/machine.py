"""Describes the machine for the records of this folder's benchmarks, and limits a benchmark to a lower instruction set."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

LIBRARIES = {  # limits the kernels of torch, oneDNN and MKL to an instruction set; must be set before torch is imported
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avxvnni": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx512vnni": {
        "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}  # fmt: skip


def limits(isa: str) -> dict[str, str]:
    """The environment variables that limit both sides of a benchmark to this instruction set."""
    return {"FORERUN_CPU_ISA": isa, **LIBRARIES.get(isa, {})}


def describe() -> dict[str, Any]:
    """The machine and the versions, for a record."""
    import torch

    from forerun.kernels import cpu, cpu_threads

    packages = ("forerun", "torch", "transformers", "numpy")
    return {
        "machine": cpu_name(),
        "threads": cpu_threads.threads(),
        "isa": cpu.isa_of(cpu.kernels(torch.bfloat16)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
