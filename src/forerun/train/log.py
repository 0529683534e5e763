"""The log of a run: JSON Lines. `step`: means over the steps since the line before; `offline`: Trainer.evaluate over the
held-out answers; `engine`: acceptance of the exported drafter in the engine, by task; `phase`: seconds that a part of the run
took.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from forerun.types import LoadError

Kind = Literal["step", "offline", "engine", "phase"]
Line = dict[str, Any]


class Log:
    """Appends to a file. Lines of steps that a resumed run makes again are dropped."""

    def __init__(self, path: Path, after: int | None = None) -> None:
        """after: the step from which the run goes on; None: it begins anew."""
        self.path = path
        kept = [] if after is None else [line for line in read(path) if line.get("step", 0) <= after]
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)

    def add(self, kind: Kind, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")


def read(path: Path) -> list[Line]:
    """The lines of a log, none if there is no file; a last line that was cut off is left out. Raises LoadError."""
    if not path.is_file():
        return []
    texts = path.read_text(encoding="utf-8").split("\n")
    found = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or "kind" not in line:
                raise ValueError("it is not an object with kind")
        except ValueError as error:
            if number == len(texts):
                break
            raise LoadError("log", f"{path} line {number}", f"cannot be read ({error}); delete the line") from None
        found.append(line)
    return found


def of(lines: Sequence[Line], kind: Kind) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]
