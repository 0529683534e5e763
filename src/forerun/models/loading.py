"""Loading: a decoder's weights from safetensors files. Each stacked matrix is allocated once, and the checkpoint's tensors are
read into their parts of it, so loading needs little more memory than the weights. A missing, surplus, misshaped or non-finite
tensor is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.models.config import ModelConfig
from forerun.models.files import INDEX, SINGLE, missing_files, weight_map
from forerun.models.weights import Dense, Layer, Matrix, Weights
from forerun.types import LoadError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STAGE = 32 * 2**20  # bytes read at a time where tensors are converted or copied to a device
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def empty(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, kind: type[Matrix] = Dense
) -> Weights:
    """Weights of the right shapes, uninitialised, with matrices of this kind. On device "meta" they take no memory."""

    def vector(size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def matrix(rows: int, columns: int) -> Matrix:
        return kind.empty(rows, columns, dtype, device)

    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = tuple(
        Layer(
            attention_norm=vector(hidden),
            qkv=matrix(q + 2 * kv, hidden),
            qkv_bias=vector(q + 2 * kv) if config.qkv_bias else None,
            q_norm=vector(config.head_dim) if config.qk_norm else None,
            k_norm=vector(config.head_dim) if config.qk_norm else None,
            out=matrix(hidden, q),
            out_bias=vector(hidden) if config.out_bias else None,
            mlp_norm=vector(hidden),
            gate_up=matrix(2 * inner, hidden),
            down=matrix(hidden, inner),
        )
        for _ in range(config.layers)
    )
    embedding = matrix(config.vocab_size, hidden)
    head = embedding if config.tied else matrix(config.vocab_size, hidden)
    return Weights(dtype, embedding, layers, vector(hidden), head)


def parts(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a checkpoint must hold, by name, with the part of the weights' memory that it fills."""
    yield from _stored("model.embed_tokens", weights.embedding)
    yield "model.norm.weight", weights.norm
    if not config.tied:
        yield from _stored("lm_head", weights.head)
    q, kv, inner = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate_size
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", layer.attention_norm
        yield at + "post_attention_layernorm.weight", layer.mlp_norm
        for letter, rows in zip("qkv", layer.qkv.split((q, kv, kv)), strict=True):
            yield from _stored(f"{at}self_attn.{letter}_proj", rows)
        if layer.qkv_bias is not None:
            for letter, bias in zip("qkv", layer.qkv_bias.split((q, kv, kv)), strict=True):
                yield f"{at}self_attn.{letter}_proj.bias", bias
        for name, vector in (("q_norm.weight", layer.q_norm), ("k_norm.weight", layer.k_norm), ("o_proj.bias", layer.out_bias)):
            if vector is not None:
                yield f"{at}self_attn.{name}", vector
        yield from _stored(at + "self_attn.o_proj", layer.out)
        for name, rows in zip(("gate_proj", "up_proj"), layer.gate_up.split((inner, inner)), strict=True):
            yield from _stored(f"{at}mlp.{name}", rows)
        yield from _stored(at + "mlp.down_proj", layer.down)


def _stored(name: str, matrix: Matrix) -> Iterator[tuple[str, Tensor]]:
    return ((f"{name}.{part}", tensor) for part, tensor in matrix.stored.items())


def load(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """The weights of a Hugging Face folder, as dense matrices. Raises LoadError naming the tensor that is missing, surplus,
    misshaped or not finite in this dtype."""
    checkpoint = Checkpoint(folder)
    checkpoint.check(config)  # before memory is allocated
    if config.tied and HEAD in checkpoint.stored and not checkpoint.same(HEAD, EMBEDDING):
        why = "lm_head.weight differs from the embedding; give false in config.json"
        raise LoadError("tie_word_embeddings", True, f"{why} (in {folder})")
    weights = empty(config, dtype, device)
    wanted = dict(parts(config, weights))
    for name, out in wanted.items():
        checkpoint.read(name, out)
    _check_finite(folder, wanted, weights)
    return weights


def misfit(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why tensors of these names and shapes are not a checkpoint of this model; None if they are. A copy of a tied head and the
    rotation tables of old checkpoints are allowed."""
    wanted = {name: tuple(t.shape) for name, t in parts(config, empty(config, torch.float32, "meta"))}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        return f"{_few(missing)} missing"
    allowed = {HEAD} if config.tied else set()
    surplus = [n for n in shapes if n not in wanted and n not in allowed and not n.endswith(".rotary_emb.inv_freq")]
    if surplus:
        return f"{_few(surplus)} not part of {config.architecture} with {config.layers} layers"
    wrong = next((name for name in wanted if shapes[name] != wanted[name]), None)
    return wrong and f"tensor {wrong} has shape {list(shapes[wrong])}, expected {list(wanted[wrong])}"


def random(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Random weights of these shapes, for benchmarks. Their scale keeps activations from vanishing or exploding."""
    weights = empty(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, out in parts(config, weights):
        if out.dim() == 2:
            out.normal_(0, out.shape[1] ** -0.5, generator=generator)
        else:
            out.fill_(0.0 if name.endswith("bias") else 1.0)
    return weights


def unusable(folder: Path, why: str) -> LoadError:
    """The error for a checkpoint that cannot be read."""
    return LoadError("model", str(folder), why)


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"


def _check_finite(folder: Path, wanted: dict[str, Tensor], weights: Weights) -> None:
    # any NaN or infinity makes the sum non-finite, and a sum is cheap; it may also overflow, so values are checked then
    sums = torch.stack([t.sum().float() for t in weights.tensors()])
    if bool(torch.isfinite(sums).all()):
        return
    for name, tensor in wanted.items():
        if not bool(torch.isfinite(tensor).all()):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise unusable(folder, f"tensor {name} has values not finite in {kind}; fetch it again, or give dtype float32")


class Stored(NamedTuple):
    """Where a tensor is stored: bytes start .. stop - 1 of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Checkpoint:
    """The safetensors files of a folder. A file is an 8-byte length, a JSON header of that length with the dtype, the shape and
    the offsets of each tensor, and the data (https://github.com/huggingface/safetensors, "Format")."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: dict[str, Stored] = {}
        index, single = folder / INDEX, folder / SINGLE
        if index.is_file():
            shard_of = weight_map(index)
            for shard in sorted(set(shard_of.values())):
                if not (folder / shard).is_file():
                    raise unusable(folder, f"{shard}, named in {INDEX}, is missing; fetch it")
                self.stored.update(_header(folder / shard))
            lost = [name for name in shard_of if name not in self.stored]
            if lost:
                raise unusable(folder, f"{_few(lost)} not in the files that {INDEX} names; fetch the checkpoint again")
        elif single.is_file():
            self.stored.update(_header(single))
        elif INDEX in missing_files(folder):
            raise unusable(folder, f"it holds parts of a checkpoint, but not the {INDEX} that lists them; fetch that too")
        else:
            raise unusable(folder, f"it has neither {SINGLE} nor {INDEX}; give a checkpoint in safetensors files")

    def check(self, config: ModelConfig) -> None:
        """Raise LoadError unless the tensors are those of this model."""
        why = misfit(config, {name: at.shape for name, at in self.stored.items()})
        if why is not None:
            raise unusable(self.folder, f"{why}; fetch the whole checkpoint that belongs to this config.json")

    def read(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`, a contiguous tensor of the stored shape, converting to its dtype and device."""
        at = self.stored[name]
        flat = out.view(-1)
        if STORED[at.dtype] == out.dtype and out.device.type == "cpu":
            with at.file.open("rb", buffering=0) as file:
                _fill(file, at.start, flat)
            return
        begin = 0
        for piece in self._pieces(name, out.device.type == "cuda"):
            flat[begin : begin + len(piece)].copy_(piece)
            begin += len(piece)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same values."""
        a, b = self.stored[name], self.stored[other]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return all(torch.equal(x, y) for x, y in zip(self._pieces(name), self._pieces(other), strict=True))

    def _pieces(self, name: str, pinned: bool = False) -> Iterator[Tensor]:
        """The tensor's values in order, up to STAGE bytes at a time. Each piece is overwritten by the next."""
        at = self.stored[name]
        dtype = STORED[at.dtype]
        size = min(STAGE, at.stop - at.start) // dtype.itemsize
        stage = torch.empty(size, dtype=dtype, pin_memory=pinned)
        with at.file.open("rb", buffering=0) as file:
            for start in range(at.start, at.stop, max(1, size * dtype.itemsize)):
                piece = stage[: (at.stop - start) // dtype.itemsize]
                _fill(file, start, piece)
                yield piece


def _fill(file: FileIO, start: int, out: Tensor) -> None:
    """Read `out` from an unbuffered file, from byte `start` on."""
    into = out.view(torch.uint8).numpy().data
    file.seek(start)
    while len(into):
        n = file.readinto(into)
        if not n:
            raise LoadError("model", str(file.name), "the file ended early; fetch it again")
        into = into[n:]


def _header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    broken = unusable(path.parent, f"{path.name} is not a whole safetensors file; fetch it again")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise broken
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise broken from None
    if not isinstance(header, dict):
        raise broken
    stored = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise broken from None
        if not all(type(n) is int and 0 <= n < 2**62 for n in (*shape, start, stop)):
            raise broken
        if not isinstance(dtype, str) or dtype not in STORED:
            raise unusable(path.parent, f"tensor {name} is stored as {dtype}; give a checkpoint in one of {', '.join(STORED)}")
        if 8 + length + stop > size or stop - start != math.prod(shape) * STORED[dtype].itemsize:
            raise broken
        stored[name] = Stored(path, dtype, shape, 8 + length + start, 8 + length + stop)
    return stored
