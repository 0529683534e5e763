"""The kernels before and after a decode launch's forward pass against their torch twins, on a GPU if there is one, else under
Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions and ours are defined, at the imports below
pytest.importorskip("triton", reason="the CUDA kernels are written in Triton, which is not installed")

from forerun.config import Speculation
from forerun.drafters.ngram import DeviceNgram
from forerun.engine.cycle import NEXT_DRAFT, PROMPT, Cycle, Key, decode_key
from forerun.engine.fused import FusedCycle
from forerun.engine.policy import LEVELS
from forerun.engine.state import RowState
from forerun.kernels import cuda_step as step
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.cuda_step import LookUp, Pool
from forerun.models.decoder import Target
from forerun.models.weights import Dense
from forerun.types import Draft, Request, SamplingParams, Verdict
from forerun.verify.accept import accept_matching
from forerun.verify.sampling import BROKEN, Features, SamplingState
from tests.test_cuda_kernels import DEVICE, DTYPE, interpreter_that_numpy_allows  # noqa: F401  (a fixture for all tests here)
from tests.test_weights import Int8Blocks
from tests.tiny import VOCAB as VOCAB_OF_TINY
from tests.tiny import tiny_model

VOCAB, CONTEXT = 50, 100


class State:
    """The same random slots twice: as the twin holds them and as the kernels do. The last slot is the dummy slot, and
    one of the others is inactive."""

    def __init__(self, seed: int, slots: int = 7, width: int = 4, alphabet: int = 3, context: int = CONTEXT) -> None:
        at = torch.Generator().manual_seed(seed)
        self.slots = RowState(slots, context, 11, torch.device(DEVICE), width)

        def random(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=at).to(DEVICE)

        self.random, self.context = random, context
        self.slots.tokens[:] = random(0, alphabet, slots, context)
        self.slots.block_table[:] = random(1, 90, slots, 11)
        self.slots.length[:] = random(1, context - 20, slots)
        self.slots.limit[:] = self.slots.length + random(1, 9, slots)
        self.slots.active[:] = True
        self.slots.stop_ids[:, :3] = random(-1, 4 * alphabet, slots, 3)
        if width:
            self.slots.draft[:] = random(0, alphabet, slots, width)
            self.slots.chances[:] = (random(0, 12, slots, width) / 12).cumprod(1)
        self.slots.draft_size[:] = random(0, width + 1, slots)
        self.slots.active[[2, slots - 1]] = False
        self.slots.length[slots - 1] = 1

    def pool(self) -> Pool:
        """A copy of the state, for the kernels to work on."""
        s = self.slots
        parts = (s.tokens, s.length, s.limit, s.active, s.stop_ids, s.block_table, s.draft, s.draft_size, s.chances)
        return Pool(*(part.clone() for part in parts))

    def twin(self, look_up: LookUp | None = None) -> Cycle:
        """The twin on this state, without a model."""
        drafter = None
        if look_up:
            lengths = {"prompt_lookup_min": look_up.min_n, "prompt_lookup_max": look_up.max_n}
            drafter = DeviceNgram(self.slots, Speculation("ngram", 4, **lengths), look_up.vocab)
        return Cycle(None, None, self.slots, None, drafter, block=False)  # type: ignore[arg-type]

    def check(self, pool: Pool) -> None:
        """The kernels' state equals the twin's, except for stale entries."""
        slots = self.slots
        assert torch.equal(pool.length, slots.length)
        assert torch.equal(pool.active, slots.active)
        assert torch.equal(pool.draft_size, slots.draft_size)
        committed = torch.arange(self.context, device=DEVICE) < slots.length[:, None]
        assert torch.equal(pool.tokens[committed], slots.tokens[committed])
        drafted = torch.arange(slots.draft.shape[1], device=DEVICE) < slots.draft_size[:, None]
        assert torch.equal(pool.draft[drafted], slots.draft[drafted])


ROWS = [5, 0, 2, 3, 6, 6, 1]  # a dead one, the padding twice


@pytest.mark.parametrize("width", [0, 1, 3, 4])
def test_prepare(width: int) -> None:
    state = State(seed=width)
    slot = torch.tensor(ROWS, device=DEVICE)
    k = torch.tensor([4, 3, 4, 1, 0, 0, 2], device=DEVICE)
    state.slots.draft_size[[5, 0]] = 4
    state.slots.limit[5] = state.slots.length[5] + 3
    state.slots.limit[3] = state.slots.length[3] + 1  # no room for a draft
    embedding = Dense(torch.randn(VOCAB, 24, device=DEVICE))
    pool = state.pool()
    got = step.prepare(pool, slot, k, embedding, width)

    laid = state.twin().lay_uniform(decode_key(len(ROWS), width), torch.stack((slot, k)))
    draft, batch = laid.draft, laid.batch
    live = state.slots.active
    there = live[slot].repeat_interleave(width + 1)  # a dead row is laid out at the start
    assert torch.equal(got.positions[there], batch.positions[there])
    assert torch.equal(got.positions[~there], torch.arange(width + 1, device=DEVICE).repeat(3))
    assert torch.equal(got.size, draft.size)
    assert torch.equal(got.table, batch.block_table)
    assert torch.equal(got.x[there], embedding.embed(batch.ids)[there])
    assert torch.equal(pool.tokens[live], state.slots.tokens[live])
    assert width < 3 or draft.size.tolist()[:4] == [2, 3, draft.size[2], 0]


@pytest.mark.parametrize("drafts", [1, 5, 9, 30])
def test_prepare_where_rows_share_their_drafts(drafts: int) -> None:
    state = State(seed=drafts)
    slot = torch.tensor(ROWS, device=DEVICE)
    k = torch.tensor([4, 3, 4, 1, 0, 4, 2], device=DEVICE)
    state.slots.draft_size[[5, 0, 1]] = 4
    state.slots.limit[[5, 0, 1]] = state.slots.length[[5, 0, 1]] + 4
    embedding = Dense(torch.randn(VOCAB, 24, device=DEVICE))
    pool = state.pool()
    got = step.prepare_shared(pool, slot, k, embedding, 4, drafts, LEVELS)
    laid = state.twin().lay_shared(decode_key(len(ROWS), 4, drafts), torch.stack((slot, k)))
    draft, batch, owner = laid.draft, laid.batch, laid.owner
    assert torch.equal(got.size, draft.size)
    assert draft.size.tolist() == likeliest_one_by_one(state, slot, k, drafts)
    assert torch.equal(got.row_start, batch.row_start) and torch.equal(got.table, batch.block_table)
    used = int(batch.row_start[-1])
    assert torch.equal(got.positions, batch.positions) and torch.equal(got.owner[:used], owner[:used])
    live = state.slots.active
    theirs = live[owner[:used]]
    assert torch.equal(got.x[:used][theirs], embedding.embed(batch.ids)[:used][theirs])
    for row, (own, size) in enumerate(zip(ROWS, draft.size.tolist(), strict=True)):
        if live[own]:
            end = int(state.slots.length[own])
            assert torch.equal(pool.tokens[own, : end + size], state.slots.tokens[own, : end + size]), row


def likeliest_one_by_one(state: State, slot: torch.Tensor, k: torch.Tensor, drafts: int) -> list[int]:
    """How many drafts each row keeps, by a sort of all that there are."""
    s, found = state.slots, []
    for row, (own, most) in enumerate(zip(slot.tolist(), k.tolist(), strict=True)):
        room = int(s.limit[own] - s.length[own]) - 1
        size = max(min(int(s.draft_size[own]), most, room), 0) if s.active[own] else 0
        found += [(-int(chance * LEVELS) if chance < 1 else 1 - LEVELS, row) for chance in s.chances[own, :size].tolist()]
    kept = [row for _, row in sorted(found)[:drafts]]
    return [kept.count(row) for row in range(len(slot))]


def test_an_embedding_that_the_launch_cannot_read_is_refused() -> None:
    state, slot = State(seed=0), torch.arange(7, device=DEVICE)
    embedding = Int8Blocks.empty(VOCAB, 32, torch.bfloat16, DEVICE)
    with pytest.raises(TypeError, match="kind int8 blocks is not stored as"):
        step.prepare(state.pool(), slot, slot, embedding, 4)
    with pytest.raises(TypeError, match="kind int8 blocks is not stored as"):
        step.prepare_shared(state.pool(), slot, slot, embedding, 4, 5, LEVELS)


def test_padding_of_a_draft_may_be_any_token() -> None:
    state = State(seed=0)
    state.slots.draft[:, 2:] = torch.tensor([VOCAB, -1], device=DEVICE)
    state.slots.draft_size.clamp_(max=2)
    embedding = Dense(torch.randn(VOCAB, 24, device=DEVICE))
    slot = torch.arange(7, device=DEVICE)
    got = step.prepare(state.pool(), slot, slot * 0 + 4, embedding, 4)
    assert torch.equal(got.x.view(7, 5, -1)[:, 3:], torch.zeros(7, 2, 24, device=DEVICE))
    assert got.x.view(7, 5, -1)[:, :3].abs().sum(-1).min() > 0


def block(state: State, width: int) -> tuple[torch.Tensor, Draft, torch.Tensor]:
    """Rows, drafts that may pass the limit, and target choices that agree with the first drafts."""
    slot = torch.tensor(ROWS, device=DEVICE)
    draft = Draft(state.slots.draft[slot, :width], state.slots.draft_size[slot].clamp(max=width))
    choice = state.random(0, 12, len(ROWS), width + 1)
    agree = state.random(0, 5, len(ROWS), width) > 0
    choice[:, :width] = torch.where(agree, draft.tokens, choice[:, :width])
    broken = state.random(0, 15, len(ROWS), width + 1) == 0
    return slot, draft, torch.where(broken, BROKEN, choice)


@pytest.mark.parametrize("width", [0, 1, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_commit(width: int, seed: int) -> None:
    state = State(seed)
    slot, draft, choice = block(state, width)
    pool = state.pool()
    counts = step.commit(pool, slot, choice, draft.size)
    want = state.twin()._commit(slot, draft, choice, None)
    want[:, NEXT_DRAFT] = 0
    assert torch.equal(counts, want)
    pool.draft_size.copy_(state.slots.draft_size)  # the twin without a drafter leaves it
    state.check(pool)


def test_commit_meets_every_case() -> None:
    """The random states above: full and partial acceptance, stops at the first, a middle and past the last accepted place,
    limits that cut, and rows that go on."""
    seen = set()
    for seed in range(12):
        state = State(seed)
        slot, draft, choice = block(state, 4)
        accepted = accept_matching(choice, draft).count
        room = state.slots.limit[slot] - state.slots.length[slot]
        counts = step.commit(state.pool(), slot, choice, draft.size)
        for row in range(len(ROWS)):
            if state.slots.active[slot[row]]:
                stops = [t in state.slots.stop_ids[slot[row]] for t in choice[row]]
                full, n = int(accepted[row]), int(counts[row, 0])
                stopped = n > 0 and stops[n - 1]
                seen |= {("all", full == draft.size[row] + 1 > 1), ("cut", n == room[row] < full)}
                seen |= {("stop", stopped and n < full)}
                seen |= {("late stop", any(stops[full:])), ("second", sum(stops[:full]) > 1)}
                seen |= {("goes on", not stopped and n < room[row])}
                broken = bool(counts[row, 3])
                assert broken == (not stopped and n < full and choice[row, n] == BROKEN)
                seen |= {("broken", broken), ("broken past what is accepted", not broken and BROKEN in choice[row])}
    cases = {"all", "cut", "stop", "late stop", "goes on", "second", "broken", "broken past what is accepted"}
    assert {name for name, true in seen if true} == cases


def test_commit_of_a_verdict() -> None:
    state = State(seed=3)
    slot, draft, tokens = block(state, 4)
    count = torch.minimum(state.random(1, 6, len(ROWS)), draft.size + 1)
    pool = state.pool()
    counts = step.commit_verdict(pool, slot, tokens, count, draft.size)
    want = state.twin()._commit(slot, draft, tokens, Verdict(tokens, count))
    assert torch.equal(counts[:, :4], want[:, :4])
    pool.draft_size.copy_(state.slots.draft_size)
    state.check(pool)


LOOK_UPS = [LookUp(2, 5, VOCAB), LookUp(1, 1, VOCAB), LookUp(3, 3, 2), LookUp(2, 12, VOCAB)]


@pytest.mark.parametrize("look_up", LOOK_UPS)
@pytest.mark.parametrize("width", [1, 4, 6])
@pytest.mark.parametrize("scan", [1024, 16])  # the text in one piece, in several
def test_commit_and_draft(monkeypatch, look_up: LookUp, width: int, scan: int) -> None:
    monkeypatch.setattr(step, "SCAN", scan)
    found = set()
    for seed in range(3):
        state = State(seed, width=width)
        state.slots.stop_ids[:] = -1
        slot, draft, choice = block(state, width)
        pool = state.pool()
        counts = step.commit_and_draft(pool, slot, choice, draft.size, look_up)
        assert torch.equal(counts, committed(state, look_up, slot, draft, choice))
        state.check(pool)
        found |= set(counts[:, NEXT_DRAFT].tolist())
    assert {0, width} <= found or look_up.vocab == 2


def committed(state: State, look_up: LookUp, slot: torch.Tensor, draft: Draft, choice: torch.Tensor) -> torch.Tensor:
    """The report of the twin after commit and draft."""
    twin = state.twin(look_up)
    counts = twin._commit(slot, draft, choice, None)
    twin.draft(slot, None, Features())
    counts[:, NEXT_DRAFT] = state.slots.draft_size[slot]
    return counts


def look(text: list[int], look_up: LookUp, width: int) -> list[int]:
    """The kernel's draft after a text. The twin confirms it."""
    state = State(seed=0, slots=3, width=width, context=max(CONTEXT, len(text) + 8))
    state.slots.set(0, text[:-1])
    state.slots.stop_ids[:], state.slots.active[0], state.slots.limit[0] = -1, True, len(text) + 1
    pool, slot = state.pool(), torch.tensor([0], device=DEVICE)
    choice, nothing = torch.tensor([text[-1:]], device=DEVICE), torch.tensor([0], device=DEVICE)
    counts = step.commit_and_draft(pool, slot, choice, nothing, look_up)
    empty = Draft(choice[:, :0], nothing)
    assert torch.equal(counts, committed(state, look_up, slot, empty, choice))
    state.check(pool)
    size = int(counts[0, NEXT_DRAFT])
    assert counts[0, 0] == 1 and size == pool.draft_size[0]
    return pool.draft[0, :size].tolist()


def test_look_up_cases() -> None:
    look_up = LookUp(2, 5, VOCAB)
    assert look([1, 2, 3, 4, 1, 2], look_up, 3) == [3, 4, 1]  # a match at the very start
    assert look([1, 2, 3, 4, 1, 2], look_up, 8) == [3, 4, 1, 2]  # more wanted than follows
    assert look([9, 1, 2, 5, 1, 2, 6, 1, 2], look_up, 2) == [5, 1]  # of equals the earliest
    assert look([1, 2, 5, 7, 1, 2, 6, 7, 1, 2], look_up, 1) == [6]  # the longest before the earliest
    assert look([1, 2, 3, 4, 5, 6], look_up, 3) == []
    assert look([3, 3, 3], look_up, 4) == [3]  # the occurrence overlaps the suffix
    assert look([4, 1, 2, 4], look_up, 4) == []  # shorter than min_n
    assert look([7], LookUp(1, 3, VOCAB), 4) == []
    assert look([7, 7], LookUp(1, 3, VOCAB), 4) == [7]
    assert look([1, 2, VOCAB, 1, 2], look_up, 4) == []  # nothing past what the target knows
    assert look([1, 2, 8, VOCAB, 1, 2], look_up, 4) == [8]


def test_look_up_in_a_text_of_several_scans() -> None:
    text = torch.arange(3000)
    text[-4:] = torch.tensor([7, 8, 9, 10])
    text[2100:2104] = text[-4:]
    look_up = LookUp(2, 4, 4000)
    assert look(text.tolist(), look_up, 3) == [11, 12, 13]  # both in the first scan and the third
    text[7] = 0
    assert look(text.tolist(), look_up, 3) == [2104, 2105, 2106]
    text[2101] = 0
    assert look(text.tolist(), look_up, 3) == [11, 12, 13]  # two of three: 8 9 10


def test_one_graph_serves_all_filters(tmp_path) -> None:
    """One graph serves rows with and without filters, also with drafts that have probabilities."""
    target = Target.load(tiny_model(tmp_path / "tiny"), DTYPE, DEVICE, kernels=CudaKernels(DEVICE))
    slots = RowState(4, 30, 4, torch.device(DEVICE))
    sampling, kv = SamplingState(slots.tokens, slots.length, target.vocab), target.kv_cache(9, 8)
    for slot, more in enumerate(({"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1, "presence_penalty": 0.5}, {})):
        params = SamplingParams(temperature=0.8, max_tokens=4, **more)
        sampling.admit({slot: Request(str(slot), (1, 2), params, 4, 7)})
    for probs in (False, True):
        own = RowState(4, 30, 4, torch.device(DEVICE), 2, target.vocab if probs else None)
        cycle = FusedCycle(target, kv, own, sampling, None, False)
        assert len({cycle.features([0]), cycle.features([1]), cycle.features([3])}) == 1
        assert cycle.features([2]).penalties and cycle.features([2, 3]) == cycle.features([2]) != cycle.features([3])


def test_prompts_of_the_fused_cycle(tmp_path) -> None:
    """A padded launch against the twin's without padding: a prompt that ends and drafts, one that does not end, one that goes
    on from its pages and stops at once, and padding rows."""
    folder = tiny_model(tmp_path / "tiny", hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, layers=2)
    target = Target.load(folder, DTYPE, DEVICE, kernels=CudaKernels(DEVICE))
    rows = [(1, 0, 12, 1), (0, 8, 5, 1), (2, 0, 7, 0)]
    states = []
    for padded in (False, True):
        slots = RowState(5, 60, 8, torch.device(DEVICE), 3)
        sampling = SamplingState(slots.tokens, slots.length, target.vocab)
        drafter = DeviceNgram(slots, Speculation("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=2), VOCAB_OF_TINY)
        kv = target.kv_cache(40, 8)
        slots.block_table[:4] = 1 + torch.arange(32, device=DEVICE).view(4, 8)
        slots.tokens[:4, :30] = torch.arange(120, device=DEVICE).view(4, 30) % 7 + 100
        slots.length[:3] = torch.tensor([13, 12, 20], device=DEVICE)
        slots.active[:3], slots.limit[:3], slots.limit[0] = True, 50, 14
        cycle = (FusedCycle if padded else Cycle)(target, kv, slots, sampling, drafter, False)
        padding = [(4, 0, 0, 0)] * (2 if padded else 0)
        cycle.run(Key(PROMPT, 1, 8, 0), torch.tensor([(0, 0, 8, 0)], device=DEVICE).T.contiguous())
        given = torch.tensor([*rows[:2], *padding, *rows[2:]], device=DEVICE).T.contiguous()
        report = cycle.run(Key(PROMPT, given.shape[1], 40 if padded else 24, 0), given)
        seen = (report.tokens[:2], report.counts[:2], slots.length, slots.active, slots.draft_size, slots.tokens[:4])
        states.append((*seen, kv))
    (*want, want_kv), (*got, got_kv) = states
    for mine, wanted in zip(got, want, strict=True):
        assert torch.equal(mine, wanted)
    assert want[1][:, 0].tolist() == [1, 1] and want[3].tolist() == [False, True, True, False, False]
    for mine, wanted in zip((*got_kv.keys, *got_kv.values), (*want_kv.keys, *want_kv.values), strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-2, rtol=2e-2)
        assert not mine[0].any()


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from forerun.kernels import cuda_step as step

def check(kernel, warps=4, **constants):
    given = dict(
        active="*i1", block_table="*i32", table="*i32", embedding="*bf16", x="*bf16", logits="*fp32", tops="*fp32",
        firsts="*i32", masses="*fp64", temperatures="*fp64", noise="*fp64", PER="i32", W="i32",
        L="i32", P="i32", K="i32", V="i32", VOCAB="i32", N="i32", T="i32", D="i32", row_start="*i32", chances="*fp32",
    )
    types = {name: "constexpr" if name in constants else given.get(name, "*i64") for name in kernel.arg_names}
    compile(ASTSource(kernel, types, constexprs=constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

check(step.prepare_kernel, H=576, HP=1024, RUN=512, PDL=True)
check(step.prepare_shared_kernel, ROWS=12, LANES=16, KP=4, LEVELS=64, STEPS=7, H=576, HP=1024, RUN=512, PDL=True)
find = dict(MIN_N=2, SCAN=1024, UNROLLED=8, PDL=True)
rows = dict(LANES=8, E=16, EP=16, KP=4, BROKEN=-1)
check(step.commit_kernel, 1, **rows, GIVEN=True, FIND=False, MAX_N=5, **find)
check(step.commit_kernel, 8, **rows, GIVEN=False, FIND=True, MAX_N=5, **find)
check(step.commit_kernel, 8, **rows, GIVEN=False, FIND=True, MAX_N=12, **find)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_the_kernels_compile_for_hopper() -> None:
    """The interpreter takes what the compiler refuses, such as a name of one type before a branch and another in it."""
    bare = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
