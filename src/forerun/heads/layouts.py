"""The layouts of public checkpoints of heads: which settings of config.json say what (read_config, written), and how the
tensors are named (names). The first says which head it is, the second where its tensors are; loading.py reads and writes them.
docs/heads.md has the differences in a table.

Tensors have canonical names here: those of SafeAILab's EAGLE and EAGLE-3 and of z-lab's DFlash, and for modules of MTP those of
MiMo without "model.".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from forerun.heads.config import METHODS, HeadConfig
from forerun.heads.files import open_checkpoint
from forerun.models.config import ModelConfig
from forerun.models.files import errors_of, flag, read_json, whole
from forerun.models.loading import Source, unusable
from forerun.types import LoadError, require

EMBEDDING, HEAD, OFFSETS, KEPT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")  # the target's, in early folders of `speculators`
MASK_FILE = "mask_embedding.pt"


class Modules(NamedTuple):
    """How a family names the tensors of a module for multi-token prediction, and how it joins embedding and feature. found:
    names that tell the family. at: what the names of module i begin with ({i}; {n}: i + number of the target's layers). parts:
    what stands for the beginnings of canonical names ({at}: as above). copies: the same for the embedding and the head, of
    which each module has a copy. scope: what the names of all modules begin with, if not `at`. normed: the feature is the
    target's last state behind its final norm. minus_one: norm weights are stored minus 1."""

    family: str
    found: re.Pattern[str]
    at: str
    parts: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    scope: str = ""
    embedding_first: bool = True
    zero_first: bool = True
    normed: bool = True
    minus_one: bool = False


MODULES = (
    Modules(
        "MiMo", re.compile(r"model\.mtp_layers\.\d+\."), "model.mtp_layers.{i}.", scope="model.mtp_layers.",
        embedding_first=False, normed=False,
    ),
    Modules(
        "Qwen3-Next", re.compile(r"mtp\."), "mtp.layers.{i}.",
        (
            ("token_layernorm.", "mtp.pre_fc_norm_embedding."), ("hidden_layernorm.", "mtp.pre_fc_norm_hidden."),
            ("input_proj.", "mtp.fc."), ("final_layernorm.", "mtp.norm."),
        ),
        scope="mtp.", zero_first=False, minus_one=True,
    ),
    Modules(
        "DeepSeek-V3", re.compile(r"model\.layers\.\d+\.(enorm|hnorm|eh_proj|shared_head)\."), "model.layers.{n}.",
        (
            ("token_layernorm.", "{at}enorm."), ("hidden_layernorm.", "{at}hnorm."), ("input_proj.", "{at}eh_proj."),
            ("final_layernorm.", "{at}shared_head.norm."),
        ),
        (("embed_tokens.", "{at}embed_tokens."), ("lm_head.", "{at}shared_head.head.")),
    ),
)  # fmt: skip
UNSUPPORTED = {  # parts of tensors' names that a module for multi-token prediction must not have, and what they belong to
    ".mlp.experts.": "a mixture of experts", ".mlp.gate.": "a mixture of experts", ".mlp.shared_expert": "a mixture of experts",
    "_a_proj": "multi-head latent attention", "_b_proj": "multi-head latent attention",
    ".linear_attn.": "linear attention", ".self_attn.sinks": "attention sinks", ".indexer.": "sparse attention",
}  # fmt: skip


class Names(NamedTuple):
    """Where the tensors of a head are among those of a folder. renames: beginnings of canonical names and what stands for them,
    the first that fits counts. inside: what the names of the head's own tensors begin with; others are left alone. again:
    names of tensors that may be there if they are the same as others, which these are. minus_one: as in Modules."""

    renames: tuple[tuple[str, str], ...] = ()
    inside: tuple[str, ...] = ("",)
    again: tuple[tuple[str, str], ...] = ()
    minus_one: bool = False

    def stored(self, name: str, present: Collection[str]) -> str:
        """The name in the folder for a canonical one; vLLM's conversions put "model." before some."""
        for beginning, instead in self.renames:
            if name.startswith(beginning):
                name = instead + name[len(beginning) :]
                break
        return f"model.{name}" if name not in present and f"model.{name}" in present else name


def read_config(folder: Path, method: str, target: ModelConfig) -> HeadConfig:
    """The shape of the head in a folder. method: one of METHODS; for mtp the folder may be the target's own. Raises LoadError,
    naming the setting or the tensor, for a head of another kind or for another target, and for one that is not supported;
    SettingError for a method that does not exist."""
    require(method in METHODS, "method", method, f"give one of {', '.join(METHODS)}")
    given = settings(folder)
    checkpoint = open_checkpoint(folder)
    with errors_of(folder / "config.json"):
        _check_method(given, checkpoint.stored, method)
        head = _Head(folder, given, checkpoint, method, target)
        return {"eagle": _eagle, "eagle3": _eagle3, "mtp": _mtp, "dflash": _dflash}[method](head)


def settings(folder: Path) -> dict[str, Any]:
    """The settings in config.json at one level: those of `speculators` have the layer's under transformer_layer_config, those
    of vLLM's conversions all under model. Raises LoadError."""
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError("model", str(folder), "the folder has no config.json; give the folder of a head")
    given = read_json(path)
    layer, wrapped = (given.get(key) for key in ("transformer_layer_config", "model"))
    with errors_of(path):
        for key, inner in (("transformer_layer_config", layer), ("model", wrapped)):
            require(inner is None or isinstance(inner, dict), key, inner, "must be an object")
    if layer is not None:
        return {**given, **layer, "architectures": given.get("architectures")}
    if wrapped is not None:
        return wrapped | {k: v for k, v in given.items() if k not in ("model", "model_type", "architectures")}
    return given


def names(given: Mapping[str, Any], present: Collection[str], method: str) -> Names:
    """How a folder names its tensors. given: its settings."""
    if method == "eagle3" and not any("midlayer." in name for name in present):
        return Names((("midlayer.", "layers.0."),))
    family = _family(present) if method == "mtp" else None
    if family is None:
        return Names()
    renames: list[tuple[str, str]] = []
    layers, modules = whole(given, "num_hidden_layers"), _modules(given)
    each = [family.at.format(i=i, n=layers + i) for i in range(modules)]
    for i, at in enumerate(each):
        for part, instead in family.parts:
            renames.append((f"mtp_layers.{i}.{part}", instead.format(at=at)))
        renames.append((f"mtp_layers.{i}.", at))
    renames += [(part, instead.format(at=each[0])) for part, instead in family.copies]
    again = tuple(
        (instead.format(at=at) + "weight", instead.format(at=each[0]) + "weight")
        for at in each[1:] for _, instead in family.copies
    )  # fmt: skip
    return Names(tuple(renames), (family.scope,) if family.scope else tuple(each), again, family.minus_one)


class _Head(NamedTuple):
    """What the readers of settings work on."""

    folder: Path
    given: Mapping[str, Any]
    checkpoint: Source
    method: str
    target: ModelConfig

    def has(self, name: str) -> bool:
        """Whether the folder has a tensor of this canonical name."""
        present = self.checkpoint.stored
        return names(self.given, present, self.method).stored(name, present) in present

    def same(self, key: str, value: int, of_target: int) -> None:
        require(value == of_target, key, value, f"the target has {of_target}; give a head that was trained for this target")

    def nested(self, key: str) -> Mapping[str, Any]:
        value = self.given.get(key) or {}
        require(isinstance(value, Mapping), key, value, "must be an object")
        return value

    def decoder(self, layers: int, vocab: int, qk_norm: bool, windows: tuple[int, ...] = ()) -> ModelConfig:
        """The shape of the layers. attention_bias stands for all four biases."""
        plain = {k: v for k, v in self.given.items() if k not in ("layer_types", "eos_token_id", "bos_token_id")}
        fixed = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "vocab_size": vocab}
        decoder = ModelConfig.parse(plain | fixed | {"tie_word_embeddings": False})
        return replace(decoder, qk_norm=qk_norm, windows=windows or (0,) * layers)

    def states(self, key: str, ids: Any, shift: int) -> tuple[int, ...]:
        """The hidden states that the target must give. ids: in the numbers of the folder; shift: from these to states."""
        layers = self.target.layers
        whole_numbers = isinstance(ids, list) and bool(ids) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        require(whole_numbers, key, ids, "must be a list of whole numbers")
        fits = all(0 <= i + shift <= layers for i in ids)
        least, most = -shift, layers - shift
        require(
            fits, key, ids, f"a target of {layers} layers has {least} to {most}; give a head that was trained for this target"
        )
        require(len(ids) <= MOST_STATES, key, ids, f"at most {MOST_STATES} are supported")
        return tuple(i + shift for i in ids)


MOST_STATES = 5  # as many parts as kernels join


def _vocabularies(head: _Head, hidden: int) -> tuple[int, bool, bool]:
    """The size of the draft vocabulary, and whether the folder has an embedding and a vocabulary head."""
    vocab = whole(head.given, "vocab_size")
    head.same("vocab_size", vocab, head.target.vocab_size)
    draft = whole(head.given, "draft_vocab_size", vocab)
    require(draft <= vocab, "draft_vocab_size", draft, f"give at most vocab_size ({vocab})")
    embedding, own = head.has(EMBEDDING), head.has(HEAD)
    if not embedding and hidden != head.target.hidden_size:
        why = f"the target's, of hidden size {head.target.hidden_size}, cannot stand in for it"
        raise unusable(head.folder, f"tensor {EMBEDDING} is missing, and {why}; fetch the whole checkpoint")
    if not own and (draft != vocab or hidden != head.target.hidden_size):
        why = f"the target's, [{vocab}, {head.target.hidden_size}], cannot stand in for one of [{draft}, {hidden}]"
        raise unusable(head.folder, f"tensor {HEAD} is missing, and {why}; fetch the whole checkpoint")
    return draft, embedding, own


def _one_layer(head: _Head) -> None:
    layers = whole(head.given, "num_hidden_layers", 1)
    require(layers == 1, "num_hidden_layers", layers, f"{head.method} heads of one layer are supported")


def _eagle(head: _Head) -> HeadConfig:
    given, target = head.given, head.target
    _one_layer(head)
    head.same("hidden_size", whole(given, "hidden_size"), target.hidden_size)
    kept = whole(given, "truncated_vocab_size", target.vocab_size)
    require(kept == target.vocab_size, "truncated_vocab_size", kept, "heads with a part of the vocabulary are not supported")
    draft, embedding, own = _vocabularies(head, target.hidden_size)
    head.same("draft_vocab_size", draft, target.vocab_size)
    return HeadConfig(
        "eagle", head.decoder(1, draft, False), target.hidden_size, target.vocab_size, target.layers, (target.layers,),
        normed=True, fc_bias=flag(given, "bias", head.has("fc.bias")), own_embedding=embedding, own_head=own,
    )  # fmt: skip


def _eagle3(head: _Head) -> HeadConfig:
    given, target = head.given, head.target
    nested = head.nested("eagle_config")
    _one_layer(head)
    hidden = whole(given, "hidden_size")
    target_hidden = whole(given, "target_hidden_size", hidden)
    head.same("target_hidden_size" if given.get("target_hidden_size") else "hidden_size", target_hidden, target.hidden_size)
    aux = flag(nested, "use_aux_hidden_state", True)
    require(aux, "use_aux_hidden_state", aux, "heads that read the last state alone are not supported")
    draft, embedding, own = _vocabularies(head, hidden)
    key = "eagle_aux_hidden_state_layer_ids"
    if given.get(key):
        states = head.states(key, given[key], 0)  # vLLM and speculators: inputs of layers
    elif nested.get(key):
        states = head.states(key, nested[key], 1)  # SGLang: outputs of layers
    else:
        states = head.states(key, [2, target.layers // 2, target.layers - 3], 0)
    norm_before_fc = flag(nested, "norm_before_fc", flag(given, "norm_before_fc"))
    fc_norm = flag(given, "fc_norm")
    require(not (fc_norm and norm_before_fc), "fc_norm", True, "norm_before_fc is true as well; give one of them")
    qwen3 = "speculators_model_type" in given and given.get("model_type") == "qwen3"
    qwen3 = qwen3 or given.get("architectures") == ["Eagle3Qwen3ForCausalLM"]
    window = 0
    if given.get("layer_types") == ["sliding_attention"]:
        window = whole(given, "sliding_window")
    qk_norm = qwen3 or head.has("midlayer.self_attn.q_norm.weight")
    return HeadConfig(
        "eagle3", head.decoder(1, draft, qk_norm, (window,)), target.hidden_size, target.vocab_size, target.layers, states,
        state_norms="all" if norm_before_fc else "each" if fc_norm else "none",
        norm_before_residual=flag(given, "norm_before_residual"), norm_output=flag(given, "norm_output"),
        own_embedding=embedding, own_head=own,
    )  # fmt: skip


def _dflash(head: _Head) -> HeadConfig:
    given, target = head.given, head.target
    nested = head.nested("dflash_config")
    both = {**given, **nested}  # settings of the block are in either place
    layers, hidden = whole(given, "num_hidden_layers", most=1000), whole(given, "hidden_size")
    target_hidden = whole(given, "target_hidden_size", hidden)
    head.same("target_hidden_size" if given.get("target_hidden_size") else "hidden_size", target_hidden, target.hidden_size)
    head.same("num_target_layers", whole(given, "num_target_layers", target.layers), target.layers)
    for key, harmless in HARMLESS.items():
        value = both.get(key)
        require(value is None or value == harmless, key, value, f"not supported; only heads with {harmless!r} are read")
    types = given.get("layer_types") or []
    full = isinstance(types, list) and set(types) <= {"full_attention"}
    require(full, "layer_types", types, "sliding windows in DFlash heads are not supported; give full_attention for each layer")
    if (head.folder / MASK_FILE).is_file():
        raise unusable(head.folder, f"{MASK_FILE}: an embedding of its own for the mask token is not supported")
    draft, embedding, own = _vocabularies(head, hidden)
    key = "aux_hidden_state_layer_ids"
    if given.get(key):
        states = head.states(key, given[key], 0)  # speculators: inputs of layers
    else:
        states = head.states("target_layer_ids", both.get("target_layer_ids") or spread(target.layers, layers), 1)  # outputs
    mask = whole(both, "mask_token_id", least=0)
    require(mask < target.vocab_size, "mask_token_id", mask, f"give an id of the target, below {target.vocab_size}")
    return HeadConfig(
        "dflash", head.decoder(layers, draft, True), target.hidden_size, target.vocab_size, target.layers, states,
        state_norms="each" if flag(given, "fc_norm") else "none", own_embedding=embedding, own_head=own,
        block_size=whole(both, "block_size", least=2, most=64), mask_id=mask,
    )  # fmt: skip


HARMLESS: dict[str, Any] = {  # settings of relatives of DFlash, and the values with which they change nothing
    "use_swa": False, "sample_from_anchor": False, "attention_sink_bias": False, "attention_value_scale": None, "causal": False,
    "is_causal": False, "is_neox_style": True, "projector_type": None, "pure_draft_prefix_len": 0, "shift_label": False,
    "use_aux_hidden_state": True, "markov_rank": 0,
}  # fmt: skip


def spread(target_layers: int, layers: int) -> list[int]:
    """The layers of the target whose outputs a DFlash head reads if its settings do not say."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def _mtp(head: _Head) -> HeadConfig:
    given, target, present = head.given, head.target, head.checkpoint.stored
    family = _family(present)
    assert family is not None
    found = names(given, present, "mtp")
    for name in present:
        part = next((part for part in UNSUPPORTED if part in name), None) if name.startswith(found.inside) else None
        if part is not None:
            raise unusable(head.folder, f"tensor {name}: {UNSUPPORTED[part]} in a module of MTP is not supported yet")
    head.same("hidden_size", whole(given, "hidden_size"), target.hidden_size)
    head.same("num_hidden_layers", whole(given, "num_hidden_layers"), target.layers)
    pairs = flag(given, "rope_interleave")
    require(not pairs, "rope_interleave", pairs, "rotation of neighbouring numbers is not supported in a module of MTP")
    draft, embedding, own = _vocabularies(head, target.hidden_size)
    copies = bool(family.copies)
    modules = _modules(given)
    query = found.stored("mtp_layers.0.self_attn.q_proj.weight", present)
    qk_norm, bias = (head.has(f"mtp_layers.0.self_attn.{name}") for name in ("q_norm.weight", "q_proj.bias"))
    decoder = head.decoder(modules, draft, qk_norm)
    wide = 2 * decoder.heads * decoder.head_dim
    if query in present and present[query].shape[:1] == (wide,):
        raise unusable(head.folder, f"tensor {query} has {wide} rows: gated attention in a module of MTP is not supported yet")
    decoder = replace(decoder, qkv_bias=bias, out_bias=head.has("mtp_layers.0.self_attn.o_proj.bias"))
    return HeadConfig(
        "mtp", decoder, target.hidden_size, target.vocab_size, target.layers, (target.layers,), normed=family.normed,
        embedding_first=family.embedding_first, norm_output=True, zero_first=family.zero_first,
        own_embedding=copies and embedding, own_head=copies and own, modules=modules,
    )  # fmt: skip


def _modules(given: Mapping[str, Any]) -> int:
    return whole(given, "num_nextn_predict_layers", whole(given, "mtp_num_hidden_layers", 1), most=64)


def _family(present: Collection[str]) -> Modules | None:
    return next((family for family in MODULES if any(family.found.match(name) for name in present)), None)


def _kind(given: Mapping[str, Any], present: Collection[str]) -> tuple[str, str] | None:
    """The method that a folder is for, and the tensor or setting that says so."""
    if isinstance(stated := given.get("speculators_model_type"), str):
        return stated, "speculators_model_type"
    plain = {name.removeprefix("model.") for name in present}
    for name in ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"):
        if name in plain:
            return "eagle3", f"tensor {name}"
    if "hidden_norm.weight" in plain:
        return "dflash", "tensor hidden_norm.weight"
    family = _family(present)
    if family is not None:
        return "mtp", f"tensor {min(name for name in present if family.found.match(name))}"
    if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= plain:
        return "eagle", "tensor fc.weight, without hidden_norm"
    return None


def _check_method(given: Mapping[str, Any], present: Collection[str], method: str) -> None:
    found = _kind(given, present)
    if found is None:
        require(method != "mtp", "method", method, f"the folder has no module of {', '.join(m.family for m in MODULES)}")
        return
    kind, why = found
    known = f"give method {kind}" if kind in METHODS else f"supported are {', '.join(METHODS)}"
    require(kind == method, "method", method, f"the folder holds a head of kind {kind} ({why}); {known}")
