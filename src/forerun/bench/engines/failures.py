"""Reasons and notes of many requests, counted by kind."""

from __future__ import annotations

import re
from collections.abc import Iterable

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_ID = re.compile(r"\b(?=\w*\d)[\w-]*[0-9a-fA-F]{6,}[\w-]*\b")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_STATUS = re.compile(r"HTTP \d+")


def kind(text: str) -> str:
    """The text without its ids, numbers and quoted words, and with its HTTP status. Texts of the same kind are equal in it."""
    status = " ".join(_STATUS.findall(text))
    return status + _NUMBER.sub("0", _ID.sub("0", _QUOTED.sub("''", text)))


def counted(texts: Iterable[str]) -> list[tuple[str, int]]:
    """The first text of each kind and the number of texts of that kind, the most frequent kind first."""
    found: dict[str, tuple[str, int]] = {}
    for text in texts:
        first, times = found.get(kind(text), (text, 0))
        found[kind(text)] = (first, times + 1)
    return sorted(found.values(), key=lambda one: -one[1])
