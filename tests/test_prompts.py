"""Prompt launches with padding, as CUDA graphs need it, against launches without it. All run without a graph here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.config import EngineConfig, Speculation
from forerun.device import send
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.cycle import PROMPT, Cycle, Key
from forerun.engine.engine import Engine
from forerun.engine.layouts import PaddedLayout, PromptSizes, prompt_sizes
from forerun.engine.state import RowState
from forerun.kernels import reference
from forerun.models.decoder import KVCache, Target
from forerun.models.tokenizer import Detokenizer, Tokenizer
from forerun.models.weights import Dense
from forerun.types import Request, SamplingParams
from forerun.verify.sampling import Features, SamplingState
from tests.test_engine import PARAMS, Answer, prompts, request, run
from tests.tiny import VOCAB, tiny_model

PADDED = PromptSizes((16, 40, 64), (2, 8))
SPECULATION = {
    "ngram": Speculation("ngram", 3, 2, 5),
    "prediction": Speculation("prediction", 3),
    "draft_model": Speculation("draft_model", 3, model="x"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder, "float32")


def test_sizes() -> None:
    sizes = prompt_sizes(2048, 32)
    assert sizes.tokens == (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048) and sizes.rows == (8, 32)
    assert prompt_sizes(900, 3) == PromptSizes((32, 64, 128, 192, 256, 384, 512, 768, 900), (3,))
    assert prompt_sizes(20, 8) == PromptSizes((20,), (8,)) and prompt_sizes(32, 9).tokens == (32,)
    assert sizes.fit(1, 1) == (32, 8) and sizes.fit(32, 8) == (32, 8) and sizes.fit(33, 9) == (64, 32)
    assert sizes.fit(2048, 32) == (2048, 32)


def served(
    folder: Path, target: Target, method: str | None, prompts_padded: bool, padded: bool = True
) -> tuple[Engine, dict[str, Answer], list[tuple[int, int]]]:
    """Serve requests of every kind that join and leave, with prompts longer than a chunk, and preemption. Return the engine,
    the answers, and the (tokens, rows) of the prompt launches."""
    speculation = SPECULATION[method] if method else None
    config = EngineConfig(
        max_num_seqs=6, max_num_batched_tokens=64, kv_cache_tokens=240, block_size=8, enable_prefix_caching=False,
        adaptive_drafts=False, speculation=speculation,
    )  # fmt: skip

    def make(slots, mirror, sampling, kv, padded):  # type: ignore[no-untyped-def]
        return TABLE[method](speculation, DrafterContext(slots, mirror, sampling, kv, config, padded, VOCAB, target))

    tokenizer = Tokenizer(folder)
    it = Engine(target, config, make if method else lambda *_: None, lambda: Detokenizer(tokenizer), padded)
    shapes: list[tuple[int, int]] = []
    if padded:
        layout, cycle = it._step.layout, it._step.cycle
        assert isinstance(layout, PaddedLayout)
        layout.prompt_sizes = PADDED if prompts_padded else None
        inner = cycle.run

        def launched(key: Key, given: torch.Tensor):  # type: ignore[no-untyped-def]
            if key.layout == PROMPT:
                assert given.shape == (4, key.rows) and int(given[2].sum()) <= key.tokens
                shapes.append((key.tokens, key.rows))
            return inner(key, given)

        cycle.run = launched  # type: ignore[method-assign]
    kinds, more = list(PARAMS.values()), {"logprobs": 2}
    requests = [
        request(str(i), (p * 4)[: 130 if i % 2 else 9], **{**kinds[i % len(kinds)], **more, "seed": i, "max_tokens": 20 + i})
        for i, p in enumerate(prompts(16, 12))
    ]
    answers = run(it, requests, [i // 5 for i in range(len(requests))])
    return it, answers, shapes


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_padding_changes_nothing(folder: Path, target: Target, method: str | None) -> None:
    bare, wanted, bare_shapes = served(folder, target, method, prompts_padded=False)
    padded, answers, shapes = served(folder, target, method, prompts_padded=True)
    _, exact, _ = served(folder, target, method, prompts_padded=False, padded=False)
    assert {n: (a.ids, a.text, a.reason) for n, a in answers.items()} == {
        n: (a.ids, a.text, a.reason) for n, a in wanted.items()
    }
    assert {n: a.ids for n, a in answers.items()} == {n: a.ids for n, a in exact.items()}
    for name, answer in answers.items():
        for got, want in zip(answer.logprobs, wanted[name].logprobs, strict=True):
            assert got.token == want.token and got.logprob == pytest.approx(want.logprob, abs=1e-4)
    assert padded.stats.steps == bare.stats.steps and padded.stats.preemptions == bare.stats.preemptions > 0
    assert padded.stats.drafts == bare.stats.drafts
    caches = [(padded.kv, bare.kv)]
    if method == "draft_model":
        caches.append((padded.drafter._kv, bare.drafter._kv))  # type: ignore[union-attr]
    for got_kv, want_kv in caches:
        for got_pages, want_pages in zip((*got_kv.keys, *got_kv.values), (*want_kv.keys, *want_kv.values), strict=True):
            torch.testing.assert_close(got_pages[1:], want_pages[1:], atol=1e-4, rtol=1e-4)
    assert {tokens for tokens, _ in shapes} == set(PADDED.tokens) and {rows for _, rows in shapes} == set(PADDED.rows)
    assert len(shapes) == len(bare_shapes) and len(set(bare_shapes)) > len(set(shapes))


class State:
    """A cycle without a drafter whose slots hold prompts, with pages of their own. Padding reads token 0: it is in no prompt,
    and its embedding is NaN."""

    def __init__(self, target: Target, kernels: str, width: int = 0) -> None:
        embedding = target.weights.embedding.dense().clone()
        embedding[0] = torch.nan
        weights = target.weights._replace(embedding=Dense(embedding))
        self.poisoned = Target(target.config, weights, reference if kernels == "reference" else target.kernels)
        self.slots = RowState(6, 100, 12, torch.device("cpu"), width)
        self.sampling = SamplingState(self.slots.tokens, self.slots.length, target.vocab)
        self.kv = KVCache(target.config, 1 + 5 * 12, 8, torch.float32)
        self.slots.block_table[:5] = 1 + torch.arange(60).view(5, 12)
        at = torch.Generator().manual_seed(1)
        self.slots.tokens[:5] = torch.randint(3, VOCAB, (5, 100), generator=at)
        self.slots.length[:5] = torch.tensor([30, 9, 41, 77, 5])
        self.slots.active[:5] = True
        self.slots.limit[:5] = 95
        for slot in range(5):
            params = SamplingParams(temperature=0.9 * (slot % 2), max_tokens=9)
            self.sampling.admit({slot: Request("r", (5,), params, 9, slot)})
        self.cycle = Cycle(self.poisoned, self.kv, self.slots, self.sampling, None, block=False)

    def prefill(self, key: Key, rows: list[tuple[int, int, int, int]]):  # type: ignore[no-untyped-def]
        features = self.sampling.features(range(5))
        return self.cycle.run(key._replace(features=features, top=1), torch.tensor(rows).T.contiguous())


ROWS = [(0, 0, 30, 1), (3, 8, 30, 0), (1, 8, 1, 1), (2, 0, 41, 1)]


@pytest.mark.parametrize("kernels", ["reference", "c"])
@pytest.mark.parametrize("empty", [(), (0,), (1, 1, 3), (4,), (0, 2, 4, 4)])
@pytest.mark.parametrize("tokens", [102, 103, 160])
def test_empty_rows_and_padding_leave_no_trace(target: Target, kernels: str, empty: tuple[int, ...], tokens: int) -> None:
    """Padding rows at any place, padding tokens whose embedding is NaN, and a chunk in the middle of its prompt."""
    want, got = State(target, kernels), State(target, kernels)
    report = want.prefill(Key(PROMPT, 4, 102, 0), ROWS)
    rows = list(ROWS)
    for at in sorted(empty, reverse=True):
        rows.insert(at, (5, 0, 0, 0))
    padded = got.prefill(Key(PROMPT, len(rows), tokens, 0), rows)
    real = [i for i, row in enumerate(rows) if row[3]]
    told = [0, 2, 3]
    assert torch.equal(padded.tokens[real], report.tokens[told]) and torch.equal(padded.counts[real], report.counts[told])
    assert padded.counts[real].tolist() == [[1, 0, 0, 0, 0]] * 3
    assert padded.counts[[i for i in range(len(rows)) if i not in real]].eq(0).all()
    assert padded.logprobs is not None and report.logprobs is not None
    torch.testing.assert_close(padded.logprobs[0][real], report.logprobs[0][told])
    assert torch.equal(got.slots.length, want.slots.length) and got.slots.length.tolist() == [31, 10, 42, 77, 5, 1]
    assert torch.equal(got.slots.active, want.slots.active)
    assert torch.equal(got.slots.tokens[:5], want.slots.tokens[:5])
    for got_pages, want_pages in zip((*got.kv.keys, *got.kv.values), (*want.kv.keys, *want.kv.values), strict=True):
        assert not got_pages[0].any()
        torch.testing.assert_close(got_pages, want_pages, atol=1e-5, rtol=1e-5)
    assert got.poisoned.weights.embedding.embed(torch.tensor([0])).isnan().all()


def test_a_launch_of_padding_rows_only(target: Target) -> None:
    """The launch that a capture runs: it has padding rows only."""
    state = State(target, "c")
    before = [part.clone() for part in (state.slots.tokens[:5], state.slots.length, state.slots.active)]
    report = state.prefill(Key(PROMPT, 4, 32, 0), [(5, 0, 0, 0)] * 4)
    assert not report.counts.any()
    after = (state.slots.tokens[:5], state.slots.length, state.slots.active)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(pages.any() for pages in (*state.kv.keys, *state.kv.values))


class NothingForTheHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: values read by the host, sizes that depend on values, constants from the host."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "item", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        assert name not in self.REFUSED, name
        indices = args[1] if name in ("index", "index_put_", "_index_put_impl_") else ()
        assert not any(i is not None and i.dtype == torch.bool for i in indices), "a mask as an index"
        self.seen.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [None, "ngram", "prediction", "draft_model"])
@pytest.mark.parametrize("features", [Features(), Features(True), Features(True, True, True, True, True, True, 4, True)])
def test_a_launch_of_prompts_fits_a_graph(target: Target, method: str | None, features: Features) -> None:
    state = State(target, "c", 3 if method else 0)
    state.sampling.host = False
    key = Key(PROMPT, 4, 120, 0, features, 1)
    if method:
        speculation = SPECULATION[method]
        parts = (state.slots, state.slots, state.sampling, state.kv, EngineConfig(), True, VOCAB, target)
        drafter = TABLE[method](speculation, DrafterContext(*parts))
        state.cycle = Cycle(target, state.kv, state.slots, state.sampling, drafter, block=False)
    given = torch.tensor(ROWS).T.contiguous()
    with NothingForTheHost() as watch:
        state.cycle.run(key, given)
    assert {"searchsorted", "cumsum", "embedding"} <= watch.seen
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NothingForTheHost():
        bool(given[3, 0])


def small(folder: Path, target: Target, **settings: object) -> Engine:
    tokenizer = Tokenizer(folder)
    given: dict = {"max_num_seqs": 4, "kv_cache_tokens": 1024} | settings
    return Engine(target, EngineConfig(**given), lambda *_: None, lambda: Detokenizer(tokenizer), padded=True)


def test_a_slot_that_is_released_and_reused_between_launches(folder: Path, target: Target) -> None:
    """The new request's values count. The old request is still in a step in flight."""
    old = request("old", [9] * 50, max_tokens=60, stop_ids=(), temperature=1.3, logit_bias={5: 9.0}, repetition_penalty=1.9)
    new = request("new", [7, 8, 9], max_tokens=30, stop_ids=())
    alone = run(small(folder, target), [new])["new"].ids
    for steps in (1, 2, 5):
        it = small(folder, target, max_num_seqs=1)
        it.add(old)
        for _ in range(steps):
            it.step()
        slot = it.scheduler.running[0].slot
        assert it.abort("old")
        assert run(it, [new])["new"].ids == alone
        assert not it.state.active[slot]


def test_a_slot_that_is_admitted_and_released_between_launches(folder: Path, target: Target) -> None:
    it = small(folder, target)
    step = it._step
    it.add(request("a", [5, 6, 7]))
    plan = it.scheduler.plan()
    (sequence,) = plan.admitted
    slot = sequence.slot
    step.admit(sequence)
    step.release(sequence, slot, False)
    it.state.apply(step._changes)
    assert not it.state.active[slot] and it.state.length[slot] == 1


def test_admissions_are_written_in_one_transfer(folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven requests take as many transfers as one, and each slot holds its own request."""
    transfers = []

    def counted(values, device):  # type: ignore[no-untyped-def]
        transfers.append(values)
        return send(values, device)

    for name in ("engine.state", "verify.sampling"):
        monkeypatch.setattr(f"forerun.{name}.send", counted)
    counts = []
    for many in (1, 7):
        it = small(folder, target, max_num_seqs=8)
        asked = [
            request(str(i), p, seed=i + 5, temperature=0.5 + i, top_k=i, top_p=0.9, min_p=0.01 * i, presence_penalty=0.25 * i)
            for i, p in enumerate(prompts(many, 3))
        ]
        for one in asked:
            it.add(one)
        it.step()
        counts.append(len(transfers))
        transfers.clear()
        for sequence in it.scheduler.running:
            slot, wanted = sequence.slot, sequence.request
            ids = wanted.prompt_ids
            assert it.state.tokens[slot, : len(ids)].tolist() == list(ids) and it.state.length[slot] == len(ids) + 1
            assert it.state.active[slot] and it.state.limit[slot] == len(ids) + wanted.max_tokens
            assert it.state.stop_ids[slot].tolist() == [2] + [-1] * 15
            state, params = it.sampling, wanted.params
            assert (state.seed[slot], state.prompt_len[slot], state.top_k[slot]) == (wanted.seed, len(ids), params.top_k)
            assert (state.temperature[slot], state.top_p[slot], state.min_p[slot]) == (
                params.temperature, params.top_p, params.min_p,
            )  # fmt: skip
            assert (state.repetition[slot], state.presence[slot], state.frequency[slot]) == (1, params.presence_penalty, 0)
    assert counts[0] == counts[1] == 3  # the sequences, their sampling numbers, their pages


def test_only_possible_launches_are_captured_the_largest_first(folder: Path, target: Target) -> None:
    it = small(folder, target, max_model_len=40, max_num_seqs=20)
    layout = it._step.layout
    assert isinstance(layout, PaddedLayout)
    layout.prompt_sizes = prompt_sizes(800, 20)
    keys = layout._prompt_keys()
    assert keys == sorted(keys, key=lambda key: (key.rows, key.tokens), reverse=True)
    assert [key.tokens for key in keys if key.rows == 20] == [800, 768, 512, 384, 256, 192, 128, 64, 32]
    assert [key.tokens for key in keys if key.rows == 8] == [384, 256, 192, 128, 64, 32]  # 8 * 40 = 320 at most
    layout.prompt_sizes = None
    assert layout._prompt_keys() == []
