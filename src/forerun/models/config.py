"""The shape of a decoder, read from the config.json of a Hugging Face folder. The table FAMILIES holds the differences between
the supported architectures; no other file of the decoder asks for an architecture's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from forerun.models.files import MOST, errors_of, flag, read_json, real, token_ids, whole
from forerun.types import LoadError, require


class Family(NamedTuple):
    """How an architecture differs from Llama. kv_heads, head_dim: whether config.json may leave them out (they then follow from
    the number of heads). qkv_bias, out_bias: whether there are biases; None: attention_bias in config.json says so. window:
    the layers with a sliding window: "none", "all" (if sliding_window is set) or "layers" (use_sliding_window and
    layer_types say which). modules: what the names of tensors for multi-token prediction begin with; a target leaves them
    alone, heads/layouts.py reads them."""

    kv_heads: bool = False
    head_dim: bool = True
    qkv_bias: bool | None = False
    out_bias: bool | None = False
    qk_norm: bool = False
    window: str = "none"
    modules: tuple[str, ...] = ()


FAMILIES = {
    "LlamaForCausalLM": Family(kv_heads=True, qkv_bias=None, out_bias=None),
    "MistralForCausalLM": Family(window="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="layers"),
    "Qwen3ForCausalLM": Family(head_dim=False, qkv_bias=None, out_bias=None, qk_norm=True, window="layers"),
    "MiMoForCausalLM": Family(qkv_bias=True, window="layers", modules=("model.mtp_layers.",)),
}
MISTRAL_WINDOW = 4096  # transformers' default for a Mistral whose config.json has no sliding_window
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Rope:
    """The settings of the rotary position embedding. kind: default, linear, llama3 or yarn; the other fields are their
    parameters (original_positions: the context length before scaling; attention_factor: a factor of cos and sin)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. windows: for each layer how many positions a token attends to, its own included (0: all).
    max_positions: the longest context. tied: the head is the embedding. eos_ids: the tokens that end a text. dtype: the
    checkpoint's own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    eps: float = 1e-6
    rope: Rope = Rope()
    windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "bfloat16"
    architecture: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.layers)
        grouped = self.heads % self.kv_heads == 0
        require(grouped, "num_key_value_heads", self.kv_heads, f"give a divisor of num_attention_heads ({self.heads})")
        even = self.head_dim % 2 == 0 and self.head_dim > 0
        require(even, "head_dim", self.head_dim, "give an even number; the two halves of a head are rotated together")
        require(len(self.windows) == self.layers, "windows", self.windows, f"give one for each of the {self.layers} layers")

    @property
    def kv_values_per_token(self) -> int:
        """How many numbers (not bytes) one token has in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """From config.json and, if there is one, generation_config.json of a folder. Raises LoadError, naming the file, for an
        architecture or a feature that is not supported, and for a value of a wrong type or size."""
        path, generation = folder / "config.json", folder / "generation_config.json"
        if not path.is_file():
            raise LoadError("model", str(folder), "the folder has no config.json; give a folder in Hugging Face's layout")
        with errors_of(generation):
            stops = token_ids(read_json(generation), "eos_token_id")
        with errors_of(path):
            return cls.parse(read_json(path), stops)

    @classmethod
    def parse(cls, given: Mapping[str, Any], stops: tuple[int, ...] = ()) -> ModelConfig:
        """From the contents of a config.json. stops: end-of-sequence ids from elsewhere. Raises SettingError."""
        names = given.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        require(name in FAMILIES, "architectures", name or names, f"supported are {', '.join(FAMILIES)}")
        family = FAMILIES[name]
        quantized = given.get("quantization_config")
        require(not quantized, "quantization_config", quantized, "quantised weights are not read; give bfloat16, or a .gguf")
        act = given.get("hidden_act", "silu")
        require(act == "silu", "hidden_act", act, "only silu is supported")
        require(not given.get("mlp_bias"), "mlp_bias", given.get("mlp_bias"), "biases in the MLP are not supported; give false")
        heads = whole(given, "num_attention_heads", most=2**16)
        hidden = whole(given, "hidden_size", most=2**24)
        layers = whole(given, "num_hidden_layers", most=10_000)
        rope, positions = _rope(given, whole(given, "max_position_embeddings"))
        bias = flag(given, "attention_bias")
        dtype = str(given.get("dtype") or given.get("torch_dtype") or "float32").removeprefix("torch.")
        require(dtype in DTYPES, "dtype", dtype, f"give a checkpoint in one of {', '.join(DTYPES)}")
        bos = token_ids(given, "bos_token_id")
        return cls(
            architecture=name,
            vocab_size=whole(given, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=whole(given, "intermediate_size", most=2**24),
            layers=layers,
            heads=heads,
            kv_heads=whole(given, "num_key_value_heads", heads if family.kv_heads else None),
            head_dim=whole(given, "head_dim", hidden // heads if family.head_dim else None, most=2**16),
            max_positions=positions,
            eps=real(given, "rms_norm_eps", 1e-6),
            rope=rope,
            windows=tuple(0 if w >= positions else w for w in _windows(family, given, layers)),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            out_bias=bias if family.out_bias is None else family.out_bias,
            qk_norm=family.qk_norm,
            tied=flag(given, "tie_word_embeddings"),
            eos_ids=tuple(dict.fromkeys(stops + token_ids(given, "eos_token_id"))),
            bos_id=bos[0] if bos else None,
            dtype=dtype,
        )


def _windows(family: Family, given: Mapping[str, Any], layers: int) -> list[int]:
    types = given.get("layer_types")
    strings = types is None or (isinstance(types, list) and all(isinstance(t, str) for t in types))
    require(strings, "layer_types", types, "must be a list of names, one for each layer")
    if family.window == "none":
        return [0] * layers
    if family.window == "all":
        require(not types or len(set(types)) == 1, "layer_types", types, "all layers of this architecture must have one type")
        # null: no window; a missing key: the default
        return [whole(given, "sliding_window", 0, least=0) if "sliding_window" in given else MISTRAL_WINDOW] * layers
    window = whole(given, "sliding_window", 0, least=0) if flag(given, "use_sliding_window") else 0
    if types is None:
        first = whole(given, "max_window_layers", 28, least=0)
        return [window if i >= first else 0 for i in range(layers)]
    known = {"full_attention": 0, "sliding_attention": window}
    fits = len(types) == layers and set(types) <= set(known)
    require(fits, "layer_types", types, f"give {' or '.join(known)} for each of the {layers} layers")
    slides = "sliding_attention" in types
    require(window > 0 or not slides, "sliding_window", window, "layer_types needs one; give it, and use_sliding_window true")
    return [known[t] for t in types]


def _rope(given: Mapping[str, Any], positions: int) -> tuple[Rope, int]:
    """The rotation and the longest context. transformers 5 writes rope_parameters, which holds rope_theta. Older files have
    rope_theta at the top level and rope_scaling, whose kind is named rope_type or, in the oldest files, type."""
    key = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    scaling = given.get(key) or {}
    require(isinstance(scaling, Mapping), key, scaling, "must be an object, or null")
    nested = [k for k, v in scaling.items() if isinstance(v, dict)]
    require(not nested, key, nested, "rotations by type of layer are not supported; give one for all layers")
    partial = scaling.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    require(partial in (None, 1.0), "partial_rotary_factor", partial, "only rotation of the whole head is supported; give 1.0")
    theta = real(scaling, "rope_theta", real(given, "rope_theta", 10000.0, least=2.0), least=2.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    known = ("default", "linear", "dynamic", "llama3", "yarn")
    require(isinstance(kind, str) and kind in known, "rope_type", kind, f"supported are {', '.join(known)}")
    # dynamic scaling starts past max_position_embeddings, and contexts end there
    if kind in ("default", "dynamic"):
        return Rope(theta), positions
    key = "original_max_position_embeddings"
    original = whole(given, key, whole(scaling, key, positions))
    factor = real(scaling, "factor", positions / original if kind == "yarn" else None, least=1.0)
    if kind == "linear":
        return Rope(theta, kind, factor), positions
    if kind == "llama3":
        low, high = real(scaling, "low_freq_factor", 0.0), real(scaling, "high_freq_factor", 0.0)
        require(0 < low < high, "low_freq_factor", low, f"llama3 needs a value above 0 and below high_freq_factor ({high})")
        return Rope(theta, kind, factor, original, low, high), positions
    rope = Rope(
        theta, kind, factor, original,
        beta_fast=real(scaling, "beta_fast", 32.0),
        beta_slow=real(scaling, "beta_slow", 1.0),
        truncate=flag(scaling, "truncate", True),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )
    ordered = rope.beta_fast > rope.beta_slow > 0
    require(ordered, "beta_fast", rope.beta_fast, "yarn needs a value above beta_slow, and beta_slow above 0")
    # a checkpoint to which yarn was added by hand often has its old max_position_embeddings
    longest = max(positions, int(original * factor))
    require(longest <= MOST, "factor", factor, f"give a smaller one: {original} positions times this are more than {MOST}")
    return rope, longest


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature (Peng et al. 2309.00071, section 3.4); with DeepSeek's two mscales, the ratio of two."""
    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return real(scaling, "attention_factor")
    mscale, over = real(scaling, "mscale", 0.0), real(scaling, "mscale_all_dim", 0.0)
    return temperature(mscale) / temperature(over) if mscale and over else temperature(1.0)
