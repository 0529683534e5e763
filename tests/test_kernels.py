"""The C kernels, for each instruction set that this processor has, against their plain torch twin, over odd shapes; that no
result depends on the other tokens of a batch, bit for bit; and what happens without a compiler."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Kernels, cpu, reference
from forerun.models.decoder import Target
from forerun.models.weights import Dense
from forerun.types import SettingError
from tests.tiny import tiny_model

EPS = 1e-5
BF16, F32 = torch.bfloat16, torch.float32


# integer products (VNNI) are for weights in blocks only: test_blocks.py
EACH = pytest.mark.parametrize("isa", [isa for isa in cpu.isas() if not isa.endswith("vnni")])
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bfloat16", "float32"])


def compiled(isa: str, dtype: torch.dtype, threads: int = 1) -> cpu.CpuKernels:
    return cpu.CpuKernels(cpu.library(isa), dtype, threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weight(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape) * shape[-1] ** -0.5).to(dtype)


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16) -> Dense:
    return Dense(weight(rows, columns, dtype=dtype))


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Within a tolerance relative to the largest value."""
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert got.isfinite().all() and error <= tolerance, f"off by {error:.2e} of the largest value"


def exact(x: Tensor, norm: Tensor | None, w: Dense) -> Tensor:
    """The product in float64 of what the kernel is given."""
    x = x if norm is None else reference.rms_norm(x, norm, EPS)
    return x.double() @ w.values.double().T


SHAPES = [(576, 960), (64, 32), (48, 70), (100, 17), (33, 3), (1536, 576)]  # width, outputs: also not multiples of 32 and 16


@EACH
@DTYPES
@pytest.mark.parametrize(("k", "outs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 7, 13, 65])
def test_linear_layers_agree_with_float64(isa: str, dtype: torch.dtype, k: int, outs: int, rows: int) -> None:
    it = compiled(isa, dtype)
    x, norm, w = weight(rows, k, dtype=dtype) * 8, weight(k, dtype=dtype), matrix(outs, k, dtype=dtype)
    bias, residual = weight(outs, dtype=dtype), weight(rows, outs, dtype=dtype)
    once = 0.004 if dtype == BF16 else 1e-6
    near(it.norm_linear(x, norm, EPS, w, None), exact(x, norm, w), once)
    near(it.norm_linear(x, norm, EPS, w, bias), exact(x, norm, w) + bias.double(), once)
    near(it.linear_add(x, w, None, residual), exact(x, None, w) + residual.double(), once)
    near(it.linear_add(x, w, bias, residual), exact(x, None, w) + bias.double() + residual.double(), once)
    logits = it.norm_logits(x, norm, EPS, w)
    assert logits.dtype == F32
    near(logits, exact(x, norm, w), 1e-5 if dtype == BF16 else 1e-6)
    near(it.linear(x, w, bias), exact(x, None, w) + bias.double(), once)
    logits = it.logits(x, w)
    assert logits.dtype == F32
    near(logits, exact(x, None, w), 1e-5 if dtype == BF16 else 1e-6)
    both = matrix(2 * outs, k, dtype=dtype)
    gate, up = exact(x, norm, both).chunk(2, -1)
    near(it.norm_gate_up(x, norm, EPS, both), torch.nn.functional.silu(gate) * up, 0.01 if dtype == BF16 else 2e-6)


@EACH
@DTYPES
@pytest.mark.parametrize("k", [576, 64, 33])
def test_rms_norm_rounds_as_the_reference(isa: str, dtype: torch.dtype, k: int) -> None:
    x, norm = torch.randn(300, k).to(dtype), torch.rand(k).to(dtype)
    got, want = compiled(isa, dtype).rms_norm(x, norm, EPS), reference.rms_norm(x, norm, EPS)
    near(got, want, 0.004 if dtype == BF16 else 1e-6)
    assert dtype == F32 or (got != want).float().mean() < 0.01  # a sum in another order may change a rare rounding


@EACH
@DTYPES
@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("threads", [1, 2])
def test_parts_are_joined(isa: str, dtype: torch.dtype, tokens: int, threads: int) -> None:
    """Of several widths, some behind norms; the second is a part of the columns of a wider tensor."""
    it, widths = compiled(isa, dtype, threads), (96, 33, 64, 7, 100)
    parts = [torch.randn(tokens, width).to(dtype) for width in widths]
    parts[1] = torch.randn(tokens, 50).to(dtype)[:, 11:44]
    every = [weight(width, dtype=dtype) for width in widths]
    for count, norms in ((1, every), (2, every), (2, [None, *every[1:]]), (5, [None, *every[1:4], None]), (3, [None] * 5)):
        given = parts[:count], norms[:count]
        got, want = it.join(*given, EPS), reference.join(*given, EPS)
        near(got, want, 0.004 if dtype == BF16 else 1e-6)
        begin = 0
        for part, norm in zip(*given, strict=True):
            columns = slice(begin, begin := begin + part.shape[1])
            same = (got[:, columns] == part) if norm is None else (got[:, columns] == want[:, columns])
            assert bool(same.all()) if norm is None else dtype == F32 or same.float().mean() > 0.99
    for part, norm in ((parts[0].double(), None), (parts[2][:, ::2], None), (parts[0], every[0].double())):
        with pytest.raises(TypeError, match="must be"):
            it.join((parts[4], part), (every[4], norm), EPS)


@EACH
@pytest.mark.parametrize("count", [1, 5, 50, 4096, 9001])
def test_the_best_logits_and_their_probabilities(isa: str, count: int) -> None:
    logits = torch.randn(12, count) * 5
    logits[0] = 1.0  # the first of equal ones
    logits[1, -1] = logits[1, count // 2] = 40.0
    logits[2, count // 2] = torch.nan
    logits[3, -1] = torch.nan
    logits[4, 0] = torch.inf
    logits[5] = -torch.inf
    logits[6, 1:] = -torch.inf
    logits[7] += 1e30
    results = [compiled(isa, F32, threads).best(logits) for threads in (1, 3)]
    ids, chances = reference.best(logits)
    assert ids[[2, 3, 4, 5]].tolist() == [0] * 4 and chances[[2, 3, 4, 5]].tolist() == [0] * 4
    assert ids[0] == 0 and ids[1] == count // 2 and chances[6] == 1 and (chances[6:] > 0).all()
    for got_ids, got in results:
        assert got_ids.dtype == torch.int64 and torch.equal(got_ids, ids)
        assert got.dtype == F32 and torch.equal(got, results[0][1])
        torch.testing.assert_close(got, chances, rtol=2e-5, atol=0)
    for row in (1, 11):  # whatever the other rows are
        assert torch.equal(compiled(isa, F32).best(logits[row : row + 1])[1], results[0][1][row : row + 1])


@EACH
@DTYPES
@pytest.mark.parametrize(("k", "outs"), [(100, 17), (64, 40)])
def test_a_token_is_rounded_alike_in_every_batch(isa: str, dtype: torch.dtype, k: int, outs: int) -> None:
    """All operations that know no rows, on 1 to 600 tokens: alone, and between any neighbours."""
    it, most = compiled(isa, dtype), 600
    x, norm, w = weight(most, k, dtype=dtype) * 8, weight(k, dtype=dtype), matrix(2 * outs, k, dtype=dtype)
    bias, residual = weight(2 * outs, dtype=dtype), weight(most, 2 * outs, dtype=dtype)

    def all_of(at: slice) -> tuple[Tensor, ...]:
        mine = x[at]
        return (
            it.norm_linear(mine, norm, EPS, w, None), it.norm_linear(mine, norm, EPS, w, bias),
            it.linear_add(mine, w, None, residual[at]), it.linear_add(mine, w, bias, residual[at]),
            it.norm_gate_up(mine, norm, EPS, w), it.norm_logits(mine, norm, EPS, w), it.rms_norm(mine, norm, EPS),
            it.linear(mine, w, bias), it.logits(mine, w), it.join((mine, residual[at]), (norm, None), EPS),
        )  # fmt: skip

    together = all_of(slice(None))
    generator = random.Random(0)
    batches = [slice(i, i + 1) for i in range(0, most, 37)]
    batches += [
        slice(begin := generator.randrange(0, most - size), begin + size) for size in [*range(2, 81), 127, 128, 129, 500]
    ]
    for at in batches:
        for whole, part in zip(together, all_of(at), strict=True):
            assert torch.equal(whole[at], part), f"{at.stop - at.start} tokens"


class Sequences:
    """Rows of (past, new tokens), with pages scattered at random and, past each row's end, full of NaN."""

    def __init__(self, rows: list[tuple[int, int]], shape: AttentionShape, block: int, dtype: torch.dtype) -> None:
        self.shape, self.block, self.dtype = shape, block, dtype
        longest = max(a + n for a, n in rows)
        width = (longest + block - 1) // block + 2
        pages = width * len(rows) + 5
        self.table = torch.randperm(pages)[: width * len(rows)].to(torch.int32).view(len(rows), width).contiguous()
        self.keys = torch.full((pages, shape.kv_heads, block, shape.head_dim), float("nan"), dtype=dtype)
        self.values = self.keys.clone()
        for row, (past, _) in enumerate(rows):
            at = torch.arange(past)
            page = self.table[row, at // block].long()
            for pool in (self.keys, self.values):
                pool[page, :, at % block] = torch.randn(past, shape.kv_heads, shape.head_dim).to(dtype)
        self.positions = torch.cat([torch.arange(a, a + n) for a, n in rows])
        self.row_start = torch.tensor([0, *(n for _, n in rows)]).cumsum(0).to(torch.int32)
        self.qkv = torch.randn(len(self.positions), (shape.heads + 2 * shape.kv_heads) * shape.head_dim).to(dtype)
        half = torch.arange(shape.head_dim // 2) / (shape.head_dim // 2)
        angle = torch.arange(longest)[:, None] * 10000.0**-half
        self.cos, self.sin = angle.cos(), angle.sin()
        self.q_norm, self.k_norm = torch.rand(2, shape.head_dim).to(dtype)

    def run(
        self, kernels: Kernels, norms: bool, tokens: list[int] | None = None, finite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs and the pages afterwards, of all tokens in one call or of the given ones, each a row of its own."""
        keys, values = self.keys.clone(), self.values.clone()
        if finite:
            keys.nan_to_num_(), values.nan_to_num_()
        start, table, positions, qkv = self.row_start, self.table, self.positions, self.qkv
        if tokens is not None:
            rows = (torch.searchsorted(start, torch.tensor(tokens), right=True) - 1).tolist()
            start, table = torch.arange(len(tokens) + 1, dtype=torch.int32), table[rows].contiguous()
            positions, qkv = positions[tokens], qkv[tokens]
        batch = Batch(positions, positions, start, table, positions[:1])
        q_norm, k_norm = (self.q_norm, self.k_norm) if norms else (None, None)
        out = kernels.attend(qkv, self.shape, self.cos, self.sin, q_norm, k_norm, keys, values, batch)
        return out, keys, values


RAGGED = [(0, 40), (300, 9), (127, 1), (128, 2), (0, 1), (511, 1), (77, 60)]
ATTENTION = [
    (AttentionShape(9, 3, 64), 16),
    (AttentionShape(4, 4, 80), 8),
    (AttentionShape(8, 1, 128), 32),
    (AttentionShape(6, 2, 64, window=50), 16),
    (AttentionShape(2, 1, 24, window=200), 32),
    (AttentionShape(96, 1, 16), 8),
    (AttentionShape(4, 2, 96, window=1), 64),
    (AttentionShape(9, 3, 64, interleaved=True), 16),
    (AttentionShape(2, 1, 24, interleaved=True), 8),
]


@EACH
@DTYPES
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("shape", "block"), ATTENTION)
def test_attention_agrees_with_the_reference(
    isa: str, shape: AttentionShape, block: int, norms: bool, dtype: torch.dtype
) -> None:
    sequences = Sequences(RAGGED, shape, block, dtype)
    got, keys, values = sequences.run(compiled(isa, dtype), norms)
    want, want_keys, want_values = sequences.run(reference, norms, finite=True)
    near(got, want, 0.012 if dtype == BF16 else 1e-5)
    near(keys.nan_to_num(), want_keys, 0.008 if dtype == BF16 else 1e-6)
    assert torch.equal(values.nan_to_num(), want_values)


@EACH
@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("shape", "block"), ATTENTION)
def test_attention_in_both_directions(isa: str, shape: AttentionShape, block: int, threads: int, dtype: torch.dtype) -> None:
    """With several threads the chunks of few tokens are tasks of their own."""
    for rows in (RAGGED, [(120, 20), (500, 9)]):
        sequences = Sequences(rows, shape._replace(block=True), block, dtype)
        got, keys, values = sequences.run(compiled(isa, dtype, threads), True)
        want, want_keys, want_values = sequences.run(reference, True, finite=True)
        near(got, want, 0.012 if dtype == BF16 else 1e-5)
        near(keys.nan_to_num(), want_keys, 0.008 if dtype == BF16 else 1e-6)
        assert torch.equal(values.nan_to_num(), want_values)
    sequences.shape = shape
    assert (sequences.run(reference, True, finite=True)[0] - want).abs().max() > 0.05  # the other direction counts


@EACH
@DTYPES
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("shape", "block"), ATTENTION)
def test_keys_and_values_are_stored(isa: str, shape: AttentionShape, block: int, norms: bool, dtype: torch.dtype) -> None:
    """kv is a part of the columns of a wider tensor. Padding behind the last row is NaN and reaches no page."""
    sequences, kernels = Sequences([*RAGGED, (3, 200)], shape, block, dtype), compiled(isa, dtype, 2)
    total, size = len(sequences.positions), 2 * shape.kv_heads * shape.head_dim
    wide = torch.randn(total + 5, 3 * size).to(dtype)
    wide[total:] = torch.nan
    positions = torch.cat((sequences.positions, torch.zeros(5, dtype=torch.int64)))
    batch = Batch(positions, positions, sequences.row_start, sequences.table, None)
    found = []
    for run in (kernels, reference):
        pages = sequences.keys.clone(), sequences.values.clone()
        norm = sequences.k_norm if norms else None
        run.store(wide[:, size : 2 * size], shape, sequences.cos, sequences.sin, norm, *pages, batch)
        found.append(pages)
    (keys, values), (want_keys, want_values) = found
    assert torch.equal(keys.isnan(), want_keys.isnan()) and torch.equal(values.isnan(), want_values.isnan())
    near(keys.nan_to_num(), want_keys.nan_to_num(), 0.008 if dtype == BF16 else 1e-6)
    assert torch.equal(values.nan_to_num(), want_values.nan_to_num())
    assert int((values == values).sum() - (sequences.values == sequences.values).sum()) == total * size // 2
    with pytest.raises(ValueError, match="must be contiguous"):
        args = shape, sequences.cos, sequences.sin, None, *pages, batch
        kernels.store(wide.view(total + 5, -1, 3)[:, :, 0], *args)


@pytest.mark.parametrize("isa", ["reference", *cpu.isas()])
@DTYPES
@pytest.mark.parametrize("norms", [False, True])
def test_interleaved_heads_are_halves_in_another_order(isa: str, dtype: torch.dtype, norms: bool) -> None:
    """Keys are the same numbers; outputs are the same up to the order in which a score is summed."""
    kernels = reference if isa == "reference" else compiled(isa, dtype)
    halves = Sequences([(0, 40), (0, 9)], AttentionShape(6, 2, 24), 16, dtype)
    heads, order = halves.qkv.view(-1, 10, 24).clone(), torch.arange(24).view(2, 12).T.flatten()
    heads[:, :8] = heads[:, :8, order]
    out, keys, values = halves.run(kernels, norms, finite=True)
    halves.qkv, halves.shape = heads.flatten(1), halves.shape._replace(interleaved=True)
    halves.q_norm, halves.k_norm = halves.q_norm[order], halves.k_norm[order]
    got, got_keys, got_values = halves.run(kernels, norms, finite=True)
    near(got, out, 0.012 if dtype == BF16 else 1e-5)
    near(got_keys, keys[..., order], (0.004 if dtype == BF16 else 1e-6) if norms else 0)
    assert torch.equal(got_values, values)


@EACH
@pytest.mark.parametrize(("past", "new"), [(3000, 1), (2000, 5), (0, 700), (900, 200)])
def test_long_contexts_and_prefill_agree_with_the_reference(isa: str, past: int, new: int) -> None:
    sequences = Sequences([(past, new)], AttentionShape(6, 2, 64), 16, BF16)
    near(sequences.run(compiled(isa, BF16), False)[0], sequences.run(reference, False, finite=True)[0], 0.012)


@EACH
@DTYPES
@pytest.mark.parametrize(("shape", "block"), ATTENTION)
@pytest.mark.parametrize("rows", [RAGGED, [(300, 9)], [(0, 600)], [(120, 9), (125, 9)]])
def test_a_token_attends_alike_in_every_batch(
    isa: str, rows: list[tuple[int, int]], shape: AttentionShape, block: int, dtype: torch.dtype
) -> None:
    sequences, kernels = Sequences(rows, shape, block, dtype), compiled(isa, dtype)
    together, keys, values = sequences.run(kernels, True)
    sequences.keys, sequences.values = keys, values  # what earlier tokens of the row wrote, as in token-by-token decoding
    total = len(sequences.positions)
    for token in {*range(0, total, max(7, total // 20)), total - 1, total - 2}:
        assert torch.equal(sequences.run(kernels, True, [token])[0], together[token : token + 1])


@EACH
@DTYPES
@pytest.mark.parametrize("rows", [[(700, 9)], [(2000, 1), (20, 1)], [(0, 200)]])
@pytest.mark.parametrize("window", [0, 333])
def test_threads_do_not_change_a_bit(isa: str, rows: list[tuple[int, int]], window: int, dtype: torch.dtype) -> None:
    # with several threads the chunks of few tokens are tasks of their own, put together afterwards
    sequences = Sequences(rows, AttentionShape(9, 3, 64, window), 16, dtype)
    count = sum(n for _, n in rows)
    x, norm, w = weight(count, 70, dtype=dtype), weight(70, dtype=dtype), matrix(61, 70, dtype=dtype)
    results = []
    for kernels in (compiled(isa, dtype, threads) for threads in (1, 2, 3, 8)):
        results.append((sequences.run(kernels, False)[0], kernels.norm_linear(x, norm, EPS, w, None)))
    for attention, linear in results[1:]:
        assert torch.equal(attention, results[0][0]) and torch.equal(linear, results[0][1])


@EACH
@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [[(2000, 1), (20, 1)], RAGGED])
def test_empty_rows_and_padding_change_no_bit(isa: str, rows: list[tuple[int, int]], threads: int, dtype: torch.dtype) -> None:
    sequences, kernels = Sequences(rows, AttentionShape(6, 2, 32), 16, dtype), compiled(isa, dtype, threads)
    want, *want_pages = sequences.run(kernels, True)
    total = len(want)
    at = [0, 1, 1, len(rows)]  # empty rows in front of these
    counts, table = [n for _, n in rows], list(sequences.table)
    for row in reversed(at):
        counts.insert(row, 0)
        table.insert(row, sequences.table[0] * 0)
    sequences.table, sequences.row_start = torch.stack(table), torch.tensor([0, *counts]).cumsum(0).int()
    sequences.positions = torch.cat((sequences.positions, torch.zeros(9, dtype=torch.int64)))
    sequences.qkv = torch.cat((sequences.qkv, sequences.qkv[:9] * torch.nan))
    got, *pages = sequences.run(kernels, True)
    assert torch.equal(got[:total], want)
    for mine, wanted in zip(pages, want_pages, strict=True):
        assert torch.equal(mine.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(mine.isnan(), wanted.isnan())


class Stacked:
    """Some layers of odd shapes, with the pages of `rows`."""

    def __init__(self, rows: list[tuple[int, int]], extras: bool, dtype: torch.dtype, both: bool = False) -> None:
        shape, hidden, inner = AttentionShape(6, 2, 32, 0, 1e-6, extras, both), 100, 150

        def some(*size: int) -> Tensor:
            return weight(*size, dtype=dtype)

        self.sequences = Sequences(rows, shape, 16, dtype)
        self.shapes = [shape._replace(window=w) for w in (0, 40, 0)]
        self.layers = [
            SimpleNamespace(
                attention_norm=some(hidden), qkv=Dense(some(320, hidden)), qkv_bias=some(320) if extras else None,
                q_norm=some(32) if extras else None, k_norm=some(32) if extras else None, out=Dense(some(hidden, 192)),
                out_bias=some(hidden) if extras else None, mlp_norm=some(hidden), gate_up=Dense(some(2 * inner, hidden)),
                down=Dense(some(hidden, inner)),
            )
            for _ in self.shapes
        ]  # fmt: skip
        self.x = some(len(self.sequences.positions), hidden)

    def pages(self) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh ones for each layer."""
        return [self.sequences.keys.clone() for _ in self.layers], [self.sequences.values.clone() for _ in self.layers]

    def batch(self) -> Batch:
        s = self.sequences
        return Batch(s.positions, s.positions, s.row_start, s.table, s.positions[:1])


@EACH
@DTYPES
@pytest.mark.parametrize("rows", [[(300, 1)], [(300, 9)], [(130, 3), (0, 20), (17, 1)]])
@pytest.mark.parametrize("extras", [False, True])
def test_a_stack_of_layers_is_what_the_kernels_do_one_by_one(
    isa: str, rows: list[tuple[int, int]], extras: bool, dtype: torch.dtype
) -> None:
    """extras: biases, norms of heads, interleaved heads, attention in both directions"""
    it, kernels = Stacked(rows, extras, dtype, extras), compiled(isa, dtype)
    sequences, pages, own, y = it.sequences, it.pages(), it.pages(), it.x
    for layer, at, keys, values in zip(it.layers, it.shapes, *own, strict=True):
        qkv = kernels.norm_linear(y, layer.attention_norm, EPS, layer.qkv, layer.qkv_bias)
        mixed = kernels.attend(qkv, at, sequences.cos, sequences.sin, layer.q_norm, layer.k_norm, keys, values, it.batch())
        y = kernels.linear_add(mixed, layer.out, layer.out_bias, y)
        y = kernels.linear_add(kernels.norm_gate_up(y, layer.mlp_norm, EPS, layer.gate_up), layer.down, None, y)
    stack = cpu.Stack(kernels, it.layers, it.shapes, EPS, *pages)
    assert torch.equal(stack(it.x, sequences.cos, sequences.sin, it.batch()), y)
    half = stack(stack(it.x, sequences.cos, sequences.sin, it.batch(), 0, 2), sequences.cos, sequences.sin, it.batch(), 2)
    assert torch.equal(half, y) and y.isfinite().all()
    for mine, wanted in zip((*pages[0], *pages[1]), (*own[0], *own[1]), strict=True):
        assert torch.equal(mine.nan_to_num(), wanted.nan_to_num())


@EACH
@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_is_computed_alike_in_any_chunks(isa: str, threads: int, dtype: torch.dtype) -> None:
    total, generator = 600, random.Random(isa)
    it, kernels = Stacked([(0, total)], True, dtype), compiled(isa, dtype, threads)
    s, results = it.sequences, []
    for longest in (total, 150, 20):
        keys, values = it.pages()
        stack = cpu.Stack(kernels, it.layers, it.shapes, EPS, keys, values)
        parts, begin = [], 0
        while begin < total:
            end = total if longest == total else min(total, begin + generator.randint(1, longest))
            start = torch.tensor([0, end - begin], dtype=torch.int32)
            positions = s.positions[begin:end]
            parts.append(stack(it.x[begin:end], s.cos, s.sin, Batch(positions, positions, start, s.table, None)))
            begin = end
        results.append((torch.cat(parts), torch.stack(keys).nan_to_num(), torch.stack(values).nan_to_num()))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@EACH
@DTYPES
def test_what_the_c_code_cannot_read_is_refused(isa: str, dtype: torch.dtype) -> None:
    kernels, other = compiled(isa, dtype), F32 if dtype == BF16 else BF16
    x, norm, w, bias = (weight(*size, dtype=dtype) for size in ((2, 64), (64,), (32, 64), (32,)))
    for given in (
        (x.to(other), norm, w, bias), (x, norm.to(other), w, bias), (x, norm, w.to(other), bias), (x, norm, w, bias.to(other)),
        (x, norm, weight(64, 32, dtype=dtype).T, bias), (x, norm, w, weight(32, 2, dtype=dtype)[:, 0]),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"must be contiguous {dtype}"):
            kernels.norm_linear(given[0], given[1], EPS, Dense(given[2]), given[3])
    with pytest.raises(TypeError, match="residual must be contiguous"):
        kernels.linear_add(x, Dense(w), None, weight(32, 2, dtype=dtype).T)


def test_other_dtypes_take_plain_torch() -> None:
    assert cpu.kernels(torch.float16) is reference


@EACH
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_auto_takes_bfloat16_from_avx2_on_and_says_so(
    isa: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(cpu.SETTING, isa)
    caplog.set_level(logging.INFO, "forerun")
    target = Target.load(tiny_model(tmp_path, dtype=getattr(torch, stored)))
    assert target.dtype == (F32 if isa == "portable" else BF16) and cpu.isa_of(target.kernels) == isa
    (line,) = (record.getMessage() for record in caplog.records)
    name = "float32" if isa == "portable" else "bfloat16"
    assert line.startswith(f"CPU: {name} (auto: the checkpoint is {stored}; ") and line.endswith(f"kernels for {isa}")


def test_what_is_asked_for_is_taken_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forerun")
    folder = tiny_model(tmp_path)
    assert [Target.load(folder, dtype).dtype for dtype in ("auto", "bfloat16", "float16")] == [F32, BF16, torch.float16]
    best = cpu.isas()[0]
    assert [record.getMessage() for record in caplog.records] == [
        f"CPU: float32 (auto: the checkpoint is float32), kernels for {best}",
        f"CPU: bfloat16 (as asked for), kernels for {best}",
        "CPU: float16 (as asked for), plain PyTorch",
    ]


def fresh(code: str, **env: str) -> str:
    """What a new interpreter prints."""
    source = str(Path(cpu.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": source, **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_without_a_compiler_it_warns_once_and_takes_plain_torch(tmp_path: Path) -> None:
    code = """
import warnings, torch
from forerun.kernels import cpu, reference
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert cpu.kernels(torch.bfloat16) is reference and cpu.kernels(torch.bfloat16) is reference
print(len(seen), seen[0].message)
"""
    for compiler in ("no-such-compiler", "false"):
        told = fresh(code, CC=compiler, FORERUN_CACHE=str(tmp_path))
        assert told.startswith("1 ") and "install gcc, or set CC" in told
    assert not list(tmp_path.glob("*.so"))


def test_the_instruction_set_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cpu.isas()
    assert known[-1] == "portable" and len(known) > 1
    for isa in known:
        monkeypatch.setenv(cpu.SETTING, isa)
        for dtype in (BF16, F32):
            chosen = cpu.kernels(dtype)
            assert isinstance(chosen, cpu.CpuKernels) and chosen.isa == isa
    for given in ("", "auto"):
        monkeypatch.setenv(cpu.SETTING, given)
        chosen = cpu.kernels(BF16)
        assert isinstance(chosen, cpu.CpuKernels) and chosen.isa == known[0]


@pytest.mark.parametrize("given", ["avx3", "AVX2 ", "sse", "neon", "0", "None"])
def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(cpu.SETTING, given)
    with pytest.raises(SettingError, match=f"{cpu.SETTING}=.*{given}.*give auto or .*: .*portable"):
        cpu.kernels(BF16)


def test_a_processor_with_less_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    avx2 = "flags : fma avx avx2 f16c"
    avx512 = f"{avx2} avx512f avx512dq avx512bw avx512vl"
    for words, want in (
        (f"{avx512} avx512_bf16 avx512_vnni amx_bf16 amx_tile", ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2")),
        (f"{avx512} avx_vnni avx512_bf16 avx512_vnni", ("avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2")),
        (f"{avx512} avx512_vnni", ("avx512vnni", "avx512", "avx2")),
        (f"{avx512} avx512_bf16", ("avx512", "avx2")),
        (avx512, ("avx512", "avx2")),
        ("flags : avx2 f16c avx512f avx512dq avx512bw avx512vl", ()),
        (f"{avx2} avx_vnni", ("avxvnni", "avx2")),
        (avx2, ("avx2",)),
        ("Features : fp asimd asimddp", ("neon",)),
        ("Features : fp asimd", ()),
    ):
        monkeypatch.setattr(cpu, "processor", lambda words=words: words)
        monkeypatch.setattr(cpu, "amx_allowed", lambda: True)
        assert cpu.isas() == (*want, "portable")
        monkeypatch.setattr(cpu, "amx_allowed", lambda: False)
        assert cpu.isas() == (*(isa for isa in want if isa != "amx"), "portable")
    monkeypatch.setenv(cpu.SETTING, "avx2")
    with pytest.raises(SettingError, match="this processor has: portable"):
        cpu.kernels(BF16)


def test_a_compiler_that_does_not_know_the_best_instruction_set_makes_the_next(tmp_path: Path) -> None:
    old = tmp_path / "cc"
    old.write_text('#!/bin/sh\ncase "$*" in *avx512*) echo "unrecognized option" >&2; exit 1;; esac\nexec cc "$@"\n')
    old.chmod(0o755)
    code = """
import torch
from forerun.kernels import cpu
print(cpu.kernels(torch.bfloat16).isa)
"""
    expected = next(isa for isa in cpu.isas() if not any("avx512" in flag for flag in cpu.ISAS[isa]))
    assert fresh(code, CC=str(old), FORERUN_CACHE=str(tmp_path)).strip() == expected


def test_an_installed_package_has_all_that_is_compiled() -> None:
    folder = cpu.SOURCE.parent
    settings = tomllib.loads((folder.parents[2] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["forerun"]
    packed = {path for pattern in patterns for path in folder.parent.glob(pattern)}
    assert {path for path in folder.iterdir() if path.suffix in (".c", ".h")} <= packed
