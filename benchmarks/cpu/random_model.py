"""Writes a model with random weights as a .gguf file, in the mix of formats that llama.cpp calls Q4_K_M. It is as fast and as
large as a trained model of the same shape; its texts mean nothing.

    python benchmarks/cpu/random_model.py TOKENIZER.gguf OUT.gguf

TOKENIZER.gguf: the file whose tokenizer it gets. The shape is a Llama of 0.67 billion weights: 20 layers of 1,536, 24 heads of
64, 8 of keys and values, 5,120 inside the MLP, and one matrix for embedding and output.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 20, 1536, 5120, 24, 8, 64
Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K


def blocks(format: GGMLQuantizationType, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """[rows, bytes of a row] of random blocks of 256 values, of mean about 0 and standard deviation 1 / sqrt(columns)."""
    count, size = rows * columns // 256, 144 if format == Q4_K else 210
    data = rng.integers(0, 256, (count, size), dtype=np.uint8)
    scales = np.ones((count, 1), np.float16)
    if format == Q4_K:  # a value is d * scale * (0 .. 15) - dmin * minimum; scale and minimum have the same distribution
        data[:, 0:4] = np.concatenate([scales, 7.5 * scales], 1).astype(np.float16).view(np.uint8)
    else:  # d * scale * (-32 .. 31), d at the end
        data[:, 208:210] = scales.view(np.uint8)
    factor = columns**-0.5 / dequantize(data[:1000], format).std()
    if format == Q4_K:
        data[:, 0:4] = np.concatenate([factor * scales, 7.5 * factor * scales], 1).astype(np.float16).view(np.uint8)
    else:
        data[:, 208:210] = (factor * scales).astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def more_bits(layer: int) -> bool:
    """Whether attn_v and ffn_down of this layer are in Q6_K: the first and the last eighth, and every third between them."""
    return layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tokenizer", type=Path)
    options.add_argument("out", type=Path)
    given = options.parse_args()

    writer, rng = GGUFWriter(given.out, "llama"), np.random.default_rng(0)
    fields = GGUFReader(given.tokenizer).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            kind, inner = field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    vocabulary = len(fields["tokenizer.ggml.tokens"].contents())
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(15)  # Q4_K_M

    def add(name: str, rows: int, columns: int, format: GGMLQuantizationType = Q4_K) -> None:
        writer.add_tensor(f"{name}.weight", blocks(format, rows, columns, rng), raw_dtype=format)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    add("token_embd", vocabulary, HIDDEN, Q6_K)
    for i in range(LAYERS):
        more = Q6_K if more_bits(i) else Q4_K
        add_norm(f"blk.{i}.attn_norm")
        add(f"blk.{i}.attn_q", HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{i}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{i}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN, more)
        add(f"blk.{i}.attn_output", HIDDEN, HEADS * HEAD_DIM)
        add_norm(f"blk.{i}.ffn_norm")
        add(f"blk.{i}.ffn_gate", INNER, HIDDEN)
        add(f"blk.{i}.ffn_up", INNER, HIDDEN)
        add(f"blk.{i}.ffn_down", HIDDEN, INNER, more)
    add_norm("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
