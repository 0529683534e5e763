"""Sampling launches against their torch twins: on the GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions and ours are defined, at the imports below
pytest.importorskip("triton", reason="the CUDA kernels are written in Triton, which is not installed")

from forerun.kernels import cuda_sampling as sampling
from forerun.kernels.cuda_sampling import Filters
from forerun.verify import filters, noise
from forerun.verify.sampling import BROKEN, Features, SamplingState
from tests.statistical import PASS, REJECT, chi_square
from tests.test_cuda_kernels import DEVICE, interpreter_that_numpy_allows  # noqa: F401  (a fixture for all tests here)


def plain(temperature: torch.Tensor) -> Filters:
    return Filters(temperature, temperature * 0, (temperature * 0).long(), temperature * 0 + 1)


@pytest.mark.parametrize("purpose", [noise.CHOOSE, noise.ACCEPT, noise.REDRAW, noise.DRAFT])
def test_noise_bit_for_bit(purpose: int) -> None:
    at = torch.Generator().manual_seed(purpose)
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (9,), generator=at).to(DEVICE)
    seed[:3] = torch.tensor([0, -1, 42], device=DEVICE)
    slot = torch.randint(0, 9, (300,), generator=at).to(DEVICE)
    position = torch.randint(0, 200_000, (300,), generator=at).to(DEVICE)
    position[:2] = torch.tensor([0, (7 << 32) + 5], device=DEVICE)
    assert torch.equal(sampling.uniform(seed, slot, position, purpose), noise.uniform(seed[slot], position, purpose))


def shares(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature) as verify/sampling.py takes it."""
    divisor = temperature.float()[:, None]
    return ((logits - logits.amax(-1, keepdim=True)) / divisor).softmax(-1)


@pytest.mark.parametrize(("vocab", "block"), [(1000, 2048), (1000, 128), (512, 64)])
def test_draws_agree_with_the_twin(monkeypatch, vocab: int, block: int) -> None:
    monkeypatch.setattr(sampling, "DRAW_BLOCK", block)
    at = torch.Generator().manual_seed(vocab + block)
    rows = 40
    logits = (torch.randn(rows, vocab, generator=at) * 3).to(DEVICE)
    logits[::7, : vocab // 2] = -torch.inf  # whole blocks without mass
    temperature = torch.rand(rows, generator=at, dtype=torch.float64).to(DEVICE) + 0.3
    temperature[:6] = torch.tensor([1e-6, 1e-4, 1e-2, 10, 1e4, 1e-30], device=DEVICE, dtype=torch.float64)
    u = torch.rand(rows, generator=at, dtype=torch.float64).to(DEVICE)
    u[10:14] = torch.tensor([2.0**-53, 1 - 2.0**-53, 1e-9, 1 - 1e-9], device=DEVICE, dtype=torch.float64)
    probs = shares(logits, temperature)
    got, want = sampling.draw_tempered(logits, temperature, u), noise.draw(probs, u)
    assert (got != want).sum() <= 1
    after = probs.double().cumsum(-1)
    gap = (after.gather(1, torch.minimum(got, want)[:, None])[:, 0] / after[:, -1] - u).abs()
    assert (gap[got != want] < 1e-6).all()  # the other side of an edge
    assert (probs.gather(1, got[:, None]) > 0).all()
    alone = torch.tensor([3, 8, 11], device=DEVICE)
    assert torch.equal(got[alone], sampling.draw_tempered(logits[alone], temperature[alone], u[alone]))  # in any batch


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    logits = torch.zeros(6, 5000, device=DEVICE)
    logits[1, [2100, 4999]] = 2
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 17] = -5
    logits[4, 3000] = torch.nan
    temperature = torch.tensor([0, 0, 1, 1, 1, 1.0], device=DEVICE, dtype=torch.float64)
    u = torch.full((6,), 0.99, device=DEVICE, dtype=torch.float64)
    assert sampling.draw_tempered(logits, temperature, u).tolist() == [0, 2100, BROKEN, 17, BROKEN, 4950]


def test_choices_have_the_distribution_and_the_noise(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "DRAW_BLOCK", 16)  # two blocks, and short ones, which the interpreter adds up one by one
    at = torch.Generator().manual_seed(5)
    rows, per, vocab, slots = 60, 5, 24, 20
    logits = torch.randn(1, vocab, generator=at).to(DEVICE).expand(rows * per, vocab).contiguous()
    seed = torch.randint(0, 1 << 40, (slots,), generator=at).to(DEVICE)
    temperature = torch.full((slots,), 0.8, dtype=torch.float64, device=DEVICE)
    temperature[3] = 0
    slot = torch.arange(rows, device=DEVICE) % slots
    positions = (torch.arange(rows * per) + 1000).to(DEVICE)
    got = sampling.choose(logits, slot, positions, seed, plain(temperature))
    every = slot.repeat_interleave(per)
    greedy = every == 3
    assert (got[greedy] == logits[0].argmax()).all()
    probs = shares(logits, temperature[every].clamp(min=0.1))
    want = noise.draw(probs, noise.uniform(seed[every], positions + 1, noise.CHOOSE))
    assert (got != want)[~greedy].sum() <= 1
    seen = torch.bincount(got[~greedy], minlength=vocab).cpu().double()
    expected = shares(logits[:1], temperature[:1])[0].cpu().double()

    assert chi_square(seen.numpy(), expected.numpy()) > PASS
    assert chi_square(seen.numpy(), shares(logits[:1], temperature[:1] * 3)[0].cpu().double().numpy()) < REJECT


def column(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


SETTINGS = [  # temperature, min_p, top_k, top_p
    (1.0, 0.0, 0, 1.0), (0.7, 0.0, 5, 1.0), (1.0, 0.0, 1, 1.0), (1.3, 0.0, 0, 0.9), (1.0, 0.0, 0, 1e-6), (1.0, 0.2, 0, 1.0),
    (0.5, 0.05, 40, 0.8), (2.0, 0.0, 300, 0.95), (1.0, 0.0, 5000, 0.5), (1.0, 1.0, 0, 1.0), (0.0, 0.5, 3, 0.5),
    (1e-3, 0.0, 9, 0.9),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["spread", "ties", "close", "banned"])
def test_floors_without_sorting(monkeypatch, kind: str) -> None:
    """One logit says what all filters keep: the same as by sorting, ties, bans and negative zero included."""
    monkeypatch.setattr(sampling, "FLOOR_BLOCK", 128)  # several to a row
    rows, vocab = len(SETTINGS), 700
    at = torch.Generator().manual_seed(len(kind))
    logits = torch.randn(rows, vocab, generator=at) * 4
    if kind == "ties":
        logits = (logits / 2).round() / 2  # a dozen values, zeros of both signs among them
    elif kind == "close":
        logits = 12 + logits * 1e-4
    elif kind == "banned":
        logits[:, 100:] = -torch.inf
    logits = logits.to(DEVICE)
    temperature, min_p, top_k, top_p = (column(*values) for values in zip(*SETTINGS, strict=True))
    by = Filters(temperature, min_p, top_k.long(), top_p)
    got = sampling.floors(logits, by)
    divisor = torch.where(temperature > 0, temperature, 1.0)
    given = (x[:, None] for x in (divisor, min_p, top_k.long(), top_p))
    want = filters.thresholds(logits, *given, largest_k=vocab, any_top_p=True, unbounded=True)
    want = torch.where(temperature[:, None] > 0, want, -torch.inf)
    kept, wanted = logits >= got[:, None], logits >= want
    assert torch.equal(kept, wanted)
    assert kept[0].all() and kept[10].all() and not kept[1].all()
    few = sampling.floors(logits[3:5], Filters(*(x[3:5] for x in by)))
    assert torch.equal(few, got[3:5])  # in any batch


def test_floors_of_rows_without_a_largest_logit() -> None:
    logits = torch.zeros(4, 300, device=DEVICE)
    logits[0] = -torch.inf
    logits[1, 7] = torch.nan
    logits[2, 8] = torch.inf
    one = column(1, 1, 1, 1)
    by = Filters(one, one / 10, (one * 3).long(), one / 2)
    assert sampling.floors(logits, by).tolist() == [-torch.inf] * 3 + [0.0]


def test_filtered_choices_are_those_of_the_twin() -> None:
    """SamplingState's own choice with every filter, by slots that several positions share."""
    slots, rows, per, vocab = 8, 6, 3, 500
    at = torch.Generator().manual_seed(3)
    tokens, length = torch.zeros(slots, 20, dtype=torch.int64), torch.ones(slots, dtype=torch.int64)
    state = SamplingState(tokens.to(DEVICE), length.to(DEVICE), vocab)
    state.host = False  # the twin of fixed shape
    for name, values in (("temperature", [0.0, 0.5, 1, 1.5, 0.8, 1, 1, 1]), ("top_p", [1, 0.9, 0.5, 0.99, 1, 1, 0.3, 1])):
        getattr(state, name)[:] = column(*values)
    state.min_p[:] = column(0, 0, 0.02, 0, 0.1, 0, 0, 0)
    state.top_k[:] = column(0, 50, 0, 10, 0, 3, 0, 0, dtype=torch.int64)
    state.seed[:] = torch.randint(0, 1 << 40, (slots,), generator=at).to(DEVICE)
    logits = (torch.randn(rows * per, vocab, generator=at) * 2).to(DEVICE)
    slot = torch.tensor([0, 1, 2, 3, 5, 6], device=DEVICE)
    positions = torch.arange(rows * per, device=DEVICE) + 40
    by = Filters(state.temperature, state.min_p, state.top_k, state.top_p)
    got = sampling.choose(logits, slot, positions, state.seed, by, filtered=True)
    features = Features(sampled=True, min_p=True, top_k=64, top_p=True, unbounded=True)
    every = slot.repeat_interleave(per)
    assert torch.equal(got, state.choose(logits, every, positions + 1, features))
    free = sampling.choose(logits, slot, positions, state.seed, by)
    assert not torch.equal(free, got)  # the filters had something to say


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from forerun.kernels import cuda_sampling as sampling

def check(kernel, **constants):
    given = dict(
        logits="*fp32", temperatures="*fp64", min_ps="*fp64", top_ks="*i64", top_ps="*fp64", slots="*i64", seeds="*i64",
        positions="*i64", noise="*fp64", floors="*fp32", tops="*fp32", firsts="*i32", masses="*fp64", out="*i64", V="i32",
        PER="i32", L="i32", tokens="*i64", prompt_lens="*i64", repetitions="*fp32", presences="*fp32",
        frequencies="*fp32", counts="*i32",
    )
    if kernel is sampling.uniform_kernel:
        given |= dict(out="*fp64", N="i32")
    types = {name: "constexpr" if name in constants else given[name] for name in kernel.arg_names}
    compile(ASTSource(kernel, types, constexprs=constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})

check(sampling.count_kernel, BLOCK=1024)
check(sampling.penalise_kernel, BLOCK=2048)
check(sampling.uniform_kernel, PURPOSE=1, LANES=128, PDL=1)
for pdl in (0, 1):
    for noise in (False, True):
        check(sampling.floor_kernel, BLOCK=4096, NOISE=noise, PDL=pdl)
    check(sampling.block_mass_kernel, BLOCK=2048, NOISE=True, FLOOR=True, PDL=pdl)
    check(sampling.draw_kernel, BLOCKS=24, LANES=32, BLOCK=2048, BROKEN=-1, NOISE=True, FLOOR=True, PURPOSE=1, PDL=pdl)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_the_kernels_compile_for_hopper() -> None:
    bare = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("seed", range(4))
def test_penalties_are_those_of_the_twin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows with any of the three penalties or none, at positions in the prompt, the output and drafts behind it; what lies
    behind a position in the pool counts for nothing, whatever it is."""
    monkeypatch.setattr(sampling, "HISTORY_BLOCK", 16)
    at = torch.Generator().manual_seed(seed)
    slots, context, vocab, per = 6, 50, 30, 3
    tokens = torch.randint(0, vocab, (slots, context), generator=at).to(DEVICE)
    state = SamplingState(tokens, torch.full((slots,), 40, device=DEVICE), vocab)
    state.prompt_len.copy_(torch.randint(1, 30, (slots,), generator=at))
    state.repetition.copy_(torch.tensor([1.0, 1.3, 1.0, 0.7, 1.0, 2.0]))
    state.presence.copy_(torch.tensor([0.0, 0.0, 1.5, -0.5, 0.0, 0.3]))
    state.frequency.copy_(torch.tensor([0.0, 0.0, 0.0, 0.4, -1.0, 1.0]))
    slot = torch.tensor([3, 0, 5, 1, 2, 4], device=DEVICE)
    positions = torch.randint(0, context - per, (slots, 1), generator=at) + torch.arange(per)
    positions = positions.flatten().to(DEVICE)
    logits = torch.randn(slots * per, vocab, generator=at).to(DEVICE)
    want = state.shape(logits, slot.repeat_interleave(per), positions + 1, Features(penalties=True))
    last = positions.view(slots, per)[:, -1].tolist()
    for own, end in zip(slot.tolist(), last, strict=True):
        tokens[own, end + 1 :] = torch.tensor([-1, 10**6])[torch.arange(context - end - 1) % 2].to(DEVICE)
    got = logits.clone()
    by = (state.repetition, state.presence, state.frequency)
    sampling.penalise(got, slot, positions, tokens, state.prompt_len, *by)
    assert torch.allclose(got, want, atol=1e-6) and not torch.equal(got, logits)
    assert torch.equal(got[per : 2 * per], logits[per : 2 * per])  # no penalty
