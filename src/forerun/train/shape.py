"""The shape of a drafter that is to be trained, from a few settings and its target. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from forerun.checks import Choice, Whole, alternatives, convert, require, setting, several, whole
from forerun.heads.config import METHODS as HEADS
from forerun.heads.config import HeadConfig
from forerun.models.config import ModelConfig, Rope

METHODS = (*HEADS, "draft")
SHARE, MOST_DRAFTED = 3, 32000  # a draft vocabulary has this part of the target's, and so many ids at most
NARROW, DEEP = 256, 4  # hidden size and layers of a draft model


def _states(name: str, value: object) -> tuple[int, ...]:
    remedy = "give the numbers of the target's hidden states, for instance 2,15,27"
    found = [whole(one) for one in several(name, value, remedy)]
    numbers = tuple(one for one in found if one is not None and one >= 0)
    require(len(numbers) == len(found) and len(set(numbers)) == len(numbers), name, value, remedy)
    return numbers


@dataclass(frozen=True, slots=True)
class Shape:
    """draft_vocab: EAGLE-3: how many of the most frequent ids can be drafted. states: EAGLE-3 and DFlash: the target's hidden
    states that are read. state_norms: EAGLE-3: see HeadConfig. modules: MTP. layers: DFlash (3), a draft model (4). block:
    DFlash: tokens of a block, the anchor included. hidden, heads, intermediate: of a layer; None: the target's (a draft model:
    256, whole heads of 64, three times the hidden size). Raises SettingError."""

    draft_vocab: int | None = setting(None, Whole(1, 1 << 24, 16384), none=True)
    states: tuple[int, ...] = setting((), _states)
    state_norms: str = setting("each", Choice(("none", "each", "all")))
    modules: int = setting(1, Whole(1, 16, 1))
    layers: int | None = setting(None, Whole(1, 64, 3), none=True)
    block: int = setting(8, Whole(2, 64, 8))
    hidden: int | None = setting(None, Whole(16, 1 << 16, 256), none=True)
    heads: int | None = setting(None, Whole(1, 1024, 4), none=True)
    intermediate: int | None = setting(None, Whole(16, 1 << 20, 768), none=True)

    def __post_init__(self) -> None:
        convert(self)


READ = {
    "eagle": {"heads", "intermediate"},
    "eagle3": {"draft_vocab", "states", "state_norms", "heads", "intermediate"},
    "mtp": {"modules", "heads", "intermediate"},
    "dflash": {"states", "layers", "block", "heads", "intermediate"},
    "draft": {"layers", "hidden", "heads", "intermediate"},
}
"""The fields of Shape that a method reads."""


def known_method(value: str) -> str:
    """Raises SettingError."""
    require(value in METHODS, "method", value, f"give {alternatives(METHODS)}")
    return value


def check(method: str, given: Collection[str], shape: Shape) -> None:
    """Raise SettingError for a given setting that the method does not read."""
    for name in given:
        known = name in READ[method] or name not in Shape.__dataclass_fields__
        require(known, name, getattr(shape, name, None), f"method {method} does not read it; leave it out")


def drafter(method: str, shape: Shape, target: ModelConfig, vocab: int, mask_id: int) -> HeadConfig | ModelConfig:
    """The config of a head, or of a draft model. vocab: ids that the target gives logits for. mask_id: an id that does not
    occur in texts. Raises SettingError for a shape that does not fit the target."""
    if method == "draft":
        return _model(shape, target)
    heads = shape.heads or target.heads
    kv = target.kv_heads if heads % target.kv_heads == 0 else heads
    layers = {"mtp": shape.modules, "dflash": shape.layers or 3}.get(method, 1)
    drafted = vocab
    if method == "eagle3":
        drafted = shape.draft_vocab or max(min(vocab // SHARE // 64 * 64, MOST_DRAFTED), min(vocab, 64))
        require(drafted <= vocab, "draft_vocab", drafted, f"the target has {vocab} ids; give fewer")
        drafted = target.vocab_size if drafted == vocab else drafted
    else:
        drafted = target.vocab_size
    decoder = replace(
        target, vocab_size=drafted, layers=layers, heads=heads, kv_heads=kv, windows=(0,) * layers,
        intermediate_size=shape.intermediate or target.intermediate_size, qk_norm=method == "dflash", qkv_bias=False,
        out_bias=False, tied=False, eos_ids=(), bos_id=None, architecture="LlamaForCausalLM",
    )  # fmt: skip
    kind: dict[str, dict[str, Any]] = {  # of EAGLE as SafeAILab has it, EAGLE-3 as vLLM, MTP as MiMo, DFlash as z-lab
        "eagle": {"normed": True},
        "eagle3": {"state_norms": shape.state_norms, "own_head": True},
        "mtp": {"embedding_first": False, "norm_output": True, "zero_first": True, "modules": layers},
        "dflash": {"block_size": shape.block, "mask_id": mask_id},
    }
    states = _chosen(method, shape, target.layers, layers)
    return HeadConfig(method, decoder, target.hidden_size, target.vocab_size, target.layers, states, **kind[method])


def _chosen(method: str, shape: Shape, target_layers: int, layers: int) -> tuple[int, ...]:
    """The states that a head reads: as asked for, or as published for its method."""
    if method in ("eagle", "mtp"):
        return (target_layers,)
    for state in shape.states:
        remedy = f"the target has the states 0 to {target_layers}; give for instance {target_layers // 2}"
        require(state <= target_layers, "states", state, remedy)
    if shape.states:
        return shape.states
    if method == "eagle3":
        found = (min(2, target_layers), target_layers // 2, max(target_layers - 3, 0))
        return found if len(set(found)) == 3 else tuple(range(1, min(target_layers, 3) + 1))
    from forerun.heads.layouts import spread  # imports torch

    outputs = (min(max(layer, 0), target_layers - 1) + 1 for layer in spread(target_layers, layers))
    return tuple(dict.fromkeys(outputs))


def _model(shape: Shape, target: ModelConfig) -> ModelConfig:
    hidden = shape.hidden or NARROW
    heads = shape.heads or max(hidden // 64, 1)
    require(hidden % heads == 0, "heads", heads, f"give a divisor of hidden ({hidden}), for instance {max(hidden // 64, 1)}")
    return ModelConfig(
        target.vocab_size, hidden, shape.intermediate or 3 * hidden, shape.layers or DEEP, heads, heads, hidden // heads,
        target.max_positions, target.eps, Rope(target.rope.theta), tied=True, eos_ids=target.eos_ids, bos_id=target.bos_id,
        dtype=target.dtype,
    )  # fmt: skip
