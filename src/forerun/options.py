"""Options of the command line, each declared once, as a field of a dataclass. cli/parameters.py makes typer's parameters of
the fields, and bench/options.py the command that repeats a run, the record's form and the rules for resuming. Needs no
terminal library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from forerun.config import DEVICE, DTYPE

MODEL, SAMPLING, SPECULATION, ENGINE = "Model", "Sampling", "Speculation", "Engine"
RUN, LOAD, SERVERS, OUTPUT = "Run", "Load and prompts", "Servers", "Output"
PANELS = (MODEL, SAMPLING, SPECULATION, ENGINE, RUN, LOAD, SERVERS, OUTPUT)
"""The headings in a command's help, in their order."""


class Scope(NamedTuple):
    """When an option has a meaning. holds: a function of all options. remedy: what to do where it does not hold; {flag} stands
    for the option's name."""

    holds: Callable[[Any], bool]
    remedy: str


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beyond its name, type and default.

    flags: the long one, then the short one. separated: its values stand in one text, separated by commas; an option of several
    values that is not separated is given once for each. choices: the words it takes. default_text: the default in words.

    The rest concerns options that a record keeps. scope: when it may be given. stated: it is written on the command that
    repeats a run whatever its value is, so that the command means the same with other defaults and under a time budget.
    secret: its value may contain a secret. free: it may differ when a run is resumed, because it does not change what is
    measured.
    """

    help: str
    flags: tuple[str, ...] = ()
    panel: str | None = None
    metavar: str | None = None
    default_text: str | None = None
    separated: bool = False
    choices: tuple[str, ...] = ()
    scope: Scope | None = None
    stated: bool = False
    secret: bool = False
    free: bool = False


def option(default: Any, panel: str, help: str, *flags: str, **more: Any) -> Any:
    """A field that is an option; more: the other attributes of Option. Without a long flag it is named after the field."""
    return dataclasses.field(default=default, metadata={"option": Option(help, flags, panel, **more)})


def option_of(field: dataclasses.Field[Any]) -> Option:
    """What `option` was given, with the flags complete."""
    found: Option = field.metadata["option"]
    if any(flag.startswith("--") for flag in found.flags):
        return found
    return dataclasses.replace(found, flags=(f"--{field.name.replace('_', '-')}", *found.flags))


def model() -> Any:
    """The option --model, which several commands have. The two below are shared too."""
    return option(
        None,
        MODEL,
        "A folder with safetensors, a .gguf file, or a Hugging Face id (owner/name or owner/name@revision).",
        "-m",
        metavar="MODEL",
        default_text="SmolLM2-135M-Instruct, fetched on first use",
    )


def dtype(**more: Any) -> Any:
    return option("auto", MODEL, "Number format of weights and KV cache; auto: the checkpoint's.", choices=DTYPE.words, **more)


def device(**more: Any) -> Any:
    return option("auto", MODEL, "The device to run on; auto: a GPU if there is one.", choices=DEVICE.words, **more)
