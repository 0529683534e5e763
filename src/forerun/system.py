"""What this process may use of the machine, from Linux's /proc and control groups. Does not use torch.

A container or a service may be allowed less than the machine has. Control groups (cgroups) say how much. A group's limit holds
for all groups in it: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MACHINE = Path("/")
RECLAIMED = ("active_file", "inactive_file", "slab_reclaimable")  # used, and given up when memory is wanted: the page cache


def available_memory(root: Path = MACHINE) -> int:
    """The bytes that this process can still get without swapping: what the kernel says is available, page cache included, and
    no more than its cgroups leave. root: where /proc and /sys are."""
    known = _numbers(root / "proc/meminfo").get("MemAvailable:")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known is None else known * 1024
    for group in control_groups("memory", root):
        limit = _limit(group)
        if limit is not None:
            used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
            stat = _numbers(group / "memory.stat")
            # in version 1 the counts with "total_" include the groups within, as the usage does
            cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in RECLAIMED)
            free = min(free, limit - max(used - cache, 0))
    return max(free, 0)


def total_memory(root: Path = MACHINE) -> int:
    """The bytes that this process could have if nothing else ran: the machine's memory, no more than its cgroups' limits."""
    known = _numbers(root / "proc/meminfo").get("MemTotal:")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known is None else known * 1024
    limits = (_limit(group) for group in control_groups("memory", root))
    return min([total, *(limit for limit in limits if limit is not None)])


def control_groups(controller: str, root: Path = MACHINE) -> Iterator[Path]:
    """The folders of the cgroups that this process is in and that have this controller (memory, cpu), those around it included,
    of both versions. A container may see its own group as the outermost one and still be told the path outside; therefore some
    folders may not be there, and others may be of a group that has no limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":  # version 2; beside version 1 it may be mounted in the folder unified
            bases = ["", "unified"]
        elif controller in controllers.split(","):
            bases = [controllers, *({controller} - {controllers})]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            for depth in range(len(parts) + 1):
                yield (root / "sys/fs/cgroup" / base).joinpath(*parts[:depth])


def _limit(group: Path) -> int | None:
    """The bytes that a group may have; None without a limit. Above memory.high it is slowed down, above the others killed."""
    found = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    return min((limit for limit in found if limit is not None), default=None)


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", or if there is no such file."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines that begin with a name and a number."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
