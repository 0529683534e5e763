"""A record as one self-contained page: verdict, charts and tables, with nothing fetched from anywhere. Knows what goes where;
the drawings are svg.py's, the words are words.py's, and how it looks is in the folder page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from forerun.bench import changes, svg
from forerun.bench.compare import Change
from forerun.bench.record import Record
from forerun.bench.report import (
    COSTS,
    HEADER,
    LATENCY,
    LATENCY_LEGEND,
    LEGEND,
    by_task,
    cost_row,
    digits,
    latency_row,
    milliseconds,
    named,
    number,
    percent,
    row,
)
from forerun.bench.statistics import Call, Ratio, Spread
from forerun.bench.summary import Cell, cells, draws
from forerun.bench.words import about, command, drawn, headline, loads_of, needed, place, unsettled, versions_of, warnings

SIGNS: dict[Call, tuple[str, str]] = {
    "faster": ("▲", "faster"),
    "slower": ("▼", "slower"),
    "no difference": ("=", "same"),
    "not enough data": ("?", "open"),
}
"""The sign that stands beside a verdict, and its class."""
FEW = 20  # drafts that got to a position, below which the share accepted there is not drawn
PARTS = ("drafting", "model", "verifying", "rest")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a chart of rows: what it is of, the drawing, the figure. Without a drawing it heads those below."""

    name: str
    picture: str
    figure: str
    under: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line of the verdicts. kind: class of the colour."""

    name: str
    under: str
    picture: str
    figure: str
    spread: str
    sign: str
    call: str
    kind: str
    why: Markup


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


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    about: str
    rows: Sequence[Verdict]


def page(record: Record) -> str:
    """The whole page."""
    every = cells(record)
    numbers = {arm.name: i for i, arm in enumerate(record.settings.arms)}
    answer, arms = headline(record)
    first = record.settings.arms[0]
    return render(
        "report.html.j2",
        {
            "name": f"Does speculation pay? {record.settings.model}",
            "model": record.settings.model,
            "answer": answer,
            "arms": arms,
            "under": _under(record),
            "speed_words": _speed_words(record),
            "control": record.settings.control,
            **_verdicts(record, every),
            "sweep": _sweep(record, every, numbers),
            "sweep_words": "Bars are 95 % intervals. Speculation usually gains less the more requests share a step. "
            "c=8: eight requests in flight; 2/s: two arrive each second.",
            "keys": [{"name": name, "picture": svg.key(i)} for name, i in numbers.items()],
            "drafting": _drafting(record, every, numbers),
            "drafting_words": _drafting_words(record),
            "breakeven": _breakeven(record, every, numbers),
            "parts": PARTS if any(c.forward_share is not None for c in every) else (),
            "latency": _latency(record, every, numbers),
            "costs": _costs(record, numbers),
            "cost_table": Table("Costs of the arms", COSTS, [cost_row(a, first) for a in record.settings.arms]),
            "identity": _identity(record, every),
            "draws": [drawn(d) for d in draws(record)],
            "warnings": [_options(w) for w in warnings(record)],
            "figures": _figures(record),
            "few": len(every) <= 16,
            "settings": _settings(record),
            "command": command(record),
            "legend_words": LEGEND,
            "latency_words": LATENCY_LEGEND,
        },
    )


def changes_page(before: Record, others: Sequence[Record]) -> str:
    """The comparison of a run with each of the later ones as a page. Raises SettingError if one has no cell in common."""
    parts = [_compared(before, later) for later in others]
    return render("changes.html.j2", {"name": f"Runs compared: {before.settings.model}", "parts": parts})


def _compared(before: Record, after: Record) -> dict[str, Any]:
    made = changes.compare(before, after)
    ratios = [r for c in made for r in (c.speed, c.speedup) if r is not None]
    axis = _axis(ratios)
    places = []
    for name, here in changes.by_place(made, after):
        places.append(
            {
                "name": name,
                "speeds": [_changed(c, c.speed, c.speed_verdict, axis, speeds=True) for c in here],
                "speedups": [
                    _changed(c, c.speedup, c.speedup_verdict, axis, speeds=False) for c in here if c.speedup_verdict is not None
                ],
            }
        )
    tables = [Table(name, changes.HEADER, [changes.row(c) for c in here]) for name, here in changes.by_place(made, after)]
    return {
        "title": changes.title(before, after),
        "answer": changes.headline(made, after),
        "moved": changes.moved(made, after),
        "places": places,
        "axis": svg.scale(axis, "×"),
        "notes": changes.notes(before, after, made),
        "tables": tables,
        "commands": [command(before), command(after)],
    }


def _changed(change: Change, ratio: Ratio | None, call: Call | None, axis: svg.Axis, speeds: bool) -> Verdict:
    sign, kind = SIGNS[call or "not enough data"]
    b, a = change.before, change.after
    if speeds:
        was, unit = (b.tokens_per_s, a.tokens_per_s), " tokens/s"
    else:
        was, unit = (b.speedup.mean if b.speedup else None, a.speedup.mean if a.speedup else None), "×"
    figures = " → ".join("–" if v is None else f"{v:.2f}" if unit == "×" else f"{v:.1f}" for v in was)
    known = ratio is not None and ratio.low is not None and ratio.high is not None
    spread = f"{ratio.low:.2f} to {ratio.high:.2f}" if ratio and known else ""
    said = f"{a.arm}: from {figures}{unit}, change {ratio.mean:.2f}, {spread}; {call}" if ratio else a.arm
    picture = svg.interval(ratio, axis, kind, said) if ratio else ""
    word = {"faster": "more", "slower": "less"}.get(call or "", call or "")
    shown = word if not speeds else call or ""
    return Verdict(
        a.arm, f"{figures}{unit}", picture, f"{ratio.mean:.2f}×" if ratio else "–", spread, sign, shown, kind, Markup("")
    )


def render(template: str, values: dict[str, Any]) -> str:
    """A template of the folder page with these values, every text escaped."""
    environment = Environment(
        loader=PackageLoader("forerun.bench", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    style = resources.files("forerun.bench").joinpath("page/style.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(style=Markup(style), **values)


def _under(record: Record) -> str:
    m = record.machine
    where = m.accelerator or f"{m.cpu}, {m.cores} cores"
    return (
        f"{record.settings.engine} on {where}, {record.started[:10]}. {record.settings.repetitions} repetitions of "
        f"{loads_of(record)} for every task and arm; {versions_of(record).removesuffix(', ')}."
    )


def _speed_words(record: Record) -> str:
    kinds = {load.kind == "concurrency" for load in record.settings.loads}
    closed, opened = "output tokens a second", "output tokens a second as a request sees them, waiting included"
    if len(kinds) == 2:
        return f"{closed} (where requests arrive by the clock: {opened})"
    return closed if kinds == {True} else opened


def _verdicts(record: Record, every: Sequence[Cell]) -> dict[str, Any]:
    """All intervals on one axis."""
    axis = _axis([c.speedup for c in every if c.speedup])
    tasks = []
    for task, of_task in by_task(record):
        judged = [c for c in of_task if c.verdict is not None]
        tasks.append(Task(task, about(task), [_verdict(c, record, axis) for c in judged]))
    return {"verdicts": tasks, "axis": svg.scale(axis, "×")}


def _axis(ratios: Sequence[Ratio]) -> svg.Axis:
    """For all of them, and 1. It is cut at twice and half the extreme means, so that one wild interval squeezes no other."""
    means = [1.0, *[r.mean for r in ratios]]
    ends = [v for r in ratios for v in (r.low, r.high) if v is not None]
    held = [min(max(v, min(means) / 2), max(means) * 2) for v in ends]
    return svg.around([0.97, 1.03, *means, *held], log=True)


def _verdict(cell: Cell, record: Record, axis: svg.Axis) -> Verdict:
    assert cell.verdict is not None
    sign, kind = SIGNS[cell.verdict]
    r = cell.speedup
    known = r is not None and r.low is not None and r.high is not None
    spread = f"{r.low:.2f} to {r.high:.2f}, {r.pairs} pairs" if r and known else ""
    name = place(cell.task, cell.load, record)
    said = f"{name}, {named(cell)}: " + (f"{r.mean:.2f} times the baseline's speed, {spread}; " if r else "") + cell.verdict
    load = cell.load.label if len(record.settings.loads) > 1 else ""
    failed = f"{cell.failures} of {cell.requests} failed" if cell.failures else ""
    return Verdict(
        cell.arm,
        ", ".join(part for part in (load, failed) if part),
        svg.interval(r, axis, kind, said) if r else "",
        f"{r.mean:.2f}×" if r else "–",
        spread,
        sign,
        cell.verdict,
        kind,
        _options(_reason(cell, record)),
    )


def _reason(cell: Cell, record: Record) -> str:
    """Under a verdict: break-even in short, and what would settle what is not."""
    if cell.arm == record.settings.control:
        return ""
    if cell.speedup is None:
        return "No pair of batches was completed."
    remedy = unsettled(cell, record).partition(". ")[2] if cell.verdict == "not enough data" else ""
    return f"{needed(cell)} {remedy}".strip()


def _options(said: str) -> Markup:
    """The text with options of the command line kept on one line."""
    return Markup(re.sub(r"--[a-z-]+( \d+)?", r"<code>\g<0></code>", str(escape(said))))


def _sweep(record: Record, every: Sequence[Cell], numbers: dict[str, int]) -> list[Chart]:
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


def _drafting_words(record: Record) -> str:
    loads = record.settings.loads
    return f" Drawn for {loads[0].label}; the tables have every load." if len(loads) > 1 else ""


def _drafting(record: Record, every: Sequence[Cell], numbers: dict[str, int]) -> list[Chart]:
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
    at = cell.counts.accepted_at if cell.counts else []
    reached = [cell.counts.drafted_at[0], *at] if cell.counts and at else []
    return [
        None if share is None or n < FEW else (100 * share, None, None)
        for share, n in zip(cell.conditional, reached, strict=False)
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


def _breakeven(record: Record, every: Sequence[Cell], numbers: dict[str, int]) -> list[Chart]:
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


def _parts(cell: Cell) -> list[float] | None:
    """Shares of a step's time, in the order of PARTS; None where the engine does not say."""
    if cell.draft_share is None or cell.forward_share is None or cell.verify_share is None:
        return None
    known = [cell.draft_share, cell.forward_share, cell.verify_share]
    return [*known, max(0.0, 1 - sum(known))]


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
    step, parts = 1000 * (cell.step_s or 0), _parts(cell)
    said = f"{cell.arm} at {cell.load.label}: {step:.1f} ms a step"
    if cell.needed is not None and cell.got is not None:
        said += f", {cell.needed:.2f} tokens needed to break even, {cell.got:.2f} got"
    if parts is None:
        return Row(cell.arm, svg.bar(step, axis, numbers[cell.arm], said), f"{digits(step)} ms")
    said += ". " + ", ".join(f"{name} {100 * p:.0f} %" for name, p in zip(PARTS, parts, strict=True))
    return Row(cell.arm, svg.stack([step * p for p in parts], axis, said), f"{digits(step)} ms")


def _step_figures(cell: Cell, record: Record) -> list[str]:
    parts = _parts(cell)
    shares = ["–"] * len(PARTS) if parts is None else [percent(p) for p in parts]
    return [_label(cell, record), milliseconds(cell.step_s), number(cell.needed, 2), number(cell.got, 2), *shares]


def _label(cell: Cell, record: Record) -> str:
    return cell.arm if len(record.settings.loads) == 1 else f"{cell.arm}, {cell.load.label}"


MEASURES: tuple[tuple[str, Callable[[Cell], Spread | None]], ...] = (
    ("Time to first token", lambda c: c.ttft),
    ("Time per output token after it", lambda c: c.tpot),
    ("From scheduled to end", lambda c: c.e2e),
    ("Gap between chunks (not between tokens)", lambda c: c.gap),
)


def _latency(record: Record, every: Sequence[Cell], numbers: dict[str, int]) -> list[Chart]:
    charts = []
    for task in record.settings.tasks:
        here = [c for c in every if c.task == task]
        measures = [made for name, of in MEASURES if (made := _measure(name, of, here, record, numbers)) is not None]
        header = ["arm", "n", "median", "95 %", "99 %", "longest"]
        tables = [
            Table(f"{name} on {task}, ms", header, [[_label(c, record), *_spread(s)] for c in here if (s := of(c)) is not None])
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
        said = f"{name}, {_label(c, record)}: median {digits(scaled.median)}{unit}, longest {digits(scaled.largest)}{unit}"
        failed = f"{c.failures}/{c.requests} failed" if c.failures else ""
        picture = svg.ranges(scaled, axis, numbers[c.arm], said)
        rows.append((c, Row(c.arm, picture, f"{digits(scaled.median)}{unit}", failed)))
    return Chart(name, rows=_by_load(rows, record), axis=svg.scale(axis, unit))


def _scaled(s: Spread, by: float) -> Spread:
    beyond = [None if v is None else by * v for v in (s.p95, s.p99)]
    return Spread(s.n, by * s.least, by * s.lower, by * s.median, by * s.upper, beyond[0], beyond[1], by * s.largest)


def _spread(s: Spread) -> list[str]:
    return [str(s.n), *[milliseconds(v) for v in (s.median, s.p95, s.p99, s.largest)]]


def _costs(record: Record, numbers: dict[str, int]) -> list[Chart]:
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


def _identity(record: Record, every: Sequence[Cell]) -> Table | None:
    rows = []
    for cell in every:
        if cell.identical is None:
            continue
        apart = [d for d in record.differences if (d.task, d.load, d.arm) == (cell.task, cell.load, cell.arm)]
        gaps = [d.gap for d in apart if d.gap is not None]
        first = min((d.position for d in apart), default=None)
        rows.append(
            [
                f"{place(cell.task, cell.load, record)}, {cell.arm}",
                f"{cell.identical[0]} of {cell.identical[1]}",
                "–" if first is None else f"{apart[0].unit} {first + 1}",
                "–" if not gaps else f"{max(gaps):.3f}",
            ]
        )
    return Table("Greedy answers", ["", "identical", "earliest difference", "widest margin there"], rows) if rows else None


def _figures(record: Record) -> list[Table]:
    several, found = len(record.settings.loads) > 1, []
    for task, of_task in by_task(record):
        first = "arm, load" if several else "arm"
        failed = [f"{c.failures} of {c.requests}" for c in of_task]
        labels = [_label(c, record) for c in of_task]
        rows = [[lb, f, *row(c)[1:]] for lb, f, c in zip(labels, failed, of_task, strict=True)]
        found.append(Table(f"{task}: speed and drafting", [first, "failed", *HEADER[1:]], rows))
        rows = [[lb, f, *latency_row(c)[1:]] for lb, f, c in zip(labels, failed, of_task, strict=True)]
        found.append(Table(f"{task}: waiting", [first, "failed", *LATENCY[1:]], rows))
    return found


def _settings(record: Record) -> list[tuple[str, str]]:
    s, m = record.settings, record.machine
    shown = [
        ("Model", s.model),
        ("Engine", s.engine),
        ("Machine", f"{m.cpu}, {m.cores} cores" + (f", {m.memory_bytes / 2**30:.0f} GiB" if m.memory_bytes else "")),
        ("Accelerator", m.accelerator or "none"),
        ("System", m.system),
        ("Load as it began", "not known" if m.load is None else f"{m.load:.2f}"),
        ("Begun", f"{record.started}, took {record.seconds:.0f} s" + ("" if record.finished else ", interrupted")),
        ("Repetitions", f"{s.repetitions}, after {s.warmups} warm-up{'s' * (s.warmups != 1)}"),
        ("Load", loads_of(record)),
        ("Output tokens", f"at most {s.max_tokens}"),
        ("Seed", str(s.seed)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
    ]
    for arm in s.arms:
        settings = arm.speculation if arm.speculation is not None else "no drafter"
        shown.append((arm.name, _pairs(settings) if isinstance(settings, dict) else settings))
        if arm.facts and arm.facts.command:
            shown.append((f"{arm.name}, launched as", " ".join(arm.facts.command)))
    engine = {key: value for key, value in s.arms[0].engine.items() if key != "speculative_config"}
    if engine:
        shown.append(("Engine settings", _pairs(engine)))
    return shown


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items() if value is not None)

