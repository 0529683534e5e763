"""Loading: a decoder's weights from safetensors or .gguf files. Each stacked dense matrix is allocated once, and the
checkpoint's tensors are read into their parts of it, so loading needs little more memory than the weights. Matrices in blocks
stay in the .gguf file, which is mapped. A missing, surplus, misshaped or non-finite tensor is an error that names it.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.kernels import cpu
from forerun.models import manifest
from forerun.models.blocks import FORMATS, Blocks, Part, dequantized, quantized, row_bytes
from forerun.models.config import FAMILIES, ModelConfig
from forerun.models.files import INDEX, MANIFEST, SINGLE, Stored, missing_files, weight_map
from forerun.models.weights import Dense, Layer, Matrix, Weights
from forerun.types import LoadError, SettingError

LOG = logging.getLogger("forerun")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROTATIONS = ".rotary_emb.inv_freq"  # tensors of old checkpoints, which follow from config.json
STAGE = 32 * 2**20  # bytes read at a time where tensors are converted or copied to a device
STORED = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool,
}  # fmt: skip
QUANTIZED = {"int8": "Q8_0", "int4": "Q4_0"}  # the formats into which a checkpoint can be quantised


class Place(NamedTuple):
    """What a matrix or a vector of the decoder is stored as: tensors of these names, one after the other, with these numbers of
    rows. columns: None for a vector."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int | None = None


def places(config: ModelConfig, layer: int, at: str = "") -> dict[str, Place]:
    """The matrices and vectors that a layer has, by the fields of Layer. at: what their names begin with."""
    at, hidden, inner = at or f"model.layers.{layer}.", config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found = {
        "attention_norm": Place((f"{at}input_layernorm.weight",), (hidden,)),
        "mlp_norm": Place((f"{at}post_attention_layernorm.weight",), (hidden,)),
        "qkv": Place(tuple(f"{at}self_attn.{x}_proj.weight" for x in "qkv"), (q, kv, kv), hidden),
    }
    if config.qkv_bias:
        found["qkv_bias"] = Place(tuple(f"{at}self_attn.{x}_proj.bias" for x in "qkv"), (q, kv, kv))
    if config.qk_norm:
        found |= {f"{x}_norm": Place((f"{at}self_attn.{x}_norm.weight",), (config.head_dim,)) for x in "qk"}
    if config.out_bias:
        found["out_bias"] = Place((f"{at}self_attn.o_proj.bias",), (hidden,))
    return found | {
        "out": Place((f"{at}self_attn.o_proj.weight",), (hidden,), q),
        "gate_up": Place((f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"), (inner, inner), hidden),
        "down": Place((f"{at}mlp.down_proj.weight",), (hidden,), inner),
    }


def outside(config: ModelConfig) -> dict[str, Place]:
    """What a decoder has outside its layers, by the fields of Weights. A tied head is the embedding."""
    table = (config.vocab_size,), config.hidden_size
    found = {"embedding": Place((EMBEDDING,), *table), "norm": Place(("model.norm.weight",), (config.hidden_size,))}
    return found if config.tied else found | {"head": Place((HEAD,), *table)}


def assemble(config: ModelConfig, dtype: torch.dtype, make: Callable[[Place], Any], interleaved: bool = False) -> Weights:
    """Weights of which `make` gives each matrix and vector."""
    optional: dict[str, Any] = dict.fromkeys(("qkv_bias", "q_norm", "k_norm", "out_bias"))
    made = {field: make(place) for field, place in outside(config).items()}
    made.setdefault("head", made["embedding"])
    layers = [optional | {field: make(at) for field, at in places(config, i).items()} for i in range(config.layers)]
    return Weights(dtype, layers=tuple(Layer(**layer) for layer in layers), interleaved=interleaved, **made)


def empty(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, kind: type[Matrix] = Dense
) -> Weights:
    """Weights of the right shapes, uninitialised, with matrices of this kind. On device "meta" they take no memory."""

    def make(place: Place) -> Matrix | Tensor:
        if place.columns is None:
            return torch.empty(sum(place.rows), dtype=dtype, device=device)
        return kind.empty(sum(place.rows), place.columns, dtype, device)

    return assemble(config, dtype, make)


def parts(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a checkpoint must hold, by name, with the part of the weights' memory that it fills."""
    for field, place in outside(config).items():
        yield from _parts(place, getattr(weights, field))
    for i, layer in enumerate(weights.layers):
        for field, place in places(config, i).items():
            yield from _parts(place, getattr(layer, field))


def _parts(place: Place, whole: Matrix | Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, rows in zip(place.names, whole.split(place.rows), strict=True):
        if isinstance(rows, Matrix):
            stem = name.removesuffix("weight")
            yield from ((stem + part, tensor) for part, tensor in rows.stored.items())
        else:
            yield name, rows


def load(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, matrices: str = "dense"
) -> Weights:
    """The weights of a folder. matrices: "dense" (in dtype); "stored": those of a .gguf that are in blocks stay so; "int8" or
    "int4": quantised to QUANTIZED. The last three on a CPU only. Raises LoadError naming the tensor that is missing, surplus,
    misshaped or not finite in this dtype; SettingError for a checkpoint that cannot be quantised."""
    checkpoint: Source = GgufCheckpoint(folder, config) if (folder / MANIFEST).is_file() else Checkpoint(folder)
    checkpoint.check(config)  # before memory is allocated
    if config.tied and HEAD in checkpoint.stored and not checkpoint.same(HEAD, EMBEDDING):
        why = "lm_head.weight differs from the embedding; give false in config.json"
        raise LoadError("tie_word_embeddings", True, f"{why} (in {folder})")
    if matrices in QUANTIZED:
        _check_quantizable(checkpoint, matrices)
        return assemble(config, dtype, partial(read_quantized, checkpoint, dtype, QUANTIZED[matrices]))
    if matrices == "stored" and isinstance(checkpoint, GgufCheckpoint):
        return checkpoint.mapped(dtype)
    weights = empty(config, dtype, device)
    wanted = dict(parts(config, weights))
    for name, out in wanted.items():
        checkpoint.read(name, out)
    check_finite(folder, wanted)
    return weights


def misfit(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why tensors of these names and shapes are not a checkpoint of this model; None if they are. A copy of a tied head, the
    rotation tables of old checkpoints and modules for multi-token prediction are allowed."""
    wanted = {name: tuple(t.shape) for name, t in parts(config, empty(config, torch.float32, "meta"))}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        return f"{few(missing)} missing"
    allowed = {HEAD} if config.tied else set()
    modules = FAMILIES[config.architecture].modules
    surplus = [n for n in shapes if n not in wanted and n not in allowed and not n.startswith(modules)]
    surplus = [n for n in surplus if not n.endswith(ROTATIONS)]
    if surplus:
        return f"{few(surplus)} not part of {config.architecture} with {config.layers} layers"
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


def named(dtype: torch.dtype) -> str:
    """The dtype's name as a setting: float32, bfloat16, float16."""
    return str(dtype).removeprefix("torch.")


def few(names: list[str]) -> str:
    """Some names as the start of a sentence: "tensors a, b are"."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"


def check_finite(folder: Path, wanted: Mapping[str, Tensor]) -> None:
    """Raise LoadError, naming the tensor, if one of these has a value that is not finite."""
    # any NaN or infinity makes the sum non-finite, and a sum is cheap; it may also overflow, so values are checked then
    sums = torch.stack([t.sum().float() for t in wanted.values()])
    if bool(torch.isfinite(sums).all()):
        return
    for name, tensor in wanted.items():
        if not bool(torch.isfinite(tensor).all()):
            instead = "" if tensor.dtype == torch.float32 else ", or give dtype float32"
            raise unusable(folder, f"tensor {name} has values not finite in {named(tensor.dtype)}; fetch it again{instead}")


def _check_quantizable(checkpoint: Source, setting: str) -> None:
    """Raise SettingError unless every matrix is stored in 16 bits or more and has rows of whole blocks."""
    for name, at in checkpoint.stored.items():
        if at.dtype in FORMATS or at.dtype not in STORED:
            why = f"the file holds blocks already ({name} is {at.dtype}); leave it out, and they are used as they are"
            raise SettingError("quantization", setting, why)
        values, _ = FORMATS[QUANTIZED[setting]]
        if len(at.shape) == 2 and at.shape[1] % values:
            why = f"tensor {name} has {at.shape[1]} columns, which is no multiple of {values}; leave it out"
            raise SettingError("quantization", setting, why)


def read_quantized(checkpoint: Source, dtype: torch.dtype, format: str, place: Place) -> Blocks | Tensor:
    """A matrix in blocks of a format of QUANTIZED, or a vector in dtype. Piece by piece, so that little more memory is needed
    than for the result. Raises LoadError for values that are not finite."""
    if place.columns is None:
        return read_dense(checkpoint, dtype, place)
    data, begin = torch.empty(sum(place.rows), row_bytes(format, place.columns), dtype=torch.uint8), 0
    for name in place.names:
        for piece in checkpoint.pieces(name):
            rows = piece.float().view(-1, place.columns)
            check_finite(checkpoint.folder, {name: rows})
            data[begin : begin + len(rows)] = quantized(rows, format)
            begin += len(rows)
    return Blocks([Part(format, data)], dtype)


def read_dense(checkpoint: Source, dtype: torch.dtype, place: Place, device: torch.device | str = "cpu") -> Tensor:
    """A vector, or the dense values of a matrix. Raises LoadError for values that are not finite."""
    columns = () if place.columns is None else (place.columns,)
    out = torch.empty(sum(place.rows), *columns, dtype=dtype, device=device)
    for name, part in zip(place.names, out.split(place.rows), strict=True):
        checkpoint.read(name, part)
        check_finite(checkpoint.folder, {name: part})
    return out


def pair_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of q or k of a llama. llama.cpp rotates neighbouring rows of a head together; transformers pairs the
    two halves. So rows 0, 1, 2, 3, .. of each head come into the order 0, 2, .., 1, 3, ..  [heads*D, ..] -> the same"""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(rows.shape)


class Source(Protocol):
    """A checkpoint on disk. stored: its tensors by name."""

    folder: Path
    stored: dict[str, Stored]

    def check(self, config: ModelConfig) -> None:
        """Raise LoadError unless the tensors are those of this model."""

    def read(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`, a contiguous tensor of the stored shape, converting to its dtype and device."""

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same values."""

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The values of a tensor in order, flat: whole rows, about STAGE bytes at a time. A piece is valid until the next."""


class GgufCheckpoint:
    """The .gguf files that the manifest of a folder names."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Maps the files; reads none of their tensors."""
        self.folder, self._config = folder, config
        files, self.stored, self._interleaved = manifest.read(folder)
        self._bytes = {}
        for file in files:
            try:
                self._bytes[file] = np.memmap(file, np.uint8, "r")
            except OSError as error:
                raise LoadError("model", str(file), f"cannot be read ({error.strerror})") from None

    def check(self, config: ModelConfig) -> None:
        why = misfit(config, {name: at.shape for name, at in self.stored.items()})
        broken = [name for name in self.stored if not self._fits(name)] if why is None else []
        if broken:
            why = f"{few(broken)} not as large as the shape and the format"
        if why is not None:
            raise unusable(self.folder, f"{why}; give the .gguf file again")

    def _fits(self, name: str) -> bool:
        """Whether the tensor has the bytes of its shape in its format."""
        at = self.stored[name]
        rows, columns, size = math.prod(at.shape[:-1]), at.shape[-1], at.stop - at.start
        if at.dtype in FORMATS:
            return columns % FORMATS[at.dtype][0] == 0 and size == rows * row_bytes(at.dtype, columns)
        try:
            return size % rows == 0 and dequantized(self.rows(name)[:1], at.dtype).shape[-1] == columns
        except (KeyError, ValueError, ZeroDivisionError, NotImplementedError):
            return False

    def rows(self, name: str) -> Tensor:
        """The tensor's bytes in the mapped file: [rows, bytes of a row] uint8, read-only."""
        at = self.stored[name]
        rows = math.prod(at.shape[:-1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that it must not write to
            return torch.from_numpy(self._bytes[at.file][at.start : at.stop].reshape(rows, -1))

    def pieces(self, name: str) -> Iterator[Tensor]:
        at, data, head = self.stored[name], self.rows(name), self._config.head_dim
        step = max(STAGE // (4 * at.shape[-1]) // head, 1) * head  # whole heads, so that their rows can be reordered
        paired = self._paired(name)
        for begin in range(0, len(data), step):
            piece = dequantized(data[begin : begin + step], at.dtype)
            piece = piece.view(-1, *at.shape[1:])
            yield (pair_halves(piece, head) if paired else piece).view(-1)

    def _paired(self, name: str) -> bool:
        """Whether the rows of each head are to be reordered (pair_halves)."""
        return self._interleaved and ("q_proj" in name or "k_proj" in name)

    def read(self, name: str, out: Tensor) -> None:
        at = self.stored[name]
        if at.dtype in FORMATS and out.device.type == "cpu":
            part = Part(at.dtype, self.rows(name))
            order = torch.arange(len(part.data))
            if self._paired(name):
                order = pair_halves(order, self._config.head_dim)
            if cpu.expand(part, order, out):
                return
        _copy(self.pieces(name), out)

    def same(self, name: str, other: str) -> bool:
        a, b = self.stored[name], self.stored[other]
        return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(self.rows(name), self.rows(other))

    def mapped(self, dtype: torch.dtype) -> Weights:
        """Weights with the matrices that are in blocks as they lie in the file, without a copy. A matrix of which a part has
        another format is dense in dtype. Raises LoadError for a tensor that is not finite: of a matrix in blocks only the first
        row is looked at, since all of it would have to be read from the disk."""
        expanded = Counter[str]()
        interleaved, self._interleaved = self._interleaved, False  # rows stay in the order of the file

        def make(place: Place) -> Matrix | Tensor:
            found = [self.stored[name].dtype for name in place.names]
            if place.columns is None:
                return read_dense(self, dtype, place)
            if others := [kind for kind in found if kind not in FORMATS]:
                expanded.update(others)
                return Dense(read_dense(self, dtype, place))
            parts = [Part(kind, self.rows(name)) for kind, name in zip(found, place.names, strict=True)]
            for name, part in zip(place.names, parts, strict=True):
                check_finite(self.folder, {name: Part(part.format, part.data[:1]).dense()})
            return Blocks(parts, dtype)

        weights = assemble(self._config, dtype, make, interleaved)
        if expanded:
            told = ", ".join(f"{count} in {kind}" for kind, count in expanded.most_common())
            LOG.info("Expanded to %s, since kernels do not multiply their formats: %s", named(dtype), told)
        return weights


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
                raise unusable(folder, f"{few(lost)} not in the files that {INDEX} names; fetch the checkpoint again")
        elif single.is_file():
            self.stored.update(_header(single))
        elif INDEX in missing_files(folder):
            raise unusable(folder, f"it holds parts of a checkpoint, but not the {INDEX} that lists them; fetch that too")
        else:
            raise unusable(folder, f"it has neither {SINGLE} nor {INDEX}; give a checkpoint in safetensors files")

    def check(self, config: ModelConfig) -> None:
        why = misfit(config, {name: at.shape for name, at in self.stored.items()})
        if why is not None:
            raise unusable(self.folder, f"{why}; fetch the whole checkpoint that belongs to this config.json")

    def read(self, name: str, out: Tensor) -> None:
        at = self.stored[name]
        if STORED[at.dtype] == out.dtype and out.device.type == "cpu":
            with at.file.open("rb", buffering=0) as file:
                _fill(file, at.start, out.view(-1))
        else:
            _copy(self.pieces(name, out.device.type == "cuda"), out)

    def same(self, name: str, other: str) -> bool:
        a, b = self.stored[name], self.stored[other]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return all(torch.equal(x, y) for x, y in zip(self.pieces(name), self.pieces(other), strict=True))

    def pieces(self, name: str, pinned: bool = False) -> Iterator[Tensor]:
        at = self.stored[name]
        dtype = STORED[at.dtype]
        width = math.prod(at.shape[1:])
        rows = min(max(STAGE // dtype.itemsize // max(width, 1), 1), math.prod(at.shape[:1]))
        stage = torch.empty(rows * width, dtype=dtype, pin_memory=pinned)
        with at.file.open("rb", buffering=0) as file:
            for start in range(at.start, at.stop, max(1, len(stage) * dtype.itemsize)):
                piece = stage[: (at.stop - start) // dtype.itemsize]
                _fill(file, start, piece)
                yield piece


def _copy(pieces: Iterator[Tensor], out: Tensor) -> None:
    begin, flat = 0, out.view(-1)
    for piece in pieces:
        flat[begin : begin + len(piece)].copy_(piece)
        begin += len(piece)


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
