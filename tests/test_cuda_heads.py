"""The launches around a head's products against their torch twins, and the fast chain drafter against the plain one: on the GPU
where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions and ours are defined, at the imports below
pytest.importorskip("triton", reason="the CUDA kernels are written in Triton, which is not installed")

from pathlib import Path

from forerun.drafters import Observed, Rows
from forerun.drafters.chain import ChainDrafter
from forerun.drafters.fused_chain import FusedChain
from forerun.engine.state import RowState
from forerun.kernels import Batch, cuda_heads
from forerun.kernels.cuda import CudaKernels
from forerun.models.decoder import KVCache, Target
from forerun.models.weights import Dense
from forerun.verify.sampling import SamplingState
from tests.test_cuda_kernels import DEVICE, DTYPE, interpreter_that_numpy_allows  # noqa: F401  (a fixture for all tests here)
from tests.test_observe import SHAPE
from tests.tiny import tiny_model
from tests.tiny_heads import random_head


@pytest.mark.parametrize("width", [3, None], ids=["even", "uneven"])
@pytest.mark.parametrize("zero_first", [False, True])
def test_tokens_ahead(width: int | None, zero_first: bool) -> None:
    at = torch.Generator().manual_seed(0)
    rows, hidden, vocab = 5, 24, 40
    counts = torch.full((rows,), 3) if width else torch.tensor([1, 4, 0, 3, 2])
    start = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    begin = torch.randint(0, 9, (rows,), generator=at)
    begin[0] = 0
    row = torch.repeat_interleave(torch.arange(rows), counts)
    padding = 0 if width else 2
    positions = begin[row] + torch.arange(len(row)) - start[row]
    positions = torch.cat((positions, torch.zeros(padding, dtype=torch.int64)))
    slot = torch.randperm(7, generator=at)[:rows]
    tokens = torch.randint(0, vocab, (7, 30), generator=at)
    embedding = torch.randn(vocab, hidden, generator=at).to(DTYPE)
    committed = torch.stack([torch.randint(0, 3, (rows,), generator=at)] * 5, 1)
    given = (slot, positions, start, committed[:, 2], tokens)
    x, last = cuda_heads.ahead(*(t.to(DEVICE) for t in given), Dense(embedding.to(DEVICE)), width, zero_first)
    want = embedding[tokens[slot[row], positions[: len(row)] + 1]]
    if zero_first:
        want[positions[: len(row)] == 0] = 0
        assert (want == 0).all(1).any()
    assert torch.equal(x[: len(row)].cpu(), want)
    assert torch.equal(last.cpu(), (start[:-1] + committed[:, 2] - 1).clamp(min=0))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("vocab", [50, 9000])
def test_pick(vocab: int, mapped: bool) -> None:
    at = torch.Generator().manual_seed(1)
    logits = torch.randn(4, vocab, generator=at) * 3
    logits[1, 7] = logits[1, vocab - 1] = 30  # the first of equal ones
    logits[2, 5] = torch.nan
    ids = torch.randperm(2 * vocab, generator=at)[:vocab].sort().values if mapped else None
    embedding = torch.randn(2 * vocab, 8, generator=at).to(DTYPE)
    slot, length = torch.tensor([3, 0, 1, 2]), torch.tensor([9, 4, 6, 2])
    tokens, chances = torch.zeros(4, 3, dtype=torch.int64), torch.full((4, 3), 0.5)
    tokens, chances = tokens.to(DEVICE), chances.to(DEVICE)
    given = (logits.to(DEVICE), None if ids is None else ids.to(DEVICE), slot.to(DEVICE), length.to(DEVICE))
    x, positions = cuda_heads.pick(*given, Dense(embedding.to(DEVICE)), tokens, chances, 1)
    best = logits.argmax(1)
    best[2] = 0
    chance = logits.softmax(1).gather(1, best[:, None])[:, 0]
    chance[2] = 0
    want = best if ids is None else ids[best]
    assert torch.equal(tokens[:, 1].cpu(), want) and not bool(tokens[:, 0].any())
    assert torch.allclose(chances[:, 1].cpu(), 0.5 * chance, atol=1e-6)
    assert torch.equal(x.cpu(), embedding[want]) and torch.equal(positions.cpu(), length[slot])


def test_drafts_are_kept() -> None:
    slot, size = torch.tensor([2, 0], device=DEVICE), torch.tensor([0, 3], device=DEVICE)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]], device=DEVICE)
    draft, kept = torch.zeros(3, 5, dtype=torch.int64, device=DEVICE), torch.full((3,), 9, device=DEVICE)
    survival, chances = torch.rand(2, 3, device=DEVICE), torch.ones(3, 5, device=DEVICE)
    cuda_heads.keep(slot, size, tokens, survival, draft, kept, chances)
    assert draft.tolist() == [[4, 5, 6, 0, 0], [0] * 5, [1, 2, 3, 0, 0]] and kept.tolist() == [3, 9, 0]
    # the host sends slots, sizes and tokens as parts of one tensor
    sent = torch.tensor([[2, 1, 7, 8, 9], [1, 2, 4, 5, 6], [0, 3, 4, 5, 6]], device=DEVICE)
    parts = torch.zeros_like(draft), torch.full_like(kept, 9)
    cuda_heads.keep(sent[:, 0], sent[:, 1], sent[:, 2:], None, *parts, chances)
    assert parts[0].tolist() == [[4, 5, 6, 0, 0], [4, 5, 6, 0, 0], [7, 8, 9, 0, 0]] and parts[1].tolist() == [3, 2, 1]
    # a drafter on the host that found nothing
    cuda_heads.keep(slot, torch.zeros_like(size), tokens[:, :0], None, draft, kept, chances)
    assert kept.tolist() == [0, 9, 0] and draft.sum() == 21
    assert torch.equal(chances[slot, :3], survival) and bool((chances[1] == 1).all() & (chances[:, 3:] == 1).all())


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3 mapped", "mtp"] if DEVICE == "cuda" else ["eagle3 mapped", "mtp"])
@pytest.mark.parametrize("even", [True, False])
def test_the_fast_chain_drafts_as_the_plain_one(tmp_path: Path, kind: str, even: bool) -> None:
    """A decode launch of three rows and a dummy row, the same on both."""
    target = Target.load(tiny_model(tmp_path / "tiny", **SHAPE), DTYPE, DEVICE, kernels=CudaKernels(DEVICE))
    head = random_head(target, kind)
    at, width, found = torch.Generator().manual_seed(2), 2, []
    counts = torch.full((4,), width + 1) if even else torch.tensor([3, 1, 2, 1])
    start = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    row = torch.repeat_interleave(torch.arange(4), counts)
    length = torch.tensor([12, 9, 20, 1])
    positions = (length - 1)[row] + torch.arange(len(row)) - start[row]
    states = torch.randn(len(row), SHAPE["hidden"], generator=at).to(DTYPE).to(DEVICE)
    hidden = tuple(states.roll(i, 0) for i, _ in enumerate(head.config.states))
    tokens = torch.randint(0, 260, (4, 60), generator=at)
    for kindred in (ChainDrafter, FusedChain):
        state = RowState(4, 60, 8, torch.device(DEVICE), width)
        state.tokens[:] = tokens
        state.block_table[:3] = torch.arange(1, 25, dtype=torch.int32).view(3, 8).to(DEVICE)
        kv = KVCache(head.config.decoder, 25, 8, DTYPE, DEVICE)
        for keys in (*kv.keys, *kv.values):
            keys.copy_(torch.randn(keys.shape, generator=torch.Generator().manual_seed(3)))
        drafter = kindred(head, kv, state, SamplingState(state.tokens, state.length, target.vocab), False, True)
        committed = torch.tensor([2, 1, 1, 0])
        state.length[:] = length + committed
        slot = torch.arange(4, device=DEVICE)
        batch = Batch(positions.to(DEVICE), positions.to(DEVICE), start.to(DEVICE), state.block_table[slot], None)
        kernels = target.kernels.bounded(width + 1, 60, ragged=not even)
        given = (slot, batch, None, committed.to(DEVICE), hidden, kernels, width + 1 if even else None)
        drafter.observe(Observed(*given))
        found.append(drafter.propose(Rows(slot, torch.tensor([2, 2, 2, 0], device=DEVICE), width)))
    plain, fast = found
    assert torch.equal(plain.tokens[:3], fast.tokens[:3]) and torch.equal(plain.size, fast.size)
    assert plain.confidence is not None and fast.confidence is not None
    assert torch.allclose(plain.confidence[:3], fast.confidence[:3], atol=2e-3)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from forerun.kernels import cuda_heads as heads

def check(kernel, warps=4, **constants):
    given = dict(
        row_start="*i32", embedding="*bf16", x="*bf16", logits="*fp32", tops="*fp32", firsts="*i32", sums="*fp32",
        chances="*fp32", table="*bf16", out="*bf16", T="i32", R="i32", L="i32", V="i32", K="i32", S="i32", WIDTH="i32",
        STRIDE="i32", step="i32", blocks="i32",
    )
    types = {name: "constexpr" if name in constants else given.get(name, "*i64") for name in kernel.arg_names}
    compile(ASTSource(kernel, types, constexprs=constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

row = dict(H=576, HP=1024, PDL=1)
for even in (True, False):
    check(heads.ahead_kernel, LANES=16, EVEN=even, ZERO=even, **row)
check(heads.keep_last_kernel, **row)
for mapped in (True, False):
    check(heads.pick_kernel, BLOCKS=16, MAPPED=mapped, **row)
check(heads.keep_kernel, 1, KP=4, PDL=1)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_the_kernels_compile_for_hopper() -> None:
    """The interpreter takes what the compiler refuses."""
    bare = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
