"""The C kernels against their plain torch twin, over odd shapes; that no result depends on the other tokens of a batch,
bit for bit; and what happens without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Kernels, cpu, reference

EPS = 1e-5
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def bf16() -> cpu.CpuKernels:
    return cpu.CpuKernels(cpu.library(), BF16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weight(*shape: int) -> Tensor:
    return (torch.randn(*shape) * shape[-1] ** -0.5).to(BF16)


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Within a tolerance relative to the largest value."""
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert got.isfinite().all() and error <= tolerance, f"off by {error:.2e} of the largest value"


def exact(x: Tensor, norm: Tensor | None, w: Tensor) -> Tensor:
    """The product in float64 of what the kernel is given."""
    x = x if norm is None else reference.rms_norm(x, norm, EPS)
    return x.double() @ w.double().T


SHAPES = [(576, 960), (64, 32), (48, 70), (100, 17), (33, 3), (1536, 576)]  # width, outputs: also not multiples of 32 and 16


@pytest.mark.parametrize(("k", "outs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 7, 13, 64, 65, 130])
def test_linear_layers_agree_with_float64(bf16: cpu.CpuKernels, k: int, outs: int, rows: int) -> None:
    x, norm, w, bias, residual = weight(rows, k) * 8, weight(k), weight(outs, k), weight(outs), weight(rows, outs)
    twice = 0.004 if rows <= bf16.most else 0.01  # torch's product is rounded before the residual is added
    near(bf16.norm_linear(x, norm, EPS, w, None), exact(x, norm, w), 0.004)
    near(bf16.norm_linear(x, norm, EPS, w, bias), exact(x, norm, w) + bias.double(), 0.004)
    near(bf16.linear_add(x, w, None, residual), exact(x, None, w) + residual.double(), twice)
    near(bf16.linear_add(x, w, bias, residual), exact(x, None, w) + bias.double() + residual.double(), twice)
    logits = bf16.norm_logits(x, norm, EPS, w)
    assert logits.dtype == F32
    near(logits, exact(x, norm, w), 1e-5 if rows <= bf16.most else 0.004)
    both = weight(2 * outs, k)
    gate, up = exact(x, norm, both).chunk(2, -1)
    near(bf16.norm_gate_up(x, norm, EPS, both), torch.nn.functional.silu(gate) * up, 0.01)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("k", [576, 64, 33])
def test_rms_norm_rounds_as_the_reference(dtype: torch.dtype, k: int) -> None:
    x, norm = torch.randn(300, k).to(dtype), torch.rand(k).to(dtype)
    got, want = cpu.kernels(dtype).rms_norm(x, norm, EPS), reference.rms_norm(x, norm, EPS)
    near(got, want, 0.004 if dtype == BF16 else 1e-6)
    assert dtype == F32 or (got != want).float().mean() < 0.01  # a sum in another order may turn a rare rounding


def test_float32_layers_agree_with_the_reference() -> None:
    k = cpu.kernels(F32)
    x, norm, w, residual = torch.randn(5, 40), torch.rand(40), torch.randn(48, 40), torch.randn(5, 48)
    torch.testing.assert_close(k.norm_linear(x, norm, EPS, w, w[:, 0]), reference.norm_linear(x, norm, EPS, w, w[:, 0]))
    torch.testing.assert_close(k.linear_add(x, w, None, residual), reference.linear_add(x, w, None, residual))
    torch.testing.assert_close(k.norm_gate_up(x, norm, EPS, w), reference.norm_gate_up(x, norm, EPS, w))
    torch.testing.assert_close(k.norm_logits(x, norm, EPS, w), reference.norm_logits(x, norm, EPS, w))


@pytest.mark.parametrize("rows", [2, 3, 5, 6, 7, 9, 13, 31, 48, 64])
@pytest.mark.parametrize(("k", "outs"), [(576, 960), (100, 17)])
def test_a_row_is_rounded_alike_in_every_batch(bf16: cpu.CpuKernels, rows: int, k: int, outs: int) -> None:
    x, norm, w, residual = weight(rows, k) * 8, weight(k), weight(2 * outs, k), weight(rows, 2 * outs)

    def all_of(at: slice) -> tuple[Tensor, ...]:
        return (
            bf16.norm_linear(x[at], norm, EPS, w, None), bf16.linear_add(x[at], w, None, residual[at]),
            bf16.norm_gate_up(x[at], norm, EPS, w), bf16.norm_logits(x[at], norm, EPS, w), bf16.rms_norm(x[at], norm, EPS),
        )

    together = all_of(slice(None))
    for row in range(rows):
        for whole, alone in zip(together, all_of(slice(row, row + 1)), strict=True):
            assert torch.equal(whole[row : row + 1], alone)


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
]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("shape", "block"), ATTENTION)
def test_attention_agrees_with_the_reference(shape: AttentionShape, block: int, norms: bool, dtype: torch.dtype) -> None:
    sequences = Sequences(RAGGED, shape, block, dtype)
    got, keys, values = sequences.run(cpu.kernels(dtype), norms)
    want, want_keys, want_values = sequences.run(reference, norms, finite=True)
    near(got, want, 0.012 if dtype == BF16 else 1e-5)
    near(keys.nan_to_num(), want_keys, 0.008 if dtype == BF16 else 1e-6)
    assert torch.equal(values.nan_to_num(), want_values)


@pytest.mark.parametrize(("past", "new"), [(3000, 1), (2000, 5), (0, 700), (900, 200)])
def test_long_contexts_and_prefill_agree_with_the_reference(past: int, new: int) -> None:
    sequences = Sequences([(past, new)], AttentionShape(6, 2, 64), 16, BF16)
    near(sequences.run(cpu.kernels(BF16), False)[0], sequences.run(reference, False, finite=True)[0], 0.012)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("shape", "block"), ATTENTION)
@pytest.mark.parametrize("rows", [RAGGED, [(300, 9)], [(1000, 49)], [(120, 9), (125, 9)]])
def test_a_token_attends_alike_in_every_batch(
    rows: list[tuple[int, int]], shape: AttentionShape, block: int, dtype: torch.dtype
) -> None:
    sequences, kernels = Sequences(rows, shape, block, dtype), cpu.kernels(dtype)
    together, keys, values = sequences.run(kernels, True)
    sequences.keys, sequences.values = keys, values  # what earlier tokens of the row wrote, as in token-by-token decoding
    total = len(sequences.positions)
    for token in {*range(0, total, 7), total - 1, total - 2}:
        assert torch.equal(sequences.run(kernels, True, [token])[0], together[token : token + 1])


@pytest.mark.parametrize("rows", [[(700, 9)], [(2000, 1), (20, 1)], [(0, 200)]])
@pytest.mark.parametrize("window", [0, 333])
def test_threads_do_not_change_a_bit(bf16: cpu.CpuKernels, rows: list[tuple[int, int]], window: int) -> None:
    # with several threads the chunks of few tokens are tasks of their own, put together afterwards
    sequences = Sequences(rows, AttentionShape(9, 3, 64, window), 16, BF16)
    x, norm, w = weight(9, 576), weight(576), weight(961, 576)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((sequences.run(bf16, False)[0], bf16.norm_linear(x, norm, EPS, w, None)))
    finally:
        torch.set_num_threads(before)
    for attention, linear in results[1:]:
        assert torch.equal(attention, results[0][0]) and torch.equal(linear, results[0][1])


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [[(2000, 1), (20, 1)], RAGGED])
def test_empty_rows_and_padding_change_no_bit(rows: list[tuple[int, int]], threads: int, dtype: torch.dtype) -> None:
    sequences, kernels = Sequences(rows, AttentionShape(6, 2, 32), 16, dtype), cpu.kernels(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
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
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got[:total], want)
    for mine, wanted in zip(pages, want_pages, strict=True):
        assert torch.equal(mine.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(mine.isnan(), wanted.isnan())


@pytest.mark.parametrize("rows", [[(300, 1)], [(300, 9)], [(130, 3), (0, 20), (17, 1)]])
@pytest.mark.parametrize("extras", [False, True])
def test_a_stack_of_layers_is_what_the_kernels_do_one_by_one(
    bf16: cpu.CpuKernels, rows: list[tuple[int, int]], extras: bool
) -> None:
    shape, hidden, inner = AttentionShape(6, 2, 32, 0, 1e-6), 100, 150
    sequences = Sequences(rows, shape, 16, BF16)
    windows = [0, 40, 0]
    layers = [
        SimpleNamespace(
            attention_norm=weight(hidden), qkv=weight(320, hidden), qkv_bias=weight(320) if extras else None,
            q_norm=weight(32) if extras else None, k_norm=weight(32) if extras else None, out=weight(hidden, 192),
            out_bias=weight(hidden) if extras else None, mlp_norm=weight(hidden), gate_up=weight(2 * inner, hidden),
            down=weight(hidden, inner),
        )
        for _ in windows
    ]
    shapes = [shape._replace(window=w) for w in windows]
    pages = [[(sequences.keys.clone(), sequences.values.clone()) for _ in windows] for _ in range(2)]
    batch = Batch(sequences.positions, sequences.positions, sequences.row_start, sequences.table, sequences.positions[:1])
    x = y = weight(len(sequences.positions), hidden)
    for layer, at, (keys, values) in zip(layers, shapes, pages[0], strict=True):
        qkv = bf16.norm_linear(y, layer.attention_norm, EPS, layer.qkv, layer.qkv_bias)
        mixed = bf16.attend(qkv, at, sequences.cos, sequences.sin, layer.q_norm, layer.k_norm, keys, values, batch)
        y = bf16.linear_add(mixed, layer.out, layer.out_bias, y)
        y = bf16.linear_add(bf16.norm_gate_up(y, layer.mlp_norm, EPS, layer.gate_up), layer.down, None, y)
    keys, values = zip(*pages[1], strict=True)
    stack = cpu.Stack(bf16, layers, shapes, EPS, keys, values)
    assert torch.equal(stack(x, sequences.cos, sequences.sin, batch), y)
    half = stack(stack(x, sequences.cos, sequences.sin, batch, 0, 2), sequences.cos, sequences.sin, batch, 2)
    assert torch.equal(half, y) and y.isfinite().all()
    for (a, b), (c, d) in zip(*pages, strict=True):
        assert torch.equal(a.nan_to_num(), c.nan_to_num()) and torch.equal(b.nan_to_num(), d.nan_to_num())


def test_what_the_c_code_cannot_read_is_refused(bf16: cpu.CpuKernels) -> None:
    x, norm, w = weight(2, 64), weight(64), weight(32, 64)
    with pytest.raises(TypeError, match="float32"):
        bf16.norm_linear(x.float(), norm, EPS, w, None)
    with pytest.raises(ValueError, match="contiguous"):
        bf16.norm_linear(x, norm, EPS, weight(64, 32).T, None)


def test_other_dtypes_take_plain_torch() -> None:
    assert cpu.kernels(torch.float16) is reference


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


def test_only_torchs_openmp_runtime_is_loaded() -> None:
    code = """
import torch
from pathlib import Path
from forerun.kernels import cpu
cpu.library()
maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
print(sum(Path(path).name.startswith(("libgomp", "libiomp", "libomp.")) for path in maps))
"""
    assert fresh(code).strip() == "1"


def test_the_portable_code_agrees_too(tmp_path: Path) -> None:
    """Compiled for any processor of this family, without AVX-512."""
    code = """
import torch
from forerun.kernels import cpu, reference
cpu.FLAGS = ("-O1", *(f for f in cpu.FLAGS if f not in ("-march=native", "-O3")))
k = cpu.CpuKernels(cpu.library(), torch.bfloat16)
torch.manual_seed(0)
x, n, w = torch.randn(7, 100).bfloat16(), torch.rand(100).bfloat16(), torch.randn(46, 100).bfloat16() / 10
error = (k.norm_logits(x, n, 1e-5, w) - reference.rms_norm(x, n, 1e-5).float() @ w.float().T).abs().max()
assert error < 1e-4, error
got, want = k.norm_gate_up(x, n, 1e-5, w), reference.norm_gate_up(x, n, 1e-5, w)
assert (got - want).abs().max() < 0.02 * want.abs().max()
assert k.most == cpu.FEW_TOKENS
assert torch.equal(k.norm_linear(x[:1], n, 1e-5, w, None), k.norm_linear(x, n, 1e-5, w, None)[:1])
print("fine")
"""
    assert fresh(code, FORERUN_CACHE=str(tmp_path)).strip() == "fine"
