"""The machine of a measurement: processor, memory, accelerator, versions. Knows nothing of runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys

from forerun import system
from forerun.bench.records.record import Machine


def load_average() -> float | None:
    """Over the last minute; None where the system does not report it."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def versions() -> dict[str, str]:
    """Of this package, and of those that its figures depend on."""
    import torch

    import forerun

    others = {name: importlib.metadata.version(name) for name in ("tokenizers", "numpy")}
    return {"forerun": forerun.__version__, "python": platform.python_version(), "torch": torch.__version__, **others}


def total_memory() -> int | None:
    """Bytes of memory that this process could have, within the limits of its cgroups; None if unknown."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return system.total_memory()
    return None


def available_memory() -> int | None:
    """Bytes that this process can still get without swapping, within the limits of its cgroups; None if unknown."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return system.available_memory()
    return None


def describe(load: float | None) -> Machine:
    """This machine. load: its load average at the start of the run."""
    import torch

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    memory = total_memory()
    return Machine(_cpu(), cores, memory, accelerator, f"{platform.system()} {platform.release()} {platform.machine()}", load)


def _cpu() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
