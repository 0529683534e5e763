"""Heads from folders, random heads, and heads to folders. A head has the device and the dtype of its target. On a CPU its
matrices are in blocks (Q8_0, a vocabulary head of its own Q4_1) unless all is float32, since a dense head takes twice as long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.heads.block import Block, BlockWeights
from forerun.heads.chain import Chain, ChainWeights, Module
from forerun.heads.config import HeadConfig
from forerun.heads.files import open_checkpoint
from forerun.heads.layouts import EMBEDDING, HEAD, KEPT, OFFSETS, VERIFIER, Names, names, settings
from forerun.heads.trained import CHANCE, agreement, sample
from forerun.kernels import reference
from forerun.models import rope
from forerun.models.blocks import FORMATS, Blocks
from forerun.models.decoder import PADDING, Target
from forerun.models.loading import (
    QUANTIZED,
    ROTATIONS,
    STORED,
    Place,
    Source,
    few,
    places,
    read_dense,
    read_quantized,
    unusable,
)
from forerun.models.weights import Dense, Layer, Matrix

LOG = logging.getLogger("forerun")

FORMAT = QUANTIZED["int8"]
HEAD_FORMAT = "Q4_1"  # of the vocabulary head, half of what a pass reads: drafts are as good as with Q8_0 (docs/log.md)
Make = Callable[[Place], Any]


def format_of(place: Place) -> str:
    """The block format of a matrix. place: as outside, of_module and of_layer give it."""
    return HEAD_FORMAT if HEAD in place.names else FORMAT


def outside(config: HeadConfig) -> dict[str, Place]:
    """The matrices and vectors that a head of its own has outside its modules or layers, by the fields of its weights; the
    norms of states are under state_norms.0 and so on."""
    hidden, width = config.decoder.hidden_size, config.target_hidden * len(config.states)
    found = {}
    if config.own_embedding:
        found["embedding"] = Place((EMBEDDING,), (config.target_vocab,), hidden)
    if config.own_head:
        found["head"] = Place((HEAD,), (config.draft_vocab,), hidden)
    if config.method in ("eagle3", "dflash"):
        found["fc"] = Place(("fc.weight",), (hidden,), width)
    if config.state_norms == "all":
        found["state_norms.0"] = Place(("input_norm.weight",), (width,))
    elif config.state_norms == "each":
        for i in range(len(config.states)):
            found[f"state_norms.{i}"] = Place((f"fc_norm.{i}.weight",), (config.target_hidden,))
    if config.method == "dflash":
        found |= {"feature_norm": Place(("hidden_norm.weight",), (hidden,)), "norm": Place(("norm.weight",), (hidden,))}
    return found


def of_module(config: HeadConfig, index: int) -> dict[str, Place]:
    """What a module of a chain head has beside its layer, by the fields of Module."""
    hidden, at = config.decoder.hidden_size, f"mtp_layers.{index}."
    if config.method == "eagle":
        bias = {"fc_bias": Place(("fc.bias",), (hidden,))} if config.fc_bias else {}
        return {"fc": Place(("fc.weight",), (hidden,), 2 * hidden)} | bias
    norms = {"embedding_norm": "midlayer.input_layernorm", "feature_norm": "midlayer.hidden_norm", "norm": "norm"}
    if config.method == "mtp":
        norms = {"embedding_norm": "token_layernorm", "feature_norm": "hidden_layernorm", "norm": "final_layernorm"}
        norms = {field: at + name for field, name in norms.items()}
    found = {field: Place((f"{name}.weight",), (hidden,)) for field, name in norms.items()}
    return found | ({"fc": Place((f"{at}input_proj.weight",), (hidden,), 2 * hidden)} if config.method == "mtp" else {})


def of_layer(config: HeadConfig, index: int) -> dict[str, Place]:
    """What a layer has, by the fields of Layer."""
    at = {"eagle": "layers.0.", "eagle3": "midlayer.", "mtp": f"mtp_layers.{index}.", "dflash": f"layers.{index}."}
    found = places(config.decoder, index, at[config.method])
    if config.method in ("eagle", "eagle3"):
        del found["attention_norm"]
    if config.method == "eagle3":
        found["qkv"] = found["qkv"]._replace(columns=2 * config.decoder.hidden_size)
    return found


def assemble(config: HeadConfig, target: Target, make: Make, ids: Tensor | None) -> ChainWeights | BlockWeights:
    """Weights of which `make` gives each matrix and vector, and the target what it shares."""
    made = {field: make(place) for field, place in outside(config).items()}
    norms = tuple(made.pop(field) for field in sorted(made) if field.startswith("state_norms."))
    weights = target.weights
    made = {"embedding": weights.embedding, "head": weights.head} | made | {"state_norms": norms, "ids": ids}
    nothing: dict[str, Any] = dict.fromkeys(("qkv_bias", "q_norm", "k_norm", "out_bias"))
    nothing["attention_norm"] = torch.empty(0, dtype=target.dtype, device=target.device)
    layers = tuple(
        Layer(**nothing | {field: make(place) for field, place in of_layer(config, i).items()})
        for i in range(config.decoder.layers)
    )
    if config.method == "dflash":
        return BlockWeights(target.dtype, layers=layers, **made)
    absent = dict.fromkeys(("embedding_norm", "feature_norm", "fc", "fc_bias", "norm"))
    modules = tuple(
        Module(layer=layer, **absent | {field: make(place) for field, place in of_module(config, i).items()})
        for i, layer in enumerate(layers)
    )
    return ChainWeights(target.dtype, modules=modules, target_norm=weights.norm if config.normed else None, **made)


def wanted(config: HeadConfig) -> Iterator[Place]:
    """Every matrix and vector that the folder of a head must hold."""
    yield from outside(config).values()
    for i in range(config.decoder.layers):
        if config.method != "dflash":
            yield from of_module(config, i).values()
        yield from of_layer(config, i).values()


def in_blocks(target: Target) -> bool:
    """Whether the matrices of a head of this target are quantised: on a CPU below float32. A draft only has to be likely, and a
    head reads its weights once for each drafted token."""
    small = target.quantization is not None or target.dtype != torch.float32
    return small and target.device.type == "cpu" and target.kernels is not reference and target.kernels.multiplies(Blocks.kind)


def load(folder: Path, config: HeadConfig, target: Target) -> Chain | Block:
    """The head in a folder, of the shape that layouts.read_config gives, on its target's device and in its dtype. A copy of the
    target's embedding or vocabulary head is not kept: the target's is used, and the head's config says so. Raises LoadError
    naming the tensor that is missing, surplus, misshaped, not finite, random or all zero."""
    checkpoint = open_checkpoint(folder)
    found = names(settings(folder), checkpoint.stored, config.method)
    _check(checkpoint, config, found)
    ids = _ids(checkpoint, config, found, target)

    def shares(name: str, shared: Matrix) -> bool:
        return _is_copy(checkpoint, found.stored(name, checkpoint.stored), shared, target)

    if config.own_embedding and shares(EMBEDDING, target.weights.embedding):
        config = replace(config, own_embedding=False)
    if config.own_head and not config.mapped and shares(HEAD, target.weights.head):
        config = replace(config, own_head=False)
    quantise = in_blocks(target)

    def make(place: Place) -> Matrix | Tensor:
        format = format_of(place)
        place = place._replace(names=tuple(found.stored(name, checkpoint.stored) for name in place.names))
        if place.columns is None:
            if found.minus_one and "norm" in place.names[0]:
                return (read_dense(checkpoint, torch.float32, place) + 1).to(target.device, target.dtype)
            return read_dense(checkpoint, target.dtype, place, target.device)
        if quantise and place.columns % FORMATS[format][0] == 0:
            blocks = read_quantized(checkpoint, target.dtype, format, place)
            assert isinstance(blocks, Blocks)
            return blocks
        return Dense(read_dense(checkpoint, target.dtype, place, target.device))

    weights = assemble(config, target, make, ids)
    if config.own_head and not config.mapped:
        weights = weights._replace(head=weights.head.narrow(0, target.vocab))
    of_target = target.weights
    if config.own_embedding:
        _check_trained(folder, found.stored(EMBEDDING, checkpoint.stored), weights.embedding, of_target.embedding, None)
    if config.own_head:
        _check_trained(folder, found.stored(HEAD, checkpoint.stored), weights.head, of_target.head, ids)
    return _head(config, weights, target)


def random(config: HeadConfig, target: Target, seed: int = 0) -> Chain | Block:
    """A head of this shape with random weights, for tests and benchmarks. Their scale keeps activations from vanishing or
    exploding. An embedding and a vocabulary head are the target's with noise, so that `load` takes them for trained ones."""
    generator = torch.Generator(target.device).manual_seed(seed)
    ids = None
    if config.mapped:
        ids = torch.linspace(0, target.vocab - 1, config.draft_vocab, device=target.device, dtype=torch.float64).long()

    def make(place: Place) -> Matrix | Tensor:
        rows = sum(place.rows)
        if place.columns is None:
            value = 0.0 if place.names[0].endswith("bias") else 1.0
            return torch.full((rows,), value, dtype=target.dtype, device=target.device)
        values = torch.empty(rows, place.columns, dtype=target.dtype, device=target.device)
        values.normal_(0, place.columns**-0.5, generator=generator)
        near = {EMBEDDING: target.weights.embedding, HEAD: target.weights.head}.get(place.names[0])
        if near is not None and near.columns == place.columns:
            rows_of = torch.arange(rows, device=target.device) if ids is None or place.names[0] == EMBEDDING else ids
            theirs = near.embed(rows_of.clamp(max=near.rows - 1))
            values.mul_(0.3 * place.columns**0.5 * theirs.float().std().to(target.dtype)).add_(theirs)
        if in_blocks(target) and place.columns % FORMATS[format_of(place)][0] == 0:
            return Blocks.quantize(values, format_of(place), target.dtype)
        return Dense(values)

    return _head(config, assemble(config, target, make, ids), target)


def _head(config: HeadConfig, weights: ChainWeights | BlockWeights, target: Target) -> Chain | Block:
    positions = target.max_positions + PADDING + config.block_size
    tables = rope.tables(config.decoder.rope, config.decoder.head_dim, positions, target.device)
    if isinstance(weights, BlockWeights):
        return Block(config, weights, target.kernels, *tables)
    return Chain(config, weights, target.kernels, *tables)


def _check(checkpoint: Source, config: HeadConfig, found: Names) -> None:
    """Raise LoadError unless the folder's tensors are those of this head."""
    stored, folder = checkpoint.stored, checkpoint.folder
    shapes: dict[str, tuple[int, ...]] = {}
    for place in wanted(config):
        tail = () if place.columns is None else (place.columns,)
        shapes |= {found.stored(name, stored): (rows, *tail) for name, rows in zip(place.names, place.rows, strict=True)}
    tables = {OFFSETS: (config.draft_vocab,), KEPT: (config.target_vocab,)}
    tables = {name: shape for name, shape in tables.items() if name in stored}
    missing = [name for name in shapes if name not in stored]
    inside = [name for name in stored if name.startswith(found.inside)]
    ignored = {found.stored(name, stored) for name in VERIFIER}
    ignored |= {again for again, first in found.again if first in shapes and again in stored}
    other = next((pair for pair in found.again if pair[0] in ignored and not checkpoint.same(*pair)), None)
    if other is not None:
        raise unusable(folder, f"tensor {other[0]} differs from {other[1]}; modules with heads of their own are not supported")
    surplus = [n for n in inside if n not in shapes and n not in tables and n not in ignored and not n.endswith(ROTATIONS)]
    if missing:
        also = f"; {few(surplus)} not part of the head" if surplus else ""
        raise unusable(folder, f"{few(missing)} missing{also}; fetch the whole checkpoint")
    if surplus:
        raise unusable(folder, f"{few(surplus)} not part of a head of method {config.method}; give the head's own config.json")
    for name, shape in (shapes | tables).items():
        if stored[name].shape != shape:
            why = f"tensor {name} has shape {list(stored[name].shape)}, expected {list(shape)}"
            raise unusable(folder, f"{why}; give the config.json that belongs to the head")
    whole = [name for name in shapes if not STORED[stored[name].dtype].is_floating_point]
    if whole:
        raise unusable(folder, f"{few(whole)} stored as {stored[whole[0]].dtype}; give bfloat16")


def _ids(checkpoint: Source, config: HeadConfig, found: Names, target: Target) -> Tensor | None:
    """The target's ids of the draft ids. Raises LoadError for tables that are missing, disagree or point outside."""
    stored, folder, size = checkpoint.stored, checkpoint.folder, config.draft_vocab
    if OFFSETS not in stored:
        if config.mapped:
            why = f"a draft vocabulary of {size} out of {config.target_vocab} needs it"
            raise unusable(folder, f"tensor {OFFSETS} is missing, and {why}; fetch the whole checkpoint")
        return None
    offsets = torch.empty(size, dtype=torch.int64)
    checkpoint.read(OFFSETS, offsets)
    ids = offsets + torch.arange(size)
    outside = (ids < 0) | (ids >= target.vocab)
    if config.mapped and bool(outside.any()):
        at = int(outside.nonzero()[0])
        why = f"tensor {OFFSETS} gives draft id {at} the target's id {int(ids[at])}, which is not below {target.vocab}"
        raise unusable(folder, f"{why}; give a head that was trained for this target")
    if len(ids.unique()) != size:
        raise unusable(folder, f"tensor {OFFSETS} gives two draft ids the same id of the target; fetch it again")
    if KEPT in stored:
        kept = torch.empty(config.target_vocab, dtype=torch.bool)
        checkpoint.read(KEPT, kept)
        if not torch.equal(kept.nonzero()[:, 0], ids.sort().values):
            raise unusable(folder, f"tensors {OFFSETS} and {KEPT} disagree about the draft vocabulary; fetch the head again")
    if config.mapped:
        return ids.to(target.device)
    if bool(offsets.any()):
        raise unusable(folder, f"tensor {OFFSETS} is not 0 though the draft vocabulary is the target's; fetch the head again")
    return None


def _check_trained(folder: Path, name: str, matrix: Matrix, of_target: Matrix, ids: Tensor | None) -> None:
    """Raise LoadError if a vocabulary head or an embedding is zero or random. ids: the target's, of its rows."""
    at = sample(min(matrix.rows, of_target.rows) if ids is None else matrix.rows)
    at = at.to(next(iter(matrix.stored.values())).device)
    rows, theirs = matrix.embed(at), of_target.embed(at if ids is None else ids[at])
    zero = int((rows == 0).all(1).sum())
    if zero > len(at) // 2:
        raise unusable(folder, f"tensor {name} is zero in {zero} of {len(at)} rows; fetch the checkpoint of a trained head")
    found = agreement(rows, theirs)
    if found is not None and found < CHANCE:
        why = "tokens that are alike for the target are not alike in it"
        told = f"({found:.1f} standard deviations from chance, trained ones more than {CHANCE:g})"
        raise unusable(folder, f"tensor {name} looks random: {why} {told}; fetch the checkpoint of a trained head")


def _is_copy(checkpoint: Source, name: str, matrix: Matrix, target: Target) -> bool:
    """Whether a tensor is the target's matrix, as exactly as this is stored."""
    begin, columns = 0, checkpoint.stored[name].shape[1]
    if columns != matrix.columns:
        return False
    for piece in checkpoint.pieces(name):
        given = piece.view(-1, columns)[: matrix.rows - begin].to(target.device, target.dtype)
        if not len(given):
            break
        own = matrix.narrow(begin, len(given)).dense()
        if isinstance(matrix, Dense):
            alike = torch.equal(given, own)
        else:
            alike = float((given.float() - own.float()).norm()) <= 0.1 * float(given.float().norm())
        if not alike:
            return False
        begin += len(given)
    return True
