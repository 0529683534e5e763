"""The files of a model's folder: which of them are required, and how the JSON files are read. The files come from outside, so
any of them may be broken and any value may have a wrong type.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from forerun.types import LoadError, SettingError, require

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MANIFEST = "gguf.json"  # in a folder whose weights are in .gguf files, see manifest.py
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
MOST = 2**30  # the largest size that is accepted in a model's files


class Stored(NamedTuple):
    """Where a tensor is stored: bytes start .. stop - 1 of a file. dtype: the file format's name of its number format."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty dict if there is no such file. Raises LoadError naming the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError("model", str(path), f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise LoadError("model", str(path), f"not JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise LoadError("model", str(path), "not a JSON object; fetch the file again")
    return value


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, from the index of a checkpoint in several files. Raises LoadError for a broken index."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) and file for file in found.values()):
        raise LoadError("model", str(index), "has no weight_map of tensors to files; fetch it again")
    return found


def missing_files(folder: Path, head: bool = False) -> list[str]:
    """The required files that a model's folder lacks: config.json, tokenizer.json, and the safetensors files that its index
    names, unless it has a MANIFEST. head: a drafter's head has no tokenizer, and its weights may be pickled. Raises LoadError
    for a broken index."""
    needed = ["config.json"] if head else ["config.json", "tokenizer.json"]
    if (folder / MANIFEST).is_file() or (head and any(folder.glob("*.bin"))):
        pass
    elif (folder / INDEX).is_file():
        needed += sorted(set(weight_map(folder / INDEX).values()))
    else:
        in_shards = any(SHARD.fullmatch(file.name) for file in folder.glob("*.safetensors"))
        needed.append(INDEX if in_shards and not (folder / SINGLE).is_file() else SINGLE)
    return [name for name in needed if not (folder / name).is_file()]


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Turn a SettingError about a value of this file into a LoadError that names the file."""
    try:
        yield
    except LoadError:
        raise
    except SettingError as error:
        raise LoadError(error.name, error.value, f"{error.remedy} (in {path})") from None


def whole(given: Mapping[str, Any], key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
    """A whole number from least to most in the file; the default where it is missing or null. Raises SettingError."""
    value = default if given.get(key) is None else given[key]
    ok = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    require(ok, key, value, f"must be a whole number from {least} to {most}")
    return int(value)  # type: ignore[arg-type]


def real(given: Mapping[str, Any], key: str, default: float | None = None, least: float = 0.0) -> float:
    """A finite number of at least `least` in the file; the default where it is missing or null. Raises SettingError."""
    value = default if given.get(key) is None else given[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    ok = number and abs(value) < 1e38 and math.isfinite(value) and value >= least  # type: ignore[operator, arg-type]
    require(ok, key, value, f"must be a number of at least {least:g}")
    return float(value)  # type: ignore[arg-type]


def flag(given: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false in the file; the default where it is missing or null. Raises SettingError."""
    value = default if given.get(key) is None else given[key]
    require(isinstance(value, bool), key, value, "must be true or false")
    return bool(value)


def token_ids(given: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The token ids under a key, which may be one id, a list, or missing. Raises SettingError."""
    value = given.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    require(
        all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < MOST for i in ids),
        key, value, "must be a token id or a list of them",
    )  # fmt: skip
    return tuple(ids)
