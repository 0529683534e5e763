"""The charts of a record's page, each with its figures as a table. Knows what is drawn of which figure; the drawings are
svg.py's, and where they stand is html.py's. Each function gives one chart a task; numbers: an arm's colour and mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench.pages import svg
from forerun.bench.pages.report import digits, milliseconds, named, number, percent
from forerun.bench.records.record import Record
from forerun.bench.records.statistics import Ratio, Spread
from forerun.bench.records.summary import PARTS, Cell

FEW = 20  # drafts that got to a position, below which the share accepted there is not drawn


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a chart of rows: what it is of, the drawing, the figure. Without a drawing it heads those below."""

    name: str
    picture: str
    figure: str
    under: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Chart:
    """One card: a picture or rows, with its figures as tables. measures: of several kinds, each with rows of its own."""

    name: str
    picture: str = ""
    rows: Sequence[Row] = ()
    axis: str = ""
    tables: Sequence[Table] = ()
    measures: Sequence[Chart] = ()


def axis_of(ratios: Sequence[Ratio]) -> svg.Axis:
    """For all of them, and 1. It is cut at twice and half the extreme means, so that one wild interval squeezes no other."""
    means = [1.0, *[r.mean for r in ratios]]
    ends = [v for r in ratios for v in (r.low, r.high) if v is not None]
    held = [min(max(v, min(means) / 2), max(means) * 2) for v in ends]
    return svg.around([0.97, 1.03, *means, *held], log=True)


def sweep(record: Record, every: Sequence[Cell], numbers: dict[str, int]) -> list[Chart]:
    """Speed-up against load, where there are several."""
    loads = record.settings.loads
    if len(loads) < 2:
        return []
    cuts = [i for i in range(1, len(loads)) if loads[i].kind != loads[i - 1].kind or loads[i].kind == "trace"]
    charts = []
    for task in record.settings.tasks:
        series = []
        for arm, i in numbers.items():
            here = {c.load: c.speedup for c in every if c.task == task and c.arm == arm}
            points = [_point(here.get(load)) for load in loads]
            if any(points):
                series.append(svg.Series(i, points))
        values = [v for s in series for p in s.points if p for v in p if v is not None]
        if values:
            held = [min(max(v, 0.2), 20.0) for v in values]
            labels = [load.label for load in loads]
            said = f"Speed-up on {task} at {', '.join(labels)}; the figures are in the table of all figures"
            axis = svg.around([0.97, 1.03, *held], log=True)
            charts.append(Chart(task, svg.lines(series, labels, axis, "×", said, 1.0, cuts)))
    return charts


def _point(ratio: Ratio | None) -> tuple[float, float | None, float | None] | None:
    return None if ratio is None else (ratio.mean, ratio.low, ratio.high)


def _first_load(record: Record, every: Sequence[Cell], task: str) -> list[Cell]:
    return [c for c in every if c.task == task and c.load == record.settings.loads[0]]


def drafting_words(record: Record) -> str:
    """Which load `drafting` draws, if there are several. Begins with a space."""
    loads = record.settings.loads
    return f" Drawn for {loads[0].label}; the tables have every load." if len(loads) > 1 else ""


def drafting(record: Record, every: Sequence[Cell], numbers: dict[str, int]) -> list[Chart]:
    """Acceptance by position, joint and conditional, and how many steps accepted how many tokens."""
    charts = []
    for task in record.settings.tasks:
        here = [c for c in _first_load(record, every, task) if c.joint]
        if not here:
            continue
        longest = max(len(c.joint) for c in here)
        series = []
        for c in here:
            i = numbers[c.arm]
            series.append(svg.Series(i, [(100 * j, None, None) for j in c.joint]))
            series.append(svg.Series(i, _conditional(c), dashed=True))
        said = f"Acceptance by draft position on {task}: " + "; ".join(
            f"{c.arm} {', '.join(f'{100 * j:.0f}' for j in c.joint)} %" for c in here
        )
        picture = svg.lines(series, [str(i + 1) for i in range(longest)], svg.Axis(0, 100), "%", said)
        bars = [_lengths(c, numbers) for c in here if c.accepted_lengths]
        charts.append(Chart(task, picture, bars, tables=_positions(task, every)))
    return charts


def _conditional(cell: Cell) -> list[tuple[float, None, None] | None]:
    """What is drawn of it, in %: not where fewer than FEW drafts got that far, for there it jumps from 0 to 100 at random."""
    return [
        None if share is None or n < FEW else (100 * share, None, None)
        for share, n in zip(cell.conditional, cell.reached, strict=True)
    ]


def _lengths(cell: Cell, numbers: dict[str, int]) -> Row:
    counts = cell.accepted_lengths
    shares = [n / sum(counts) for n in counts]
    said = f"{cell.arm}: share of steps with 0, 1, 2, ... accepted tokens: {', '.join(f'{100 * s:.0f}' for s in shares)} %"
    return Row(cell.arm, svg.histogram(shares, numbers[cell.arm], said), f"{number(cell.got, 2)} a step")


def _positions(task: str, every: Sequence[Cell]) -> list[Table]:
    here = [c for c in every if c.task == task and c.joint]
    longest = max(len(c.joint) for c in here)
    heads = [str(i + 1) for i in range(longest)]
    label = lambda c: f"{named(c)}, {c.load.label}"  # noqa: E731
    filled = lambda values: [*map(percent, values), *["–"] * (longest - len(values))]  # noqa: E731
    steps = [[str(n) for n in c.accepted_lengths] + ["–"] * (longest + 1 - len(c.accepted_lengths)) for c in here]
    conditional = [[label(c), *filled(c.conditional)] for c in here]
    return [
        Table("Accepted up to a position, of all steps", ["arm", *heads], [[label(c), *filled(c.joint)] for c in here]),
        Table("Accepted at a position, of those that got there", ["arm", *heads], conditional),
        Table(
            "Steps by accepted tokens",
            ["arm", *map(str, range(longest + 1))],
            [[label(c), *s] for c, s in zip(here, steps, strict=True)],
        ),
    ]


def breakeven(record: Record, every: Sequence[Cell], numbers: dict[str, int]) -> list[Chart]:
    """How long a step takes, and what of it, where the engine says so."""
    charts = []
    for task in record.settings.tasks:
        here = [c for c in every if c.task == task and c.step_s]
        if not here:
            continue
        axis = svg.around([1000 * (c.step_s or 0) for c in here])
        rows = _by_load([(c, _step_row(c, axis, numbers)) for c in here], record)
        header = ["arm", "ms/step", "tokens needed", "tokens got", *PARTS]
        table = Table(f"A step on {task}", header, [_step_figures(c, record) for c in here])
        charts.append(Chart(task, rows=rows, axis=svg.scale(axis, " ms"), tables=[table]))
    return charts


def _by_load(rows: Sequence[tuple[Cell, Row]], record: Record) -> list[Row]:
    """The rows with a line of its own before each load, if there are several."""
    if len(record.settings.loads) == 1:
        return [made for _, made in rows]
    found = []
    for load in record.settings.loads:
        here = [made for cell, made in rows if cell.load == load]
        found += [Row(load.label, "", ""), *here] if here else []
    return found


def _step_row(cell: Cell, axis: svg.Axis, numbers: dict[str, int]) -> Row:
    step, parts = 1000 * (cell.step_s or 0), cell.parts
    said = f"{cell.arm} at {cell.load.label}: {step:.1f} ms a step"
    if cell.needed is not None and cell.got is not None:
        said += f", {cell.needed:.2f} tokens needed to break even, {cell.got:.2f} got"
    if parts is None:
        return Row(cell.arm, svg.bar(step, axis, numbers[cell.arm], said), f"{digits(step)} ms")
    said += ". " + ", ".join(f"{name} {100 * p:.0f} %" for name, p in zip(PARTS, parts, strict=True))
    return Row(cell.arm, svg.stack([step * p for p in parts], axis, said), f"{digits(step)} ms")


def _step_figures(cell: Cell, record: Record) -> list[str]:
    parts = cell.parts
    shares = ["–"] * len(PARTS) if parts is None else [percent(p) for p in parts]
    return [label(cell, record), milliseconds(cell.step_s), number(cell.needed, 2), number(cell.got, 2), *shares]


def label(cell: Cell, record: Record) -> str:
    return cell.arm if len(record.settings.loads) == 1 else f"{cell.arm}, {cell.load.label}"


MEASURES: tuple[tuple[str, Callable[[Cell], Spread | None]], ...] = (
    ("Time to first token", lambda c: c.ttft),
    ("Time per output token after it", lambda c: c.tpot),
    ("From scheduled to end", lambda c: c.e2e),
    ("Gap between chunks (not between tokens)", lambda c: c.gap),
)


def latency(record: Record, every: Sequence[Cell], numbers: dict[str, int]) -> list[Chart]:
    """How the times of requests lie, for each of MEASURES."""
    charts = []
    for task in record.settings.tasks:
        here = [c for c in every if c.task == task]
        measures = [made for name, of in MEASURES if (made := _measure(name, of, here, record, numbers)) is not None]
        header = ["arm", "n", "median", "95 %", "99 %", "longest"]
        tables = [
            Table(f"{name} on {task}, ms", header, [[label(c, record), *_spread(s)] for c in here if (s := of(c)) is not None])
            for name, of in MEASURES
            if any(of(c) for c in here)
        ]
        if measures:
            charts.append(Chart(task, measures=measures, tables=tables))
    return charts


def _measure(
    name: str, of: Callable[[Cell], Spread | None], here: Sequence[Cell], record: Record, numbers: dict[str, int]
) -> Chart | None:
    known = [(c, s) for c in here if (s := of(c)) is not None]
    if not known:
        return None
    top = max(s.largest for _, s in known)
    scale, unit = (1.0, " s") if top >= 2 else (1000.0, " ms")
    axis = svg.around([scale * top])
    rows = []
    for c, s in known:
        scaled = _scaled(s, scale)
        said = f"{name}, {label(c, record)}: median {digits(scaled.median)}{unit}, longest {digits(scaled.largest)}{unit}"
        failed = f"{c.failures}/{c.requests} failed" if c.failures else ""
        picture = svg.ranges(scaled, axis, numbers[c.arm], said)
        rows.append((c, Row(c.arm, picture, f"{digits(scaled.median)}{unit}", failed)))
    return Chart(name, rows=_by_load(rows, record), axis=svg.scale(axis, unit))


def _scaled(s: Spread, by: float) -> Spread:
    beyond = [None if v is None else by * v for v in (s.p95, s.p99)]
    return Spread(s.n, by * s.least, by * s.lower, by * s.median, by * s.upper, beyond[0], beyond[1], by * s.largest)


def _spread(s: Spread) -> list[str]:
    return [str(s.n), *[milliseconds(v) for v in (s.median, s.p95, s.p99, s.largest)]]


def costs(record: Record, numbers: dict[str, int]) -> list[Chart]:
    """KV cache, start-up and memory, for those arms of which they are known."""
    kinds: tuple[tuple[str, str, Callable[[Any], float | None], Callable[[float], str]], ...] = (
        ("Tokens that the KV cache holds", "", lambda f: f.kv_tokens, lambda v: f"{v:,.0f}"),
        ("Start-up", " s", lambda f: f.startup_s, lambda v: f"{digits(v)} s"),
        ("Memory", " GB", lambda f: None if f.memory_bytes is None else f.memory_bytes / 1e9, lambda v: f"{v:.2f} GB"),
    )
    charts = []
    for name, unit, of, shown in kinds:
        known = [(a.name, v) for a in record.settings.arms if a.facts and (v := of(a.facts)) is not None]
        if not known:
            continue
        axis = svg.around([v for _, v in known])
        base = next((v for arm, v in known if arm == record.settings.reference), None)
        rows = []
        for arm, value in known:
            change = f"{100 * (value / base - 1):+.0f} %" if base and arm != record.settings.reference else ""
            rows.append(Row(arm, svg.bar(value, axis, numbers[arm], f"{name}, {arm}: {shown(value)}"), shown(value), change))
        charts.append(Chart(name, rows=rows, axis=svg.scale(axis, unit)))
    return charts
