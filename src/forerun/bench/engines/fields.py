"""The fields of a JSON object that a server sent, each read with the type and the range that it must have. A value of another
type or out of range counts as missing and is noted. Also how a server's texts are written into messages and records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

MOST = 1 << 40  # the largest count and the largest number
KEPT_DEPTH = 4  # levels of the usage that are kept in the record

T = TypeVar("T")


class Fields:
    """Every chunk of every stream is read through this class, so its methods are written for speed. values: the object. notes:
    what was odd, each note once. outer, key: the object that holds this one, and its key there. The methods return None, or an
    empty value, for a field that is missing."""

    __slots__ = ("_key", "_outer", "notes", "values")

    def __init__(self, values: Mapping[str, Any], notes: dict[str, None], outer: Fields | None = None, key: str = "") -> None:
        self.values, self.notes, self._outer, self._key = values, notes, outer, key

    def note(self, text: str) -> None:
        self.notes[text] = None

    def path(self, key: str) -> str:
        """The keys from the outermost object to this field."""
        return key if self._outer is None else f"{self._outer.path(self._key)}.{key}"

    def count(self, key: str) -> int | None:
        """A whole number from 0 to MOST."""
        value: Any = self.values.get(key)
        valid = type(value) in (int, float) and 0 <= value <= MOST and value == int(value)
        return int(value) if valid else self._missing(key, value, "a count", None)

    def number(self, key: str) -> float | None:
        """A number from 0 to MOST."""
        value: Any = self.values.get(key)
        valid = type(value) in (int, float) and 0 <= value <= MOST
        return float(value) if valid else self._missing(key, value, "a number of 0 or more", None)

    def ids(self, key: str) -> tuple[int, ...] | None:
        """A list of token ids."""
        value: Any = self.values.get(key)
        valid = type(value) is list and all(type(i) is int and 0 <= i < 1 << 31 for i in value)
        return tuple(value) if valid else self._missing(key, value, "a list of token ids", None)

    def text(self, key: str) -> str:
        value: Any = self.values.get(key)
        return value if type(value) is str else self._missing(key, value, "a text", "")

    def object(self, key: str) -> Fields:
        value: Any = self.values.get(key)
        found = value if type(value) is dict else self._missing(key, value, "an object", {})
        return Fields(found, self.notes, self, key)

    def objects(self, key: str) -> list[Fields]:
        """The objects of a list."""
        value: Any = self.values.get(key)
        listed = value if type(value) is list else self._missing(key, value, "a list", [])
        found = [Fields(one, self.notes, self, key) for one in listed if type(one) is dict]
        if len(found) < len(listed):
            self.note(f"{self.path(key)} holds a value that is not an object; it was ignored")
        return found

    def texts(self, key: str) -> str:
        """A text, or the texts of a list of parts, as some servers send `content`."""
        value: Any = self.values.get(key)
        if value is None or type(value) is str:
            return value or ""
        return "".join(self._part(key, part) for part in value) if type(value) is list else self.text(key)

    def _part(self, key: str, part: Any) -> str:
        if type(part) is str:
            return part
        if type(part) is dict:
            for name in ("text", "refusal"):
                if type(part.get(name)) is str:
                    return str(part[name])
            if "thinking" in part:
                return Fields(part, self.notes, self, key).texts("thinking")
        self.note(f"{self.path(key)} holds {shown(part)}, which is not a text; it was ignored")
        return ""

    def _missing(self, key: str, value: Any, kind: str, default: T) -> T:
        if value is not None:
            self.note(f"{self.path(key)} is {shown(value)}, which is not {kind}; it was ignored")
        return default


def readable(text: str, most: int) -> str:
    """The text on one line, without characters that cannot be shown or written to a file, cut to `most` characters."""
    text = joined(text[: 4 * most])
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:most]


def joined(text: str) -> str:
    """The text with UTF-16 surrogates joined to characters. Some servers send the two halves in different pieces. A lone half
    becomes �."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def shown(value: Any) -> str:
    """A JSON value in at most 40 characters."""
    try:
        return readable(json.dumps(value, ensure_ascii=False), 40)
    except (ValueError, RecursionError):
        return "a value that cannot be shown"


def kept_of(value: Any, depth: int = KEPT_DEPTH) -> Any:
    """A JSON value as it can be kept in a record: texts cut, unusable numbers left out, at most `depth` levels."""
    if type(value) is dict and depth:
        return {readable(key, 80): kept_of(one, depth - 1) for key, one in list(value.items())[:50]}
    if type(value) is str:
        return readable(value, 80)
    number = type(value) in (int, float) and -MOST <= value <= MOST
    return value if number or type(value) is bool else None
