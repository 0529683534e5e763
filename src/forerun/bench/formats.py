"""How numbers, ratios, durations and lists are written in tables and sentences. A value that does not exist is a dash."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.bench.records.statistics import Ratio, Spread

NONE = "–"


def number(value: float | None, places: int) -> str:
    """With that many decimal places."""
    return NONE if value is None else f"{value:.{places}f}"


def digits(value: float | None, scale: float = 1.0) -> str:
    """`scale` times the value with three significant digits, never an exponent: 0.123, 1.23, 12.3, 1234."""
    if value is None:
        return NONE
    size = abs(scale * value)
    return f"{scale * value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def percent(share: float | None) -> str:
    """A share from 0 to 1, in per cent."""
    return NONE if share is None else f"{100 * share:.0f}%"


def interval(ratio: Ratio | None) -> str:
    """A ratio with its confidence interval: 1.64 [1.60,1.68]."""
    if ratio is None:
        return NONE
    return f"{ratio.mean:.2f}" + (f" [{ratio.low:.2f},{ratio.high:.2f}]" if ratio.low is not None and ratio.high else "")


def between(ratio: Ratio | None) -> str:
    """The confidence interval in words: 1.60 to 1.68. Empty where it is not known."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return ""
    return f"{ratio.low:.2f} to {ratio.high:.2f}"


def spread(values: Spread | None, scale: float) -> str:
    """Median, 95th and 99th percentile, those that are known, each with three digits."""
    if values is None:
        return NONE
    return " ".join(digits(v, scale) for v in (values.median, values.p95, values.p99) if v is not None)


def duration(seconds: float) -> str:
    """An estimate, rounded as such: 40 s, 2 min 30 s, 12 min, 1 h 20 min."""
    if seconds < 95:
        return f"{max(5 * round(seconds / 5), 5)} s"
    minutes = seconds / 60
    if minutes < 5:
        half = round(2 * minutes)
        return f"{half // 2} min" + (" 30 s" if half % 2 else "")
    if minutes < 59.5:
        return f"{round(minutes)} min"
    hours, rest = divmod(5 * round(minutes / 5), 60)
    return f"{hours} h" + (f" {rest} min" if rest else "")


def count(n: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{n} {noun}{'s' * (n != 1)}"


def listed(names: Iterable[str]) -> str:
    """a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
