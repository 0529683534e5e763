"""The charts of a record as values, each with its figures as a table. The templates of the page draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forerun.bench.formats import NONE, digits, number, percent
from forerun.bench.pages.view import Axis, Chart, Column, Mark, Plot, Row, Rows, Section, Series, Table, row
from forerun.bench.pages.words import label, named
from forerun.bench.records.record import Facts, Record
from forerun.bench.records.statistics import Call, Ratio, Spread
from forerun.bench.records.summary import PARTS, Cell

COLOURS = 8  # classes c0 to c7 of the style sheet
FEW = 20  # drafts that reached a position, below which the share accepted there is not drawn


def around(values: Sequence[float], unit: str = "", log: bool = False) -> Axis:
    """An axis that holds all values with some room; a linear one starts at 0."""
    low, high = min(values), max(values)
    if log:
        room = max(1.03, (high / low) ** 0.06)
        return Axis(low / room, high * room, unit, log=True)
    return Axis(0.0, high * 1.04 if high > 0 else 1.0, unit)


def axis_of(ratios: Sequence[Ratio]) -> Axis:
    """An axis for all ratios, and 1. It is cut at twice and half the extreme means, so that one wide interval does not squeeze
    the others."""
    means = [1.0, *[r.mean for r in ratios]]
    ends = [v for r in ratios for v in (r.low, r.high) if v is not None]
    held = [min(max(v, min(means) / 2), max(means) * 2) for v in ends]
    return around([0.97, 1.03, *means, *held], "×", log=True)


def verdict_row(
    arm: str, ratio: Ratio | None, call: Call | None, alt: str, under: str, spread: str, word: str | None = None, why: str = ""
) -> Row:
    """A ratio with its interval in the colour of its verdict, and 1. word: the verdict as it is written."""
    marks, style = [], (call or "").replace(" ", "-")
    if ratio is not None:
        marks = [Mark("stroke", "one", 1.0), Mark("dot", style, ratio.mean)]
        if ratio.low is not None and ratio.high is not None:
            marks.insert(1, Mark("interval", style, ratio.low, ratio.high))
    figure = f"{ratio.mean:.2f}×" if ratio else NONE
    return Row(arm, figure, alt, marks, under=under, call=call, word=word or call or "", spread=spread, why=why)


def colour(arm: int) -> str:
    """The class of an arm's colour."""
    return f"c{arm % COLOURS}"


def sections(record: Record, every: Sequence[Cell]) -> list[Section]:
    """Those for which the record has figures. An arm's colour and symbol are those of its place among the arms."""
    s = record.settings
    numbers = {arm.name: i for i, arm in enumerate(s.arms)}
    charted = [c for c in every if c.arm != s.control]
    keys = [(name, i) for name, i in numbers.items() if name != s.reference]
    candidates = [(name, i) for name, i in keys if name != s.control]
    parts = PARTS if any(c.parts for c in charted) else ()

    def by_task(make: Callable[[Record, Sequence[Cell], dict[str, int]], Chart | None], of: Sequence[Cell]) -> list[Chart]:
        made = [make(record, [c for c in of if c.task == task], numbers) for task in s.tasks]
        return [chart for chart in made if chart is not None]

    found = [
        Section("sweep", by_task(_sweep, every), keys),
        Section("drafting", by_task(_drafting, charted), candidates, load=s.loads[0].label if len(s.loads) > 1 else ""),
        Section("steps", by_task(_steps, charted), parts=parts),
        Section("waiting", by_task(_waiting, charted), wide=True),
        Section("costs", [Chart("", *costs(record))] if any(a.facts for a in s.arms) else [], wide=True),
    ]
    return [section for section in found if section.charts]


def _sweep(record: Record, here: Sequence[Cell], numbers: dict[str, int]) -> Chart | None:
    """Speed-up against load, where there are several."""
    loads = record.settings.loads
    series = []
    for arm, i in numbers.items():
        points = [(loads.index(c.load), r.mean, r.low, r.high) for c in here if c.arm == arm and (r := c.speedup)]
        series += [Series(i, points)] if points else []
    values = [v for s in series for point in s.points for v in point[1:] if v is not None]
    if len(loads) < 2 or not values:
        return None
    cuts = [i for i in range(1, len(loads)) if loads[i].kind != loads[i - 1].kind or loads[i].kind == "trace"]
    labels = [load.label for load in loads]
    alt = f"Speed-up on {here[0].task} at {', '.join(labels)}; the figures are in the table of all figures"
    axis = around([0.97, 1.03, *[min(max(v, 0.2), 20.0) for v in values]], "×", log=True)
    return Chart(here[0].task, [Plot("", series, labels, axis, alt, 1.0, cuts)])


def _drafting(record: Record, here: Sequence[Cell], numbers: dict[str, int]) -> Chart | None:
    """Acceptance by position, joint and conditional, and the number of steps by accepted tokens."""
    first = [c for c in here if c.load == record.settings.loads[0] and c.joint]
    if not first:
        return None
    series = []
    for c in first:
        series.append(Series(numbers[c.arm], [(i, 100 * v, None, None) for i, v in enumerate(c.joint)]))
        there = [(i, 100 * v, None, None) for i, v in enumerate(c.conditional) if v is not None and c.reached[i] >= FEW]
        series.append(Series(numbers[c.arm], there, dashed=True))
    places = [str(i + 1) for i in range(max(len(c.joint) for c in first))]
    alt = f"Acceptance by draft position on {first[0].task}: " + "; ".join(f"{c.arm} {_shares(c.joint)} %" for c in first)
    plot = Plot("Accepted by position of the draft", series, places, Axis(0, 100, "%"), alt)
    bars = [_lengths(c, numbers[c.arm]) for c in first if c.accepted_lengths]
    return Chart(first[0].task, [plot, Rows("Accepted tokens of a step", bars)], _positions([c for c in here if c.joint]))


def _shares(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * v:.0f}" for v in values)


def _lengths(c: Cell, number_of_arm: int) -> Row:
    shares = [n / sum(c.accepted_lengths) for n in c.accepted_lengths]
    alt = f"{c.arm}: share of steps with 0, 1, 2, ... accepted tokens: {_shares(shares)} %"
    return Row(c.arm, f"{number(c.got, 2)} a step", alt, histogram=shares, arm=number_of_arm)


def _positions(here: Sequence[Cell]) -> list[Table]:
    longest = max(len(c.joint) for c in here)
    kinds: tuple[tuple[str, int, Callable[[Cell], Sequence[Any]], Callable[[Any], str]], ...] = (
        ("Accepted up to a position, of all steps", 1, lambda c: c.joint, percent),
        ("Accepted at a position, of those that got there", 1, lambda c: c.conditional, percent),
        ("Steps by accepted tokens", 0, lambda c: c.accepted_lengths, str),
    )
    found = []
    for caption, start, of, text in kinds:
        columns = [Column("arm", left=True), *[Column(str(i)) for i in range(start, longest + 1)]]
        rows = [[f"{named(c)}, {c.load.label}", *map(text, of(c))] for c in here]
        found.append(Table(caption, columns, [row + [NONE] * (len(columns) - len(row)) for row in rows]))
    return found


def _steps(record: Record, here: Sequence[Cell], numbers: dict[str, int]) -> Chart | None:
    """The time of a step, and its parts where the engine reports them."""
    timed = [c for c in here if c.step_s]
    if not timed:
        return None
    columns = [
        Column("arm", lambda c: label(c, record), left=True),
        Column("ms/step", lambda c: digits(c.step_s, 1000)),
        Column("tokens needed", lambda c: number(c.needed, 2)),
        Column("tokens got", lambda c: number(c.got, 2)),
    ]
    parts = [Column(name) for name in PARTS]
    rows = [[*row(c, columns), *map(percent, c.parts or [None] * len(PARTS))] for c in timed]
    axis = around([1000 * (c.step_s or 0) for c in timed], " ms")
    drawn = _by_load([(c, _step(c, numbers[c.arm])) for c in timed], record)
    return Chart(timed[0].task, [Rows("", drawn, axis)], [Table(f"A step on {timed[0].task}", [*columns, *parts], rows)])


def _step(c: Cell, number_of_arm: int) -> Row:
    step, marks, begin = 1000 * (c.step_s or 0), [], 0.0
    alt = f"{c.arm} at {c.load.label}: {step:.1f} ms a step"
    if c.needed is not None and c.got is not None:
        alt += f", {c.needed:.2f} tokens needed to break even, {c.got:.2f} got"
    for i, part in enumerate(c.parts or ()):
        marks.append(Mark("bar", f"p{i}", step * begin, step * (begin + part)))
        begin += part
    if c.parts:
        alt += ". " + ", ".join(f"{name} {100 * part:.0f} %" for name, part in zip(PARTS, c.parts, strict=True))
    return Row(c.arm, f"{digits(step)} ms", alt, marks or [Mark("bar", colour(number_of_arm), 0.0, step)])


def _by_load(rows: Sequence[tuple[Cell, Row]], record: Record) -> list[Row]:
    """The rows with a heading before each load, if there are several."""
    found = []
    for load in record.settings.loads:
        here = [made for cell, made in rows if cell.load == load]
        found += [Row(load.label), *here] if here and len(record.settings.loads) > 1 else here
    return found


MEASURES: tuple[tuple[str, Callable[[Cell], Spread | None]], ...] = (
    ("Time to first token", lambda c: c.ttft),
    ("Time per output token after it", lambda c: c.tpot),
    ("From scheduled to end", lambda c: c.e2e),
    ("Gap between chunks (not between tokens)", lambda c: c.gap),
)


def _waiting(record: Record, here: Sequence[Cell], numbers: dict[str, int]) -> Chart | None:
    """The distribution of requests' times, for each of MEASURES."""
    drawings, tables = [], []
    columns = [Column("arm", left=True), *[Column(name) for name in ("n", "median", "95 %", "99 %", "longest")]]
    for name, of in MEASURES:
        known = [(c, s) for c in here if (s := of(c)) is not None]
        if known:
            top = max(s.largest for _, s in known)
            scale, unit = (1.0, " s") if top >= 2 else (1000.0, " ms")
            rows = [(c, _range(c, s, name, scale, unit, numbers[c.arm], record)) for c, s in known]
            drawings.append(Rows(name, _by_load(rows, record), around([scale * top], unit)))
            figures = [(c, [digits(v, 1000) for v in (s.median, s.p95, s.p99, s.largest)], s.n) for c, s in known]
            shown = [[label(c, record), str(n), *values] for c, values, n in figures]
            tables.append(Table(f"{name} on {here[0].task}, ms", columns, shown))
    return Chart(here[0].task, drawings, tables) if drawings else None


def _range(c: Cell, s: Spread, name: str, scale: float, unit: str, number_of_arm: int, record: Record) -> Row:
    style, median = colour(number_of_arm), f"{digits(s.median, scale)}{unit}"
    alt = f"{name}, {label(c, record)}: median {median}, longest {digits(s.largest, scale)}{unit}"
    marks = [Mark("line", style, scale * s.least, scale * s.largest), Mark("bar", style, scale * s.lower, scale * s.upper)]
    marks += [Mark("symbol", style, scale * s.p95)] if s.p95 is not None else []
    marks.append(Mark("stroke", "median", scale * s.median))
    return Row(c.arm, median, alt, marks, under=f"{c.failures}/{c.requests} failed" if c.failures else "")


COSTS: tuple[tuple[str, str, Callable[[Facts], float | None], Callable[[float], str]], ...] = (
    ("KV cache tokens", "", lambda f: f.kv_tokens, lambda v: f"{v:,.0f}"),
    ("start-up", " s", lambda f: f.startup_s, lambda v: f"{digits(v)} s"),
    ("memory", " GB", lambda f: None if f.memory_bytes is None else f.memory_bytes / 1e9, lambda v: f"{v:.2f} GB"),
)


def costs(record: Record) -> tuple[list[Rows], list[Table]]:
    """What each arm takes, as its engine reports it, with the change from the reference: drawn, and as a table."""
    known = [(i, arm.name, arm.facts) for i, arm in enumerate(record.settings.arms) if arm.facts]
    drawings, rows = [], [[name] for _, name, _ in known]
    for name, unit, of, text in COSTS:
        base, drawn = next((of(f) for _, arm, f in known if arm == record.settings.reference), None), []
        for (i, arm, facts), texts in zip(known, rows, strict=True):
            value = of(facts)
            change = f"{100 * (value / base - 1):+.0f} %" if value and base and arm != record.settings.reference else ""
            texts.append(NONE if value is None else text(value) + (f" ({change})" if change else ""))
            if value is not None:
                bar, alt = Mark("bar", colour(i), 0.0, value), f"{name}, {arm}: {texts[-1]}"
                drawn.append(Row(arm, text(value), alt, [bar], spread=change))
        if drawn:
            drawings.append(Rows(name, drawn, around([one.marks[0].high for one in drawn], unit)))
    for (_, _, facts), texts in zip(known, rows, strict=True):
        texts.append(", ".join(map(" ".join, facts.scheduler.items())) or NONE)
    columns = [Column("arm", left=True), *[Column(cost[0]) for cost in COSTS], Column("scheduler", left=True, wraps=True)]
    return drawings, [Table("Costs of the arms", columns, rows)] if rows else []
