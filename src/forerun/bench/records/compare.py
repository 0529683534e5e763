"""Compares two runs cell by cell, for instance last week's record and today's. Knows records and figures.

Runs at different times are not interleaved, so every change of the machine between them is part of a change of speed. It is not
part of a change of the speed-up, because each run measured its own baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from forerun.bench.records.record import Record
from forerun.bench.records.statistics import Call, Ratio, paired_ratio, unpaired_ratio, verdict
from forerun.bench.records.summary import Cell, cells, margin, measured, speed

SETTINGS = {
    "model": "settings.model",
    "engine": "settings.engine",
    "processor": "machine.cpu",
    "cores": "machine.cores",
    "accelerator": "machine.accelerator",
    "system": "machine.system",
    "output tokens, at most": "settings.max_tokens",
    "warm-ups": "settings.warmups",
    "seed": "settings.seed",
}
"""What is compared of two runs, by its name in a report: attributes of a record."""


@dataclass(frozen=True, slots=True)
class Change:
    """A cell that both runs have. speed: later over earlier. speedup: the later speed-up over the earlier one, None for the
    baseline. Where the runs sent the same prompts, both are paired by prompt. The verdicts are on these ratios."""

    before: Cell
    after: Cell
    speed: Ratio | None
    same_prompts: bool
    speed_verdict: Call
    speedup: Ratio | None
    speedup_verdict: Call | None


def changes(before: Record, after: Record) -> list[Change]:
    """The cells of the same task, load and arm, in the order of the later run."""
    earlier = {(c.task, c.load, c.arm): c for c in cells(before)}
    return [
        _change(before, after, earlier[c.task, c.load, c.arm], c) for c in cells(after) if (c.task, c.load, c.arm) in earlier
    ]


def _change(before: Record, after: Record, old: Cell, new: Cell) -> Change:
    least = max(margin(before, old.task, old.load), margin(after, new.task, new.load))
    same = _prompts(before, old) == _prompts(after, new)
    ratio = _ratio(_speeds(before, old), _speeds(after, new), same)
    if new.speedup is None or old.speedup is None:
        return Change(old, new, ratio, same, verdict(ratio, least), None, None)
    gained = _ratio(_speedups(before, old), _speedups(after, new), same)
    return Change(old, new, ratio, same, verdict(ratio, least), gained, verdict(gained, least))


def _prompts(record: Record, cell: Cell) -> list[tuple[str, ...]]:
    return [tuple(a.prompt for a in b.answers) for b in measured(record, cell.task, cell.load, cell.arm)]


def _speeds(record: Record, cell: Cell) -> list[float | None]:
    """Of each batch."""
    return [speed(b) for b in measured(record, cell.task, cell.load, cell.arm)]


def _speedups(record: Record, cell: Cell) -> list[float | None]:
    """Of each batch, over the reference's batch of the same repetition."""
    base = {b.repetition: speed(b) for b in measured(record, cell.task, cell.load, record.settings.reference)}
    pairs = [(speed(b), base.get(b.repetition)) for b in measured(record, cell.task, cell.load, cell.arm)]
    return [ours / theirs if ours and theirs else None for ours, theirs in pairs]


def _ratio(before: Sequence[float | None], after: Sequence[float | None], paired: bool) -> Ratio | None:
    if not paired:
        return unpaired_ratio([b for b in before if b is not None], [a for a in after if a is not None])
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b is not None and a is not None]
    return paired_ratio([b for b, _ in pairs], [a for _, a in pairs])


def unmatched(before: Record, after: Record) -> list[str]:
    """The cells that only one of the two runs has, in words."""
    old, new = ({(c.task, c.load.label, c.arm) for c in cells(record)} for record in (before, after))
    return [
        f"only the {which} run has {task}, {load}, {arm}."
        for which, found in (("earlier", old - new), ("later", new - old))
        for task, load, arm in sorted(found)
    ]


def differences(before: Record, after: Record) -> list[str]:
    """The settings, versions and machines in which the runs differ, in words. Each is part of every change."""
    known = [(name, attrgetter(path)(before), attrgetter(path)(after)) for name, path in SETTINGS.items()]
    for name in dict.fromkeys([*before.versions, *after.versions]):
        known.append((f"version of {name}", before.versions.get(name), after.versions.get(name)))
    found = [f"{name}: {_said(old)} before, {_said(new)} after." for name, old, new in known if old != new]
    earlier = {arm.name: arm for arm in before.settings.arms}
    for arm in after.settings.arms:
        if (was := earlier.get(arm.name)) is None:
            continue
        if arm.speculation != was.speculation:
            found.append(f"{arm.name}: the drafter's settings differ.")
        keys = [key for key in dict.fromkeys([*was.engine, *arm.engine]) if was.engine.get(key) != arm.engine.get(key)]
        found += [f"{arm.name}: {key}={was.engine.get(key)!r} before, {arm.engine.get(key)!r} after." for key in keys]
    return found


def _said(value: object) -> str:
    return "none" if value is None else str(value)


def drift(made: Sequence[Change], reference: str) -> float | None:
    """The baseline's later speed over its earlier one, the geometric mean over the cells: the machine's part of every change of
    speed. None without a baseline."""
    logs = [math.log(c.speed.mean) for c in made if c.after.arm == reference and c.speed is not None]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None
