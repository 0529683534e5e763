"""Thresholds on a record, for continuous integration: the language they are written in, and the checks of each cell.

speedup.copy >= 1.3                     every candidate, on task copy, under every load
speedup_low.copy@c=8[ngram k=4] > 1     the lower end of the interval, of one arm under one load
identical == all                        every greedy answer of every candidate
failures == 0                           of every arm, the baseline included
verdict != slower                       of every candidate, on every task
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from forerun.bench.formats import digits, interval
from forerun.bench.records.record import Record
from forerun.bench.records.statistics import Call
from forerun.bench.records.summary import Cell, cells, draws
from forerun.types import SettingError, require

FORM = re.compile(
    r"\s*(?P<metric>\w+)(?:\.(?P<task>[^@\[\]<>=!]+?))?(?:@(?P<load>c=\d+|[^\[\]<>=!\s]+))?(?:\[(?P<arm>[^\]]+)\])?"
    r"\s*(?P<sign>>=|<=|==|!=|>|<)\s*(?P<value>\S(?:.*\S)?)\s*"
)
SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
EXAMPLE = "give one as in 'speedup.copy >= 1.3', 'identical == all' or 'failures == 0'"


class Metric(NamedTuple):
    """path: the attribute of a cell. scale: from the record's unit to the metric's. every: of the baseline, too, not only of
    candidates. unless: the message where a cell has no such figure. words: the possible values, if not numbers."""

    path: str
    scale: float = 1.0
    every: bool = False
    unless: str = "it was not measured"
    words: tuple[str, ...] = ()

    def of(self, cell: Cell) -> float | str | None:
        value: Any = cell
        for name in self.path.split("."):
            value = getattr(value, name, None)
        return value if value is None or self.words else self.scale * value


PAIRS = "no pair of batches was completed"
STEPS = "the engine does not count steps"
FEW = "there are too few requests (20 for p95, 100 for p99)"
METRICS: dict[str, Metric] = {
    "speedup": Metric("speedup.mean", unless=PAIRS),
    "speedup_low": Metric("speedup.low", unless="there are fewer than two pairs"),
    "verdict": Metric("verdict", words=get_args(Call)),
    "identical": Metric("identical_share"),
    "failures": Metric("failures", every=True),
    "tokens_per_s": Metric("tokens_per_s"),
    "ms_per_step": Metric("step_s", 1000, unless=STEPS),
    "acceptance_rate": Metric("acceptance_rate", unless="nothing was drafted"),
    "acceptance_length": Metric("got", unless=STEPS),
    **{f"{name}_ms": Metric(f"{name}.median", 1000) for name in ("ttft", "tpot", "e2e")},
    **{f"{name}_{p}_ms": Metric(f"{name}.{p}", 1000, unless=FEW) for name in ("ttft", "tpot", "e2e") for p in ("p95", "p99")},
    "ttft_ratio": Metric("ttft_ratio.mean", unless=PAIRS),
    "tpot_ratio": Metric("tpot_ratio.mean", unless=PAIRS),
}
OF_ARMS = ("kv_tokens", "startup_s", "distribution")
"""Metrics of an arm as a whole, whatever the task and the load."""


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
        return SIGNS[self.sign](figure, self.value)


@dataclass(frozen=True, slots=True)
class Check:
    """A threshold on one cell or arm. detail: its figure, or why there is none."""

    threshold: Threshold
    where: str
    passed: bool
    detail: str


def parse(texts: Sequence[str]) -> tuple[Threshold, ...]:
    """Raises SettingError for a text that is not a threshold."""
    return tuple(_parsed(text) for text in texts)


def _parsed(text: str) -> Threshold:
    found = FORM.fullmatch(text)
    if found is None:
        raise SettingError("ci", text, EXAMPLE)
    threshold = Threshold(text.strip(), **found.groupdict())
    metric, sign, value = found["metric"], found["sign"], found["value"]
    known = (*METRICS, *OF_ARMS)
    require(metric in known, "ci", text, f"there is no metric {metric!r}; there are {', '.join(known)}")
    whole = metric in OF_ARMS and (found["task"] or found["load"])
    require(not whole, "ci", text, f"an arm has one {metric} for all tasks and loads; give {metric}[ARM] {sign} {value}")
    words = ("same", "different") if metric == "distribution" else METRICS[metric].words if metric in METRICS else ()
    if not words:
        return replace(threshold, value=_number(metric, value, text))
    require(value in words, "ci", text, f"{metric} is one of {', '.join(words)}")
    require(sign in ("==", "!="), "ci", text, f"{metric} is compared with == or !=")
    return threshold


def _number(metric: str, value: str, text: str) -> float:
    if value == "all" and metric == "identical":
        return 1.0
    try:
        number = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        raise SettingError("ci", text, f"{value!r} is no number; {EXAMPLE}") from None
    shares = {"identical": "all, 95% or 0.95", "acceptance_rate": "60% or 0.6"}
    require(metric not in shares or 0 <= number <= 1, "ci", text, f"{metric} is a share: give {shares.get(metric)}")
    return number


def exist(thresholds: Sequence[Threshold], tasks: Sequence[str], loads: Sequence[str], arms: Sequence[str]) -> None:
    """Raises SettingError for a threshold on a task, load (by its label) or arm that is not among these."""
    for t in thresholds:
        for kind, name, known in (("task", t.task, tasks), ("load", t.load, loads), ("arm", t.arm, arms)):
            require(name is None or name in known, "ci", t.text, f"there is no {kind} {name!r}; there are {', '.join(known)}")


def check(thresholds: Sequence[Threshold], record: Record) -> list[Check]:
    """The checks of each threshold. A missing figure fails; every threshold fails if the run was interrupted or something was
    given up. Raises SettingError as `exist` does."""
    s = record.settings
    exist(thresholds, s.tasks, [load.label for load in s.loads], [arm.name for arm in s.arms])
    every, found = cells(record), []
    for t in thresholds:
        made = _of_arms(t, record) if t.metric in OF_ARMS else _of_cells(t, record, every)
        found += made or [Check(t, "nowhere", False, "no cell of the run has this figure")]
        if not record.finished:
            found.append(Check(t, "the run", False, "it was interrupted"))
        found += [Check(t, "the run", False, reason) for reason in record.given_up]
    return found


def _of_cells(t: Threshold, record: Record, every: Sequence[Cell]) -> list[Check]:
    metric, found = METRICS[t.metric], []
    for cell in every:
        if t.task not in (None, cell.task) or t.load not in (None, cell.load.label):
            continue
        if not _applies(t, cell.arm, record, metric.every) or (t.metric == "identical" and cell.identical is None):
            continue
        where = ", ".join([cell.task, *([cell.load.label] if len(record.settings.loads) > 1 else []), cell.arm])
        figure = metric.of(cell)
        detail = metric.unless if figure is None else _written(t.metric, figure, cell)
        found.append(Check(t, where, figure is not None and t.holds(figure), detail))
    return found


def _of_arms(t: Threshold, record: Record) -> list[Check]:
    findings: dict[str, str] = {}
    for draw in draws(record):
        findings[draw.arm] = "different" if findings.get(draw.arm) == "different" else draw.comparison.finding
    found = []
    for arm in record.settings.arms:
        if _applies(t, arm.name, record, every=False):
            figure = findings.get(arm.name) if t.metric == "distribution" else getattr(arm.facts, t.metric, None)
            passed = figure is not None and figure != "not enough data" and t.holds(figure)
            found.append(Check(t, arm.name, passed, "it was not measured" if figure is None else f"{figure}"))
    return found


def _applies(t: Threshold, arm: str, record: Record, every: bool) -> bool:
    """Whether a threshold is on that arm: the arm it names, else the candidates, or all."""
    if t.arm is not None:
        return t.arm == arm
    return every or arm not in (record.settings.reference, record.settings.control)


def _written(metric: str, figure: float | str, cell: Cell) -> str:
    if metric == "identical" and cell.identical:
        return f"{cell.identical[0]} of {cell.identical[1]}"
    if metric.startswith("speedup"):
        return interval(cell.speedup)
    if metric == "failures":
        return f"{cell.failures} of {cell.requests}"
    return figure if isinstance(figure, str) else digits(figure)


def line(c: Check) -> str:
    """pass or FAIL, and the figure."""
    return f"{'pass' if c.passed else 'FAIL'}  {c.threshold.text}: {c.where}: {c.detail}"
