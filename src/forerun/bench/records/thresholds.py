"""Thresholds on a record, for continuous integration: a small language for them, what each cell says to them, and a JUnit
file. Knows the figures of summary.py; prints nothing and exits nowhere.

    speedup.copy >= 1.3                     every candidate, on task copy, under every load
    speedup_low.copy@c=8[ngram k=4] > 1     the lower end of the interval, of one arm under one load
    identical == all                        every greedy answer of every candidate
    failures == 0                           of every arm, the baseline too
    verdict != slower                       of every candidate everywhere
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple
from xml.etree import ElementTree

from forerun.bench.pages.report import digits, interval
from forerun.bench.pages.words import headline
from forerun.bench.records.record import Record
from forerun.bench.records.statistics import Ratio, Spread
from forerun.bench.records.summary import Cell, cells, draws
from forerun.types import SettingError, require

FORM = re.compile(
    r"\s*(?P<metric>\w+)(?:\.(?P<task>[^@\[\]<>=!]+?))?(?:@(?P<load>c=\d+|[^\[\]<>=!\s]+))?(?:\[(?P<arm>[^\]]+)\])?"
    r"\s*(?P<sign>>=|<=|==|!=|>|<)\s*(?P<value>\S(?:.*\S)?)\s*"
)
SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
EXAMPLE = "give one as in 'speedup.copy >= 1.3', 'identical == all' or 'failures == 0'"
VERDICTS = ("faster", "slower", "no difference", "not enough data")


class Metric(NamedTuple):
    """of: the figure of a cell, None where it is not to be had. every: of the baseline too, not of candidates only.
    unless: what to say where there is no figure. words: the values it takes, if not numbers."""

    of: Callable[[Cell], float | str | None]
    every: bool = False
    unless: str = "it was not measured"
    words: tuple[str, ...] = ()


def _ms(of: Callable[[Cell], Spread | None], which: Literal["median", "p95", "p99"]) -> Callable[[Cell], float | None]:
    def figure(cell: Cell) -> float | None:
        values = of(cell)
        if values is None:
            return None
        value = {"median": values.median, "p95": values.p95, "p99": values.p99}[which]
        return None if value is None else 1000 * value

    return figure


def _ratio(of: Callable[[Cell], Ratio | None]) -> Callable[[Cell], float | None]:
    return lambda cell: None if (r := of(cell)) is None else r.mean


FEW = "there are too few requests (20 for p95, 100 for p99)"
METRICS: dict[str, Metric] = {
    "speedup": Metric(_ratio(lambda c: c.speedup), unless="no pair of batches was completed"),
    "speedup_low": Metric(lambda c: c.speedup.low if c.speedup else None, unless="there are fewer than two pairs"),
    "verdict": Metric(lambda c: c.verdict, words=VERDICTS),
    "identical": Metric(lambda c: c.identical[0] / c.identical[1] if c.identical and c.identical[1] else None),
    "failures": Metric(lambda c: float(c.failures), every=True),
    "tokens_per_s": Metric(lambda c: c.tokens_per_s),
    "ms_per_step": Metric(lambda c: None if c.step_s is None else 1000 * c.step_s, unless="the engine does not count steps"),
    "acceptance_rate": Metric(lambda c: c.acceptance_rate, unless="nothing was drafted"),
    "acceptance_length": Metric(lambda c: c.got, unless="the engine does not count steps"),
    "ttft_ms": Metric(_ms(lambda c: c.ttft, "median")),
    "ttft_p95_ms": Metric(_ms(lambda c: c.ttft, "p95"), unless=FEW),
    "ttft_p99_ms": Metric(_ms(lambda c: c.ttft, "p99"), unless=FEW),
    "tpot_ms": Metric(_ms(lambda c: c.tpot, "median")),
    "tpot_p95_ms": Metric(_ms(lambda c: c.tpot, "p95"), unless=FEW),
    "tpot_p99_ms": Metric(_ms(lambda c: c.tpot, "p99"), unless=FEW),
    "e2e_ms": Metric(_ms(lambda c: c.e2e, "median")),
    "e2e_p95_ms": Metric(_ms(lambda c: c.e2e, "p95"), unless=FEW),
    "e2e_p99_ms": Metric(_ms(lambda c: c.e2e, "p99"), unless=FEW),
    "ttft_ratio": Metric(_ratio(lambda c: c.ttft_ratio), unless="no pair of batches was completed"),
    "tpot_ratio": Metric(_ratio(lambda c: c.tpot_ratio), unless="no pair of batches was completed"),
}
OF_ARMS = ("kv_tokens", "startup_s", "distribution")
"""Metrics that an arm has once, whatever the task and the load."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """task, load (its label), arm: None: all of them. value: a number, or one of the metric's words."""

    text: str
    metric: str
    task: str | None
    load: str | None
    arm: str | None
    sign: str
    value: float | str

    def holds(self, figure: float | str) -> bool:
        if isinstance(self.value, str) or isinstance(figure, str):
            return (figure == self.value) == (self.sign == "==")
        return SIGNS[self.sign](figure, self.value)


@dataclass(frozen=True, slots=True)
class Check:
    """What one cell or arm said to a threshold. said: its figure, or why there is none."""

    threshold: Threshold
    where: str
    passed: bool
    said: str


def parse(texts: Sequence[str]) -> tuple[Threshold, ...]:
    """Raises SettingError for one that cannot be read, with what exists."""
    return tuple(_one(text) for text in texts)


def _one(text: str) -> Threshold:
    found = FORM.fullmatch(text)
    if found is None:
        raise SettingError("ci", text, EXAMPLE)
    metric, sign, value = found["metric"], found["sign"], found["value"]
    known = (*METRICS, *OF_ARMS)
    require(metric in known, "ci", text, f"there is no metric {metric!r}; there are {', '.join(known)}")
    whole = metric in OF_ARMS and (found["task"] or found["load"])
    require(not whole, "ci", text, f"an arm has one {metric} for all tasks and loads; give {metric}[ARM] {sign} {value}")
    words = ("same", "different") if metric == "distribution" else METRICS[metric].words if metric in METRICS else ()
    threshold = Threshold(text.strip(), metric, found["task"], found["load"], found["arm"], sign, value)
    if words:
        require(value in words, "ci", text, f"{metric} is one of {', '.join(words)}")
        require(sign in ("==", "!="), "ci", text, f"{metric} is compared with == or !=")
        return threshold
    return Threshold(threshold.text, metric, found["task"], found["load"], found["arm"], sign, _number(metric, value, text))


def _number(metric: str, value: str, text: str) -> float:
    if value == "all" and metric == "identical":
        return 1.0
    percent = value.endswith("%")
    try:
        number = float(value.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        raise SettingError("ci", text, f"{value!r} is no number; {EXAMPLE}") from None
    share = metric in ("identical", "acceptance_rate")
    require(not share or 0 <= number <= 1, "ci", text, f"{metric} is a share: give all, 95% or 0.95" if metric == "identical"
            else f"{metric} is a share: give 60% or 0.6")  # fmt: skip
    return number


def exist(thresholds: Sequence[Threshold], tasks: Sequence[str], loads: Sequence[str], arms: Sequence[str]) -> None:
    """Raises SettingError for a threshold on a task, load (by its label) or arm that is none of these."""
    for t in thresholds:
        for kind, name, known in (("task", t.task, tasks), ("load", t.load, loads), ("arm", t.arm, arms)):
            require(name is None or name in known, "ci", t.text, f"there is no {kind} {name!r}; there are {', '.join(known)}")


def check(thresholds: Sequence[Threshold], record: Record) -> list[Check]:
    """What the record says to each. A figure that is not to be had fails; so does everything if the run was interrupted or
    something was given up.
    Raises SettingError as `exist` does."""
    s = record.settings
    exist(thresholds, s.tasks, [load.label for load in s.loads], [arm.name for arm in s.arms])
    every, found = cells(record), []
    for t in thresholds:
        made = _of_arms(t, record) if t.metric in OF_ARMS else _of_cells(t, record, every)
        found += made or [Check(t, "nowhere", False, "no cell of the run has this figure")]
        if not record.finished:
            found.append(Check(t, "the run", False, "it was interrupted"))
        found += [Check(t, "the run", False, said) for said in record.given_up]
    return found


def _of_cells(t: Threshold, record: Record, every: Sequence[Cell]) -> list[Check]:
    metric, found = METRICS[t.metric], []
    for cell in every:
        if (t.task or cell.task) != cell.task or (t.load or cell.load.label) != cell.load.label:
            continue
        if not _counts(t, cell.arm, record, metric.every) or (t.metric == "identical" and cell.identical is None):
            continue
        where = ", ".join([cell.task, *([cell.load.label] if len(record.settings.loads) > 1 else []), cell.arm])
        figure = metric.of(cell)
        said = metric.unless if figure is None else _said(t.metric, figure, cell)
        found.append(Check(t, where, figure is not None and t.holds(figure), said))
    return found


def _of_arms(t: Threshold, record: Record) -> list[Check]:
    findings: dict[str, str] = {}
    for draw in draws(record):
        findings[draw.arm] = "different" if findings.get(draw.arm) == "different" else draw.comparison.finding
    found = []
    for arm in record.settings.arms:
        if not _counts(t, arm.name, record, every=False):
            continue
        of_facts = {"kv_tokens": arm.facts.kv_tokens, "startup_s": arm.facts.startup_s} if arm.facts else {}
        figure: float | str | None = findings.get(arm.name) if t.metric == "distribution" else of_facts.get(t.metric)
        passed = figure is not None and figure != "not enough data" and t.holds(figure)
        found.append(Check(t, arm.name, passed, "it was not measured" if figure is None else f"{figure}"))
    return found


def _counts(t: Threshold, arm: str, record: Record, every: bool) -> bool:
    """Whether a threshold speaks of that arm: the one it names, else the candidates, or all."""
    if t.arm is not None:
        return t.arm == arm
    return every or arm not in (record.settings.reference, record.settings.control)


def _said(metric: str, figure: float | str, cell: Cell) -> str:
    if metric == "identical" and cell.identical:
        return f"{cell.identical[0]} of {cell.identical[1]}"
    if metric.startswith("speedup"):
        return interval(cell.speedup)
    if metric == "failures":
        return f"{cell.failures} of {cell.requests}"
    return figure if isinstance(figure, str) else digits(figure)


def junit(checks: Sequence[Check], record: Record) -> str:
    """The checks as a JUnit XML file, a test case for each threshold and cell."""
    failed = [c for c in checks if not c.passed]
    counts = {"tests": str(len(checks)), "failures": str(len(failed)), "errors": "0", "time": f"{record.seconds:.3f}"}
    root = ElementTree.Element("testsuites", counts)
    stamp = record.started.partition("+")[0]
    suite = ElementTree.SubElement(root, "testsuite", {"name": "forerun bench", **counts, "skipped": "0", "timestamp": stamp})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {"model": record.settings.model, "machine": record.machine.cpu, **record.versions}.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": value})
    for c in checks:
        case = ElementTree.SubElement(suite, "testcase", {"classname": c.threshold.text, "name": c.where, "time": "0"})
        if not c.passed:
            ElementTree.SubElement(case, "failure", {"type": "threshold", "message": line(c)})
    answer, arms = headline(record)
    ElementTree.SubElement(suite, "system-out").text = "\n".join([f"{answer}.", *[f"{arm}: {said}." for arm, said in arms]])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def line(c: Check) -> str:
    """pass or FAIL, and what was found."""
    return f"{'pass' if c.passed else 'FAIL'}  {c.threshold.text}: {c.where}: {c.said}"
