"""GGUF files to Hugging Face folders: dequantised once to bfloat16, renamed, put into transformers' order of rows, with a
tokenizer.json made from the file's own vocabulary. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from forerun.models import rope
from forerun.models.config import ModelConfig, Rope
from forerun.types import SettingError, require

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
INSTEAD = "give the model's Hugging Face folder"
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip

# how each kind of vocabulary splits a text before its merges, in llama.cpp's words for tokenizer.ggml.pre
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """patterns are applied one after the other, each to what the one before left; whole: a piece that is a token needs no
    merges; bos: a text starts with the beginning-of-sequence token unless the file says otherwise; nfc: normalise."""

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


SPLITS = {
    "gpt-2": Split((GPT2,)),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": Split((r"\p{N}", GPT2)),
    "llama-bpe": Split((LLAMA3,), whole=True, bos=True),
    "qwen2": Split((LLAMA3.replace("{1,3}", ""),), nfc=True),
}


def convert(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the model of a .gguf file into an existing empty folder. Raises SettingError naming what is not supported."""
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise SettingError("model", str(path), f"not a whole GGUF file ({error}); fetch it again") from None
    fields = _Fields(path, reader)
    config = _config(fields, {t.name: t for t in reader.tensors})
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id") if k in config})
    _tokenizer(fields, folder)
    tensors = [t for t in reader.tensors if t.name != "rope_freqs.weight"]
    names = [_name(path, t.name) for t in tensors]
    shapes = {n: tuple(int(d) for d in reversed(t.shape)) for n, t in zip(names, tensors, strict=True)}
    progress(f"converting {path.name}: {len(names)} tensors to bfloat16")
    parsed = ModelConfig.parse(config, {})
    values = (_values(path, name, tensor, parsed) for name, tensor in zip(names, tensors, strict=True))
    write_bfloat16(folder / "model.safetensors", shapes, values)


def write_bfloat16(path: Path, shapes: dict[str, tuple[int, ...]], tensors: Iterable[torch.Tensor]) -> None:
    """A safetensors file, written tensor by tensor so that never more than one is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().data)


class _Fields:
    """The file's key-value pairs."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path, self._reader = path, reader
        self.architecture = str(self.get("general.architecture", ""))
        require(
            self.architecture in ARCHITECTURES, "general.architecture", self.architecture,
            f"supported in a .gguf are {', '.join(ARCHITECTURES)}",
        )

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def of_model(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def needed(self, key: str) -> Any:
        value = self.of_model(key)
        if value is None:
            raise SettingError("model", str(self.path), f"metadata {self.architecture}.{key} is missing; convert it anew")
        return value


def _config(fields: _Fields, tensors: dict[str, Any]) -> dict[str, Any]:
    experts = fields.of_model("expert_count", 0)
    require(not experts, "expert_count", experts, "mixtures of experts are not supported; give a dense model")
    heads, hidden = int(fields.needed("attention.head_count")), int(fields.needed("embedding_length"))
    head_dim = int(fields.of_model("attention.key_length", hidden // heads))
    rotated = int(fields.of_model("rope.dimension_count", head_dim))
    require(rotated == head_dim, "rope.dimension_count", rotated, f"the whole head is rotated; give {head_dim}")
    has_embedding = "token_embd.weight" in tensors
    require(has_embedding, "model", str(fields.path), "tensor token_embd.weight is missing; fetch the file again")
    window = int(fields.of_model("attention.sliding_window", 0) or 0)
    require(window == 0, "attention.sliding_window", window, f"not read from a .gguf; {INSTEAD}")
    biased = "blk.0.attn_q.bias" in tensors
    config = {
        "architectures": [ARCHITECTURES[fields.architecture]],
        "model_type": fields.architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": int(fields.needed("feed_forward_length")),
        "num_hidden_layers": int(fields.needed("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.of_model("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(fields.needed("context_length")),
        "rms_norm_eps": float(np.float32(fields.needed("attention.layer_norm_rms_epsilon"))),
        "hidden_act": "silu",
        "attention_bias": biased,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    config |= _rope(fields, tensors, head_dim)
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[key] = int(token)
    # the end of a turn is stored apart from the end of a text
    turn = fields.get("tokenizer.ggml.eot_token_id")
    if turn is not None and "eos_token_id" in config and int(turn) != config["eos_token_id"]:
        config["eos_token_id"] = [config["eos_token_id"], int(turn)]
    return config


def _rope(fields: _Fields, tensors: dict[str, Any], head_dim: int) -> dict[str, Any]:
    theta = float(fields.of_model("rope.freq_base", 10000.0))
    kind = fields.of_model("rope.scaling.type", "none")
    require(kind in ("none", "linear", "yarn"), "rope.scaling.type", kind, "supported in a .gguf are none, linear and yarn")
    scaling: dict[str, Any] | None = None
    if kind != "none":
        scaling = {"rope_type": kind, "factor": float(fields.needed("rope.scaling.factor"))}
        original = fields.of_model("rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = int(original)
    if "rope_freqs.weight" in tensors:
        require(kind == "none", "rope.scaling.type", kind, "with a rope_freqs tensor only none is supported")
        scaling = _llama3(fields, tensors["rope_freqs.weight"].data, theta, head_dim)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _llama3(fields: _Fields, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's stretched rotation is in the file as what each frequency was divided by. All published models share the
    other three numbers, so the largest divisor is the factor; the rest must come out as they are."""
    factor = float(divisors.max())
    guess = Rope(theta, "llama3", factor, 8192, 1.0, 4.0)
    expected = rope.frequencies(Rope(theta), head_dim) / rope.frequencies(guess, head_dim)
    if len(divisors) != len(expected) or not np.allclose(divisors, expected.numpy(), rtol=1e-3):
        raise SettingError("model", str(fields.path), f"tensor rope_freqs.weight is not Llama 3's; {INSTEAD}")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def _name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("blk."):
        _, number, stem = stem.split(".", 2)
        layer = f"model.layers.{number}."
    require(stem in NAMES, "model", str(path), f"tensor {name} is not known; {INSTEAD}")
    return f"{layer}{NAMES[stem]}.{kind}"


def _values(path: Path, name: str, tensor: Any, config: ModelConfig) -> torch.Tensor:
    try:
        values = torch.from_numpy(np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, "W"))
    except NotImplementedError:
        kind = tensor.tensor_type.name
        why = f"tensor {tensor.name}: {kind} cannot be dequantised; give a Q8_0 or F16 file"
        raise SettingError("model", str(path), why) from None
    if config.architecture == "LlamaForCausalLM":
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if part in name:
                return pair_halves(values, heads)
    return values


def pair_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of a head of a llama's q and k against each other, transformers its two halves:
    bring rows 0, 1, 2, 3, .. of each head into the order 0, 2, .., 1, 3, ..  [heads*D, ..] -> the same"""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _tokenizer(fields: _Fields, folder: Path) -> None:
    kind = fields.get("tokenizer.ggml.model")
    require(kind == "gpt2", "tokenizer.ggml.model", kind, f"supported in a .gguf is gpt2 (byte-level BPE); {INSTEAD}")
    pre = fields.get("tokenizer.ggml.pre", "default")
    require(pre in SPLITS, "tokenizer.ggml.pre", pre, f"supported are {', '.join(SPLITS)}; {INSTEAD}")
    split = SPLITS[pre]
    tokens: list[str] = fields.get("tokenizer.ggml.tokens")
    types: list[int] = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(m.split(" ", 1)) for m in fields.get("tokenizer.ggml.merges")]
    # unused entries pad the vocabulary; they are no tokens
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    if split.nfc:
        made.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in split.patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    for special, add in ((TokenType.CONTROL, made.add_special_tokens), (TokenType.USER_DEFINED, made.add_tokens)):
        add([tokenizers.AddedToken(t, normalized=False) for t, i in vocab.items() if types[i] == special])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            settings[key] = tokens[int(token)]
    if fields.get("tokenizer.ggml.add_bos_token", split.bos) and "bos_token" in settings:
        bos = settings["bos_token"]
        made.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    template = fields.get("tokenizer.chat_template")
    if template:
        settings["chat_template"] = template
    made.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")
