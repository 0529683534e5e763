"""Learning, look-up and choice in Triton against their torch twins: on the GPU where there is one, else under Triton's
interpreter."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions and ours are defined, at the imports below
pytest.importorskip("triton", reason="the CUDA kernels are written in Triton, which is not installed")

from forerun.drafters import Needs, Rows
from forerun.drafters.calibration import BINS, Calibration, Candidates
from forerun.drafters.fused_measured import FusedCalibration, FusedMeasured
from forerun.drafters.measured import DeviceMeasured, LookUp
from forerun.engine.state import RowState
from forerun.kernels import cuda_mixed
from forerun.kernels.cuda import CudaKernels
from forerun.types import Draft
from tests.test_cuda_kernels import DEVICE, interpreter_that_numpy_allows  # noqa: F401  (a fixture for all tests here)

SLOTS = 12


def states(width: int) -> tuple[RowState, RowState]:
    made = [RowState(SLOTS, 200, 1, torch.device(device), width) for device in ("cpu", DEVICE)]
    return made[0], made[1]


@pytest.mark.parametrize("width", [1, 4, 7])
@pytest.mark.parametrize("lanes", [16, 512])
def test_the_tables_and_the_choice(width: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_mixed, "LANES", lanes)
    one, other = states(width)
    plain, fast = Calibration(one), FusedCalibration(other, 0)
    rate = torch.rand(BINS, generator=torch.Generator().manual_seed(1))
    one.blind[::5] = True
    other.blind.copy_(one.blind)
    plain.rate.copy_(rate)
    fast.rate.copy_(rate)
    at, seen = torch.Generator().manual_seed(0), set[int]()
    for _ in range(12):
        rows = int(torch.randint(1, SLOTS, (1,), generator=at))
        slot = torch.randperm(SLOTS - 1, generator=at)[:rows]
        if rows > 2:
            slot[-2:] = SLOTS - 1  # padding rows have the dummy slot
        head, found = torch.randint(0, 2, (2, rows, width), generator=at)
        sizes = torch.randint(0, width + 1, (2, rows), generator=at)
        survival = (torch.rand(rows, width, generator=at) ** 0.3).cumprod(1)
        match = torch.randint(1, 10, (rows,), generator=at)
        given = Candidates(head, sizes[0], survival, found, sizes[1], match)
        want = plain.weigh(slot, given)
        got = fast.weigh(slot.to(DEVICE), Candidates(*(part.to(DEVICE) for part in given)))
        live = slot != SLOTS - 1
        for name, a, b in zip(want._fields, want, got, strict=True):
            assert torch.allclose(a[live].float(), b[live].cpu().float(), atol=1e-5), name
        seen |= set(want.source.tolist())
        count = torch.randint(0, width + 2, (rows, 5), generator=at)
        for state in (one, other):
            state.length[:] = 50
            state.tokens[:, 40:60] = torch.randint(0, 2, (SLOTS, 20), generator=torch.Generator().manual_seed(rows))
        plain.learn(slot, count[:, 2])
        fast.learn(slot.to(DEVICE), count.to(DEVICE)[:, 2])
        for name in ("rate", "weight", "luck"):
            many = SLOTS - 1 if name == "luck" else BINS
            assert torch.allclose(getattr(plain, name)[:many], getattr(fast, name).cpu()[:many], atol=1e-5), name
    assert seen == {0, 1} and not torch.equal(plain.rate, rate)
    assert not fast._tables.sums.any()


class Head:
    """Drafts that are given."""

    def __init__(self, tokens: torch.Tensor, survival: torch.Tensor) -> None:
        self.needs, self._draft = Needs(True, pass_tokens=1), (tokens, survival)

    def propose(self, rows: Rows) -> Draft:
        tokens, survival = (part.to(rows.slot.device) for part in self._draft)
        return Draft(tokens, rows.k, None, survival)


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("wanted", [LookUp(1, 3, 3), LookUp(2, 5, 9), None])
def test_a_whole_proposal(wanted: LookUp | None, passes: bool) -> None:
    width, rng, found = 4, random.Random(0), []
    head = torch.randint(0, 4, (6, width), generator=torch.Generator().manual_seed(0))
    survival = torch.rand(6, width, generator=torch.Generator().manual_seed(1)).cumprod(1)
    text = [[rng.randrange(4) for _ in range(rng.randint(1, 60))] for _ in range(6)]
    for kind, state in zip((DeviceMeasured, FusedMeasured), states(width), strict=True):
        device = state.length.device
        for slot, ids in enumerate(text):
            state.tokens[slot, : len(ids)] = torch.tensor(ids)
            state.length[slot] = len(ids)
        state.active[:5] = True
        last = () if kind is DeviceMeasured else (CudaKernels(DEVICE),)
        it = kind(Head(head, survival), state, wanted, False, *last)  # type: ignore[arg-type]
        k = torch.where(state.active[:6], width, 0)
        found.append(it.propose(Rows(torch.arange(6, device=device), k, width, passes=passes)))
    plain, fast = found
    assert torch.equal(plain.size, fast.size.cpu())
    there = torch.arange(width) < plain.size[:, None]
    assert torch.equal(torch.where(there, plain.tokens, 0), torch.where(there, fast.tokens.cpu(), 0))
    for name in ("confidence", "cheap"):
        a, b = getattr(plain, name), getattr(fast, name)
        assert a is not None and torch.allclose(a, b.cpu(), atol=1e-5), name
    assert plain.size[:5].any() == (passes or wanted is not None)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from forerun.kernels import cuda_mixed as mixed, cuda_step as step

def check(kernel, warps, **constants):
    given = dict(
        rate="*fp32", weight="*fp32", luck="*fp32", told="*fp32", sums="*fp32", given="*fp32", edges="*fp32", survival="*fp32",
        cheap="*fp32", active="*i1", blind="*i1", B="i32", L="i32", K="i32", DUMMY="i32", STRIDE="i32", MANY="i32", LONG="i32",
        VOCAB="i32",
        MEMORY="fp32", WINDOW="fp32", PRECISION="fp32", MOST_SHIFT="fp32", LEAST="fp32", MOST="fp32", LEAST_SURVIVAL="fp32",
    )
    types = {name: "constexpr" if name in constants else given.get(name, "*i64") for name in kernel.arg_names}
    compile(ASTSource(kernel, types, constexprs=constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

for rows in (1, 8):
    check(mixed.learn_kernel, 4, ROWS=rows, KP=4, BINS=376, BP=512, PDL=1)
for width in (1, 4, 8):
    check(mixed.weigh_kernel, 1, KP=width, EP=16, PDL=1, **dict(zip(mixed.Kinds._fields, range(1, 13))))
check(step.look_up_kernel, 8, KP=4, MIN_N=2, MAX_N=5, SCAN=1024, UNROLLED=8, PDL=1)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_the_kernels_compile_for_hopper() -> None:
    """The interpreter takes what the compiler refuses."""
    bare = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
