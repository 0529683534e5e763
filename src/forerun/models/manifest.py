"""gguf.json: the file in a model's cache folder that names the .gguf files with the weights, and where each tensor is in them.
It is written once, since reading a .gguf's own header takes many seconds where it holds a large vocabulary. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forerun.models.files import MANIFEST, Stored, read_json
from forerun.types import LoadError

MOST = 2**62  # the largest size or offset that is accepted


class Manifest(NamedTuple):
    """files: the .gguf files; stored: the tensors by their names in a Hugging Face checkpoint; interleaved: the rows of q and k
    lie in llama.cpp's order (see AttentionShape)."""

    files: tuple[Path, ...]
    stored: dict[str, Stored]
    interleaved: bool


def write(folder: Path, files: Sequence[Path], stored: Mapping[str, Stored], interleaved: bool) -> None:
    """Write the manifest. A file in the folder is named relative to it, and may be copied with it. Of any other file the size
    and the time of its last change are kept, so that another file in its place is noticed."""
    named = []
    for file in files:
        inside, state = file.parent == folder, file.stat()
        path = file.name if inside else str(file.resolve())
        named.append({"path": path, "bytes": state.st_size, "mtime_ns": None if inside else state.st_mtime_ns})
    number = {file: i for i, file in enumerate(files)}
    tensors = {name: [number[at.file], at.dtype, list(at.shape), at.start, at.stop] for name, at in stored.items()}
    text = json.dumps({"files": named, "interleaved": interleaved, "tensors": tensors})
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read(folder: Path) -> Manifest:
    """The manifest of a folder that has one. Raises LoadError for a .gguf file that is not as it was, and for a manifest that
    is broken."""
    path = folder / MANIFEST
    given = read_json(path)
    broken = LoadError("model", str(path), "is broken; give the .gguf file again")
    try:
        files, sizes, interleaved = [], [], given["interleaved"]
        for file in given["files"]:
            files.append(folder / file["path"])
            sizes.append(_whole(file["bytes"]))
            _check(files[-1], sizes[-1], file["mtime_ns"])
        stored = {}
        for name, (number, kind, shape, start, stop) in given["tensors"].items():
            dims = tuple(_whole(n) for n in shape)
            stored[name] = Stored(files[_whole(number)], str(kind), dims, _whole(start), _whole(stop))
            if not start <= stop <= sizes[number] or not dims:
                raise broken
    except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
        raise error if isinstance(error, LoadError) else broken from None
    if not files or not stored or type(interleaved) is not bool:
        raise broken
    return Manifest(tuple(files), stored, interleaved)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST:
        raise ValueError
    return value


def _check(file: Path, size: int, changed: int | None) -> None:
    """Raise LoadError unless the file is there, with the size and time of change that it had."""
    try:
        state = file.stat()
    except OSError:
        raise LoadError("model", str(file), "the file is not there any more; put it back, or give its new path") from None
    if state.st_size != size or changed not in (None, state.st_mtime_ns):
        raise LoadError("model", str(file), "the file has changed since it was first read; give its path again")
