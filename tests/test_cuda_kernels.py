"""The Triton kernels against their torch twins: on the GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions and ours are defined, at the imports below
pytest.importorskip("triton", reason="the CUDA kernels are written in Triton, which is not installed")

from forerun.kernels import AttentionShape, Batch, cuda_attention, reference
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.cuda_cuts import fitting
from forerun.kernels.cuda_products import Tiles, parts
from forerun.models.config import ModelConfig
from forerun.models.decoder import Forward, Target
from forerun.models.weights import Dense
from forerun.types import SettingError
from forerun.verify.sampling import BROKEN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's dot products do not know bfloat16
EPS = 1e-5


@pytest.fixture(scope="module", autouse=True)
def interpreter_that_numpy_allows():
    """Triton 3.6's interpreter takes int() of an array of one element for a loop's bounds, an error from numpy 2.4 on."""
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    yield
    interpreter._patch_lang_tensor = original


@pytest.fixture(scope="module")
def run() -> CudaKernels:
    return CudaKernels(DEVICE)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DTYPE).to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor, bound: float = 1e-2) -> None:
    assert got.shape == want.shape
    difference = (got.double() - want.double()).norm() / want.double().norm()
    assert difference < bound, f"differs by {float(difference):.2e}"


def wide(function, *given):
    """The twin in float32 on the same values: what both round from."""
    given = [Dense(x.values.float()) if isinstance(x, Dense) else x for x in given]
    return function(*(x.float() if isinstance(x, torch.Tensor) else x for x in given))


# all of K in one part or two, in three; K in a loop, with a norm of its own, split over the warps; more tokens in a program
CUTS = [
    Tiles(8, 4, 0, 1), Tiles(16, 2, 0, 3), Tiles(16, 4, 64, 2), Tiles(16, 4, 64, 2, apart=True), Tiles(16, 4, 64, 2, 4),
    Tiles(16, 4, 64, 2, tokens=32), Tiles(8, 4, 0, 2, tokens=32),
]


@pytest.mark.parametrize(("tokens", "k"), [(1, 96), (3, 72), (16, 64), (20, 96)])
@pytest.mark.parametrize("cut", CUTS)
def test_products(run: CudaKernels, monkeypatch, tokens: int, k: int, cut: Tiles) -> None:
    monkeypatch.setattr("forerun.kernels.cuda.choose", lambda *given: cut)
    run.few = 64  # 20 tokens are two blocks of 16
    x, norm = random(tokens, k, seed=1), random(k, seed=2)
    weight, bias = Dense(random(37, k, seed=3, scale=k**-0.5)), random(37, seed=4)
    residual, both = random(tokens, 37, seed=5), Dense(random(2 * 24, k, seed=6, scale=k**-0.5))
    close(run.norm_linear(x, norm, EPS, weight, bias), wide(reference.norm_linear, x, norm, EPS, weight, bias))
    close(run.norm_linear(x, norm, EPS, weight, None), wide(reference.norm_linear, x, norm, EPS, weight, None))
    close(run.linear_add(x, weight, None, residual), wide(reference.linear_add, x, weight, None, residual))
    close(run.norm_gate_up(x, norm, EPS, both), wide(reference.norm_gate_up, x, norm, EPS, both))
    logits = run.norm_logits(x, norm, EPS, weight)
    assert logits.dtype == torch.float32
    close(logits, wide(reference.norm_logits, x, norm, EPS, weight))


def test_a_cut_fits_the_shared_memory() -> None:
    cut = Tiles(32, 4, 256, 4, apart=True)
    assert fitting(cut, False, 1 << 18) == cut and fitting(cut, True, 166912) == cut
    assert fitting(cut, True, 100_000) == cut._replace(stages=2)
    assert fitting(cut, True, 50_000) == cut._replace(stages=2, step=128)
    assert fitting(Tiles(8, 4, 0, 2), False, 1000) == Tiles(8, 4, 0, 2)  # held in registers


def test_k_is_held_in_parts_with_little_to_spare() -> None:
    assert parts(576, 2, 64) == (512, 64) and parts(576, 3, 64) == (256, 256, 64)
    assert parts(1024, 2, 32) == (512, 512) and parts(3072, 2, 128) == (2048, 1024)
    assert parts(960, 2, 64) == (512, 512) and parts(40, 2, 64) == (64,)
    for k in (96, 700, 1100, 2048):
        for count in (1, 2, 3):
            found = parts(k, count, 32)
            assert k <= sum(found) < 2 * k and len(found) <= count + 1 and list(found) == sorted(found, reverse=True)


def test_an_output_does_not_depend_on_how_many_tokens_there_are(run: CudaKernels) -> None:
    x, norm, weight = random(16, 96, seed=1), random(96, seed=2), Dense(random(40, 96, seed=3))
    together = run.norm_logits(x, norm, EPS, weight)
    for count in (1, 9):
        assert torch.equal(run.norm_logits(x[:count].contiguous(), norm, EPS, weight), together[:count])


def test_more_tokens_than_a_tile_take_the_library_product(run: CudaKernels) -> None:
    x, norm, both = random(70, 64, seed=1), random(64, seed=2), Dense(random(96, 64, seed=3, scale=0.1))
    close(run.norm_gate_up(x, norm, EPS, both), wide(reference.norm_gate_up, x, norm, EPS, both))
    residual = random(70, 96, seed=4)
    close(run.linear_add(x, both, None, residual), wide(reference.linear_add, x, both, None, residual))
    logits = run.norm_logits(x, norm, EPS, both)
    close(logits, wide(reference.norm_logits, x, norm, EPS, both))


def test_rms_norm_rounds_as_the_twin(run: CudaKernels) -> None:
    x, norm = random(5, 72, seed=1), random(72, seed=2)
    got, want = run.rms_norm(x, norm, EPS), reference.rms_norm(x, norm, EPS)
    assert (got != want).float().mean() < 0.02  # a sum in another order may round one way or the other
    close(got, want, 1e-3)


def test_argmax_takes_the_first_of_equals(run: CudaKernels) -> None:
    logits = torch.zeros(4, 9000, device=DEVICE)
    logits[1, 8999] = 1
    logits[2, [4096, 5000]] = 2
    logits[3] = -torch.inf
    logits[3, 17] = -5
    assert run.argmax(logits).tolist() == [0, 8999, 4096, 17]


def test_argmax_of_logits_that_are_not_finite(run: CudaKernels) -> None:
    logits = torch.zeros(5, 9000, device=DEVICE)
    logits[0] = -torch.inf
    logits[1, 0] = torch.nan
    logits[2, 8999] = torch.nan
    logits[3, 4100] = torch.inf
    logits[4, 1:] = -torch.inf
    assert run.argmax(logits).tolist() == [BROKEN, BROKEN, BROKEN, BROKEN, 0]


def paged(rows: list[tuple[int, int]], shape: AttentionShape, block: int, seed: int = 0):
    """A batch of rows (first position, tokens), with random keys and values at every position of their pages."""
    generator = torch.Generator().manual_seed(seed)
    most = max((first + count + block - 1) // block for first, count in rows)
    pages = 1 + most * len(rows)
    table = (1 + torch.randperm(pages - 1, generator=generator)).view(len(rows), most).int().to(DEVICE)
    caches = [random(pages, shape.kv_heads, block, shape.head_dim, seed=seed + i) for i in (1, 2)]
    positions = torch.cat([torch.arange(first, first + count) for first, count in rows]).to(DEVICE)
    starts = torch.tensor([0] + [count for _, count in rows]).cumsum(0).int().to(DEVICE)
    total = len(positions)
    return Batch(positions * 0, positions, starts, table, torch.arange(total, device=DEVICE)), caches


def check_attention(kernels: CudaKernels, rows, shape: AttentionShape, norms: bool, block: int = 8) -> None:
    batch, (keys, values) = paged(rows, shape, block)
    heads, kv, dim = shape[:3]
    angle = torch.outer(torch.arange(512.0), 10 ** -torch.linspace(0, 3, dim // 2)).to(DEVICE)
    q_norm, k_norm = (random(dim, seed=7), random(dim, seed=8)) if norms else (None, None)
    qkv = random(len(batch.positions), (heads + 2 * kv) * dim, seed=9)
    given = (qkv, shape, angle.cos(), angle.sin(), q_norm, k_norm)
    want_keys, want_values = keys.clone(), values.clone()
    want = reference.attend(*given, want_keys, want_values, batch)
    for _ in range(2):  # twice: a launch has to leave its counters as it found them
        got_keys, got_values = keys.clone(), values.clone()
        got = kernels.attend(*given, got_keys, got_values, batch)
        close(got, want)
        close(got_keys, want_keys, 2e-3)
        assert torch.equal(got_values, want_values)
    untouched = (want_keys == keys).all(-1)
    assert torch.equal(got_keys[untouched], keys[untouched])
    assert not torch.equal(got_keys, keys)


SHAPES = [AttentionShape(6, 2, 16, 0, EPS), AttentionShape(4, 2, 32, 0, EPS), AttentionShape(3, 3, 24, 40, EPS)]


@pytest.fixture(params=["few", "many"])
def rows_are(request, monkeypatch) -> None:
    """Attention cut as for few rows, or as for many."""
    for wide in (False, True):
        monkeypatch.setitem(cuda_attention.CUTS, (True, wide), cuda_attention.CUTS[request.param == "few", wide])


@pytest.mark.parametrize("captured", [True, False], ids=["decode", "ragged"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_both_directions(run: CudaKernels, shape: AttentionShape, captured: bool) -> None:
    rows = [(first, 5) for first in (0, 3, 63, 200)]
    check_attention(run.bounded(5, 512) if captured else run, rows, shape._replace(block=True), norms=True)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_and_values_are_stored(run: CudaKernels, shape: AttentionShape, norms: bool) -> None:
    """kv is a part of the columns of a wider tensor. Padding behind the last row is NaN and reaches no page."""
    rows = [(0, 3), (40, 17), (7, 1)]
    batch, (keys, values) = paged(rows, shape, 8)
    _, kv, dim = shape[:3]
    angle = torch.outer(torch.arange(512.0), 10 ** -torch.linspace(0, 3, dim // 2)).to(DEVICE)
    wide = random(21 + 3, 3 * 2 * kv * dim, seed=9)
    wide[21:] = torch.nan
    part = wide[:, 2 * kv * dim : 4 * kv * dim]
    norm = random(dim, seed=3) if norms else None
    batch = batch._replace(positions=torch.cat((batch.positions, batch.positions.new_zeros(3))))
    found = []
    for kernels in (run, reference):
        own = (keys.clone(), values.clone())
        kernels.store(part, shape, angle.cos(), angle.sin(), norm, *own, batch)
        found.append(own)
    (got_keys, got_values), (want_keys, want_values) = found
    close(got_keys, want_keys, 2e-3)
    assert torch.equal(got_values, want_values) and not torch.equal(got_keys, keys)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("normed", [0, 1])  # the parts with even or odd numbers
def test_parts_are_joined(run: CudaKernels, count: int, normed: int) -> None:
    parts = [random(7, 20 + 9 * i, seed=i) for i in range(count)]
    parts[-1] = random(7, 100, seed=8)[:, 30:70]
    norms = [random(part.shape[1], seed=i + 9) if i % 2 == normed else None for i, part in enumerate(parts)]
    got, want = run.join(parts, norms, EPS), reference.join(parts, norms, EPS)
    close(got, want, 2e-3)
    begin = 0
    for part, norm in zip(parts, norms, strict=True):
        columns = slice(begin, begin := begin + part.shape[1])
        assert norm is not None or torch.equal(got[:, columns], part)


def test_no_part_or_too_many_are_refused(run: CudaKernels) -> None:
    part = random(2, 8)
    for count in (1, 6):
        with pytest.raises(SettingError, match="give 1 to 5 parts"):
            run.join([part] * count, [None] * 6, EPS)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_plain_products(run: CudaKernels, tokens: int) -> None:
    x, weight, bias = random(tokens, 64), Dense(random(48, 64, seed=1)), random(48, seed=2)
    close(run.linear(x, weight, bias), wide(reference.linear, x, weight, bias))
    close(run.linear(x, weight, None), wide(reference.linear, x, weight, None))
    logits = run.logits(x, weight)
    assert logits.dtype == torch.float32
    close(logits, wide(reference.logits, x, weight), 1e-5)  # not rounded to 16 bits


@pytest.mark.parametrize("count", [50, 4096, 9000])
def test_the_best_logits_and_their_probabilities(run: CudaKernels, count: int) -> None:
    logits = torch.randn(9, count, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 5
    logits[0] = 1.0  # the first of equal ones
    logits[1, -1] = logits[1, count // 2] = 40.0
    logits[2, count // 2] = torch.nan
    logits[3, -1] = torch.nan
    logits[4, 0] = torch.inf
    logits[5] = -torch.inf
    logits[6, 1:] = -torch.inf
    ids, chances = reference.best(logits)
    got_ids, got = run.best(logits)
    assert torch.equal(got_ids, ids) and ids[:7].tolist() == [0, count // 2, 0, 0, 0, 0, 0]
    torch.testing.assert_close(got, chances, rtol=1e-5, atol=0)
    assert got[2:6].tolist() == [0.0] * 4 and got[6] == 1


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on a GPU")
def test_operations_of_drafters_in_a_graph(run: CudaKernels) -> None:
    """They wait for nothing: their launches are captured, and a replay computes with what the inputs are then."""
    shape = SHAPES[1]._replace(block=True)
    rows = [(0, 5), (63, 5), (200, 5)]
    batch, (keys, values) = paged(rows, shape, 8)
    angle = torch.outer(torch.arange(512.0), 10 ** -torch.linspace(0, 3, 16)).to(DEVICE)
    x, parts, norm = random(15, 64, seed=1), [random(15, 40, seed=i) for i in range(5)], random(40, seed=7)
    kv, qkv, weight = random(15, 3 * 128, seed=2), random(15, 8 * 32, seed=3), Dense(random(90, 64, seed=4))
    given = (angle.cos(), angle.sin())

    def step(kernels) -> tuple[torch.Tensor, ...]:
        few = kernels.bounded(5, 512)
        logits = few.logits(x, weight)
        few.store(kv[:, 128:256], shape, *given, None, keys, values, batch)
        stored = keys.clone(), values.clone()
        mixed = few.attend(qkv, shape, *given, None, None, keys, values, batch)
        joined = few.join(parts, [norm, None, norm, None, None], EPS)
        return joined, few.linear(x, weight, None), logits, mixed, *stored, *few.best(logits)

    step(run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(run)
    for tensor in (x, kv, qkv, *parts):
        tensor.copy_(tensor.roll(1, 0) * 0.5)
    graph.replay()
    *got, ids, chances = (tensor.clone() for tensor in captured)
    for mine, wanted in zip(got, step(reference), strict=False):
        close(mine, wanted)
    want_ids, want_chances = reference.best(got[2])
    assert torch.equal(ids, want_ids)
    close(chances, want_chances, 1e-5)


def test_interleaved_heads_are_refused(run: CudaKernels) -> None:
    with pytest.raises(TypeError, match="put their rows into halves"):
        check_attention(run, [(0, 3)], SHAPES[0]._replace(interleaved=True), False)


@pytest.mark.usefixtures("rows_are")
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("context", [100, 512])  # one stretch, several
def test_decode_attention(run: CudaKernels, width: int, shape: AttentionShape, context: int) -> None:
    firsts = (0, 1, 63, 64, 90) if context == 100 else (0, 125, 127, 300)  # in one tile and across two
    check_attention(run.bounded(width, context), [(first, width) for first in firsts], shape, norms=shape.head_dim == 32)


@pytest.mark.usefixtures("rows_are")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("context", [100, 512])
def test_decode_attention_of_rows_of_several_lengths(run: CudaKernels, shape: AttentionShape, context: int) -> None:
    """Padding behind the last row is NaN: it reaches neither the pages nor the results of the rows."""
    firsts = (0, 63, 90, 40) if context == 100 else (0, 125, 300, 127)
    rows = list(zip(firsts, (1, 5, 2, 9), strict=True))
    check_attention(run.bounded(9, context, ragged=True), rows, shape, norms=shape.head_dim == 32)
    batch, (keys, values) = paged(rows, shape, 8)
    heads, kv, dim = shape[:3]
    angle = torch.outer(torch.arange(512.0), 10 ** -torch.linspace(0, 3, dim // 2)).to(DEVICE)
    qkv = random(17 + 3, (heads + 2 * kv) * dim, seed=9)
    qkv[17:] = torch.nan
    padded = batch._replace(positions=torch.cat((batch.positions, batch.positions.new_zeros(3))))
    found = []
    for given, theirs in ((qkv, padded), (qkv[:17], batch)):
        own = (keys.clone(), values.clone())
        ragged = run.bounded(9, context, ragged=True)
        found.append((ragged.attend(given, shape, angle.cos(), angle.sin(), None, None, *own, theirs)[:17], *own))
    for with_padding, without in zip(*found, strict=True):
        assert torch.equal(with_padding, without)


@pytest.mark.usefixtures("rows_are")
@pytest.mark.parametrize("context", [100, 512])
def test_a_verify_step_attends_to_the_bit_as_plain_steps_do(run: CudaKernels, context: int) -> None:
    shape, first, width = AttentionShape(6, 2, 16, 0, EPS), 60 if context == 100 else 253, 5
    batch, (keys, values) = paged([(first, width)], shape, 8)
    angle = torch.outer(torch.arange(512.0), 10 ** -torch.linspace(0, 3, 8)).to(DEVICE)
    qkv = random(width, 10 * 16, seed=9)
    given = (shape, angle.cos(), angle.sin(), None, None, keys, values)
    together = run.bounded(width, context).attend(qkv, *given, batch)
    for i in range(width):
        one = batch._replace(positions=batch.positions[i : i + 1])
        assert torch.equal(run.bounded(1, context).attend(qkv[i : i + 1], *given, one), together[i : i + 1])


def test_attention_of_a_row_is_cut_alike_whatever_its_tokens() -> None:
    assert cuda_attention.cut_for(64, 48).early and cuda_attention.cut_for(128, 16).early
    assert not cuda_attention.cut_for(64, 49).early and not cuda_attention.cut_for(96, 17).early
    assert cuda_attention.cut_for(256, 8).positions == 64


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_attention_of_ragged_rows(run: CudaKernels, shape: AttentionShape) -> None:
    check_attention(run, [(0, 70), (37, 1), (60, 20), (0, 1)], shape, norms=shape.head_dim == 32)


@pytest.mark.parametrize(("padding", "empty"), [(3, ()), (0, (0, 0)), (40, (1, 2)), (5, (4, 4, 4, 4))])
def test_prefill_attention_with_empty_rows_and_padding(run: CudaKernels, padding: int, empty: tuple[int, ...]) -> None:
    """The padding is NaN, which must reach no row and no page. The block tables of empty rows are page 0. empty: the rows
    before which an empty row is put."""
    shape = AttentionShape(4, 2, 32, 0, EPS)
    exact, (keys, values) = paged([(0, 70), (37, 1), (60, 20), (0, 1)], shape, 8)
    total = len(exact.positions)
    counts, table = exact.row_start.diff().tolist(), list(exact.block_table)
    for row in reversed(empty):
        counts.insert(row, 0)
        table.insert(row, table[0] * 0)
    batch = exact._replace(
        positions=torch.cat((exact.positions, exact.positions.new_zeros(padding))),
        row_start=torch.tensor([0, *counts], device=DEVICE).cumsum(0).int(),
        block_table=torch.stack(table),
    )
    angle = torch.outer(torch.arange(512.0), 10 ** -torch.linspace(0, 3, 16)).to(DEVICE)
    qkv = random(total + padding, 8 * 32, seed=9)
    qkv[total:] = torch.nan
    given = (shape, angle.cos(), angle.sin(), random(32, seed=7), random(32, seed=8))
    want_keys, want_values = keys.clone(), values.clone()
    want = run.attend(qkv[:total].contiguous(), *given, want_keys, want_values, exact)
    close(want, reference.attend(qkv[:total], *given, keys.clone(), values.clone(), exact))
    for kernels in (run, reference):
        got_keys, got_values = keys.clone(), values.clone()
        got = kernels.attend(qkv, *given, got_keys, got_values, batch)
        assert not got[total:].any()
        close(got[:total], want)
        close(got_keys, want_keys, 2e-3)
        assert torch.equal(got_values, want_values)
        assert torch.equal(got_keys[0], keys[0]) and torch.equal(got_values[0], values[0])


def test_attention_of_nothing_but_padding(run: CudaKernels) -> None:
    shape = AttentionShape(4, 2, 32, 0, EPS)
    batch, (keys, values) = paged([(0, 8)], shape, 8)
    batch = batch._replace(positions=batch.positions * 0, row_start=batch.row_start * 0)
    angle = torch.ones(512, 16, device=DEVICE)
    qkv, before = random(8, 8 * 32) * torch.nan, (keys.clone(), values.clone())
    assert not run.attend(qkv, shape, angle, angle, None, None, keys, values, batch).any()
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


def test_hidden_states_of_every_layer_in_a_step_that_is_captured(run: CudaKernels) -> None:
    """A prompt, then a verify step of two rows. Logits do not depend on whether states are returned. On a GPU the step is
    captured, which fails if anything waits for the device, and replayed on other tokens."""
    config = ModelConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, layers=3, heads=2, kv_heads=1, head_dim=32, max_positions=64
    )
    target = Target.random(config, DTYPE, DEVICE, kernels=run)
    slow = Target(config, target.weights, reference)
    ids = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    table = (1 + torch.arange(6, device=DEVICE)).view(2, 3).int()

    def part(first: int, last: int) -> Batch:
        positions = torch.arange(first, last, device=DEVICE).repeat(2)
        starts = torch.tensor([0, last - first, 2 * (last - first)], device=DEVICE).int()
        return Batch(ids[:, first:last].flatten(), positions, starts, table, None)

    caches = [target.kv_cache(7, 8), slow.kv_cache(7, 8)]
    every, verify, few = (0, 1, 2, 3), part(20, 24), run.bounded(4, 32)
    for got, want in zip(
        target.forward(part(0, 20), caches[0], every).hidden, slow.forward(part(0, 20), caches[1], every).hidden, strict=True
    ):
        close(got, want)

    def step(layers: tuple[int, ...]) -> Forward:
        return target.forward(verify, caches[0], layers, few)

    found, plain = step(every), step(())
    assert torch.equal(found.logits, plain.logits)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(every)
        verify.ids.copy_((verify.ids + 7) % 50)
        graph.replay()
        found = captured
    for got, want in zip(found.hidden, slow.forward(verify, caches[1], every).hidden, strict=True):
        close(got, want)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from forerun.kernels import cuda_attention as attention, cuda_prefill as prefill, cuda_products as products

def check(kernel, warps=4, **constants):
    given = dict(
        positions="*i64", table="*i32", row_start="*i32", arrived="*i32", cos="*fp32", sin="*fp32", part="*fp32",
        part_top="*fp32", part_total="*fp32", eps="fp32", scale="fp32", T="i32", R="i32", TABLE="i32",
        STRIDE="i32", OUT="i32", V="i32", logits="*fp32", tops="*fp32", firsts="*i32", sums="*fp32", chances="*fp32",
    )
    types = {name: "constexpr" if name in constants else given.get(name, "*bf16") for name in kernel.arg_names}
    compile(ASTSource(kernel, types, constexprs=constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

heads = dict(HEADS=4, KV=2, D=32, DP=32, HP=16, BM=16, BLOCK=16, NORM=True, FAR=True)
decode = dict(heads, WIDTH=5, QUERIES=1, TOKENS=16, BN=32, SPLITS=4, LEAST=1, WINDOW=64, AT_ONCE=2)
for pdl in (0, 1, 2):
    for ragged in (False, True):
        for warps, early in ((4, False), (8, True)):
            check(attention.decode_kernel, warps, **decode, RAGGED=ragged, BOTH=ragged, EARLY=early, PDL=pdl)
check(prefill.rotate_kernel, **heads, RP=2)
check(prefill.rotate_kernel, **(heads | {"HEADS": 0}), RP=2)
two = dict(STARTS=(0, 576, 1076, 1076, 1076), WIDTHS=(576, 500, 1, 1, 1), NORMED=(True, False, False, False, False))
five = dict(STARTS=(0, 9, 18, 27, 36), WIDTHS=(9,) * 5, NORMED=(False, True, False, True, False))
for pdl in (0, 1, 2):
    check(products.join_kernel, **two, WIDTH=1024, PDL=pdl)
    check(products.join_kernel, **five, WIDTH=16, PDL=pdl)
for sums in (False, True):
    check(products.block_best_kernel, WIDTH=4096, SUMS=sums, PDL=1)
    check(products.best_kernel, BLOCKS=12, WIDTH=16, BROKEN=0, SUMS=sums, PDL=1)
del heads["NORM"], heads["HP"]
for both in (False, True):
    check(prefill.prefill_kernel, **heads, BN=32, RP=2, WINDOW=64, BOTH=both)
product = dict(N=64, K=96, BM=16, BN=16, NORM=True, GATE=True, ADD=False, BIAS=False)
for pdl in (1, 2):
    check(products.whole_kernel, **product, STARTS=(0, 64), WIDTHS=(64, 32), SPLIT=2, PDL=pdl)
    check(products.loop_kernel, **product, STEP=64, SPLIT=1, AHEAD=64, PDL=pdl)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_the_kernels_compile_for_hopper() -> None:
    """The interpreter takes what the compiler refuses, such as a name of one type before a branch and another in it."""
    bare = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
