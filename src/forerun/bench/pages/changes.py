"""The view of a comparison of two runs. Its figures are compare.py's."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.bench.formats import NONE, between, interval, listed, number, percent
from forerun.bench.pages import charts
from forerun.bench.pages.view import Axis, Column, Part, Row, Rows, View, table
from forerun.bench.pages.words import command, model_of, place
from forerun.bench.records.compare import Change, changes, differences, drift, unmatched
from forerun.bench.records.record import Record
from forerun.bench.records.statistics import Call, Ratio
from forerun.types import SettingError

UNPAIRED = (
    "the runs were not interleaved and so are not paired: every change of the machine between them is part of a change of "
    "tokens/s. It is not part of a change of the speed-up, because each run measured its own baseline."
)
NOTICED = 0.03  # a baseline that changed by more than that is mentioned


def _speeds(c: Change) -> str:
    return f"{number(c.before.tokens_per_s, 1)} → {number(c.after.tokens_per_s, 1)}"


def _speedups(c: Change) -> str:
    b, a = c.before.speedup, c.after.speedup
    return f"{b.mean:.2f} → {a.mean:.2f}" if b and a else NONE


def _accepted(c: Change) -> str:
    b, a = c.before.acceptance_rate, c.after.acceptance_rate
    return NONE if b is None else f"{percent(b)} → {percent(a)}"


SPEEDS = (
    Column("tokens/s", lambda c: c.after.arm, left=True, wraps=True),
    Column("before → after", _speeds),
    Column("change [95 %]", lambda c: interval(c.speed)),
    Column("verdict", lambda c: c.speed_verdict, left=True, wraps=True),
)
SPEEDUPS = (
    Column("speed-up", lambda c: c.after.arm, left=True, wraps=True),
    Column("before → after", _speedups),
    Column("change [95 %]", lambda c: interval(c.speedup)),
    Column("verdict", lambda c: c.speedup_verdict or NONE, left=True, wraps=True),
    Column("accepted", _accepted),
)


def view(before: Record, after: Record) -> View:
    """Raises SettingError if the runs have no cell in common."""
    made = changes(before, after)
    if not made:
        remedy = "the runs have no task, load and arm in common; give records of the same tasks"
        raise SettingError("report", f"{before.started} and {after.started}", remedy)
    axis = charts.axis_of([r for c in made for r in (c.speed, c.speedup) if r is not None])
    names = list(dict.fromkeys(_place(c, after) for c in made))
    ratio = drift(made, after.settings.reference)
    moved = ratio is not None and abs(ratio - 1) > NOTICED
    other = ["the runs sent other prompts, so intervals of tokens/s include what differs between prompts."]
    return View(
        heading=f"{model_of(after)}: {before.started[:16]} against {after.started[:16]}".replace("T", " "),
        answer=headline(made, after),
        leads=[("", f"The baseline itself came out {ratio:.2f} times as fast as before.")] if moved else [],
        parts=[_part(name, [c for c in made if _place(c, after) == name], axis) for name in names],
        warnings=[
            UNPAIRED,
            *([] if all(c.same_prompts for c in made) else other),
            *differences(before, after),
            *unmatched(before, after),
        ],
        commands=[("Earlier run", command(before)), ("Later run", command(after))],
        compares=True,
    )


def _place(c: Change, record: Record) -> str:
    return place(c.after.task, c.after.load, record)


def _part(name: str, here: Sequence[Change], axis: Axis) -> Part:
    gains = [c for c in here if c.speedup_verdict is not None]
    verdicts = [
        Rows("Speed-up", [_row(c, c.speedup, c.speedup_verdict, f"{_speedups(c)}×", gain=True) for c in gains], axis),
        Rows("Tokens a second", [_row(c, c.speed, c.speed_verdict, f"{_speeds(c)} tokens/s") for c in here], axis),
    ]
    tables = [table(f"{name}: tokens/s", SPEEDS, here), table(f"{name}: speed-up", SPEEDUPS, gains)]
    return Part(name, "", [one for one in verdicts if one.rows], [], [one for one in tables if one.rows])


def _row(c: Change, ratio: Ratio | None, call: Call | None, figures: str, gain: bool = False) -> Row:
    word = {"faster": "more", "slower": "less"}.get(str(call)) if gain else None
    alt = f"{c.after.arm}: from {figures}, change {interval(ratio)}; {call}"
    return charts.verdict_row(c.after.arm, ratio, call, alt, word=word, under=figures, spread=between(ratio))


def headline(made: Sequence[Change], record: Record) -> str:
    """Where the speed-up changed, in a sentence without its full stop."""
    judged = [c for c in made if c.speedup_verdict is not None and c.after.arm != record.settings.control]
    if not judged:
        return "The runs have no candidate in common"
    parts = []
    for call, words in (("slower", "less"), ("faster", "more")):
        arms: dict[str, list[str]] = {}
        for c in judged:
            if c.speedup_verdict == call:
                arms.setdefault(c.after.arm, []).append(_place(c, record))
        here = [f"{arm} on {listed(places)}" for arm, places in arms.items()]
        parts += [f"speculation gains {words} than before with {', with '.join(here)}"] if here else []
    if parts:
        whole = "; ".join(parts)
        return whole[0].upper() + whole[1:]
    if all(c.speedup_verdict == "no difference" for c in judged):
        return "Speculation gains as much as before"
    return "No certain change of the speed-up"
