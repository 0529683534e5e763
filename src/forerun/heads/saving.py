"""Heads to folders, in the layouts that vLLM and SGLang load: EAGLE as SafeAILab, EAGLE-3 as SpecForge, DFlash as z-lab, MTP as
MiMo. loading.load reads back what save wrote, tensor by tensor."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.checks import shown
from forerun.heads.block import BlockWeights
from forerun.heads.chain import ChainWeights
from forerun.heads.config import HeadConfig
from forerun.heads.layouts import KEPT, OFFSETS, read_config
from forerun.heads.loading import of_layer, of_module, outside
from forerun.models.config import ModelConfig, Rope
from forerun.models.files import INDEX, SHARD, SINGLE
from forerun.models.loading import Place, named
from forerun.models.weights import Matrix
from forerun.types import require

CONFIG = "config.json"


def save(
    folder: Path, config: HeadConfig, weights: ChainWeights | BlockWeights, target_name: str, shard_bytes: int | None = None
) -> None:
    """Write a head into a folder, which is made. target_name: the target's, for readers. shard_bytes: begin another file behind
    so many bytes of tensors; None: one file. The weights that are the target's are not written. A folder that did not exist
    appears with all files at once; in one that did, config.json is removed first and written last, and files that are not of a
    head stay. Raises SettingError for a head that its layout cannot say."""
    settings = written(config, weights.dtype, target_name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_tensors(made, dict(tensors(config, weights)), shard_bytes)
        (made / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        _check(made, config, weights.dtype)
        made.chmod(0o777 & ~_umask())
        if not folder.exists():
            made.rename(folder)
            return
        for old in (CONFIG, INDEX, SINGLE, *(file.name for file in folder.iterdir() if SHARD.fullmatch(file.name))):
            (folder / old).unlink(missing_ok=True)
        for file in sorted(made.iterdir(), key=lambda file: file.name == CONFIG):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def tensors(config: HeadConfig, weights: ChainWeights | BlockWeights) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a head's folder, by name."""
    before = "model." if config.method == "mtp" else ""
    for place, value in _items(config, weights):
        dense = value.dense() if isinstance(value, Matrix) else value
        for name, part in zip(place.names, dense.split(place.rows), strict=True):
            yield before + name, part.contiguous()
    if weights.ids is not None:
        ids = weights.ids.cpu()
        kept = torch.zeros(config.target_vocab, dtype=torch.bool)
        kept[ids] = True
        yield OFFSETS, ids - torch.arange(len(ids))
        yield KEPT, kept


def _items(config: HeadConfig, weights: ChainWeights | BlockWeights) -> Iterator[tuple[Place, Matrix | Tensor]]:
    for field, place in outside(config).items():
        name, _, index = field.partition(".")
        value = getattr(weights, name)
        yield place, value[int(index)] if index else value
    layers = weights.layers if isinstance(weights, BlockWeights) else tuple(m.layer for m in weights.modules)
    for i, layer in enumerate(layers):
        for field, place in of_layer(config, i).items():
            yield place, getattr(layer, field)
        if isinstance(weights, ChainWeights):
            for field, place in of_module(config, i).items():
                yield place, getattr(weights.modules[i], field)


def written(config: HeadConfig, dtype: torch.dtype, target_name: str) -> dict[str, Any]:
    """The config.json of a head, which layouts.read_config reads."""
    d, method = config.decoder, config.method
    settings = {
        "hidden_act": "silu", "hidden_size": d.hidden_size, "intermediate_size": d.intermediate_size,
        "num_hidden_layers": d.layers, "num_attention_heads": d.heads, "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_dim, "max_position_embeddings": d.max_positions, "rms_norm_eps": d.eps, **_rope(d.rope),
        "vocab_size": config.target_vocab, "tie_word_embeddings": False, "attention_bias": d.qkv_bias,
        "torch_dtype": named(dtype), "target_model_name_or_path": target_name,
    }  # fmt: skip
    if method in ("eagle3", "dflash"):
        settings["draft_vocab_size"] = config.draft_vocab
    if config.target_hidden != d.hidden_size:
        settings["target_hidden_size"] = config.target_hidden
    return settings | {"eagle": _eagle, "eagle3": _eagle3, "mtp": _mtp, "dflash": _dflash}[method](config)


def _eagle(config: HeadConfig) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": config.fc_bias}


def _eagle3(config: HeadConfig) -> dict[str, Any]:
    window = config.decoder.windows[0]
    kind = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    if config.decoder.qk_norm:
        kind = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    own: dict[str, Any] = kind | {
        "eagle_aux_hidden_state_layer_ids": list(config.states),
        "num_aux_hidden_states": len(config.states),
        "norm_before_residual": config.norm_before_residual, "norm_output": config.norm_output,
        "fc_norm": config.state_norms == "each", "norm_before_fc": config.state_norms == "all",
    }  # fmt: skip
    if min(config.states) > 0:  # SGLang reads these, as outputs of layers
        own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.states], "use_aux_hidden_state": True}
    return own | ({"layer_types": ["sliding_attention"], "sliding_window": window} if window else {})


def _dflash(config: HeadConfig) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_id, "target_layer_ids": [i - 1 for i in config.states]},
        "num_target_layers": config.target_layers, "layer_types": ["full_attention"] * config.decoder.layers,
        "fc_norm": config.state_norms == "each",
    }  # fmt: skip


def _mtp(config: HeadConfig) -> dict[str, Any]:
    # vLLM goes by the architecture; transformers does not know MiMo, whose decoder is a Qwen2
    return {
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_hidden_layers": config.target_layers,
        "num_nextn_predict_layers": config.modules,
    }  # fmt: skip


def _rope(rope: Rope) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if rope.kind != "default":
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind in ("llama3", "yarn"):
            scaling["original_max_position_embeddings"] = rope.original_positions
        if rope.kind == "llama3":
            scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        if rope.kind == "yarn":
            scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
            scaling["attention_factor"] = rope.attention_factor
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _check(folder: Path, config: HeadConfig, dtype: torch.dtype) -> None:
    """Raise SettingError, naming the field, unless the folder is read as a head of this shape."""
    target = ModelConfig(config.target_vocab, config.target_hidden, 1, config.target_layers, 1, 1, 2, 1)
    found = read_config(folder, config.method, target)
    ends: dict[str, Any] = {"eos_ids": (), "bos_id": None, "tied": False, "dtype": named(dtype)}
    meant = replace(config, decoder=replace(config.decoder, architecture=found.decoder.architecture, **ends))
    for read, given, owner in ((found, meant, ""), (found.decoder, meant.decoder, "decoder.")):
        for field in fields(read):
            ours, theirs = getattr(given, field.name), getattr(read, field.name)
            remedy = f"the layout of {config.method} cannot say it; give {shown(theirs)}"
            require(field.name == "decoder" or ours == theirs, owner + field.name, ours, remedy)


def _write_tensors(folder: Path, given: Mapping[str, Tensor], shard_bytes: int | None) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in given.items():
        if shard_bytes is not None and held and held + tensor.nbytes > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor.cpu()
        held += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, {"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in given.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
