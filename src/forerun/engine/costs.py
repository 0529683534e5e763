"""What a step costs by its number of positions: measured when an engine starts that adapts its drafts to it, and kept in
a file of the cache folder for the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import forerun
from forerun.kernels import cpu
from forerun.models.decoder import Target

LOG = logging.getLogger("forerun")

Points = list[tuple[int, float]]  # (positions, seconds), by positions

FORMAT = 1  # of the file
LIMIT_S = 2.0  # measuring ends about here, where three rounds would take longer
ROUNDS = 3
WORTH_S = 0.2  # what took less is not worth a file
FRESH_S = 7 * 86400.0  # a processor's speed changes with what runs beside; older points are measured again
AT_ONCE = (1, 8)  # positions measured first: they must be known


def step_costs(
    target: Target, run: Callable[[int], object], most: int, clock: Callable[[], float] = time.perf_counter
) -> Points:
    """Points from the cache file, or else measured and put there. run: computes one step of so many positions, at most
    `most` (at least 2)."""
    key = _key(target, most)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cpu.cache_folder() / f"step-costs-{digest}.json"
    points = _read(path, key, most)
    if points is not None:
        return points
    LOG.info("Measuring what steps of 1 to %d positions cost here (about %g s at most)", most, LIMIT_S)
    start = clock()
    points = measure(run, most, clock)
    if clock() - start >= WORTH_S:
        _write(path, key, points)
    return points


def measure(run: Callable[[int], object], most: int, clock: Callable[[], float] = time.perf_counter) -> Points:
    """Seconds of steps of 1, 2, 4 .. `most` positions: the best of up to ROUNDS each, in turn. When LIMIT_S are spent the rest
    is left out, but for one step of 1 position and one of a few, which are always measured."""
    start, best = clock(), dict[int, float]()
    first = [min(n, most) for n in AT_ONCE]
    sizes = [*first, *(n for n in (1 << i for i in range(most.bit_length())) if n not in first)]
    for number in range(ROUNDS):
        for n in sizes:
            expected = max((s for m, s in best.items() if m <= n), default=0.0)
            if len(best) >= len(first) and clock() - start + expected > LIMIT_S:
                if number == 0:
                    continue  # a smaller step may still fit in
                return sorted(best.items())
            begin = clock()
            run(n)
            took = clock() - begin
            best[n] = min(took, best.get(n, math.inf))
    return sorted(best.items())


def _key(target: Target, most: int) -> dict[str, Any]:
    """All that the costs depend on. Models of one shape cost the same."""
    return {
        "format": FORMAT,
        "model": asdict(target.config) | {"vocab_size": target.vocab},
        "dtype": str(target.dtype),
        "device": str(target.device),
        "kernels": cpu.build_of(target.kernels),
        "threads": torch.get_num_threads(),
        "processor": cpu.processor(),
        "versions": {"forerun": forerun.__version__, "torch": torch.__version__},
        "positions": most,
    }


def _read(path: Path, key: dict[str, Any], most: int) -> Points | None:
    """None if there is no file, or it is old, or is not what `_write` makes."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        points = [(int(n), float(seconds)) for n, seconds in kept["points"]]
        known = kept["key"] == json.loads(json.dumps(key)) and 0 <= time.time() - float(kept["measured_at"]) <= FRESH_S
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    positions = [n for n, _ in points]
    sound = all(1 <= n <= most and 0 < seconds < math.inf for n, seconds in points)
    return points if known and sound and len(points) >= 2 and positions == sorted(set(positions)) else None


def _write(path: Path, key: dict[str, Any], points: Points) -> None:
    """Whole or not at all, for processes that start together; without a folder that can be written it is left out."""
    kept = {"key": key, "measured_at": time.time(), "points": points}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            made.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            os.replace(made, path)
    except OSError as error:
        LOG.info("What steps cost is not kept: %s cannot be written (%s)", path, error)
