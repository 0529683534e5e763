"""The one view of a result: what a report says, as values. report.py makes it from a record and changes.py from two records;
terminal.py, markdown.py and html.py show it. Knows no record and no output format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forerun.bench.records.statistics import Call


@dataclass(frozen=True, slots=True)
class Column:
    """of: the text of a value, for `table`. narrow: the name on a terminal, with line breaks. left: aligned left. wraps: its
    texts may be broken on a terminal. optional: left out of a terminal that is too narrow."""

    name: str
    of: Callable[[Any], str] = str
    narrow: str = ""
    left: bool = False
    wraps: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """rows: texts, in the order of the columns. groups: the load of each row, where there are several; otherwise empty."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    groups: Sequence[str] = ()


def table(caption: str, columns: Sequence[Column], values: Sequence[Any], groups: Sequence[str] = ()) -> Table:
    return Table(caption, columns, [row(value, columns) for value in values], groups)


def row(value: Any, columns: Sequence[Column]) -> list[str]:
    return [column.of(value) for column in columns]


@dataclass(frozen=True, slots=True)
class Axis:
    """From low to high, linear or logarithmic. unit: written behind each tick."""

    low: float
    high: float
    unit: str = ""
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value, 0 to 1. Values outside the axis are placed at its ends."""
        low, high, v = (math.log(x) if self.log else x for x in (self.low, self.high, max(self.low, min(self.high, value))))
        return 0.5 if high == low else (v - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values on the axis, at most that many."""
        if self.log and self.high / self.low > 3:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 1.5, 2, 3, 4, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
                found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
                if len(found) <= most:
                    return found
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        size = 10.0 ** math.floor(math.log10(span / most))
        step = next(s * size for s in (1, 2, 2.5, 5, 10, 20) if span / (s * size) <= most - 1)
        return [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of a drawing, in units of its axis. interval: a line from low to high with ends; line: without ends; bar: a
    rectangle; dot, stroke, symbol: at `low`. style: the class of its colour (c0 .. c7: an arm; p0 .. p3: a part of a step;
    otherwise of a verdict)."""

    kind: Literal["interval", "line", "bar", "dot", "stroke", "symbol"]
    style: str
    low: float
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a chart: name, drawing, figure. alt: the alternative text of the drawing. histogram: shares of 0, 1, 2, ... in
    place of marks, in the colour of arm number `arm`. call: a verdict, written as `word`. spread and under: small print below
    figure and name. why: a sentence below the row. Without a drawing the row is a heading."""

    name: str
    figure: str = ""
    alt: str = ""
    marks: Sequence[Mark] = ()
    histogram: Sequence[float] = ()
    arm: int = 0
    under: str = ""
    call: Call | None = None
    word: str = ""
    spread: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows on one axis, which is drawn below them if there is one."""

    caption: str
    rows: Sequence[Row]
    axis: Axis | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """points: each the number of its place, a value, and the ends of its interval (None: unknown). arm: colour and symbol."""

    arm: int
    points: Sequence[tuple[int, float, float | None, float | None]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """Values over evenly spaced places. alt: its alternative text. reference: a value marked across the plot. cuts: the places
    that no line leads to from the place before."""

    caption: str
    series: Sequence[Series]
    places: Sequence[str]
    axis: Axis
    alt: str
    reference: float | None = None
    cuts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Drawings of one subject, with their figures as tables."""

    name: str
    drawings: Sequence[Rows | Plot]
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under a heading, by which the template knows them. keys: the legend, each arm with its number. parts: a
    legend of the parts of a bar. load: the only load that is drawn, if there are several. wide: each chart has the page's
    width, its drawings next to each other."""

    id: Literal["sweep", "drafting", "steps", "waiting", "costs"]
    charts: Sequence[Chart]
    keys: Sequence[tuple[str, int]] = ()
    parts: Sequence[str] = ()
    load: str = ""
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A task. verdicts: drawn, for a page. sentences: each with its verdict, for texts. tables: its figures."""

    name: str
    about: str
    verdicts: Sequence[Rows]
    sentences: Sequence[tuple[str, Call | None]]
    tables: Sequence[Table]


@dataclass(frozen=True, slots=True)
class View:
    """A whole report. heading: what it is about. answer: its result, a sentence without its full stop. leads: what there is to
    add, each with the arm it is about (or empty). context: how it was measured. control: the arm that is the baseline again.
    compares: it is about two runs.

    tables: figures that belong to no task. sections: charts, for a page. identity: tables on equal answers, for a page.
    findings: of the test of sampled answers. warnings: what could mislead. legend: the meaning of columns. settings: for a
    page. commands: the command lines of the runs, each with a heading.
    """

    heading: str
    answer: str
    leads: Sequence[tuple[str, str]]
    parts: Sequence[Part]
    warnings: Sequence[str]
    commands: Sequence[tuple[str, str]]
    context: str = ""
    tables: Sequence[Table] = ()
    sections: Sequence[Section] = ()
    identity: Sequence[Table] = ()
    findings: Sequence[str] = ()
    legend: Sequence[str] = ()
    settings: Sequence[tuple[str, str]] = ()
    control: str | None = None
    compares: bool = False
