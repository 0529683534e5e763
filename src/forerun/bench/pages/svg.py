"""Small charts as inline SVG. Knows numbers and marks; nothing of arms, tasks or records. Colours are classes that the page's
style sheet fills in, so that one drawing serves light and dark.

Written here because nothing found fits: plotting libraries draw to a fixed width and carry their colours and fonts along, or
need a script in the page. In these, positions across are percentages and those down are pixels, so a chart takes whatever
width it gets and its text and marks keep their size, on a phone and on a desktop alike. Every chart has a title that
says in words what it shows; no two series differ by colour alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from forerun.bench.records.statistics import Ratio, Spread

MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",  # circle
    "M-3.6 -3.6H3.6V3.6H-3.6Z",  # square
    "M0 -5L5 0L0 5L-5 0Z",  # diamond
    "M0 -4.8L4.8 3.8H-4.8Z",  # triangle
    "M0 4.8L4.8 -3.8H-4.8Z",  # triangle, upside down
    "M-4.4 -1.5H-1.5V-4.4H1.5V-1.5H4.4V1.5H1.5V4.4H-1.5V1.5H-4.4Z",  # plus
)
COLOURS = 8  # classes c0 to c7 of the style sheet


@dataclass(frozen=True, slots=True)
class Axis:
    """From low to high, evenly or by ratio."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value, 0 to 1; what lies outside is put on the edge."""
        low, high, v = (math.log(x) if self.log else x for x in (self.low, self.high, max(self.low, min(self.high, value))))
        return 0.5 if high == low else (v - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values on the axis, at most so many."""
        if self.log and self.high / self.low > 3:
            for steps in ((1, 1.5, 2, 3, 4, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
                decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
                found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
                if len(found) <= most:
                    return found
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        size = 10.0 ** math.floor(math.log10(span / most))
        step = next(s * size for s in (1, 2, 2.5, 5, 10, 20) if span / (s * size) <= most - 1)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def around(values: Sequence[float], log: bool = False) -> Axis:
    """An axis that holds all of them with a little room; an even one starts at 0."""
    low, high = min(values), max(values)
    if log:
        room = max(1.03, (high / low) ** 0.06)
        return Axis(low / room, high * room, log=True)
    return Axis(0.0, high * 1.04 if high > 0 else 1.0)


def picture(said: str, height: int, *parts: str) -> Markup:
    """An image of that height, as wide as its place; `said` is what it shows, for those who do not see it."""
    body = "".join(parts)
    return Markup(
        f'<svg role="img" width="100%" height="{height}" aria-label="{escape(said)}"><title>{escape(said)}</title>{body}</svg>'
    )


def mark(series: int, x: float, y: float, hollow: bool = False) -> str:
    """A series' mark at x (0 to 1) across and y pixels down."""
    shape, kind = MARKS[series % len(MARKS)], "hollow" if hollow else "mark"
    return f'<svg x="{_pc(x)}" y="{y:.1f}" overflow="visible"><path class="{kind} {colour(series)}" d="{shape}"/></svg>'


def key(series: int, dashed: bool = False, hollow: bool = False) -> Markup:
    """A series' line and mark, for a legend."""
    line = _line(0, 8, 1, 8, f"line {colour(series)}", "4 3" if dashed else "")
    return Markup(f'<svg class="key" width="30" height="16" aria-hidden="true">{line}{mark(series, 0.5, 8, hollow)}</svg>')


def colour(series: int) -> str:
    return f"c{series % COLOURS}"


def interval(ratio: Ratio, axis: Axis, kind: str, said: str) -> Markup:
    """A ratio with its interval on a line, against 1. kind: the class that colours it."""
    parts = [_line(axis.at(1), 0, axis.at(1), 30, "one")]
    if ratio.low is not None and ratio.high is not None:
        low, high = axis.at(ratio.low), axis.at(ratio.high)
        parts.append(_line(low, 15, high, 15, f"whisker {kind}"))
        for edge, value, at, out in ((axis.low, ratio.low, low, -1), (axis.high, ratio.high, high, 1)):
            beyond = value < edge if out < 0 else value > edge  # an arrow says that it goes on
            shape = f"M{-out * 5} -4L0 0L{-out * 5} 4" if beyond else "M0 -4V4"
            parts.append(f'<svg x="{_pc(at)}" y="15" overflow="visible"><path class="whisker {kind}" d="{shape}"/></svg>')
    parts.append(f'<circle class="dot {kind}" cx="{_pc(axis.at(ratio.mean))}" cy="15" r="5.5"/>')
    return picture(said, 30, *parts)


def scale(axis: Axis, unit: str) -> Markup:
    """The axis of charts above it that are rows."""
    parts = []
    for value in axis.ticks(5):
        x = axis.at(value)
        anchor = "start" if x < 0.04 else "end" if x > 0.96 else "middle"
        parts.append(_line(x, 0, x, 4, "grid") + _text(x, 16, f"{value:g}{unit}", anchor))
    return Markup(f'<svg width="100%" height="20" aria-hidden="true">{"".join(parts)}</svg>')


@dataclass(frozen=True, slots=True)
class Series:
    """points: for each place across a value with its interval, or None. number: which colour and mark."""

    number: int
    points: Sequence[tuple[float, float | None, float | None] | None]
    dashed: bool = False


def lines(
    series: Sequence[Series],
    places: Sequence[str],
    axis: Axis,
    unit: str,
    said: str,
    reference: float | None = None,
    cuts: Sequence[int] = (),
) -> Markup:
    """Values over places that are evenly apart. reference: a value to mark right across. cuts: places that no line leads to
    from the one before. The text of the vertical axis stands
    to the left of the image, that of the places below."""
    height, foot = 190, 24
    at = lambda i: (i + 0.5) / len(places)  # noqa: E731
    down = lambda v: 6 + (1 - axis.at(v)) * (height - 6)  # noqa: E731
    parts = []
    for value in axis.ticks(5):
        parts.append(_line(0, down(value), 1, down(value), "grid"))
        parts.append(f'<text class="tick" x="-8" y="{down(value) + 4:.1f}" text-anchor="end">{value:g}{escape(unit)}</text>')
    if reference is not None:
        parts.append(_line(0, down(reference), 1, down(reference), "one"))
    every = math.ceil(len(places) / 10)
    parts += [_text(at(i), height + 18, name, "middle") for i, name in enumerate(places) if i % every == 0]
    for index, s in enumerate(series):
        aside = (index - (len(series) - 1) / 2) * min(0.02, 0.3 / len(places)) if reference is not None else 0.0
        known = [(i, at(i) + aside, p) for i, p in enumerate(s.points) if p is not None]
        for (_, x0, a), (i, x1, b) in itertools.pairwise(known):
            if i not in cuts:
                parts.append(_line(x0, down(a[0]), x1, down(b[0]), f"line {colour(s.number)}", "4 3" if s.dashed else ""))
        for _, x, (value, low, high) in known:
            if low is not None and high is not None:
                parts.append(_line(x, down(low), x, down(high), f"whisker {colour(s.number)}"))
            parts.append(mark(s.number, x, down(value), hollow=s.dashed))
    return picture(said, height + foot, *parts)


def histogram(shares: Sequence[float], number: int, said: str) -> Markup:
    """Shares (that sum to 1) of 0, 1, 2, ... as bars with their places below."""
    height, most = 64, max(shares)
    slot, parts = 1 / len(shares), [_line(0, height, 1, height, "axis")]
    for i, share in enumerate(shares):
        tall = (height - 14) * share / most
        parts.append(_rect(i * slot + 0.12 * slot, height - tall, 0.76 * slot, tall, f"bar {colour(number)}"))
        if len(shares) <= 10:
            parts.append(_text((i + 0.5) * slot, height - tall - 4, f"{100 * share:.0f}", "middle"))
        if i % math.ceil(len(shares) / 12) == 0:
            parts.append(_text((i + 0.5) * slot, height + 14, str(i), "middle"))
    return picture(said, height + 18, *parts)


def ranges(values: Spread, axis: Axis, number: int, said: str) -> Markup:
    """All values as a thin line, the middle half as a bar, the median as a stroke, the 95th percentile as a mark."""
    at = axis.at
    parts = [
        _line(at(values.least), 13, at(values.largest), 13, f"whisker {colour(number)}"),
        _rect(at(values.lower), 7, max(at(values.upper) - at(values.lower), 0.004), 12, f"bar {colour(number)}"),
    ]
    if values.p95 is not None:
        parts.append(mark(number, at(values.p95), 13, hollow=True))
    return picture(said, 26, *parts, _line(at(values.median), 3, at(values.median), 23, "median"))


def bar(value: float, axis: Axis, number: int, said: str) -> Markup:
    return picture(said, 18, _rect(0, 3, 1, 12, "track"), _rect(0, 3, axis.at(value), 12, f"bar {colour(number)}"))


def stack(parts: Sequence[float], axis: Axis, said: str) -> Markup:
    """Parts of one bar, side by side, classes p0, p1, ..."""
    drawn, begin = [], 0.0
    for i, part in enumerate(parts):
        drawn.append(_rect(axis.at(begin), 3, axis.at(begin + part) - axis.at(begin), 14, f"part p{i}"))
        begin += part
    return picture(said, 20, *drawn)


def _pc(x: float) -> str:
    return f"{100 * x:.2f}%"


def _line(x0: float, y0: float, x1: float, y1: float, kind: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line class="{kind}" x1="{_pc(x0)}" y1="{y0:.1f}" x2="{_pc(x1)}" y2="{y1:.1f}"{dashed}/>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{_pc(x)}" y="{y:.1f}" width="{_pc(width)}" height="{height:.1f}" rx="2"/>'


def _text(x: float, y: float, said: str, anchor: str) -> str:
    return f'<text class="tick" x="{_pc(x)}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'
