"""The cost of a step by its positions and its context. An engine with adaptive drafts measures it when it starts, and keeps the
result in a file of the cache folder for the next start. Times of a machine that is busy with other programs are not kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median_high
from typing import Any, NamedTuple

import numpy as np
import torch

import forerun
from forerun.kernels import cpu
from forerun.models.decoder import Target

LOG = logging.getLogger("forerun")


class Point(NamedTuple):
    """One measurement: a step of one row over so many positions, after so many tokens of context."""

    positions: int
    context: int
    seconds: float


class Measured(NamedTuple):
    """points: by context and positions; sound: whether nothing else slowed the steps down, as far as can be seen."""

    points: list[Point]
    sound: bool


class Clocks(NamedTuple):
    """wall: seconds that have passed; own: seconds that this thread had a processor."""

    wall: Callable[[], float]
    own: Callable[[], float]


CLOCKS = Clocks(time.perf_counter, time.thread_time)
FORMAT = 4  # of the file
LIMIT_S = 2.0  # measuring ends after about this time, even if rounds are left
ROUNDS, MOST_ROUNDS = 3, 12  # samples of each step: of sound points, and of others
AGREEMENT = 1.25  # the median of a step's samples over their minimum, at most
OWN = 0.8  # share of the time for which this thread has a processor, at least
WORTH_S = 0.2  # measurements that took less are not kept
FRESH_S = 86400.0  # older points are measured again, since a processor's speed changes with its other load
FIRST = (1, 8)  # positions that are always measured, and first: without and with context


class Costs:
    """Seconds of a step, interpolated between measured points: linear in its positions, plus the time to read keys and values,
    linear in the context of its rows, with a slope that depends on the positions of a row."""

    def __init__(self, points: Sequence[Point]) -> None:
        """points: ordered by positions: at least two without context, any number with context."""
        bare = [point for point in points if not point.context]
        self._at = np.array([float(point.positions) for point in bare])
        self._seconds = np.maximum.accumulate([point.seconds for point in bare])  # noise must not make larger steps cheaper
        slopes = [
            (point.positions, max(point.seconds - float(self.bare(point.positions)), 0.0) / point.context)
            for point in points
            if point.context
        ]
        self._widths = np.array([float(n) for n, _ in slopes] or [1.0])
        self._slopes = np.maximum.accumulate([slope for _, slope in slopes] or [0.0])

    def bare(self, positions: np.ndarray | float) -> np.ndarray:
        """Seconds without context. Past the last point the line through the last two goes on."""
        at, seconds = self._at, self._seconds
        behind = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2])
        return np.interp(positions, at, seconds) + behind * np.maximum(np.asarray(positions) - at[-1], 0)

    def __call__(self, positions: np.ndarray, rows: int, context: float) -> np.ndarray:
        """Seconds [S] of steps with these positions [S]. rows: of each step; context: mean tokens of a row."""
        return self.bare(positions) + rows * context * np.interp(positions / rows, self._widths, self._slopes)


class PassCosts:
    """Seconds of a drafter's pass, interpolated linearly between measured numbers of rows."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """seconds: by rows, at least one."""
        self._rows = sorted(seconds)
        self._seconds = np.maximum.accumulate([seconds[rows] for rows in self._rows])

    def __call__(self, rows: int) -> float:
        last = self._rows[-1]  # behind it a row costs its share
        return float(np.interp(rows, self._rows, self._seconds)) * max(rows / last, 1.0)


def pass_costs(
    run: Callable[[int], object], most: int, passes: int, clock: Callable[[], float] = time.perf_counter
) -> PassCosts:
    """Time passes of 1, 8 and `most` rows, the minimum of a few. run(rows): makes so many passes. Measuring ends after about
    half of LIMIT_S, but each number of rows is timed once."""
    best, start = dict[int, float](), clock()
    for number in range(1 + ROUNDS):  # the first round only warms up
        for rows in sorted({1, min(8, most), most}):
            begin = clock()
            run(rows)
            if number or rows not in best:
                best[rows] = min(clock() - begin, best.get(rows, math.inf) if number > 1 else math.inf)
        if clock() - start > LIMIT_S / 2 and number:
            break
    return PassCosts({rows: seconds / passes for rows, seconds in best.items()})


def step_costs(
    target: Target, run: Callable[[int, int], object], most: int, context: int, clocks: Clocks = CLOCKS
) -> list[Point]:
    """Points from the cache file, or measured and, if they are sound, written to it. run(positions, behind): computes one step
    of 1 .. `most` positions (`most` is at least 2) after 0 or `context` tokens (`context` may be 0)."""
    key = _key(target, most, context)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cpu.cache_folder() / f"step-costs-{digest}.json"
    points = _read(path, key, most)
    if points is not None:
        return points
    LOG.info("Measuring what steps of 1 to %d positions cost here (about %g s at most)", most, LIMIT_S)
    start = clocks.wall()
    measured = measure(run, most, context, clocks)
    if not measured.sound:
        LOG.info("What steps cost is not kept for the next start: other programs were busy, or steps take long")
    elif clocks.wall() - start >= WORTH_S:
        _write(path, key, measured.points)
    return measured.points


def measure(run: Callable[[int, int], object], most: int, context: int, clocks: Clocks = CLOCKS) -> Measured:
    """Time steps of 1, 2, 4 .. `most` positions without context, and steps of FIRST with it. Steps of which ROUNDS samples
    would take longer than LIMIT_S are left out, except those of FIRST without context.

    Each step is timed once a round. Sound points are medians. If other programs are busy, more rounds follow, and means count:
    a short step runs between two interruptions or meets one, a long one meets many. By the minimum or the median, long steps
    could seem too costly, and no draft would pay."""
    first = [min(n, most) for n in FIRST]
    more = [n for n in (1 << i for i in range(most.bit_length())) if n not in first]
    steps = [*((n, 0) for n in first), *((n, context) for n in first if context), *((n, 0) for n in more)]
    run(first[0], 0)  # reads weights that are still on the disk
    start, own, samples = clocks.wall(), clocks.own(), dict[tuple[int, int], list[float]]()

    def spent() -> float:
        return clocks.wall() - start

    def timed(n: int, behind: int) -> None:
        begin = clocks.wall()
        run(n, behind)
        samples.setdefault((n, behind), []).append(clocks.wall() - begin)

    def sound() -> bool:
        return agree(samples) and clocks.own() - own >= OWN * spent()

    for n, behind in steps:
        expected = max((s[0] for (m, c), s in samples.items() if m <= n and c <= behind), default=0.0)
        if len(samples) < len(first) or spent() + expected <= LIMIT_S / ROUNDS:
            timed(n, behind)
    rounds = (step for number in range(1, MOST_ROUNDS) for step in samples if number < ROUNDS or not sound())
    for step in rounds:
        if spent() + min(samples[step]) > LIMIT_S:
            break
        timed(*step)
    kept = sound()
    points = [Point(n, behind, median_high(s) if kept else mean(s)) for (n, behind), s in samples.items()]
    return Measured(sorted(points, key=lambda point: (point.context, point.positions)), kept)


def agree(samples: Mapping[tuple[int, int], Sequence[float]]) -> bool:
    """Whether each step has two samples or more that agree, and no step takes longer than one of more positions. samples: by
    positions and context: the seconds of each run."""
    steady = all(len(s) > 1 and median_high(s) <= AGREEMENT * min(s) for s in samples.values())
    bare = [median_high(s) for (_, context), s in sorted(samples.items()) if not context]
    return steady and all(less <= AGREEMENT * more for less, more in pairwise(bare))


def _key(target: Target, most: int, context: int) -> dict[str, Any]:
    """All that the costs depend on. Two models of the same shape cost the same."""
    return {
        "format": FORMAT,
        "model": asdict(target.config) | {"vocab_size": target.vocab},
        "dtype": str(target.dtype),
        "bytes": target.bytes,
        "quantization": target.quantization,
        "device": str(target.device),
        "kernels": cpu.build_of(target.kernels),
        "threads": cpu.threads_of(target.kernels),
        "processor": cpu.processor(),
        "versions": {"forerun": forerun.__version__, "torch": torch.__version__},
        "positions": [most, context],
    }


def _read(path: Path, key: dict[str, Any], most: int) -> list[Point] | None:
    """The points in a file. None if there is no file, if it is old, or if `_write` did not make it."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        points = [Point(int(n), int(context), float(seconds)) for n, context, seconds in kept["points"]]
        known = kept["key"] == json.loads(json.dumps(key)) and 0 <= time.time() - float(kept["measured_at"]) <= FRESH_S
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    sound = all(1 <= p.positions <= most and p.context in (0, key["positions"][1]) and 0 < p.seconds < math.inf for p in points)
    order = [(p.context, p.positions) for p in points]
    enough = sum(not p.context for p in points) >= 2
    return points if known and sound and enough and order == sorted(set(order)) else None


def _write(path: Path, key: dict[str, Any], points: list[Point]) -> None:
    """Write the file at once or not at all, since other processes may write it too. A failure is logged and ignored."""
    kept = {"key": key, "measured_at": time.time(), "points": points}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            made.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            os.replace(made, path)
    except OSError as error:
        LOG.info("What steps cost is not kept: %s cannot be written (%s)", path, error)
