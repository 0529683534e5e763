"""Products with weights in the block formats of GGUF files, for each instruction set that this processor has: against float64
with the same quantised activations, against the expanded weights, and bit for bit alike in every batch and on all sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Layers, cpu, one_by_one, reference
from forerun.models.blocks import FORMATS, Blocks, Part, row_bytes, stack
from forerun.models.weights import Dense, Layer

EPS = 1e-5
BF16, F32 = torch.bfloat16, torch.float32
EACH = pytest.mark.parametrize("isa", cpu.isas())
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bfloat16", "float32"])


def kernels(isa: str, dtype: torch.dtype, threads: int = 1) -> cpu.CpuKernels:
    return cpu.CpuKernels(cpu.library(isa), dtype, threads)


def columns_of(format: str, blocks: int) -> int:
    """Columns of a matrix of so many blocks of 32, or of 256 where the format has those."""
    return blocks * FORMATS[format][0]


def blocks(format: str, rows: int, columns: int, dtype: torch.dtype = F32, seed: int = 0) -> Blocks:
    """Random weights: any bits, with scales that give products about 1."""
    rng = np.random.default_rng(seed)
    size = FORMATS[format][1]
    data = rng.integers(0, 256, (rows, row_bytes(format, columns) // size, size), dtype=np.uint8)
    spread = {"Q8_0": 74, "Q6_K": 1370}.get(format, 300 if format.endswith("K") else 9)  # of the integers
    scale = rng.uniform(0.5, 1.5, data.shape[:2]) / columns**0.5 / spread
    at = 208 if format == "Q6_K" else 0
    data[:, :, at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    if format in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        data[:, :, 2:4] = (scale * rng.uniform(-8, 8, scale.shape)).astype(np.float16)[..., None].view(np.uint8)
    return Blocks([Part(format, torch.from_numpy(data.reshape(rows, -1)))], dtype)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def quantised(x: Tensor, fused: bool) -> Tensor:
    """Activations [T,K] as the kernels take them: 32 values at a time, as integers up to 127 times a scale. float64. fused: the
    product with 127 / top is not rounded before it becomes an integer."""
    x = x.float().unflatten(-1, (-1, 32))
    top = x.abs().amax(-1, keepdim=True)
    factor = torch.where(top > 0, 127 / top, 0)
    whole = (x.double() * factor.double() if fused else x * factor).round()
    return (whole.double() * (top / 127).double()).flatten(-2)


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Within a tolerance relative to the largest value."""
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert got.isfinite().all() and error <= tolerance, f"off by {error:.2e} of the largest value"


def values(matrix: Blocks) -> Tensor:
    return Blocks(matrix.parts, F32).dense().double()


def rounding(dtype: torch.dtype) -> float:
    return 2e-6 if dtype == F32 else 8e-3  # bfloat16: of the result


@EACH
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "count", "tokens"), [(150, 3, 21), (5, 18, 1), (64, 8, 140), (33, 1, 7)])
@DTYPES
def test_products_agree_with_float64(isa: str, format: str, rows: int, count: int, tokens: int, dtype: torch.dtype) -> None:
    k = columns_of(format, count)
    w, x, residual = blocks(format, rows, k, dtype), torch.randn(tokens, k).to(dtype), torch.randn(tokens, rows).to(dtype)
    bias = torch.randn(rows).to(dtype)
    run, want = kernels(isa, dtype), quantised(x, isa != "portable") @ values(w).T
    near(run.linear_add(x, w, bias, residual), residual.double() + bias.double() + want, rounding(dtype))
    near(run.linear_add(x, w, None, torch.zeros_like(residual)), x.double() @ values(w).T, 0.03)  # the error of the activations


@EACH
@pytest.mark.parametrize("format", FORMATS)
@DTYPES
def test_normed_products_agree_with_float64(isa: str, format: str, dtype: torch.dtype) -> None:
    k, run = columns_of(format, 2), kernels(isa, dtype)
    x, norm = torch.randn(9, k).to(dtype), (torch.rand(k) + 0.5).to(dtype)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * norm.double()
    near(run.norm_logits(x, norm, EPS, blocks(format, 70, k)), normed @ values(blocks(format, 70, k)).T, 0.03)
    gate, up = blocks(format, 40, k, dtype, 1), blocks(format, 40, k, dtype, 2)
    want = torch.nn.functional.silu(normed @ values(gate).T) * (normed @ values(up).T)
    for pair in (stack([gate, up]), Blocks([Part(format, torch.cat([gate.parts[0].data, up.parts[0].data]))], dtype)):
        near(run.norm_gate_up(x, norm, EPS, pair), want, 0.05)
    parts = [blocks(f, rows, columns_of(format, 2), dtype, rows) for f, rows in (("Q8_0", 36), (format, 7), (format, 20))]
    bias = torch.randn(63).to(dtype)
    near(run.norm_linear(x, norm, EPS, stack(parts), bias), normed @ values(stack(parts)).T + bias.double(), 0.03)


@EACH
@pytest.mark.parametrize("format", FORMATS)
@DTYPES
def test_a_token_is_rounded_alike_in_every_batch(isa: str, format: str, dtype: torch.dtype) -> None:
    k, run = columns_of(format, 9), kernels(isa, dtype)
    w, x, norm = blocks(format, 100, k, dtype), torch.randn(300, k).to(dtype), torch.rand(k).to(dtype)
    whole = run.norm_logits(x, norm, EPS, w)
    for begin, end in [(0, 1), (1, 3), (3, 8), (8, 17), (17, 140), (299, 300)]:
        assert torch.equal(run.norm_logits(x[begin:end].contiguous(), norm, EPS, w), whole[begin:end])


@pytest.mark.parametrize("format", FORMATS)
def test_all_instruction_sets_give_the_same_bits(format: str) -> None:
    """Without a norm, whose sum depends on the number of lanes. Plain C has no fused multiplication and is left out."""
    k = columns_of(format, 3)
    w, x = blocks(format, 37, k), torch.randn(11, k)
    got = [kernels(isa, F32).linear_add(x, w, None, torch.zeros(11, 37)) for isa in cpu.isas() if isa != "portable"]
    assert all(torch.equal(one, got[0]) for one in got)


@EACH
@pytest.mark.parametrize("format", FORMATS)
@DTYPES
def test_an_embedding_is_the_expanded_row(isa: str, format: str, dtype: torch.dtype) -> None:
    w = blocks(format, 50, columns_of(format, 5), dtype)
    ids = torch.tensor([3, 49, 0, 3, *range(20)])
    assert torch.equal(kernels(isa, dtype).embed(ids, w), w.dense()[ids])


@EACH
@pytest.mark.parametrize("format", FORMATS)
@DTYPES
def test_rows_are_expanded_in_any_order(
    isa: str, format: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the values of the slow form, rounded once to bfloat16. Infinite scales give infinite values."""
    monkeypatch.setenv(cpu.SETTING, isa)
    (rows,) = blocks(format, 2 * 32 + 5, columns_of(format, 3)).parts
    order = torch.randperm(len(rows.data))
    out = torch.full((len(order), rows.columns), 7.0, dtype=dtype)
    assert cpu.expand(rows, order, out) == (isa not in ("neon", "portable"))
    assert torch.equal(out, rows.dense().to(dtype)[order] if isa not in ("neon", "portable") else torch.full_like(out, 7.0))
    at = 208 if format == "Q6_K" else 0
    rows.data[11, at : at + 2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # infinite
    if cpu.expand(rows, order, out):
        broken = ~out.isfinite().all(1)
        assert order[broken].tolist() == [11]


@EACH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_activations_give_broken_results(isa: str, bad: float) -> None:
    """So the engine sees broken weights. The other tokens are not affected."""
    w, x = blocks("Q4_1", 40, 96), torch.randn(3, 96)
    right = kernels(isa, F32).linear_add(x, w, None, torch.zeros(3, 40))
    x[1, 70] = bad
    got = kernels(isa, F32).linear_add(x, w, None, torch.zeros(3, 40))
    assert not got[1].isfinite().any() and torch.equal(got[[0, 2]], right[[0, 2]])


def layer(hidden: int, inner: int, dtype: torch.dtype, formats: tuple[str, ...], seed: int) -> Layer:
    q, k, v, out, gate, up, down = (
        blocks(format, rows, columns, dtype, seed + i)
        for i, (format, rows, columns) in enumerate(
            zip(
                formats,
                (64, 32, 32, hidden, inner, inner, hidden),
                (hidden, hidden, hidden, 64, hidden, hidden, inner),
                strict=True,
            )
        )
    )
    ones = torch.ones(hidden, dtype=dtype)
    return Layer(ones, stack([q, k, v]), None, None, None, out, None, ones, stack([gate, up]), down)


@EACH
@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_a_stack_of_layers_is_what_the_kernels_do_one_by_one(isa: str, dtype: torch.dtype, threads: int) -> None:
    """Blocks of several formats, and a layer of dense matrices among them. It is near the reference too."""
    run, hidden, inner = kernels(isa, dtype, threads), 256, 512
    formats = ("Q4_K", "Q4_K", "Q6_K", "Q5_1", "Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q8_0", "Q5_0", "Q4_1", "Q5_K", "Q5_K", "Q4_K")
    weights = [layer(hidden, inner, dtype, each, 10 * i) for i, each in enumerate(formats)]
    dense = weights[0]._replace(**{n: Dense(getattr(weights[0], n).dense()) for n in ("qkv", "out", "gate_up", "down")})
    shapes = (AttentionShape(4, 2, 16, 0, EPS),) * 3
    angle = torch.arange(64)[:, None] * 0.3 ** torch.arange(8)
    cos, sin = angle.cos().float(), angle.sin().float()

    def pages() -> list[Tensor]:
        return [torch.zeros(8, 2, 8, 16, dtype=dtype) for _ in range(3)]

    ids = torch.arange(21)
    batch = Batch(ids, ids, torch.tensor([0, 21], dtype=torch.int32), torch.arange(1, 8, dtype=torch.int32)[None], None)
    x = torch.randn(21, hidden).to(dtype)
    layers = [Layers([weights[0], dense, weights[1]], shapes, EPS, cos, sin, pages(), pages()) for _ in range(3)]
    got = run.bind(layers[0])(x, batch, 0, 3)
    assert torch.equal(got, one_by_one(run, layers[1], x, batch, 0, 3))
    want = one_by_one(reference, layers[2], x, batch, 0, 3).double()  # type: ignore[arg-type]
    assert (got.double() - want).pow(2).mean() <= 0.05**2 * want.pow(2).mean()


def test_parts_that_the_kernels_do_not_take_are_refused() -> None:
    run = kernels(cpu.isas()[0], F32)
    x, norm = torch.randn(2, 64), torch.ones(64)
    with pytest.raises(TypeError, match="at most 3"):
        run.norm_linear(x, norm, EPS, stack([blocks("Q8_0", 16, 64)] * 4), None)
    with pytest.raises(TypeError, match="2 of equal size"):
        run.norm_gate_up(x, norm, EPS, stack([blocks("Q8_0", 16, 64), blocks("Q8_0", 8, 64)]))
    with pytest.raises(TypeError, match="contiguous"):
        run.norm_linear(x, norm, EPS, Blocks([Part("Q8_0", torch.zeros(4, 2 * 68, dtype=torch.uint8)[:, :68])], F32), None)
