"""Reads the text files, JSON Lines and JSON that a user gives. An error names the file and the line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from forerun.checks import SettingError, require

_OTHER = {  # first bytes of other kinds of files; UTF-32 comes first, since its mark begins with that of UTF-16
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "packed (gzip)",
    b"PK\x03\x04": "packed (zip)",
    b"(\xb5/\xfd": "packed (zstd)",
}


def read(setting: str, path: Path) -> str:
    """The text of a file in UTF-8, without a byte-order mark. setting: the option that gave the path. Raises SettingError,
    which names the line that is not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingError(setting, str(path), f"cannot be read ({error.strerror}); give a text file in UTF-8") from None
    return decoded(setting, str(path), data)


def decoded(setting: str, source: str, data: bytes) -> str:
    """The text of bytes in UTF-8; otherwise as `read`. source: where the bytes come from, for messages."""
    for mark, kind in _OTHER.items():
        require(not data.startswith(mark), setting, source, f"it is {kind}; give it as plain text in UTF-8")
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line, column = data.count(b"\n", 0, error.start) + 1, error.start - data.rfind(b"\n", 0, error.start)
        where = f"line {line} has byte 0x{data[error.start]:02x} at column {column}, which is not UTF-8"
        raise SettingError(setting, source, f"{where}; save it in UTF-8") from None
    at = text.find("\0")
    line = text.count("\n", 0, max(at, 0)) + 1
    require(at < 0, setting, source, f"line {line} has a zero byte, as UTF-16 has; save it in UTF-8")
    return text


def json_lines(setting: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a file in JSON Lines, each with its line number, from 1. Only a line feed ends a line: a text may contain
    the other line ends of Unicode (U+2028, U+2029, U+0085). Raises SettingError."""
    found = []
    for number, line in enumerate(read(setting, path).split("\n"), 1):
        if not line.strip(" \t\r"):
            continue
        where = f"{path.name} line {number}"
        try:
            value = json.loads(line, parse_constant=_constant, parse_float=_float)
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            half = "it holds half of a character (one of \\ud800 to \\udfff alone); leave it out"
            raise SettingError(setting, where, half) from None
        except (ValueError, RecursionError) as error:
            raise SettingError(setting, where, f"not JSON ({error}); give one object a line") from None
        require(type(value) is dict, setting, where, 'give an object, such as {"prompt": "..."}')
        found.append((number, value))
    require(bool(found), setting, str(path), "it has no lines; give one JSON object a line")
    return found


def json_object(setting: str, text: str, example: str, shown: object = None) -> dict[str, Any]:
    """The JSON object in the text of an option. example: a valid object, for messages. shown: what messages show in place of
    the text, if it may contain a secret. Raises SettingError."""
    shown = text if shown is None else shown
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(setting, shown, f"not JSON ({error}); give {example}") from None
    require(isinstance(value, dict), setting, shown, f"give a JSON object such as {example}")
    return dict(value)


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
