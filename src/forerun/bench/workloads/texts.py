"""The texts that the tasks are made of: files in data/, each read when a prompt first needs it."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from types import MappingProxyType
from typing import Any

DATA = Path(__file__).with_name("data")


@functools.cache
def texts(name: str) -> MappingProxyType[str, Any]:
    """What data/NAME.toml holds. The comments in the file explain its keys."""
    return MappingProxyType(tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8")))


@functools.cache
def words() -> tuple[str, ...]:
    """Common English nouns, in the order of the alphabet."""
    return tuple((DATA / "words.txt").read_text(encoding="utf-8").split())


def filled(text: str, **values: object) -> str:
    """The text with {name} replaced by the value of that name. Other braces stay, as in JSON."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text
