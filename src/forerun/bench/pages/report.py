"""A record as tables: for a terminal and for Markdown, the same rows. Made from the record only; sentences are words.py's."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.bench.pages.words import about, command, drawn, failed, headline, model_of, sentence, title, warnings
from forerun.bench.records.record import ArmRecord, Record
from forerun.bench.records.statistics import Ratio, Spread
from forerun.bench.records.summary import Cell, cells, draws, unanswered

POSITIONS = 4  # draft positions shown in a table; the record and the page have them all

HEADER = (
    "arm",
    "tokens/s",
    "speed-up [95 %]",
    "ms/step",
    "accepted",
    "tokens/step",
    "by position",
    "steps drafted",
    "identical",
    "verdict",
)
NARROW = (
    "arm",
    "tokens\n/s",
    "speed-up\n[95 %]",
    "ms/\nstep",
    "accep-\nted",
    "tokens\n/step",
    "by\nposition",
    "draf-\nted",
    "ident-\nical",
)
LATENCY = ("arm", "TTFT ms", "TPOT ms", "E2E s", "chunk gap ms", "queue prefill decode ms")
COSTS = ("arm", "KV tokens", "start-up s", "memory GB", "scheduler")
WIDE = 100  # columns from which the verdict fits into the table; it is in the sentence below in any case
LEGEND = (
    "accepted: of the drafted tokens. tokens/step: acceptance length, 1 + accepted / verify steps. by position: share of steps "
    "accepted up to there, in %. identical: greedy answers equal to the baseline's, token by token. –: does not apply."
)
LATENCY_LEGEND = (
    "TTFT, TPOT, E2E, chunk gap: median, 95th and 99th percentile over requests, the latter two where there are at least 20 "
    "and 100. A chunk gap is the time between two pieces of a stream and not between tokens. queue, prefill, decode: means of "
    "a request."
)
STYLE = {"faster": "green", "slower": "red", "no difference": "cyan", "not enough data": "yellow"}


def terminal(record: Record, width: int) -> Iterator[RenderableType]:
    """What to print on a terminal of that many columns, top to bottom."""
    yield Text(title(record))
    for arm in unanswered(record):
        yield Text(f"{arm.arm}: {failed(arm.requests, arm.requests, arm.reasons)}.", style="red")
    wide = width >= WIDE
    for task, of_task in by_task(record):
        yield Text()
        yield Text(f"{task}: {about(task)}", style="bold")
        yield _table([(c, row(c)) for c in of_task], (*NARROW, HEADER[-1]) if wide else NARROW, record)
        for cell in of_task:
            if (said := sentence(cell, record)) is not None:
                yield Text(said, style=STYLE[cell.verdict] if cell.verdict else "")
        yield Text()
        rows = [(c, latency_row(c)) for c in of_task]
        yield _table(rows, LATENCY if _room([r for _, r in rows], LATENCY) <= width else LATENCY[:-1], record)
    costs = [cost_row(arm, record.settings.arms[0]) for arm in record.settings.arms if arm.facts]
    if costs:
        yield Text()
        yield listing(costs, COSTS)
    yield Text()
    for draw in draws(record):
        yield Text(drawn(draw))
    yield Text(LEGEND, style="dim")
    yield Text(LATENCY_LEGEND, style="dim")
    for warning in warnings(record):
        yield Text(f"Note: {warning}", style="yellow")


def _room(rows: list[list[str]], header: tuple[str, ...]) -> int:
    """How many columns of a terminal such a table takes, if nothing wraps."""
    return sum(max(len(value) for value in column) + 1 for column in zip(header, *rows, strict=True)) - 1


def _table(rows: list[tuple[Cell, list[str]]], header: tuple[str, ...], record: Record) -> Table:
    """The columns of the header, which are the first ones of each row; a line of its own before each of several loads."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    wrapping = ("arm", "by\nposition", "verdict")  # so that a figure is never cut off for want of room
    for name in header:
        wraps, left = name in wrapping, name in ("arm", "verdict")
        table.add_column(Text(name), justify="left" if left else "right", no_wrap=not wraps, min_width=9 if wraps else None)
    load = None
    for cell, figures in rows:
        if len(record.settings.loads) > 1 and cell.load != load:
            load = cell.load
            table.add_row(Text(load.label, style="bold"))
        table.add_row(*[Text(f, style=STYLE.get(f, "")) for f in figures[: len(header)]])
    return table


def listing(rows: list[list[str]], header: tuple[str, ...], style: dict[str, str] | None = None) -> Table:
    """A plain table for a terminal; style: of cells that hold exactly such a word."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="left" if i in (0, len(header) - 1) else "right", overflow="fold")
    for figures in rows:
        table.add_row(*[Text(f, style=(style or {}).get(f, "")) for f in figures])
    return table


def markdown(record: Record) -> str:
    """The same for a pull request."""
    answer, arms = headline(record)
    lines = [f"### Does speculation pay? {model_of(record)}", "", f"**{answer}.**", ""]
    lines += [*[f"- {arm}: {said}." for arm, said in arms], "", title(record), ""]
    several = len(record.settings.loads) > 1
    for task, of_task in by_task(record):
        lines += [f"**{task}**: {about(task)}", ""]
        lines += lined([_at(c, row(c), several) for c in of_task], ("load", *HEADER) if several else HEADER)
        lines += ["", *[f"- {said}" for cell in of_task if (said := sentence(cell, record)) is not None], ""]
        lines += lined([_at(c, latency_row(c), several) for c in of_task], ("load", *LATENCY) if several else LATENCY)
        lines.append("")
    costs = [cost_row(arm, record.settings.arms[0]) for arm in record.settings.arms if arm.facts]
    if costs:
        lines += [*lined(costs, COSTS), ""]
    lines += [LEGEND, "", LATENCY_LEGEND, ""]
    lines += [f"- {drawn(draw)}" for draw in draws(record)]
    lines += [f"- Note: {warning}" for warning in warnings(record)]
    lines += ["", "Repeat it:", "", f"    {command(record)}"]
    return "\n".join(lines).rstrip() + "\n"


def _at(cell: Cell, figures: list[str], several: bool) -> list[str]:
    return [cell.load.label, *figures] if several else figures


def show(record: Record, console: Console) -> None:
    for part in terminal(record, console.width):
        console.print(part)


def by_task(record: Record) -> list[tuple[str, list[Cell]]]:
    every = cells(record)
    return [(task, of_task) for task in record.settings.tasks if (of_task := [c for c in every if c.task == task])]


def row(cell: Cell) -> list[str]:
    """One line of the table, in the order of HEADER."""
    shown = " ".join(f"{100 * j:.0f}" for j in cell.joint[:POSITIONS]) + "…" * (len(cell.joint) > POSITIONS)
    return [
        named(cell),
        number(cell.tokens_per_s, 1),
        interval(cell.speedup),
        number(None if cell.step_s is None else 1000 * cell.step_s, 1),
        percent(cell.acceptance_rate),
        number(cell.got, 2),
        shown or "–",
        percent(cell.drafted_share),
        f"{cell.identical[0]}/{cell.identical[1]}" if cell.identical else "–",
        cell.verdict or "–",
    ]


def latency_row(cell: Cell) -> list[str]:
    """In the order of LATENCY."""
    s = cell.split
    parts = [milliseconds(s.queue_s), milliseconds(s.prefill_s), milliseconds(s.decode_s)]
    return [
        named(cell),
        spread(cell.ttft, 1000),
        spread(cell.tpot, 1000),
        spread(cell.e2e, 1),
        spread(cell.gap, 1000),
        " ".join(parts) + (" (server)" if s.by_server else ""),
    ]


def cost_row(arm: ArmRecord, reference: ArmRecord) -> list[str]:
    """In the order of COSTS."""
    f, base = arm.facts, reference.facts
    if f is None:
        return [arm.name, *["–"] * (len(COSTS) - 1)]
    change = ""
    if f.kv_tokens and base and base.kv_tokens and arm.name != reference.name:
        change = f" ({100 * (f.kv_tokens / base.kv_tokens - 1):+.0f} %)"
    return [
        arm.name,
        ("–" if f.kv_tokens is None else f"{f.kv_tokens:,}") + change,
        number(f.startup_s, 1),
        number(None if f.memory_bytes is None else f.memory_bytes / 1e9, 2),
        ", ".join(f"{key} {value}" for key, value in f.scheduler.items()) or "–",
    ]


def named(cell: Cell) -> str:
    """The arm, and its failures, which belong beside every figure."""
    return cell.arm if not cell.failures else f"{cell.arm} ({cell.failures}/{cell.requests} failed)"


def interval(ratio: Ratio | None) -> str:
    """1.64 [1.60,1.68]"""
    if ratio is None:
        return "–"
    return f"{ratio.mean:.2f}" + (f" [{ratio.low:.2f},{ratio.high:.2f}]" if ratio.low is not None and ratio.high else "")


def spread(values: Spread | None, scale: float) -> str:
    """Median, 95th and 99th percentile, to three digits."""
    if values is None:
        return "–"
    return " ".join(digits(scale * v) for v in (values.median, values.p95, values.p99) if v is not None)


def digits(value: float) -> str:
    """Three digits that matter, never an exponent: 0.123, 1.23, 12.3, 1234."""
    size = abs(value)
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else digits(1000 * seconds)


def number(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:.{places}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


def lined(rows: list[list[str]], header: tuple[str, ...]) -> list[str]:
    """A table in Markdown."""
    left = {0, len(header) - 1}
    return [_line(header), _line(["---" if i in left else "---:" for i in range(len(header))]), *[_line(r) for r in rows]]


def _line(values: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(v.replace("|", "\\|") for v in values) + " |"
