"""What each server offers beyond the OpenAI API, as dialects.toml says."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Metrics:
    """An engine's Prometheus metrics. The fields are explained in dialects.toml."""

    path: str
    counters: Mapping[str, str]
    by_position: str | None = None
    kv_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """The fields are explained in dialects.toml."""

    name: str
    owner: str | None = None
    ignore_eos: bool = True
    ids: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    version: tuple[str, str] | None = None
    salt: str | None = None
    flush: str | None = None
    metrics: Metrics | None = None


def _dialect(name: str, keys: dict[str, Any]) -> Dialect:
    metrics = keys.pop("metrics", None)
    return Dialect(name, **keys, metrics=None if metrics is None else Metrics(**metrics))


DIALECTS = {
    name: _dialect(name, keys)
    for name, keys in tomllib.loads(Path(__file__).with_name("dialects.toml").read_text(encoding="utf-8")).items()
}
