"""Draws the charts of a view as inline SVG. Colours are classes that the page's style sheet fills in, for light and dark.

A plotting library was tried: matplotlib and pygal draw to a fixed width, carry their own colours and fonts, and take 9 and 18
kB for a small chart; others need a script in the page. Here, positions across are percentages and positions down are pixels,
so a chart has the width of its place while its text and marks keep their size. Every drawing has a title that says in words
what it shows, and no two arms differ by colour alone.
"""

from __future__ import annotations

import itertools
import math

from markupsafe import Markup, escape

from forerun.bench.pages.view import Axis, Mark, Plot, Row

SYMBOLS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",  # circle
    "M-3.6 -3.6H3.6V3.6H-3.6Z",  # square
    "M0 -5L5 0L0 5L-5 0Z",  # diamond
    "M0 -4.8L4.8 3.8H-4.8Z",  # triangle
    "M0 4.8L4.8 -3.8H-4.8Z",  # triangle, upside down
    "M-4.4 -1.5H-1.5V-4.4H1.5V-1.5H4.4V1.5H1.5V4.4H-1.5V1.5H-4.4Z",  # plus
)
COLOURS = 8  # classes c0 to c7 of the style sheet
HEIGHT = 26  # of a row's drawing, in pixels


def at(axis: Axis, value: float) -> float:
    """The place of a value, 0 to 1. Values outside the axis are placed at its ends."""
    low, high, v = (math.log(x) if axis.log else x for x in (axis.low, axis.high, max(axis.low, min(axis.high, value))))
    return 0.5 if high == low else (v - low) / (high - low)


def ticks(axis: Axis, most: int = 6) -> list[float]:
    """Round values on the axis, at most that many."""
    if axis.log and axis.high / axis.low > 3:
        decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        for steps in ((1, 1.5, 2, 3, 4, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
            found = [s * 10.0**d for d in decades for s in steps if axis.low <= s * 10.0**d <= axis.high]
            if len(found) <= most:
                return found
    span = axis.high - axis.low
    if span <= 0:
        return [axis.low]
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * size for s in (1, 2, 2.5, 5, 10, 20) if span / (s * size) <= most - 1)
    return [i * step for i in range(math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9) + 1)]


def row(made: Row, axis: Axis | None) -> Markup:
    """The drawing of a row."""
    if made.histogram:
        return _histogram(made)
    return _image(made.said, HEIGHT, *[_mark(mark, axis) for mark in made.marks if axis])


def _mark(mark: Mark, axis: Axis) -> str:
    low, high, y = at(axis, mark.low), at(axis, mark.high), HEIGHT / 2
    if mark.kind == "interval":
        parts = [_line(low, y, high, y, f"whisker {mark.style}")]
        for place, beyond, out in ((low, mark.low < axis.low, -1), (high, mark.high > axis.high, 1)):
            shape = f"M{-out * 5} -4L0 0L{-out * 5} 4" if beyond else "M0 -4V4"  # an arrow where it goes on
            parts.append(_path(place, y, f"whisker {mark.style}", shape))
        return "".join(parts)
    if mark.kind == "line":
        return _line(low, y, high, y, f"whisker {mark.style}")
    if mark.kind == "bar":
        return _rect(low, y - 6, max(high - low, 0.004), 12, f"bar {mark.style}")
    if mark.kind == "symbol":
        return symbol(int(mark.style[1:]), low, y, hollow=True)
    if mark.kind == "stroke":
        return _line(low, 0 if mark.style == "one" else 3, low, HEIGHT if mark.style == "one" else 23, mark.style)
    return f'<circle class="dot {mark.style}" cx="{_pc(low)}" cy="{y:g}" r="5.5"/>'


def scale(axis: Axis) -> Markup:
    """The axis below the rows drawn on it."""
    parts = []
    for value in ticks(axis, 5):
        x = at(axis, value)
        anchor = "start" if x < 0.04 else "end" if x > 0.96 else "middle"
        parts.append(_line(x, 0, x, 4, "grid") + _text(x, 16, f"{value:g}{axis.unit}", anchor))
    return Markup(f'<svg width="100%" height="20" aria-hidden="true">{"".join(parts)}</svg>')


def key(arm: int) -> Markup:
    """The line and the symbol of an arm, for a legend."""
    line = _line(0, 8, 1, 8, f"line {colour(arm)}")
    return Markup(f'<svg class="key" width="30" height="16" aria-hidden="true">{line}{symbol(arm, 0.5, 8)}</svg>')


def colour(arm: int) -> str:
    return f"c{arm % COLOURS}"


def symbol(arm: int, x: float, y: float, hollow: bool = False) -> str:
    """The symbol of an arm at x (0 to 1) across and y pixels down."""
    return _path(x, y, f"{'hollow' if hollow else 'mark'} {colour(arm)}", SYMBOLS[arm % len(SYMBOLS)])


def plot(made: Plot) -> Markup:
    """The labels of the vertical axis are drawn left of the image."""
    height, foot, axis, n = 190, 24, made.axis, len(made.places)
    down = lambda v: 6 + (1 - at(axis, v)) * (height - 6)  # noqa: E731
    parts = []
    for value in ticks(axis, 5):
        parts.append(_line(0, down(value), 1, down(value), "grid"))
        parts.append(f'<text class="tick" x="-8" y="{down(value) + 4:.1f}" text-anchor="end">{value:g}{axis.unit}</text>')
    if made.reference is not None:
        parts.append(_line(0, down(made.reference), 1, down(made.reference), "one"))
    every = math.ceil(n / 10)
    parts += [_text((i + 0.5) / n, height + 18, name, "middle") for i, name in enumerate(made.places) if i % every == 0]
    for index, s in enumerate(made.series):  # intervals at one place are moved apart
        aside = 0.0 if made.reference is None else (index - (len(made.series) - 1) / 2) * min(0.02, 0.3 / n)
        known = [(i, (i + 0.5) / n + aside, point) for i, point in enumerate(s.points) if point is not None]
        for (_, x0, a), (i, x1, b) in itertools.pairwise(known):
            if i not in made.cuts:
                parts.append(_line(x0, down(a[0]), x1, down(b[0]), f"line {colour(s.arm)}", "4 3" if s.dashed else ""))
        for _, x, (value, low, high) in known:
            if low is not None and high is not None:
                parts.append(_line(x, down(low), x, down(high), f"whisker {colour(s.arm)}"))
            parts.append(symbol(s.arm, x, down(value), hollow=s.dashed))
    return _image(made.said, height + foot, *parts)


def _histogram(made: Row) -> Markup:
    height, slot, parts = 64, 1 / len(made.histogram), [_line(0, 64, 1, 64, "axis")]
    for i, share in enumerate(made.histogram):
        tall = (height - 14) * share / max(made.histogram)
        parts.append(_rect((i + 0.12) * slot, height - tall, 0.76 * slot, tall, f"bar {colour(made.arm)}"))
        if len(made.histogram) <= 10:
            parts.append(_text((i + 0.5) * slot, height - tall - 4, f"{100 * share:.0f}", "middle"))
        if i % math.ceil(len(made.histogram) / 12) == 0:
            parts.append(_text((i + 0.5) * slot, height + 14, str(i), "middle"))
    return _image(made.said, height + 18, *parts)


def _image(said: str, height: int, *parts: str) -> Markup:
    """An image of that height, as wide as its place. said: what it shows, for readers who do not see it."""
    said = escape(said)
    body = "".join(parts)
    return Markup(f'<svg role="img" width="100%" height="{height}" aria-label="{said}"><title>{said}</title>{body}</svg>')


def _pc(x: float) -> str:
    return f"{100 * x:.2f}%"


def _path(x: float, y: float, kind: str, shape: str) -> str:
    return f'<svg x="{_pc(x)}" y="{y:g}" overflow="visible"><path class="{kind}" d="{shape}"/></svg>'


def _line(x0: float, y0: float, x1: float, y1: float, kind: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line class="{kind}" x1="{_pc(x0)}" y1="{y0:.1f}" x2="{_pc(x1)}" y2="{y1:.1f}"{dashed}/>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{_pc(x)}" y="{y:.1f}" width="{_pc(width)}" height="{height:.1f}" rx="2"/>'


def _text(x: float, y: float, said: str, anchor: str) -> str:
    return f'<text class="tick" x="{_pc(x)}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'
