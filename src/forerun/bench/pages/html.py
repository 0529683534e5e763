"""A record as one self-contained page: verdict, charts and tables, with nothing fetched from anywhere. Knows what goes where;
the drawings are svg.py's, the words are words.py's, and how it looks is in the folder page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from forerun.bench.pages import changes, charts, svg
from forerun.bench.pages.report import (
    COSTS,
    HEADER,
    LATENCY,
    LATENCY_LEGEND,
    LEGEND,
    by_task,
    cost_row,
    latency_row,
    named,
    number,
    row,
)
from forerun.bench.pages.words import (
    about,
    command,
    drawn,
    failed,
    hardware,
    headline,
    load_of,
    loads_of,
    model_of,
    needed,
    place,
    unsettled,
    versions_of,
    warnings,
)
from forerun.bench.records.compare import Change
from forerun.bench.records.record import Record
from forerun.bench.records.statistics import Call, Ratio
from forerun.bench.records.summary import Cell, cells, draws

SIGNS: dict[Call, tuple[str, str]] = {
    "faster": ("▲", "faster"),
    "slower": ("▼", "slower"),
    "no difference": ("=", "same"),
    "not enough data": ("?", "open"),
}
"""The sign that stands beside a verdict, and its class."""


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
class Task:
    name: str
    about: str
    rows: Sequence[Verdict]


def page(record: Record) -> str:
    """The whole page."""
    every = cells(record)
    charted = [c for c in every if c.arm != record.settings.control]
    numbers = {arm.name: i for i, arm in enumerate(record.settings.arms)}
    answer, arms = headline(record)
    first = record.settings.arms[0]
    return render(
        "report.html.j2",
        {
            "name": f"Does speculation pay? {model_of(record)}",
            "model": model_of(record),
            "answer": answer,
            "arms": arms,
            "under": _under(record),
            "speed_words": _speed_words(record),
            "control": record.settings.control,
            **_verdicts(record, every),
            "sweep": charts.sweep(record, every, numbers),
            "sweep_words": "Bars are 95 % intervals. Speculation usually gains less the more requests share a step. "
            "c=8: eight requests in flight; 2/s: two arrive each second.",
            "sweep_keys": _keys(record, numbers, {record.settings.reference}),
            "keys": _keys(record, numbers, {record.settings.reference, record.settings.control}),
            "drafting": charts.drafting(record, charted, numbers),
            "drafting_words": charts.drafting_words(record),
            "breakeven": charts.breakeven(record, charted, numbers),
            "parts": charts.PARTS if any(c.parts for c in every) else (),
            "latency": charts.latency(record, charted, numbers),
            "costs": charts.costs(record, numbers),
            "cost_table": charts.Table("Costs of the arms", COSTS, [cost_row(a, first) for a in record.settings.arms]),
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


def _keys(record: Record, numbers: dict[str, int], without: set[str | None]) -> list[dict[str, str]]:
    """The legend of the arms that are drawn."""
    return [{"name": name, "picture": svg.key(i)} for name, i in numbers.items() if name not in without]


def changes_page(before: Record, others: Sequence[Record]) -> str:
    """The comparison of a run with each of the later ones as a page. Raises SettingError if one has no cell in common."""
    parts = [_compared(before, later) for later in others]
    return render("changes.html.j2", {"name": f"Runs compared: {model_of(before)}", "parts": parts})


def _compared(before: Record, after: Record) -> dict[str, Any]:
    made = changes.compare(before, after)
    ratios = [r for c in made for r in (c.speed, c.speedup) if r is not None]
    axis = charts.axis_of(ratios)
    grouped = changes.by_place(made, after)
    places = []
    for name, here in grouped:
        places.append(
            {
                "name": name,
                "speeds": [_changed(c, c.speed, c.speed_verdict, axis, speeds=True) for c in here],
                "speedups": [
                    _changed(c, c.speedup, c.speedup_verdict, axis, speeds=False) for c in here if c.speedup_verdict is not None
                ],
            }
        )
    tables = [charts.Table(name, changes.HEADER, [changes.row(c) for c in here]) for name, here in grouped]
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
        loader=PackageLoader("forerun.bench.pages", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    style = resources.files("forerun.bench.pages").joinpath("page/style.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(style=Markup(style), **values)


def _under(record: Record) -> str:
    engine = versions_of(record).removesuffix(", ")
    if record.settings.engine == "forerun":
        engine = f"forerun {record.versions.get('forerun', '?')} with {engine}"
    each = f"{record.settings.repetitions} repetitions of {loads_of(record)} for every task and arm"
    return f"{engine} on {hardware(record.machine)}, {record.started[:10]}. {each}."


def _speed_words(record: Record) -> str:
    kinds = {load.kind == "concurrency" for load in record.settings.loads}
    closed, opened = "output tokens a second", "output tokens a second as a request sees them, waiting included"
    if len(kinds) == 2:
        return f"{closed} (where requests arrive by the clock: {opened})"
    return closed if kinds == {True} else opened


def _verdicts(record: Record, every: Sequence[Cell]) -> dict[str, Any]:
    """All intervals on one axis."""
    axis = charts.axis_of([c.speedup for c in every if c.speedup])
    tasks = []
    for task, of_task in by_task(record):
        judged = [c for c in of_task if c.verdict is not None]
        tasks.append(Task(task, about(task), [_verdict(c, record, axis) for c in judged]))
    return {"verdicts": tasks, "axis": svg.scale(axis, "×")}


def _verdict(cell: Cell, record: Record, axis: svg.Axis) -> Verdict:
    assert cell.verdict is not None
    sign, kind = SIGNS[cell.verdict]
    r = cell.speedup
    known = r is not None and r.low is not None and r.high is not None
    spread = f"{r.low:.2f} to {r.high:.2f}, {r.pairs} pairs" if r and known else ""
    name = place(cell.task, cell.load, record)
    said = f"{name}, {named(cell)}: " + (f"{r.mean:.2f} times the baseline's speed, {spread}; " if r else "") + cell.verdict
    load = load_of(cell.load) if len(record.settings.loads) > 1 else ""
    lost = failed(cell.failures, cell.requests, cell.reasons) if cell.failures else ""
    return Verdict(
        cell.arm,
        ", ".join(part for part in (load, lost) if part),
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


def _identity(record: Record, every: Sequence[Cell]) -> list[charts.Table]:
    """How many greedy answers are the baseline's, and where those that are not left it."""
    found = {(place(c.task, c.load, record), c.arm): c.identical for c in every if c.identical is not None}
    if not found:
        return []
    places, arms = list(dict.fromkeys(p for p, _ in found)), list(dict.fromkeys(arm for _, arm in found))
    rows = [[p, *[_of(found.get((p, arm))) for arm in arms]] for p in places]
    tables = [charts.Table("Greedy answers that equal the baseline's", ["task", *arms], rows)]
    if record.differences:
        header = ["arm", "task", "repetition", "at", "margin of the baseline's token"]
        apart = [
            [d.arm, place(d.task, d.load, record), str(d.repetition + 1), f"{d.unit} {d.position + 1}", number(d.gap, 3)]
            for d in record.differences
        ]
        tables.append(charts.Table("Where others left it", header, apart))
    return tables


def _of(counts: tuple[int, int] | None) -> str:
    return "–" if counts is None else f"{counts[0]} of {counts[1]}"


def _figures(record: Record) -> list[charts.Table]:
    """The tables of the terminal, in pieces that a page has room for."""
    first, found = "arm, load" if len(record.settings.loads) > 1 else "arm", []
    speeds, drafts = [1, 2, 3, 8, 9], [4, 5, 6, 7]  # of HEADER
    for task, of_task in by_task(record):
        heads = [[charts.label(c, record), f"{c.failures} of {c.requests}"] for c in of_task]
        for name, columns in (("speed", speeds), ("drafting", drafts)):
            rows = [[*head, *[row(c)[i] for i in columns]] for head, c in zip(heads, of_task, strict=True)]
            found.append(charts.Table(f"{task}: {name}", [first, "failed", *[HEADER[i] for i in columns]], rows))
        rows = [[*head, *latency_row(c)[1:]] for head, c in zip(heads, of_task, strict=True)]
        found.append(charts.Table(f"{task}: waiting", [first, "failed", *LATENCY[1:]], rows))
    return found


def _settings(record: Record) -> list[tuple[str, str]]:
    s, m = record.settings, record.machine
    memory = f", {m.memory_bytes / 2**30:.0f} GiB" if m.memory_bytes else ""
    shown = [
        ("Model", model_of(record)),
        ("Engine", s.engine),
        ("Client's machine" if m.client_only else "Machine", f"{m.cpu}, {m.cores} cores{memory}"),
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
