"""The options of `forerun train`: their declarations, and how a configuration file and the command line give them. Imports no
torch. The fields of the panels Data, Shape, Training and Evaluation have the names and defaults of Answering, Shape, Settings
and Checking.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from forerun import textfile
from forerun.checks import Flag, SettingError, Text, Whole, convert, require, setting
from forerun.options import DATA, EVALUATION, MODEL, OUTPUT, SHAPE, TRAINING, device_option, dtype_option, option, option_of
from forerun.train.questions import Answering
from forerun.train.settings import LOSSES, MOST, OPTIMIZERS, Settings
from forerun.train.shape import METHODS, Shape

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checking:
    """When a drafter is tried out while it learns. evaluations: how often over the held-out answers, spread evenly over the
    steps; engine_evaluations: how often with the engine, the last time at the end; k: drafted tokens; engine_prompts: of each
    task; checkpoint_minutes: between two checkpoints. Raises SettingError."""

    evaluations: int = setting(10, Whole(0, MOST, 10))
    engine_evaluations: int = setting(2, Whole(0, 1000, 2))
    k: int = setting(4, Whole(1, 32, 4))
    engine_prompts: int = setting(32, Whole(1, 1 << 20, 32))
    checkpoint_minutes: int = setting(5, Whole(1, 10000, 5))

    def __post_init__(self) -> None:
        convert(self)


@dataclass(frozen=True, slots=True)
class Options:
    """Their order is that of a configuration file."""

    target: str | None = option(
        None, MODEL, "The model that the drafter is for: a folder, a .gguf file, or a Hugging Face id.", "--target", "-m",
        metavar="MODEL", default_text="SmolLM2-135M-Instruct, fetched on first use",
    )  # fmt: skip
    dtype: str = dtype_option()
    device: str = device_option()
    data: Path | None = option(
        None, DATA,
        "Prompts: JSON Lines (.jsonl) with prompt, messages or turns, and optionally task; or a text with a message a line.",
        metavar="FILE",
    )  # fmt: skip
    most: int | None = option(None, DATA, "Use the first so many prompts.", default_text="all")
    answer_tokens: int = option(200, DATA, "Of an answer, at most.")
    prompt_tokens: int = option(1024, DATA, "Leave longer prompts out.")
    greedy: float = option(0.5, DATA, "The share of prompts that are answered greedily.")
    temperature: float = option(0.7, DATA, "Of the other answers.")
    held_out: float = option(0.02, DATA, "The share of prompts that are kept out of training.")
    answer_seed: int = option(0, DATA, "Of the choice of prompts, and of sampled answers.")
    batch: int | None = option(None, DATA, "Answers that are made at once.", default_text="256 on a GPU, 16 on a CPU")
    draft_vocab: int | None = option(
        None, SHAPE, "eagle3: the most frequent ids, which can be drafted.", default_text="a third of the target's"
    )
    states: tuple[int, ...] = option(
        (), SHAPE, "eagle3, dflash: the target's hidden states that are read.", metavar="N,...", separated=True,
        default_text="as published",
    )  # fmt: skip
    state_norms: str = option("each", SHAPE, "eagle3: norms before the states are joined.", choices=("none", "each", "all"))
    modules: int = option(1, SHAPE, "mtp: how many.")
    layers: int | None = option(None, SHAPE, "dflash, draft: how many.", default_text="3; 4")
    block: int = option(8, SHAPE, "dflash: tokens of a block, the anchor included.")
    hidden: int | None = option(None, SHAPE, "draft: the hidden size.", default_text="256")
    heads: int | None = option(None, SHAPE, "Attention heads of a layer.", default_text="the target's; draft: of 64 numbers")
    intermediate: int | None = option(None, SHAPE, "The inner size of a layer.", default_text="the target's; 3 times hidden")
    steps: int = option(1000, TRAINING, "Steps of the optimiser.")
    tokens: int = option(15360, TRAINING, "Tokens of a step, prompts included.")
    optimizer: str = option("muon", TRAINING, "What updates the matrices of layers; see docs/training.md.", choices=OPTIMIZERS)
    rate: float = option(2e-3, TRAINING, "The highest learning rate.")
    warm_up: float = option(0.03, TRAINING, "The part of the steps in which it rises.")
    final: float = option(0.0, TRAINING, "What the cosine lowers it to, as a part of the highest.")
    beta1: float = option(0.9, TRAINING, "Of AdamW.")
    beta2: float = option(0.95, TRAINING, "Of AdamW.")
    eps: float = option(1e-8, TRAINING, "Of AdamW.")
    weight_decay: float = option(0.0, TRAINING, "Of AdamW.")
    clip: float = option(0.5, TRAINING, "The largest norm of a gradient.")
    unroll: int | None = option(None, TRAINING, "Steps of training-time test.", default_text="5; eagle and draft: 1")
    fade: float = option(0.8, TRAINING, "The weight of step i of these is FADE to the power of i.")
    loss: str = option("lk", TRAINING, "What is minimised; see docs/training.md.", choices=LOSSES)
    loss_temperature: float = option(1.0, TRAINING, "Of both distributions in the loss; below 1 likely tokens count more.")
    lk_rate: float = option(3.0, TRAINING, "lk: how soon the acceptance itself counts.")
    pace: float | None = option(None, TRAINING, "dflash: a of D-PACE, in place of --fade.", default_text="off")
    anchors: int | None = option(None, TRAINING, "dflash: blocks of a step.", default_text="a quarter of the answered tokens")
    noise: float = option(0.1, TRAINING, "eagle: features get uniform noise up to this.")
    seed: int = option(0, TRAINING, "Of initial values, of the order, and of noise.")
    feature_memory: int | None = option(
        None, TRAINING, "Bytes that the target's states may take; what needs more is computed again.",
        default_text="3/4 of a GPU's free memory, 1/4 of a CPU's",
    )  # fmt: skip
    evaluations: int = option(10, EVALUATION, "How often the drafter is tried on held-out answers.")
    engine_evaluations: int = option(2, EVALUATION, "How often with the engine; the last time at the end.")
    k: int = option(4, EVALUATION, "Drafted tokens of a step.")
    engine_prompts: int = option(32, EVALUATION, "Held-out prompts of each task for the engine, at most.")
    checkpoint_minutes: int = option(5, EVALUATION, "Minutes between checkpoints.")
    out: Path | None = option(
        None, OUTPUT, "The folder of the run. The same command again goes on where it stopped.", "-o", metavar="FOLDER"
    )
    shard_bytes: int | None = option(None, OUTPUT, "Begin another file after so many bytes of a head.", default_text="one")

    def part(self, kind: type[T]) -> T:
        """The settings of a kind, of the fields with its names. Raises SettingError."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]


def read(path: Path) -> dict[str, Any]:
    """The options of a configuration file in TOML, by their names (a flag's without its dashes, - as _), and `method`. Tables
    only group them. Raises SettingError, which names the line or the option."""
    try:
        given = tomllib.loads(textfile.read("config", path))
    except tomllib.TOMLDecodeError as error:
        raise SettingError("config", str(path), f"not TOML ({error}); give lines such as steps = 1000") from None
    flat: dict[str, Any] = {}
    for name, value in given.items():
        for key, one in value.items() if isinstance(value, dict) else ((name, value),):
            require(key not in flat, key, one, f"{path.name} has it twice; give it once")
            flat[key] = one
    hints, known = get_type_hints(Options), [*(field.name for field in dataclasses.fields(Options)), "method"]
    found = {}
    for key, one in flat.items():
        name = key.replace("-", "_")
        close = difflib.get_close_matches(name, known, 1)
        remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        require(name in known, key, one, f"{path.name}: no such option; {remedy}")
        found[name] = one if name == "method" else _converted(name, one, hints[name])
    return found


def _converted(name: str, value: Any, hint: Any) -> Any:
    """The value as the type of the option. Settings check ranges."""
    kinds = set(get_args(hint)) or {hint}
    if Path in kinds:
        return Path(Text("file")(name, value))
    if kinds & {int, float}:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        require(number or hint == tuple[int, ...], name, value, "give a number")
    if bool in kinds:
        return Flag()(name, value)
    if kinds & {str}:
        field = next(f for f in dataclasses.fields(Options) if f.name == name)
        choices = option_of(field).choices
        word = Text(choices[0] if choices else "a text")(name, value)
        require(not choices or word in choices, name, value, f"give one of {', '.join(choices)}")
        return word
    return tuple(value) if isinstance(value, list) else value


def combined(given: Options, names: Collection[str], path: Path | None) -> tuple[Options, str | None, set[str]]:
    """The options of a file and of the command line, which comes first; the file's method; and the names of all that were
    given. names: those on the command line."""
    if path is None:
        return given, None, {n for n in names if n in Options.__dataclass_fields__}
    of_file = read(path)
    method = of_file.pop("method", None)
    require(method is None or isinstance(method, str), "method", method, f"give one of {', '.join(METHODS)}")
    merged = of_file | {name: getattr(given, name) for name in names if name in Options.__dataclass_fields__}
    return Options(**merged), method, set(merged)


def defaults() -> dict[str, Any]:
    """The settings that the options are of, with their defaults."""
    return {f.name: f.default for kind in (Answering, Shape, Settings, Checking) for f in dataclasses.fields(kind)}
