"""Conversion of GGUF files to Hugging Face folders. Tensors are dequantised to bfloat16, renamed, and their rows put into
transformers' order; tokenizer.json is made from the file's vocabulary. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from forerun.models import rope
from forerun.models.config import ModelConfig, Rope
from forerun.models.files import errors_of, real, whole
from forerun.models.gguf_tokenizer import INSTEAD, end_ids, token_id, tokenizer_files
from forerun.models.loading import misfit
from forerun.types import LoadError, require

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
UNREAD_SCALING = (
    "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor",
)  # fmt: skip
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip

PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)  # the names that llama.cpp's gguf-split gives
BLOCK = re.compile(r"blk\.(?P<number>\d+)\.(?P<stem>.+)")


def parts(path: Path) -> list[Path]:
    """All parts of a split model, in order, given any one of them (NAME-00001-of-0000N.gguf); for any other name the file
    alone. Raises LoadError naming the parts that are missing."""
    name = PART.fullmatch(path.name)
    if name is None:
        return [path]
    count = int(name["count"])
    files = [path.with_name(f"{name['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise LoadError("model", str(path), f"is part of a split model, and {shown} is missing; put all {count} into a folder")
    return files


def convert(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Convert the model of a .gguf file, with all its parts if it is split, into an existing empty folder. progress: gets lines
    for people. Raises LoadError naming what is missing, broken or not supported."""
    readers, meta = _open(parts(path))
    tensors = {t.name: t for reader in readers for t in reader.tensors}
    freqs = tensors.pop("rope_freqs.weight", None)
    with errors_of(path):
        config = _config(meta, tensors, None if freqs is None else freqs.data)
        parsed = ModelConfig.parse(config)
    names = [_name(path, name) for name in tensors]
    shapes = {n: tuple(int(d) for d in reversed(t.shape)) for n, t in zip(names, tensors.values(), strict=True)}
    why = misfit(parsed, shapes)
    if why is not None:
        raise LoadError("model", str(path), f"{why}; fetch the file again")
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id") if k in config})
    with errors_of(path):
        for name, contents in tokenizer_files(meta).items():
            (folder / name).write_text(contents, encoding="utf-8")
    progress(f"converting {path.name}: {len(names)} tensors to bfloat16")
    values = (_values(path, name, tensor, parsed) for name, tensor in zip(names, tensors.values(), strict=True))
    write_bfloat16(folder / "model.safetensors", shapes, values)


def _open(files: list[Path]) -> tuple[list[GGUFReader], dict[str, Any]]:
    """The readers of all parts, and the metadata of the first. Raises LoadError for a file that is not whole, and for parts
    that do not belong together."""
    readers, found = [], []
    for file in files:
        try:
            reader = GGUFReader(file)
            found.append({key: field.contents() for key, field in reader.fields.items()})
        except Exception as error:  # a broken file makes numpy raise errors of many types in the library
            raise LoadError("model", str(file), f"not a whole GGUF file ({error}); fetch it again") from None
        readers.append(reader)
    names: set[str] = set()
    for i, (file, reader, meta) in enumerate(zip(files, readers, found, strict=True), 1):
        with errors_of(file):
            number, count = whole(meta, "split.no", i - 1, least=0) + 1, whole(meta, "split.count", 1)
        if (number, count) != (i, len(files)):
            why = f"it is part {number} of {count} of a split model; end its name in -{number:05d}-of-{count:05d}.gguf"
            raise LoadError("model", str(file), f"{why} and put the other parts into the same folder")
        again = [t.name for t in reader.tensors if t.name in names]
        if again:
            raise LoadError("model", str(file), f"tensor {again[0]} is in an earlier part too; fetch the parts again")
        names.update(t.name for t in reader.tensors)
    total = found[0].get("split.tensors.count", len(names))
    if total != len(names):
        why = f"the model has {total} tensors and its parts hold {len(names)}; fetch the parts again"
        raise LoadError("model", str(files[0]), why)
    return readers, found[0]


def write_bfloat16(path: Path, shapes: dict[str, tuple[int, ...]], tensors: Iterable[torch.Tensor]) -> None:
    """Write a safetensors file, tensor by tensor, so that only one is in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().data)


def _config(meta: dict[str, Any], tensors: dict[str, Any], freqs: np.ndarray | None) -> dict[str, Any]:
    """The contents of config.json for this model. Raises SettingError for a value that is missing or not supported."""
    architecture = meta.get("general.architecture")
    known = isinstance(architecture, str) and architecture in ARCHITECTURES
    require(known, "general.architecture", architecture, f"supported in a .gguf are {', '.join(ARCHITECTURES)}")

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    experts = meta.get(key("expert_count"), 0)
    require(not experts, "expert_count", experts, "mixtures of experts are not supported; give a dense model")
    heads, hidden = whole(meta, key("attention.head_count"), most=2**16), whole(meta, key("embedding_length"))
    head_dim = whole(meta, key("attention.key_length"), hidden // heads)
    rotated = whole(meta, key("rope.dimension_count"), head_dim)
    require(rotated == head_dim, "rope.dimension_count", rotated, f"the whole head is rotated; give {head_dim}")
    require("token_embd.weight" in tensors, "token_embd.weight", None, "the tensor is missing; fetch the file again")
    window = whole(meta, key("attention.sliding_window"), 0, least=0)
    require(window == 0, "attention.sliding_window", window, f"not read from a .gguf; {INSTEAD}")
    config = {
        "architectures": [ARCHITECTURES[str(architecture)]],
        "model_type": architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": whole(meta, key("feed_forward_length")),
        "num_hidden_layers": whole(meta, key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": whole(meta, key("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "max_position_embeddings": whole(meta, key("context_length")),
        "rms_norm_eps": float(np.float32(real(meta, key("attention.layer_norm_rms_epsilon")))),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    theta = real(meta, key("rope.freq_base"), 10000.0)
    config |= {"rope_theta": theta, "rope_scaling": _scaling(meta, key, theta, freqs, head_dim)}
    for name, field in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (token := token_id(meta, field)) is not None:
            config[name] = token
    ends = end_ids(meta)
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return config


def _scaling(
    meta: dict[str, Any], key: Callable[[str], str], theta: float, freqs: np.ndarray | None, head_dim: int
) -> dict[str, Any] | None:
    """The value of rope_scaling in config.json."""
    kind = meta.get(key("rope.scaling.type"), "none")
    require(kind in ("none", "linear", "yarn"), "rope.scaling.type", kind, "supported in a .gguf are none, linear and yarn")
    for name in UNREAD_SCALING:
        value = meta.get(key(name), 1.0)
        require(value == 1.0, name, value, f"not read from a .gguf; {INSTEAD}")
    if freqs is not None:
        require(kind == "none", "rope.scaling.type", kind, "with a rope_freqs tensor only none is supported")
        return _llama3(freqs, theta, head_dim)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": real(meta, key("rope.scaling.factor"))}
    if meta.get(original := key("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = whole(meta, original)
    for name in ("beta_fast", "beta_slow"):
        if meta.get(beta := key(f"rope.scaling.yarn_{name}")) is not None:
            scaling[name] = real(meta, beta)
    return scaling


def _llama3(divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's rope_scaling from the divisor of each frequency, which is what the file holds. The largest divisor is the
    factor; all published models share the other three values. Raises SettingError for divisors that these do not give."""
    factor = float(divisors.max())
    guess = Rope(theta, "llama3", factor, 8192, 1.0, 4.0)
    expected = rope.frequencies(Rope(theta), head_dim) / rope.frequencies(guess, head_dim)
    same = divisors.shape == tuple(expected.shape) and np.allclose(divisors, expected.numpy(), rtol=1e-3)
    require(same, "rope_freqs.weight", f"{factor:g} at most", f"the tensor is not Llama 3's; {INSTEAD}")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def _name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer, block = "", BLOCK.fullmatch(stem)
    if block is not None:
        layer, stem = f"model.layers.{block['number']}.", block["stem"]
    if stem not in NAMES:
        raise LoadError("model", str(path), f"tensor {name} is not known; {INSTEAD}")
    return f"{layer}{NAMES[stem]}.{kind}"


def _values(path: Path, name: str, tensor: Any, config: ModelConfig) -> torch.Tensor:
    try:
        values = torch.from_numpy(np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, "W"))
    except NotImplementedError:
        kind = tensor.tensor_type.name
        why = f"tensor {tensor.name}: {kind} cannot be dequantised; give a Q8_0 or F16 file"
        raise LoadError("model", str(path), why) from None
    if config.architecture == "LlamaForCausalLM":
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if part in name:
                return pair_halves(values, heads)
    return values


def pair_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of q or k of a llama. llama.cpp rotates neighbouring rows of a head together; transformers pairs the
    two halves. So rows 0, 1, 2, 3, .. of each head come into the order 0, 2, .., 1, 3, ..  [heads*D, ..] -> the same"""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")
