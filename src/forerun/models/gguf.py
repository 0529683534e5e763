"""What a GGUF file says of its model, as the small files of a Hugging Face folder: config.json, the tokenizer's files, and
gguf.json, which tells where each tensor is (manifest.py). The weights stay in the .gguf, where loading.py reads them. The
format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from forerun.models import manifest, rope
from forerun.models.blocks import FORMATS
from forerun.models.config import ModelConfig, Rope
from forerun.models.files import Stored, errors_of, real, whole
from forerun.models.gguf_file import Header, TensorInfo, read_header
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


def describe(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the small files of a .gguf file's model into an existing folder, for all its parts if it is split. progress: gets
    lines for people. Raises LoadError naming what is missing, broken or not supported."""
    files = parts(path)
    progress(f"reading {path.name}")
    headers, meta = _open(files)
    tensors = {t.name: (file, t) for file, header in zip(files, headers, strict=True) for t in header.tensors}
    found = tensors.pop("rope_freqs.weight", None)
    freqs = None if found is None else np.fromfile(found[0], np.float32, found[1].n_bytes // 4, offset=found[1].data_offset)
    with errors_of(path):
        config = _config(meta, {name: tensor for name, (_, tensor) in tensors.items()}, freqs)
        parsed = ModelConfig.parse(config)
    stored = {_name(path, name): _stored(file, tensor) for name, (file, tensor) in tensors.items()}
    why = misfit(parsed, {name: at.shape for name, at in stored.items()})
    if why is not None:
        raise LoadError("model", str(path), f"{why}; fetch the file again")
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id") if k in config})
    with errors_of(path):
        for name, contents in tokenizer_files(meta).items():
            (folder / name).write_text(contents, encoding="utf-8")
    manifest.write(folder, files, stored, config["model_type"] == "llama")


def _stored(file: Path, tensor: TensorInfo) -> Stored:
    """Raises LoadError for a format whose values cannot be computed."""
    kind, start = tensor.tensor_type.name, tensor.data_offset
    if kind not in FORMATS:
        _, size = GGML_QUANT_SIZES[tensor.tensor_type]
        try:
            dequantize(np.zeros((1, size), np.uint8), tensor.tensor_type)
        except NotImplementedError:
            why = f"tensor {tensor.name}: {kind} cannot be dequantised; give a Q8_0 or F16 file"
            raise LoadError("model", str(file), why) from None
    return Stored(file, kind, tensor.shape[::-1], start, start + tensor.n_bytes)


def _open(files: list[Path]) -> tuple[list[Header], dict[str, Any]]:
    """The headers of all parts, and the metadata of the first. Raises LoadError for a file that is not whole, and for parts
    that do not belong together."""
    headers = []
    for file in files:
        try:
            headers.append(read_header(file))
        except (ValueError, OSError) as error:
            raise LoadError("model", str(file), f"not a whole GGUF file ({error}); fetch it again") from None
    names: set[str] = set()
    for i, (file, header) in enumerate(zip(files, headers, strict=True), 1):
        with errors_of(file):
            number, count = whole(header.meta, "split.no", i - 1, least=0) + 1, whole(header.meta, "split.count", 1)
        if (number, count) != (i, len(files)):
            why = f"it is part {number} of {count} of a split model; end its name in -{number:05d}-of-{count:05d}.gguf"
            raise LoadError("model", str(file), f"{why} and put the other parts into the same folder")
        again = [t.name for t in header.tensors if t.name in names]
        if again:
            raise LoadError("model", str(file), f"tensor {again[0]} is in an earlier part too; fetch the parts again")
        names.update(t.name for t in header.tensors)
    total = headers[0].meta.get("split.tensors.count", len(names))
    if total != len(names):
        why = f"the model has {total} tensors and its parts hold {len(names)}; fetch the parts again"
        raise LoadError("model", str(files[0]), why)
    return headers, headers[0].meta


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
    matrices = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    dtype = "float32" if matrices == {"F32"} else "bfloat16"
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
        "dtype": dtype,
        "torch_dtype": dtype,
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


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")
