"""A second kind of matrix, block-quantised and defined only here, goes through loading, the reference kernels and a whole
target. And the memory that weights take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, cpu, reference
from forerun.models import loading
from forerun.models.config import ModelConfig
from forerun.models.decoder import Target
from forerun.models.weights import Dense, Layer, Matrix, Weights
from forerun.types import SettingError
from tests.tiny import random_tensors, tiny_model

BLOCK = 32


class Int8Blocks(Matrix):
    """8-bit integers with a float32 scale for each block of 32 along a row."""

    kind = "int8 blocks"

    def __init__(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """numbers: [rows, columns] int8; scales: [rows, columns / 32] float32."""
        self.rows, self.columns = numbers.shape
        self.dtype = dtype
        self.stored = {"weight": numbers, "scales": scales}

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str) -> Int8Blocks:
        numbers = torch.empty(rows, columns, dtype=torch.int8, device=device)
        return cls(numbers, torch.empty(rows, columns // BLOCK, device=device), dtype)

    def _expanded(self, at: Tensor | slice) -> Tensor:
        numbers, scales = self.stored["weight"][at], self.stored["scales"][at]
        return (numbers.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2).to(self.dtype)

    def dense(self) -> Tensor:
        return self._expanded(slice(None))

    def embed(self, ids: Tensor) -> Tensor:
        return self._expanded(ids)

    def narrow(self, first: int, count: int) -> Int8Blocks:
        numbers, scales = (t[first : first + count] for t in self.stored.values())
        return Int8Blocks(numbers, scales, self.dtype)


def quantised(values: Tensor) -> dict[str, Tensor]:
    """The tensors of Int8Blocks for values [rows, columns] float32."""
    blocks = values.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1) / 127
    return {"weight": (blocks / scales[..., None]).round().to(torch.int8).flatten(-2), "scales": scales}


def fill(config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Quantised weights, filled part by part by the names of a checkpoint, as loading does."""
    weights, given = loading.empty(config, dtype, "cpu", Int8Blocks), random_tensors(config)
    for name, out in loading.parts(config, weights):
        stem, _, last = name.rpartition(".")
        whole = given[f"{stem}.weight" if last == "scales" else name]
        out.copy_(quantised(whole)[last] if whole.dim() == 2 else whole)
    return weights


def expanded(weights: Weights) -> Weights:
    """The same weights in dense matrices."""

    def dense(layer: Layer) -> Layer:
        qkv, out, gate_up, down = (Dense(matrix.dense()) for matrix in layer.matrices())
        return layer._replace(qkv=qkv, out=out, gate_up=gate_up, down=down)

    embedding = Dense(weights.embedding.dense())
    head = embedding if weights.head is weights.embedding else Dense(weights.head.dense())
    return weights._replace(embedding=embedding, layers=tuple(dense(layer) for layer in weights.layers), head=head)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    return ModelConfig.read(tiny_model(tmp_path, "qwen2", tied=request.param))


def passes(target: Target) -> list[Tensor]:
    """Logits and hidden states of a prompt, a verify step and a plain step."""
    kv, found = target.kv_cache(5, 8), []
    ids = torch.randint(3, 200, (20,), generator=torch.Generator().manual_seed(0))
    for first, last in ((0, 14), (14, 19), (19, 20)):
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        batch = Batch(ids[first:last], torch.arange(first, last), starts, torch.arange(5, dtype=torch.int32)[None], None)
        out = target.forward(batch, kv, layers=(0, 2))
        found += [out.logits, *out.hidden]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_of_another_kind_gives_the_logits_of_its_dense_twin(config: ModelConfig, dtype: torch.dtype) -> None:
    weights = fill(config, dtype)
    target, twin = Target(config, weights, reference), Target(config, expanded(weights), reference)
    assert target.dtype == dtype and target.kv_bytes_per_token == twin.kv_bytes_per_token
    for got, want in zip(passes(target), passes(twin), strict=True):
        assert torch.equal(got, want)
    target.keep_vocabulary(199)
    twin.keep_vocabulary(199)
    assert passes(target)[0].shape == (14, 199)
    for got, want in zip(passes(target), passes(twin), strict=True):
        assert torch.equal(got, want)


def test_quantised_weights_are_near_those_they_come_from(config: ModelConfig) -> None:
    """So the logits on which the twins agree are those of the model, up to quantisation."""
    weights, plain = fill(config, torch.float32), loading.empty(config, torch.float32, "cpu")
    given = random_tensors(config)
    for name, out in loading.parts(config, plain):
        out.copy_(given[name])
    got, want = (passes(Target(config, some, reference))[0] for some in (weights, plain))
    assert 0 < (got - want).norm() / want.norm() < 0.05


def test_stacked_matrices_are_filled_part_by_part(config: ModelConfig) -> None:
    layer, given = fill(config, torch.float32).layers[1], random_tensors(config)
    whole = quantised(torch.cat([given[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkv"]))
    assert layer.qkv.rows == len(whole["weight"]) and all(torch.equal(layer.qkv.stored[name], whole[name]) for name in whole)
    whole = quantised(torch.cat([given[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]))
    assert all(torch.equal(layer.gate_up.stored[name], whole[name]) for name in whole)


@pytest.mark.parametrize("kind", [Dense, Int8Blocks])
def test_embedding_and_narrowing(kind: type[Matrix]) -> None:
    matrix = kind.empty(10, 64, torch.bfloat16, "cpu")
    for tensor in matrix.stored.values():
        tensor.copy_(torch.randint(1, 99, tensor.shape))
    ids = torch.tensor([3, 9, 3])
    assert matrix.embed(ids).dtype == torch.bfloat16 and torch.equal(matrix.embed(ids), matrix.dense()[ids])
    for part, (first, last) in zip(matrix.split((4, 5, 1)), ((0, 4), (4, 9), (9, 10)), strict=True):
        assert (part.rows, part.columns) == (last - first, 64) and torch.equal(part.dense(), matrix.dense()[first:last])
    for tensor in matrix.narrow(2, 3).stored.values():
        tensor.zero_()
    assert not matrix.dense()[2:5].any() and matrix.dense()[[1, 5]].all()


def test_kernels_for_dense_matrices_refuse_another_kind(config: ModelConfig) -> None:
    kernels = cpu.CpuKernels(cpu.library(cpu.isas()[0]), torch.float32)
    weights = fill(config, torch.float32)
    with pytest.raises(SettingError, match=r"kernels=.CpuKernels.*int8 blocks.*give forerun\.kernels\.reference"):
        Target(config, weights, kernels)
    layer = weights.layers[0]
    with pytest.raises(TypeError, match="kind int8 blocks"):
        kernels.linear_add(torch.zeros(1, layer.down.columns), layer.down, None, torch.zeros(1, layer.down.rows))
    with pytest.raises(TypeError, match="kind int8 blocks"):
        cpu.Stack(kernels, [layer], [AttentionShape(4, 2, 32)], 0.0, [torch.zeros(1)], [torch.zeros(1)])
    twin = expanded(weights)
    mixed = twin._replace(embedding=weights.embedding)  # which is only looked up
    for got, want in zip(passes(Target(config, mixed, kernels)), passes(Target(config, twin, kernels)), strict=True):
        assert torch.equal(got, want)


def test_memory_counts_what_is_shared_once(config: ModelConfig) -> None:
    vectors = sum(4 * t.numel() for layer in loading.empty(config, torch.float32, "cpu").layers for t in layer.vectors())
    layers = [(config.heads + 2 * config.kv_heads) * config.head_dim, 2 * config.intermediate_size]
    numbers = sum(rows * config.hidden_size for rows in layers) + config.hidden_size * (
        config.heads * config.head_dim + config.intermediate_size
    )
    numbers = config.layers * numbers + config.vocab_size * config.hidden_size * (1 if config.tied else 2)
    for kind, each in ((Dense, 4.0), (Int8Blocks, 1 + 4 / BLOCK)):
        target = Target(config, loading.empty(config, torch.float32, "cpu", kind), reference)
        assert target.bytes == numbers * each + vectors + 4 * config.hidden_size
        target.keep_vocabulary(100)
        assert target.weights.head.rows == 100 and target.weights.embedding.rows == config.vocab_size
        assert target.weights.bytes == target.bytes
