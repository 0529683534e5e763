"""How many threads the CPU kernels use: one for each core that this process may use. And how torch is kept from using others at
the same time.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from forerun.system import MACHINE, control_groups
from forerun.types import require

SETTING = "FORERUN_CPU_THREADS"
MOST = 256  # MOST_THREADS in cpu_team.h


@cache
def threads() -> int:
    """The threads of the kernels, read once: FORERUN_CPU_THREADS, else `cores`. Raises SettingError."""
    given = os.environ.get(SETTING) or "auto"
    if given == "auto":
        return min(cores(), MOST)
    fits = given.isascii() and given.isdecimal() and 1 <= int(given) <= MOST
    require(fits, SETTING, given, f"give auto or a number from 1 to {MOST}")
    return int(given)


def cores(root: Path = MACHINE) -> int:
    """The cores that this process may use, at least 1: those of its affinity, hardware threads of one core counted once, and no
    more than its cgroups allow time for, rounded up. root: where /proc and /sys are."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    topology = root / "sys/devices/system/cpu"
    found = {_text(topology / f"cpu{i}/topology/thread_siblings_list") or str(i) for i in cpus}
    return max(1, math.ceil(min(len(found), quota(root))))


def quota(root: Path = MACHINE) -> float:
    """The CPU time that the cgroups of this process allow, in cores; infinite without a limit."""
    return min((_limit(group) for group in control_groups("cpu", root)), default=math.inf)


def _limit(group: Path) -> float:
    """The limit of one cgroup, in cores."""
    text = _text(group / "cpu.max") or f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}"
    try:
        allowed, period = map(int, text.split())
    except ValueError:  # "max", or no such file
        return math.inf
    return allowed / period if allowed > 0 and period > 0 else math.inf


@contextmanager
def only_this_thread() -> Iterator[None]:
    """Inside, torch computes the operations of the calling thread on that thread alone. Otherwise threads of torch's OpenMP
    runtime would take part in a large operation, and spin for milliseconds behind it on the cores that the kernels need. Other
    threads, and this one afterwards, compute as torch.set_num_threads says: this sets OpenMP's variable of the thread."""
    openmp, before = _openmp(), torch.get_num_threads()  # in a new thread, the latter sets that variable
    if openmp is None or before == 1:
        yield
        return
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


@cache
def _openmp() -> ctypes.CDLL | None:
    """torch's OpenMP runtime, None if it has none."""
    paths = {line.split()[-1] for line in _text(Path("/proc/self/maps")).splitlines() if "/" in line}
    runtimes = [path for path in paths if Path(path).name.startswith(("libgomp", "libiomp5", "libomp."))]
    beside_torch = str(Path(torch.__file__).parent)
    runtimes.sort(key=lambda path: (not path.startswith(beside_torch), path))
    return ctypes.CDLL(runtimes[0]) if runtimes else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
