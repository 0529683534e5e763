"""A server's counters from its metrics in the Prometheus text format. Knows no HTTP. A counter never falls while a server runs.

A library would refuse the whole text for one line that is not in the format. Here only that line is left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from forerun.bench.engines.dialects import Metrics
from forerun.bench.records.record import ServerCounters

MOST = 1 << 53  # the largest value of a counter
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_POSITION = re.compile(r"[0-9]{1,3}")


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> Iterator[Sample]:
    """The samples of a text. Lines in another form and values that a counter cannot have are left out."""
    for line in text.split("\n"):  # not splitlines: a label may hold other line separators
        match = _LINE.match(line)
        value = None if match is None else _number(match[3])
        if match is not None and value is not None:
            yield Sample(match[1], dict(_LABEL.findall(match[2] or "")), value)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= MOST else None


def counters_of(metrics: Metrics, text: str) -> ServerCounters:
    """The counters of a server; None for each one that is not in the text."""
    found: dict[str, float] = {}
    wanted = {metric: field for field, metric in metrics.counters.items()}
    positions: dict[int, float] = {}
    for sample in parse(text):
        if sample.name in wanted:
            field = wanted[sample.name]
            found[field] = found.get(field, 0.0) + sample.value
        elif sample.name == metrics.by_position and _POSITION.fullmatch(sample.labels.get("position", "")):
            at = int(sample.labels["position"])
            positions[at] = positions.get(at, 0.0) + sample.value
    accepted_at = tuple(positions.get(i, 0.0) for i in range(max(positions, default=-1) + 1))
    return ServerCounters(accepted_at=accepted_at, **found)


def kv_tokens_of(metrics: Metrics | None, text: str) -> int | None:
    """The capacity of the KV cache in tokens, None if the metrics do not hold it."""
    metric, *label = (metrics and metrics.kv_tokens) or (None,)
    for sample in parse(text):
        value = _number(sample.labels.get(label[0], "")) if label else sample.value
        if sample.name == metric and value is not None:
            return int(value)
    return None


def difference(before: ServerCounters, after: ServerCounters) -> ServerCounters | None:
    """The increase of each counter; None if one fell, which means that another process answered."""
    old, new = dataclasses.asdict(before), dataclasses.asdict(after)
    width = max(len(before.accepted_at), len(after.accepted_at))
    positions = zip(_padded(old.pop("accepted_at"), width), _padded(new.pop("accepted_at"), width), strict=True)
    accepted_at = tuple(b - a for a, b in positions)
    known = [name for name in new if old[name] is not None or new[name] is not None]
    increase = {name: (new[name] or 0.0) - (old[name] or 0.0) for name in known}
    if min((*increase.values(), *accepted_at), default=0.0) < -1e-9:
        return None
    return ServerCounters(accepted_at=accepted_at, **increase)


def _padded(values: tuple[float, ...], width: int) -> tuple[float, ...]:
    return values + (0.0,) * (width - len(values))
