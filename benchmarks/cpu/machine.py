"""What the benchmarks of this folder say of the machine, and how they make it a lesser one."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

LIBRARIES = {  # keeps torch's own kernels, oneDNN's and MKL's to an instruction set; to be set before torch is imported
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}


def limits(isa: str) -> dict[str, str]:
    """The environment in which all that a benchmark compares has no more than this instruction set."""
    return {"FORERUN_CPU_ISA": isa, **LIBRARIES.get(isa, {})}


def describe() -> dict[str, Any]:
    """The machine and the versions, for a record."""
    import torch

    from forerun.kernels import cpu

    packages = ("forerun", "torch", "transformers", "numpy")
    return {
        "machine": cpu_name(),
        "threads": torch.get_num_threads(),
        "isa": cpu.isa_of(cpu.kernels(torch.bfloat16)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
