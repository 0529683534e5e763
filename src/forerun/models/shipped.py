"""The trained drafters that come with Forerun, in trained/TARGET/NAME: what there is, by name and by method, and the one that a
method takes for a target if no model is given. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from forerun.checks import SettingError, alternatives
from forerun.config import Speculation

TARGET = "smollm2-135m-instruct"
FOLDERS = {"draft_model": "draft", "eagle3": "eagle3", "mtp": "mtp", "dflash": "dflash"}  # by method
MODEL = "draft.gguf"  # the file of a draft model; a head has a folder in its published layout
ROOT = Path(__file__).parents[1] / "trained"


class Shipped(NamedTuple):
    """name: what `model` of a speculative configuration takes; path: a head's folder, or the .gguf file of a draft model."""

    name: str
    method: str
    path: Path

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def bytes(self) -> int:
        """Of its files."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


def drafters() -> list[Shipped]:
    """Those that are here. An installation from a part of the repository may have none."""
    found = []
    for method, name in FOLDERS.items():
        folder = ROOT / TARGET / name
        path = folder / MODEL if method == "draft_model" else folder
        if (path if method == "draft_model" else folder / "config.json").is_file():
            found.append(Shipped(f"{TARGET}/{name}", method, path))
    return found


def methods(model: str) -> tuple[str, ...]:
    """The methods that need no `model` on this target."""
    return tuple(one.method for one in drafters()) if serves(model) else ()


def serves(model: str) -> bool:
    """Whether a model is the one that the drafters are for, by the last part of its name: the default model, its id on Hugging
    Face, or a folder or file named so, as in SmolLM2-135M-Instruct.Q4_1.gguf."""
    return Path(model.partition("@")[0]).name.lower().startswith(TARGET)


def resolve(name: str) -> Path | None:
    """The path of a drafter by its name; None if this is not such a name. Raises SettingError for one that is not here."""
    if not name.lower().startswith(f"{TARGET}/"):
        return None
    here = {one.name: one.path for one in drafters()}
    if name.lower() not in here:
        raise SettingError("model", name, f"no such drafter comes with Forerun; {_choices(here)}")
    return here[name.lower()]


def chosen(speculation: Speculation | None, model: str) -> Speculation | None:
    """The settings with the drafter that is taken for this target where none is given. mtp without a model means the target's
    own modules where none comes with Forerun. Raises SettingError."""
    if speculation is None or speculation.model is not None or speculation.method not in FOLDERS:
        return speculation
    method, here = speculation.method, {one.method: one.name for one in drafters()}
    if serves(model) and method in here:
        return replace(speculation, model=here[method])
    if method == "mtp":
        return speculation
    why = f"method {method} needs the drafter's path or id, since none comes with Forerun for the target {model}"
    raise SettingError("model", None, f"{why}; {_choices(here.values())}")


def _choices(names: Iterable[str]) -> str:
    return f"give {alternatives([*names, 'a path', 'an id such as owner/name'])}"
