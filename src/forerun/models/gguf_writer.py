"""Writes a small model as a .gguf file with its matrices in blocks, as llama.cpp's converter lays it out. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import quantize

from forerun.checks import alternatives
from forerun.models import loading
from forerun.models.config import ModelConfig
from forerun.models.gguf import ARCHITECTURES, NAMES
from forerun.models.gguf_file import read_header
from forerun.models.tokenizer import Tokenizer
from forerun.types import require

LLAMA = "llama"
FORMATS = ("Q8_0", "Q5_1", "Q5_0")


def write(path: Path, folder: Path, vocabulary: Path, embedding: str = "Q8_0", **about: str) -> None:
    """Write the model of a Hugging Face folder: matrices in Q8_0 (8.5 bits a value), vectors in float32. embedding: the format
    of the embedding, which is most of a small model: Q8_0, Q5_1 (6 bits) or Q5_0 (5.5). vocabulary: a .gguf file whose keys of
    the tokenizer are copied, since a folder does not say which of llama.cpp's patterns its tokenizer has. about: keys of
    `general`, for instance name and license. Raises SettingError for an architecture other than Llama's, for a shape that the
    keys written here do not tell, and for another vocabulary; LoadError for a folder that cannot be read."""
    require(embedding in FORMATS, "embedding", embedding, f"give {alternatives(FORMATS)}")
    config = ModelConfig.read(folder)
    remedy = f"only {ARCHITECTURES[LLAMA]} is written, without biases and with plain rotations"
    plain = config.rope.kind == "default" and not (config.qkv_bias or config.out_bias or config.qk_norm or any(config.windows))
    require(config.architecture == ARCHITECTURES[LLAMA] and plain, "architecture", config.architecture, remedy)
    widths = (config.hidden_size, config.intermediate_size, config.heads * config.head_dim)
    require(not any(n % 32 for n in widths), "hidden_size", config.hidden_size, "blocks have 32 values; give multiples of 32")
    meta = read_header(vocabulary).meta
    _check_vocabulary(folder, config, meta)
    weights = loading.load(folder, config, torch.float32, torch.device("cpu"), "dense")
    writer = GGUFWriter(path, LLAMA)
    for key, value in about.items():
        writer.add_string(f"general.{key}", value)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.eps)
    for key, value in meta.items():
        if key.startswith("tokenizer."):
            _copy(writer, key, value)
    for name, tensor in loading.parts(config, weights):
        values = tensor.numpy()
        if tensor.dim() == 1:
            writer.add_tensor(_name(name), values)
            continue
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if part in name:  # the two halves of a head, which rotate together, lie interleaved
                values = values.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        kind = GGMLQuantizationType[embedding if name == loading.EMBEDDING else "Q8_0"]
        writer.add_tensor(_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check_vocabulary(folder: Path, config: ModelConfig, meta: Mapping[str, Any]) -> None:
    tokens = meta.get("tokenizer.ggml.tokens", [])
    remedy = "give a .gguf of the model whose vocabulary this one has"
    require(len(tokens) == config.vocab_size, "vocabulary", f"{len(tokens)} tokens for {config.vocab_size} rows", remedy)
    own = Tokenizer(folder).inner.get_vocab()
    other = next((text for text, i in own.items() if i >= len(tokens) or tokens[i] != text), None)
    require(other is None, "vocabulary", other, f"the token has another id there; {remedy}")


def _copy(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        writer.add_key_value(key, value, GGUFValueType.UINT32)
    else:
        writer.add_key_value(key, value, GGUFValueType.get_type(value))


def _name(name: str) -> str:
    """llama.cpp's name of a tensor, from that in a Hugging Face checkpoint."""
    stem, _, kind = name.rpartition(".")
    for theirs, ours in NAMES.items():
        if stem == ours or stem.endswith(f".{ours}"):
            at = stem.removesuffix(ours)
            return f"blk.{at.split('.')[2]}.{theirs}.{kind}" if at else f"{theirs}.{kind}"
    raise KeyError(name)
