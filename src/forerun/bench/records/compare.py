"""One run against a later one, cell by cell: last week's record and today's. Knows records and figures; prints nothing.

Runs at different times are not interleaved, so whatever changed of the machine in between is part of every change of a speed.
A change of a speed-up is not: each run measured its own baseline beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.bench.records.record import Batch, Record
from forerun.bench.records.statistics import Call, Ratio, paired_ratio, unpaired_ratio, verdict
from forerun.bench.records.summary import Cell, cells, margin, measured, speed


@dataclass(frozen=True, slots=True)
class Change:
    """A cell that both runs have. speed: later over earlier. speedup: the later speed-up over the earlier one, None for the
    baseline. Both are paired by prompt where the runs sent the same prompts, so that what differs between prompts cancels.
    The verdicts speak of these."""

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
    ours, theirs = measured(after, new.task, new.load, new.arm), measured(before, old.task, old.load, old.arm)
    least = max(margin(before, old.task, old.load), margin(after, new.task, new.load))
    same = _prompts(theirs) == _prompts(ours)
    if same:
        alike = [(speed(x), speed(y)) for x, y in zip(theirs, ours, strict=True)]
        pairs = [(a, b) for a, b in alike if a is not None and b is not None]
        ratio = paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
    else:
        ratio = unpaired_ratio(_speeds(theirs), _speeds(ours))
    if new.speedup is None or old.speedup is None:
        return Change(old, new, ratio, same, verdict(ratio, least), None, None)
    was, now = _speedups(before, old), _speedups(after, new)
    both = sorted(was.keys() & now.keys())
    if same:
        gained = paired_ratio([was[r] for r in both], [now[r] for r in both])
    else:
        gained = unpaired_ratio(list(was.values()), list(now.values()))
    return Change(old, new, ratio, same, verdict(ratio, least), gained, verdict(gained, least))


def _prompts(batches: Sequence[Batch]) -> list[tuple[str, ...]]:
    return [tuple(a.prompt for a in b.answers) for b in batches]


def _speeds(batches: Sequence[Batch]) -> list[float]:
    return [s for b in batches if (s := speed(b)) is not None]


def _speedups(record: Record, cell: Cell) -> dict[int, float]:
    """The ratio to the baseline of each repetition of the cell, by repetition."""
    base = {b.repetition: speed(b) for b in measured(record, cell.task, cell.load, record.settings.reference)}
    found = {}
    for batch in measured(record, cell.task, cell.load, cell.arm):
        ours, theirs = speed(batch), base.get(batch.repetition)
        if ours is not None and theirs is not None:
            found[batch.repetition] = ours / theirs
    return found


def unmatched(before: Record, after: Record) -> list[str]:
    """What only one of the two runs has, in words."""
    old, new = ({(c.task, c.load.label, c.arm) for c in cells(record)} for record in (before, after))
    return [
        f"only the {which} run has {task}, {load}, {arm}."
        for which, found in (("earlier", old - new), ("later", new - old))
        for task, load, arm in sorted(found)
    ]


def differences(before: Record, after: Record) -> list[str]:
    """In what the runs differ beside the time, each of which is part of every change."""
    b, a = before.settings, after.settings
    known = [
        ("model", b.model, a.model),
        ("engine", b.engine, a.engine),
        ("processor", before.machine.cpu, after.machine.cpu),
        ("cores", before.machine.cores, after.machine.cores),
        ("accelerator", before.machine.accelerator, after.machine.accelerator),
        ("system", before.machine.system, after.machine.system),
        ("output tokens, at most", b.max_tokens, a.max_tokens),
        ("warm-ups", b.warmups, a.warmups),
        ("seed", b.seed, a.seed),
        *[
            (f"version of {name}", before.versions.get(name), after.versions.get(name))
            for name in dict.fromkeys([*before.versions, *after.versions])
        ],
    ]
    found = [f"{name}: {_said(old)} before, {_said(new)} after." for name, old, new in known if old != new]
    earlier = {arm.name: arm for arm in b.arms}
    for arm in a.arms:
        if arm.name in earlier and arm.speculation != earlier[arm.name].speculation:
            found.append(f"{arm.name}: drafts with other settings than before.")
        if arm.name in earlier and arm.engine != earlier[arm.name].engine:
            theirs = earlier[arm.name].engine
            keys = [key for key in dict.fromkeys([*theirs, *arm.engine]) if theirs.get(key) != arm.engine.get(key)]
            found += [f"{arm.name}: {key}={theirs.get(key)!r} before, {arm.engine.get(key)!r} after." for key in keys]
    return found


def _said(value: object) -> str:
    return "none" if value is None else str(value)


def drift(made: Sequence[Change], reference: str) -> float | None:
    """By what the baselines of the two runs differ, the geometric mean over the cells: the machine's part of every change of a
    speed. None without one."""
    logs = [math.log(c.speed.mean) for c in made if c.after.arm == reference and c.speed is not None]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None
