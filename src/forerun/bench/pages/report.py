"""The view of a record: its rows, columns and charts, each derived once. The sentences are words.py's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.bench.formats import NONE, between, digits, interval, number, percent, spread
from forerun.bench.pages import charts, words
from forerun.bench.pages.view import Column, Part, Row, Rows, Table, View, table
from forerun.bench.records.record import Difference, Record
from forerun.bench.records.summary import Cell, cells, draws

POSITIONS = 4  # draft positions shown in a table; the record and the page have all


def _by_position(c: Cell) -> str:
    return " ".join(f"{100 * share:.0f}" for share in c.joint[:POSITIONS]) + "…" * (len(c.joint) > POSITIONS) or NONE


def _split(c: Cell) -> str:
    s = c.split
    return " ".join(digits(v, 1000) for v in (s.queue_s, s.prefill_s, s.decode_s)) + (" (server)" if s.by_server else "")


ARM = Column("arm", words.named, left=True, wraps=True)
FIGURES = (
    ARM,
    Column("tokens/s", lambda c: number(c.tokens_per_s, 1), "tokens\n/s"),
    Column("speed-up [95 %]", lambda c: interval(c.speedup), "speed-up\n[95 %]"),
    Column("ms/step", lambda c: number(None if c.step_s is None else 1000 * c.step_s, 1), "ms/\nstep"),
    Column("accepted", lambda c: percent(c.acceptance_rate), "accep-\nted"),
    Column("tokens/step", lambda c: number(c.got, 2), "tokens\n/step"),
    Column("by position", _by_position, "by\nposition", wraps=True),
    Column("steps drafted", lambda c: percent(c.drafted_share), "draf-\nted"),
    Column("identical", lambda c: "{}/{}".format(*c.identical) if c.identical else NONE, "ident-\nical"),
    Column("verdict", lambda c: c.verdict or NONE, left=True, wraps=True, optional=True),
)
WAITING = (
    ARM,
    Column("TTFT ms", lambda c: spread(c.ttft, 1000)),
    Column("TPOT ms", lambda c: spread(c.tpot, 1000)),
    Column("E2E s", lambda c: spread(c.e2e, 1)),
    Column("chunk gap ms", lambda c: spread(c.gap, 1000)),
    Column("queue prefill decode ms", _split, optional=True),
)
LEGEND = (
    "accepted: of the drafted tokens. tokens/step: acceptance length, 1 + accepted / verify steps. by position: share of steps "
    "accepted up to there, in %. identical: greedy answers equal to the baseline's, token by token. –: does not apply.",
    "TTFT, TPOT, E2E, chunk gap: median, 95th and 99th percentile over requests, the latter two where there are at least 20 "
    "and 100. A chunk gap is the time between two pieces of a stream, not between tokens. queue, prefill, decode: means of a "
    "request.",
)
APART = (
    Column("arm", lambda d: d[0].arm, left=True),
    Column("task", lambda d: d[1], left=True),
    Column("repetition", lambda d: str(d[0].repetition + 1)),
    Column("at", lambda d: f"{d[0].unit} {d[0].position + 1}"),
    Column("margin of the baseline's token", lambda d: number(d[0].gap, 3)),
)


def view(record: Record) -> View:
    s, every = record.settings, cells(record)
    answer, arms = words.headline(record)
    axis = charts.axis_of([c.speedup for c in every if c.speedup])
    return View(
        heading=f"Does speculation pay? {words.model_of(record)}",
        answer=answer,
        leads=arms,
        context=words.title(record),
        parts=[_part(record, task, here, axis) for task in s.tasks if (here := [c for c in every if c.task == task])],
        tables=charts.costs(record)[1],
        sections=charts.sections(record, every),
        identity=_identity(record, every),
        findings=[words.drawn(draw) for draw in draws(record)],
        warnings=words.warnings(record),
        legend=LEGEND,
        settings=_settings(record),
        commands=[("Repeat it", words.command(record))],
        control=s.control,
    )


def _part(record: Record, task: str, here: Sequence[Cell], axis: Any) -> Part:
    groups = [c.load.label for c in here] if len(record.settings.loads) > 1 else []
    return Part(
        task,
        words.about(task),
        [Rows("", [_verdict(c, record) for c in here if c.verdict is not None], axis)],
        [(text, c.verdict) for c in here if (text := words.sentence(c, record)) is not None],
        [table(f"{task}: speed and drafting", FIGURES, here, groups), table(f"{task}: waiting", WAITING, here, groups)],
    )


def _verdict(c: Cell, record: Record) -> Row:
    load = words.load_of(c.load) if len(record.settings.loads) > 1 else ""
    where = f"{words.place(c.task, c.load, record)}, {words.named(c)}"
    lost = words.failed(c.failures, c.requests, c.reasons) if c.failures else ""
    return charts.verdict_row(
        c.arm,
        c.speedup,
        c.verdict,
        f"{where}: {interval(c.speedup)} times the baseline's speed; {c.verdict}",
        under=", ".join(part for part in (load, lost) if part),
        spread=f"{between(c.speedup)}, {c.speedup.pairs} pairs" if c.speedup and between(c.speedup) else "",
        why=words.reason(c, record),
    )


def _identity(record: Record, every: Sequence[Cell]) -> list[Table]:
    """How many greedy answers equal the baseline's, and where the others differ."""
    compared = [c for c in every if c.identical is not None]
    if not compared:
        return []
    of = {(words.place(c.task, c.load, record), c.arm): "{} of {}".format(*c.identical) for c in compared if c.identical}
    places, arms = list(dict.fromkeys(name for name, _ in of)), list(dict.fromkeys(arm for _, arm in of))
    rows = [[name, *[of.get((name, arm), NONE) for arm in arms]] for name in places]
    columns = [Column("task", left=True), *map(Column, arms)]
    apart: list[tuple[Difference, str]] = [(d, words.place(d.task, d.load, record)) for d in record.differences]
    tables = [Table("Greedy answers that equal the baseline's", columns, rows)]
    return tables + ([table("Where the others differ", APART, apart)] if apart else [])


def _settings(record: Record) -> list[tuple[str, str]]:
    s, m = record.settings, record.machine
    memory = f", {m.memory_bytes / 2**30:.0f} GiB" if m.memory_bytes else ""
    shown = [
        ("Model", words.model_of(record)),
        ("Engine", s.engine),
        ("Client's machine" if m.client_only else "Machine", f"{m.cpu}, {m.cores} cores{memory}"),
        ("Accelerator", m.accelerator or "none"),
        ("System", m.system),
        ("Load at the start", "not known" if m.load is None else f"{m.load:.2f}"),
        ("Start", f"{record.started}, took {record.seconds:.0f} s" + ("" if record.finished else ", interrupted")),
        ("Repetitions", f"{s.repetitions}, after {words.count(s.warmups, 'warm-up')}"),
        ("Load", words.loads_of(record)),
        ("Output tokens", f"at most {s.max_tokens}"),
        ("Seed", str(s.seed)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
    ]
    for arm in s.arms:
        shown.append((arm.name, "no drafter" if arm.speculation is None else _pairs(arm.speculation)))
        if arm.facts and arm.facts.command:
            shown.append((f"{arm.name}, launched as", " ".join(arm.facts.command)))
    engine = {key: value for key, value in s.arms[0].engine.items() if key != "speculative_config"}
    return [*shown, ("Engine settings", _pairs(engine))] if engine else shown


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items() if value is not None)
