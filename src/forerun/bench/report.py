"""A record in words: a table and sentences for each task, and what to beware of. Made from the record only, the same rows for
the terminal and for Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.bench.record import Difference, Record
from forerun.bench.statistics import pairs_needed
from forerun.bench.summary import Cell, cells, margin, noise
from forerun.bench.workloads import TASKS, VARIANTS

NEAR_TIE = 0.5  # in log-probability: wider than rounding in bfloat16 moves two logits of one forward pass apart
POSITIONS = 4  # draft positions shown in a table; the record has them all
BUSY = 0.5  # load average for each core from which other programs are likely to disturb

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
WIDE = 100  # columns from which the verdict fits into the table; it is in the sentence below in any case
LEGEND = (
    "accepted: of the drafted tokens. tokens/step: acceptance length, 1 + accepted / verify steps. by position: share of steps "
    "accepted up to there, in %. identical: greedy answers equal to the baseline's, token by token. –: does not apply."
)
STYLE = {"faster": "green", "slower": "red", "no difference": "cyan", "not enough data": "yellow"}


def terminal(record: Record, width: int) -> Iterator[RenderableType]:
    """What to print on a terminal of that many columns, top to bottom."""
    yield Text(title(record))
    for task, of_task in by_task(record):
        yield Text()
        yield Text(f"{task}: {TASKS[task].about}", style="bold")
        yield _table(of_task, (*NARROW, HEADER[-1]) if width >= WIDE else NARROW)
        for cell in of_task:
            if (said := sentence(cell, record)) is not None:
                yield Text(said, style=STYLE[cell.verdict] if cell.verdict else "")
    yield Text()
    yield Text(LEGEND, style="dim")
    for warning in warnings(record):
        yield Text(f"Note: {warning}", style="yellow")


def _table(of_task: list[Cell], header: tuple[str, ...]) -> Table:
    """The columns of the header, which are the first ones of each row."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for i, name in enumerate(header):
        wraps = HEADER[i] in ("arm", "by position", "verdict")  # so that a figure is never cut off for want of room
        left = HEADER[i] in ("arm", "verdict")
        table.add_column(Text(name), justify="left" if left else "right", no_wrap=not wraps, min_width=9 if wraps else None)
    for cell in of_task:
        figures = row(cell)[: len(header)]
        table.add_row(*[Text(f, style=STYLE.get(f, "")) for f in figures])
    return table


def markdown(record: Record) -> str:
    """The same for a pull request."""
    lines = [f"### Does speculation pay? {record.settings.model}", "", title(record), ""]
    for task, of_task in by_task(record):
        lines += [f"**{task}**: {TASKS[task].about}", "", _line(HEADER), _line(["---", *["---:"] * (len(HEADER) - 2), "---"])]
        lines += [_line(row(cell)) for cell in of_task]
        lines += ["", *[f"- {said}" for cell in of_task if (said := sentence(cell, record)) is not None], ""]
    lines += [LEGEND, ""]
    lines += [f"- Note: {warning}" for warning in warnings(record)]
    return "\n".join(lines).rstrip() + "\n"


def show(record: Record, console: Console) -> None:
    for part in terminal(record, console.width):
        console.print(part)


def by_task(record: Record) -> list[tuple[str, list[Cell]]]:
    every = cells(record)
    return [(task, of_task) for task in record.settings.tasks if (of_task := [c for c in every if c.task == task])]


def title(record: Record) -> str:
    s, m, v = record.settings, record.machine, record.versions
    where = m.accelerator or f"{m.cpu}, {m.cores} cores"
    dtype = s.arms[0].engine.get("dtype", "")
    return (
        f"{s.model} {dtype} on {where}. {s.repetitions} repetitions of {s.concurrency} request{'s' * (s.concurrency > 1)}, "
        f"at most {s.max_tokens} output tokens. forerun {v.get('forerun', '?')}, torch {v.get('torch', '?')}, "
        f"{record.started}, "
        f"{record.seconds:.0f} s."
    )


def row(cell: Cell) -> list[str]:
    """One line of the table, in the order of HEADER."""
    counts = cell.counts
    drafts = counts.drafted > 0
    joint = " ".join(f"{100 * j:.0f}" for j in counts.joint[:POSITIONS]) + "…" * (len(counts.joint) > POSITIONS)
    speedup = "–"
    if cell.speedup is not None:
        r = cell.speedup
        speedup = f"{r.mean:.2f}" + (f" [{r.low:.2f},{r.high:.2f}]" if r.low is not None and r.high is not None else "")
    return [
        cell.arm,
        _number(cell.tokens_per_s, 1),
        speedup,
        _number(None if cell.step_s is None else 1000 * cell.step_s, 1),
        _percent(counts.acceptance_rate),
        _number(cell.got, 2),
        joint if drafts else "–",
        _percent(counts.drafting_steps / counts.steps) if drafts else "–",
        f"{cell.identical[0]}/{cell.identical[1]}" if cell.identical else "–",
        cell.verdict or "–",
    ]


def sentence(cell: Cell, record: Record) -> str | None:
    """Whether speculation pays in this cell, and why. None for the arms that do not speculate."""
    if cell.verdict is None or cell.arm == record.settings.control:
        return None
    r = cell.speedup
    spread = f"{r.mean:.2f} times the baseline's speed" if r else ""
    if r and r.low is not None and r.high is not None:
        spread += f" ({r.low:.2f} to {r.high:.2f})"
    if cell.verdict == "not enough data":
        said = f"{cell.task}, {cell.arm}: not enough data to say whether it pays"
        if r is None:
            return said + "; no pair of batches was completed."
        more, most = (
            pairs_needed(r, margin(record, cell.task)),
            VARIANTS // record.settings.concurrency - record.settings.warmups,
        )
        if more is None:
            remedy = " Try --repetitions 8."
        elif more <= most:
            remedy = f" Try --repetitions {max(more, r.pairs + 1)}."
        else:
            remedy = " That is too uneven for more repetitions to settle: measure on a quieter machine."
        return f"{said}: {spread} over {r.pairs} pair{'s' * (r.pairs > 1)}.{remedy}"
    call = {
        "faster": "speculation pays",
        "slower": "speculation does not pay",
        "no difference": "speculation makes no difference",
    }
    return f"{cell.task}, {cell.arm}: {call[cell.verdict]}, {spread}.{_why(cell)}"


def _why(cell: Cell) -> str:
    if cell.needed is None or cell.got is None:
        return ""
    if not cell.counts.drafted:
        return " It never had a draft, so every step gave one token."
    return (
        f" A step took {cell.needed:.2f} times as long as a plain one, so it needed {cell.needed:.2f} tokens to break even; "
        f"it got {cell.got:.2f}."
    )


def warnings(record: Record) -> list[str]:
    """What could mislead a reader of the figures, each with what to do about it."""
    s, m = record.settings, record.machine
    every = cells(record)
    found = []
    if not record.finished:
        found.append("the run was interrupted; the figures are of what was measured until then.")
    if m.load is not None and m.load > BUSY * m.cores:
        found.append(
            f"the machine was busy when the run began (load {m.load:.1f} on {m.cores} cores); close other programs and "
            "measure again."
        )
    if s.warmups == 0:
        found.append("there was no warm-up, so the first repetition pays for first-time costs; leave --warmups at 1 or more.")
    for cell in every:
        if cell.failures:
            found.append(
                f"{cell.task}, {cell.arm}: {cell.failures} of {cell.requests} requests failed and were left out, with "
                "the batch they were in."
            )
        if cell.cached_tokens:
            found.append(
                f"{cell.task}, {cell.arm}: {cell.cached_tokens} prompt tokens came from the prefix cache, so time to "
                "first token is flattered."
            )
        if cell.requests > cell.failures and cell.output_tokens / (cell.requests - cell.failures) < 16:
            found.append(
                f"{cell.task}, {cell.arm}: answers are shorter than 16 tokens on average, mostly prompt time; choose "
                "another task or model."
            )
    for task in s.tasks:
        control = noise(record, task)
        if control is not None and margin(record, task) > 0.02:
            found.append(
                f"{task}: the baseline against itself came out at {control.mean:.3f}; nothing smaller is called a "
                "difference. A quieter machine or more --repetitions narrow it."
            )
        caution = TASKS[task].caution
        if caution and any(c.task == task for c in every):
            found.append(f"{task}: {caution}.")
    found += _unequal(record)
    found += _departures(record)
    return found


def _unequal(record: Record) -> list[str]:
    """Engine settings in which an arm differs from the reference, but for the drafter."""
    first, *others = record.settings.arms
    return [
        f"{arm.name} ran with {key}={arm.engine.get(key)!r}, {first.name} with {first.engine.get(key)!r}; the "
        "comparison includes that."
        for arm in others
        for key in first.engine
        if key != "speculative_config" and arm.engine and arm.engine.get(key) != first.engine.get(key)
    ]


def _departures(record: Record) -> list[str]:
    """Where greedy answers differed, and whether a near-tie explains it."""
    found = []
    for arm in record.settings.arms:
        of_arm = [d for d in record.differences if d.arm == arm.name]
        if not of_arm:
            continue
        near = [d for d in of_arm if d.gap is not None and d.gap <= NEAR_TIE]
        wide = [d for d in of_arm if d.gap is not None and d.gap > NEAR_TIE]
        places = ", ".join([_where(d) for d in of_arm[:4]] + ["…"] * (len(of_arm) > 4))
        said = f"{arm.name}: {len(of_arm)} greedy answer{'s' * (len(of_arm) > 1)} left the baseline's ({places})."
        if near:
            said += f" {len(near)} at a near-tie, where a verify step's different order of summing decides."
        if wide:
            said += f" {len(wide)} where the model was sure: that is a fault worth reporting, with the record attached."
        found.append(said)
    return found


def _where(d: Difference) -> str:
    gap = "" if d.gap is None else f", margin {d.gap:.3f}"
    return f"{d.task} {d.repetition + 1} at token {d.position + 1}{gap}"


def _line(values: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(v.replace("|", "\\|") for v in values) + " |"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"
