"""How an option of the command line is declared: once, as a field of a dataclass. cli/parameters.py makes typer's parameters of
the fields, and bench/options.py the command that repeats a run, the record's form and the rules for resuming. Needs no terminal
library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from forerun.config import DEVICE, DTYPE, QUANTIZATION

MODEL, SAMPLING, SPECULATION, ENGINE = "Model", "Sampling", "Speculation", "Engine"
RUN, LOAD, SERVERS, OUTPUT = "Run", "Load and prompts", "Servers", "Output"
SERVER, LIMITS = "Server", "Limits"
DATA, SHAPE, TRAINING, EVALUATION = "Data", "Shape", "Training", "Evaluation"
PANELS = (MODEL, SAMPLING, SPECULATION, ENGINE, DATA, SHAPE, TRAINING, EVALUATION, RUN, LOAD, SERVERS, SERVER, LIMITS, OUTPUT)
"""The headings in a command's help, in their order."""


class Scope(NamedTuple):
    """Where an option has an effect. holds: a function of all options, True where it has one. remedy: of the error elsewhere;
    {flag} stands for the option's flag."""

    holds: Callable[[Any], bool]
    remedy: str


@dataclass(frozen=True, slots=True)
class Option:
    """An option without its name, type and default, which are the field's.

    flags: the long one, then the short one. panel: the heading in the help. default_text: the default as the help shows it.
    separated: several values are one text, separated by commas; otherwise several values are given one at a time. choices: the
    words that it takes.

    The others are for options that a record keeps. scope: where it may be given. stated: the command that repeats a run has it
    even at its default, so that it means the same run with other defaults and under a time budget. secret: it may contain a
    secret. free: it may differ when a run is resumed, because it does not change what is measured.
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
    """A field that is an option. more: other attributes of Option. Without a long flag the field's name becomes the flag."""
    return dataclasses.field(default=default, metadata={"option": Option(help, flags, panel, **more)})


def option_of(field: dataclasses.Field[Any]) -> Option:
    """The option of a field, with its long flag."""
    found: Option = field.metadata["option"]
    if any(flag.startswith("--") for flag in found.flags):
        return found
    return dataclasses.replace(found, flags=(f"--{field.name.replace('_', '-')}", *found.flags))


def model_option() -> Any:
    """--model. Like those below, several commands have it."""
    return option(
        None,
        MODEL,
        "A folder with safetensors, a .gguf file, or a Hugging Face id (owner/name or owner/name@revision).",
        "-m",
        metavar="MODEL",
        default_text="SmolLM2-135M-Instruct, fetched on first use",
    )


def dtype_option(**more: Any) -> Any:
    return option(
        "auto",
        MODEL,
        "Number format of weights and KV cache; auto: the checkpoint's; on a CPU weights stay in a GGUF file's blocks.",
        choices=DTYPE.words,
        **more,
    )


def quantization_option(**more: Any) -> Any:
    return option(
        "auto",
        MODEL,
        "int8 or int4: quantise a checkpoint of 16 bits or more while it loads (CPU); auto: as --dtype says.",
        choices=QUANTIZATION.words,
        **more,
    )


def device_option(**more: Any) -> Any:
    return option("auto", MODEL, "The device to run on; auto: a GPU if there is one.", choices=DEVICE.words, **more)
