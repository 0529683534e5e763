"""The learning curve of a run: one page in its folder, and a few lines on a terminal. Made of log.jsonl and run.json alone, so
it can be looked at while the run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench.formats import NONE, number, percent
from forerun.bench.pages import html
from forerun.bench.pages.charts import around
from forerun.bench.pages.view import Axis, Chart, Column, Plot, Series, Table
from forerun.models.files import read_json
from forerun.train.log import Line, of, read

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "training.html"
PLACES = 40  # of a plot, at most
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under a heading. keys: the legend: each series with its number."""

    name: str
    about: str
    charts: Sequence[Chart]
    keys: Sequence[tuple[str, int]] = ()


def write(folder: Path) -> Path:
    """Write the page of a run. Returns its path."""
    path = folder / PAGE
    path.write_text(page(read(folder / "log.jsonl"), read_json(folder / "run.json")), encoding="utf-8")
    return path


def page(lines: Sequence[Line], settings: dict[str, Any]) -> str:
    """Every text is escaped."""
    method, target = settings.get("method", "drafter"), settings.get("target") or "the default model"
    last = max((line.get("step", 0) for line in lines), default=0)
    seconds = [f"{line['name']} {line['seconds']:.0f} s" for line in of(lines, "phase")]
    done = f"{last} of {settings.get('steps', last)} steps of {settings.get('tokens', NONE)} tokens"
    context = f"{done}. " + (f"Time: {', '.join(seconds)}." if seconds else "The run has not ended.")
    sections = [one for one in (_lengths(lines), _positions(lines), _losses(lines), _tasks(lines)) if one is not None]
    given = [(name, str(value)) for name, value in settings.items() if value not in (None, [], "")]
    title = f"Training of {method} for {target}"
    return html.filled("training.html.j2", title, answer=answer(lines), context=context, sections=sections, settings=given)


def answer(lines: Sequence[Line]) -> str:
    """What came out, in a sentence without its full stop."""
    engine, offline = of(lines, "engine"), of(lines, "offline")
    if engine and engine[-1]["tasks"]:
        steps = sum(task["steps"] for task in engine[-1]["tasks"])
        length = sum(task["steps"] * task["length"] for task in engine[-1]["tasks"]) / steps
        return f"{length:.2f} tokens a verify step on held-out prompts in the engine, with {engine[-1]['k']} drafted"
    if offline:
        found = offline[-1]["lengths"]
        return f"{found[-1]:.2f} tokens a verify step on held-out answers, with {len(found)} drafted"
    return "Not evaluated yet"


def _plot(caption: str, values: Sequence[tuple[int, Sequence[tuple[int, float]]]], unit: str, axis: Axis | None = None) -> Plot:
    """Series of (step, value), by number. Close steps share a place, which has their mean."""
    steps = sorted({step for _, points in values for step, _ in points})
    width = max(-(-len(steps) // PLACES), 1)
    place = {step: i // width for i, step in enumerate(steps)}
    series, every, alts = [], [], []
    for arm, points in values:
        here: dict[int, list[float]] = {}
        for step, value in points:
            here.setdefault(place[step], []).append(value)
        means = [(i, sum(found) / len(found), None, None) for i, found in sorted(here.items())]
        series.append(Series(arm, means))
        every += [value for _, value, _, _ in means]
        if points:
            alts.append(f"{points[0][1]:.3g}{unit} at step {points[0][0]} to {points[-1][1]:.3g}{unit} at step {points[-1][0]}")
    count = -(-len(steps) // width)
    apart = 2 * max(-(-count // 10), 1)  # half of the labels that the page would draw, since numbers of steps are long
    ends = [steps[min((i + 1) * width, len(steps)) - 1] for i in range(count)]
    names = [f"{end:,}" if i % apart == 0 else "" for i, end in enumerate(ends)]
    return Plot(caption, series, names, axis or around(every, unit), f"{caption}: {'; '.join(alts)}")


def _losses(lines: Sequence[Line]) -> Section | None:
    steps = of(lines, "step")
    if not steps:
        return None
    plot = _plot("Loss", [(0, [(line["step"], line["loss"]) for line in steps])], "")
    hits = [(i, [(line["step"], 100 * line["accuracy"][i]) for line in steps]) for i in range(len(steps[0]["accuracy"]))]
    right = _plot("Right at each unrolled step", hits, "%", Axis(0, 100, "%"))
    few = steps[:: max(len(steps) // 20, 1)]
    columns = [Column("step", left=True), *[Column(name) for name in ("loss", "norm of the gradient", "learning rate")]]
    rows = [[f"{line['step']:,}", f"{line['loss']:.4f}", f"{line['norm']:.3f}", f"{line['rate']:.2e}"] for line in few]
    about = "On the answers that it is trained on, means over a few steps. Right: its likeliest token is the target's."
    keys = [(f"step {i + 1}", i) for i in range(len(hits))]
    return Section("Loss", about, [Chart("", [plot, right], [Table("Loss by step", columns, rows)])], keys)


def _engine_lengths(lines: Sequence[Line]) -> list[tuple[int, float]]:
    found = []
    for line in of(lines, "engine"):
        steps = sum(task["steps"] for task in line["tasks"])
        if steps:
            found.append((line["step"], sum(task["steps"] * task["length"] for task in line["tasks"]) / steps))
    return found


def _lengths(lines: Sequence[Line]) -> Section | None:
    offline = of(lines, "offline")
    if not offline:
        return None
    k = len(offline[0]["lengths"])
    widths = sorted({1, 2, k} & set(range(1, k + 1)))
    values = [(i + 1, [(line["step"], line["lengths"][width - 1]) for line in offline]) for i, width in enumerate(widths)]
    keys = [(f"k = {width}, offline", i + 1) for i, width in enumerate(widths)]
    engine = _engine_lengths(lines)
    if engine:
        values.append((len(widths) + 1, engine))
        keys.append((f"k = {k}, in the engine", len(widths) + 1))
    columns = [Column("step", left=True), *[Column(f"k = {i}") for i in range(1, k + 1)]]
    rows = [[f"{line['step']:,}", *[number(value, 3) for value in line["lengths"]]] for line in offline]
    about = "Tokens of a greedy verify step on held-out prompts: accepted drafts and one more. Offline: a walk over answers."
    plot = _plot("Acceptance length", values, "")
    return Section("Acceptance length", about, [Chart("", [plot], [Table("Offline, by step", columns, rows)])], keys)


def _positions(lines: Sequence[Line]) -> Section | None:
    offline = of(lines, "offline")
    if not offline:
        return None
    k = len(offline[0]["accepted"])
    values = [(i, [(line["step"], 100 * line["accepted"][i]) for line in offline]) for i in range(k)]
    columns = [Column("step", left=True), *[Column(str(i + 1)) for i in range(k)]]
    rows = [[f"{line['step']:,}", *map(percent, line["accepted"])] for line in offline]
    about = f"The share of verify steps whose draft of {k} was accepted up to that position, offline."
    plot = _plot("Accepted up to a position", values, "%", Axis(0, 100, "%"))
    keys = [(f"position {i + 1}", i) for i in range(k)]
    return Section("Acceptance by position", about, [Chart("", [plot], [Table("By step", columns, rows)])], keys)


def _tasks(lines: Sequence[Line]) -> Section | None:
    table = tasks(lines)
    about = "Greedy answers to held-out prompts with the drafter as it is exported; every draft is verified to its end."
    return None if table is None else Section("In the engine", about, [Chart("", [], [table])])


def tasks(lines: Sequence[Line]) -> Table | None:
    """The last evaluation with the engine, by task."""
    engine = of(lines, "engine")
    if not engine or not engine[-1]["tasks"]:
        return None
    found = engine[-1]["tasks"]
    k = max(len(task["accepted"]) for task in found)
    columns = [Column("task", left=True), Column("prompts"), Column("tokens"), Column("tokens/step")]
    columns += [Column(f"to {i + 1}") for i in range(k)]
    rows = []
    for task in found:
        shares = [percent(task["accepted"][i]) if i < len(task["accepted"]) else NONE for i in range(k)]
        rows.append([task["task"], str(task["prompts"]), f"{task['tokens']:,}", f"{task['length']:.2f}", *shares])
    return Table(f"In the engine at step {engine[-1]['step']:,}, {engine[-1]['k']} drafted", columns, rows)


def spark(values: Sequence[float], width: int = 40) -> str:
    """A line of blocks, one for each value or mean of values."""
    if not values:
        return ""
    each = max(-(-len(values) // width), 1)
    means = [sum(values[i : i + each]) / len(values[i : i + each]) for i in range(0, len(values), each)]
    low, high = min(means), max(means)
    size = len(SPARKS) - 1
    return "".join(SPARKS[round((value - low) / (high - low) * size) if high > low else size // 2] for value in means)


def show(folder: Path, console: Console) -> None:
    """The curve and the acceptance by task, on a terminal."""
    from rich.text import Text

    from forerun.bench.pages.terminal import drawn

    lines = read(folder / "log.jsonl")
    console.print(Text(f"{answer(lines)}.", style="bold"))
    for name, values in (
        ("loss", [line["loss"] for line in of(lines, "step")]),
        ("acceptance length", [line["lengths"][-1] for line in of(lines, "offline")]),
    ):
        if values:
            console.print(Text(f"{name:18} {values[0]:6.3f} {spark(values)} {values[-1]:.3f}"))
    for line in of(lines, "offline")[-1:]:
        shares = " ".join(map(percent, line["accepted"]))
        console.print(Text(f"accepted up to positions 1, 2, ... on {line['samples']} held-out answers: {shares}"))
    table = tasks(lines)
    if table is not None:
        console.print(Text(f"\n{table.caption}"))
        console.print(drawn(table, console.width))
