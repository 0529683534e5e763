"""The engine on tiny random models: speculation changes the number of steps and nothing else, for requests of any kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Needs, Rows, Stateless
from forerun.engine.engine import Engine
from forerun.engine.state import RowState
from forerun.engine.stats import DraftStats
from forerun.models.decoder import Target
from forerun.models.tokenizer import Detokenizer, Tokenizer
from forerun.types import Draft, Request, SamplingParams, SettingError
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder, "float32")


class Scripted(Stateless):
    """Drafts each request's known answer. Of a draft the first `good` tokens are right, and the next one is wrong."""

    def __init__(
        self, slots: RowState, answers: dict[str, Sequence[int]], good: Callable[[], int], device: bool = True
    ) -> None:
        self.slots, self.answers, self.good = slots, answers, good
        self.needs = Needs(device)
        self.of: dict[int, Request] = {}

    def admit(self, slot: int, request: Request) -> None:
        self.of[slot] = request

    def release(self, slot: int, finished: bool) -> None:
        del self.of[slot]

    def propose(self, rows: Rows) -> Draft:
        tokens, sizes = torch.zeros(len(rows.slot), rows.width, dtype=torch.int64), []
        for i, (slot, k) in enumerate(zip(rows.slot.tolist(), rows.k.tolist(), strict=True)):
            request = self.of.get(slot)
            if request is None or k == 0:  # a padding row, or one that has ended
                sizes.append(0)
                continue
            done = int(self.slots.length[slot]) - len(request.prompt_ids)
            ahead = list(self.answers[request.id][done : done + k])
            good = self.good()
            if good < len(ahead):
                ahead[good] = (ahead[good] + 1) % 200
            tokens[i, : len(ahead)] = torch.tensor(ahead, dtype=torch.int64)
            sizes.append(len(ahead))
        return Draft(tokens, torch.tensor(sizes))


def engine(folder: Path, target: Target, make: Callable = lambda *_: None, padded: bool = False, **settings: object) -> Engine:
    given: dict = {"max_num_seqs": 8, "kv_cache_tokens": 2048} | settings
    tokenizer = Tokenizer(folder)
    return Engine(target, EngineConfig(**given), make, lambda: Detokenizer(tokenizer), bool(padded))


def request(name: str, prompt: Sequence[int], stop_ids: tuple[int, ...] = (2,), **params: object) -> Request:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 40} | params)  # type: ignore[arg-type]
    return Request(name, tuple(prompt), given, given.max_tokens or 0, given.seed or 0, stop_ids, given.banned_token_ids)


class Answer:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list = []
        self.reason: str | None = None


LAYOUTS = pytest.mark.parametrize("padded", [False, True, "hosted"], ids=["exact", "padded", "hosted"])


def run(it: Engine, requests: Sequence[Request], join_at: Sequence[int] | None = None) -> dict[str, Answer]:
    """Serve all requests. join_at: the step at which each one is added."""
    answers = {r.id: Answer() for r in requests}
    waiting = sorted(zip(join_at or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    step = 0
    while waiting or it.has_work:
        while waiting and waiting[0][0] <= step:
            it.add(waiting.pop(0)[1])
        for event in it.step():
            answer = answers[event.request_id]
            assert answer.reason is None, "an event after the end"
            answer.ids += event.tokens
            answer.text += event.text
            answer.logprobs += event.logprobs
            answer.reason = event.finish_reason
        step += 1
    return answers


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 200) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def speculative(
    folder: Path, target: Target, answers: dict[str, Answer], k: int, good: Callable[[], int], **settings: object
) -> Engine:
    known = {name: answer.ids for name, answer in answers.items()}
    config = {"speculation": Speculation("ngram", k), **settings}
    hosted = settings.get("padded") == "hosted"
    make = lambda slots, mirror, *_: Scripted(mirror if hosted else slots, known, good, not hosted)  # noqa: E731
    return engine(folder, target, make, **config)


PARAMS = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -1.5},  # the same token again and again, inside one block
    "bias": {"logit_bias": {5: 8.0, 7: -100.0}},
    "banned": {"banned_token_ids": ((5,), (6, 7), (8, 9, 10))},
    "min_tokens": {"min_tokens": 12, "max_tokens": 40},
    "sampled": {"temperature": 0.8, "seed": 11},
    "all": {
        "temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.3,
        "frequency_penalty": 0.4, "logit_bias": {5: 3.0}, "banned_token_ids": ((6, 7),), "min_tokens": 5, "seed": 3,
    },
}  # fmt: skip


@LAYOUTS
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("k", [1, 2, 8, 48])
def test_every_parameter_gives_the_plain_tokens(folder: Path, target: Target, name: str, k: int, padded: bool) -> None:
    """Steps accept 0, 1, some and k drafts. Tokens, text and logprobs are those of plain decoding."""
    requests = [request(str(i), p, logprobs=2, **PARAMS[name]) for i, p in enumerate(prompts(3))]
    plain = run(engine(folder, target), requests)
    rng = random.Random(k)
    for good in (lambda: 0, lambda: 1, lambda: k, lambda: rng.randint(0, k)):
        it = speculative(folder, target, plain, k, good, padded=padded)
        for name_, answer in run(it, requests).items():
            expected = plain[name_]
            assert (answer.ids, answer.text, answer.reason) == (expected.ids, expected.text, expected.reason)
            assert [p.token for p in answer.logprobs] == answer.ids
            for got, wanted in zip(answer.logprobs, expected.logprobs, strict=True):
                assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_right_drafts_save_steps(folder: Path, target: Target) -> None:
    requests = [request("a", prompts(1)[0], max_tokens=36, stop_ids=())]
    plain = engine(folder, target)
    answers = run(plain, requests)
    it = speculative(folder, target, answers, 4, lambda: 4)
    assert run(it, requests)["a"].ids == answers["a"].ids
    assert plain.stats.steps == 36 and it.stats.steps == 1 + 7  # after the prompt's token 35 more, five a step
    assert it.stats.drafts.acceptance_rate == 1.0 and it.stats.drafts.acceptance_length == 5.0


@LAYOUTS
def test_the_engine_counts_what_its_requests_count(folder: Path, target: Target, padded: bool) -> None:
    """Drafts of all lengths, of which 0 .. 4 are accepted: the engine's counts are the sums over the requests, by position."""
    requests = [request(str(i), p, max_tokens=20 + i, stop_ids=()) for i, p in enumerate(prompts(5, 4))]
    plain = run(engine(folder, target), requests)
    rng = random.Random(1)
    it = speculative(folder, target, plain, 4, lambda: rng.randint(0, 4), padded=padded)
    sequences = [it.add(one) for one in requests]
    while it.has_work:
        it.step()
    whole = DraftStats()
    for sequence in sequences:
        whole.add(sequence.stats)
    assert it.stats.drafts == whole
    assert whole.accepted + whole.steps == sum(len(plain[one.id].ids) - 1 for one in requests)
    assert whole.drafted_at[0] == whole.drafting_steps < whole.steps and whole.accepted == sum(whole.accepted_at) > 0


@LAYOUTS
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_the_budget_is_met_exactly(folder: Path, target: Target, max_tokens: int, padded: bool) -> None:
    """k = 4 and max_tokens 1 .. 2k + 1: tokens delivered and tokens counted equal max_tokens."""
    requests = [request("a", [5, 6, 7], max_tokens=max_tokens, stop_ids=())]
    plain = run(engine(folder, target), requests)
    it = speculative(folder, target, plain, 4, lambda: 4, padded=padded)
    answer = run(it, requests)["a"]
    assert len(answer.ids) == max_tokens == it.stats.output_tokens and answer.reason == "length"
    assert answer.ids == plain["a"].ids


@LAYOUTS
def test_up_to_the_very_end_of_the_context(folder: Path, target: Target, padded: bool) -> None:
    requests = [request("a", [5, 6, 7], max_tokens=61, stop_ids=())]
    plain = run(engine(folder, target, max_model_len=64), requests)
    it = speculative(folder, target, plain, 8, lambda: 8, max_model_len=64, padded=padded)
    assert run(it, requests)["a"].ids == plain["a"].ids and len(plain["a"].ids) == 61


class Dictated:
    """A target with a script: after a prompt of n tokens it chooses script[0], then script[1], ..."""

    def __init__(self, target: Target, script: Sequence[int], prompt: int) -> None:
        self._target, self._script, self._prompt = target, script, prompt
        same = "config dtype device max_positions kv_bytes_per_token kv_cache kernels vocab quantization"
        for name in same.split():
            setattr(self, name, getattr(target, name))

    def forward(self, batch, kv, layers=(), kernels=None, x=None):  # type: ignore[no-untyped-def]
        done = self._target.forward(batch, kv, layers)
        ends = batch.positions if batch.logits_at is None else batch.positions[batch.logits_at]
        at = ends + 1 - self._prompt
        said = torch.tensor(self._script)[at.clamp(max=len(self._script) - 1)]
        logits = torch.zeros_like(done.logits).scatter_(1, said[:, None], 20.0)
        return done._replace(logits=logits)


@pytest.mark.parametrize("max_tokens,expected,reason", [(5, [10, 11, 2], "stop"), (2, [10, 11], "length")])
def test_a_stop_ends_the_block_where_it_falls(
    folder: Path, target: Target, max_tokens: int, expected: list[int], reason: str
) -> None:
    """The block is [10, 11, STOP, 20, 21, 22]. Another row has no drafts."""
    script = [9, 10, 11, 2, 20, 21, 22, 23]
    dictated = Dictated(target, script, 3)
    first = request("a", [5, 6, 7], max_tokens=max_tokens + 1, logprobs=0)
    other = request("b", [5, 6, 8], max_tokens=8, stop_ids=())
    known = {"a": script, "b": []}
    released: list[list[int]] = []

    class Noting(Scripted):
        def release(self, slot: int, finished: bool) -> None:
            released.append(self.slots.history(slot).tolist())
            super().release(slot, finished)

    it = engine(folder, dictated, lambda slots, *_: Noting(slots, known, lambda: 9), speculation=Speculation("ngram", 5))  # type: ignore[arg-type]
    start = it.scheduler.pages.free
    answers = run(it, [first, other])
    assert answers["a"].ids == [9, *expected] and answers["a"].reason == reason
    assert len(answers["a"].logprobs) == len(answers["a"].ids)
    assert answers["b"].ids == script
    assert released[0] == [5, 6, 7, 9, *expected]  # the tokens that the drafter may learn from
    assert it.scheduler.pages.free == start
    assert it.stats.drafts.accepted == min(len(expected), max_tokens) - (reason == "length" and max_tokens == 2)


class Confident(Scripted):
    """Its confidence follows from the length of the row, so that a test knows it."""

    def propose(self, rows: Rows) -> Draft:
        length = self.slots.length[rows.slot]
        return super().propose(rows)._replace(confidence=1 / (length[:, None] + torch.arange(1.0, rows.width + 1)))


@LAYOUTS
def test_the_policy_knows_the_confidence_of_the_draft_at_hand(folder: Path, target: Target, padded: bool) -> None:
    requests = [request(str(i), prompt) for i, prompt in enumerate(prompts(4))]
    known = {name: answer.ids for name, answer in run(engine(folder, target), requests).items()}
    hosted = padded == "hosted"
    make = lambda state, mirror, *_: Confident(mirror if hosted else state, known, lambda: 2, not hosted)  # noqa: E731
    it = engine(folder, target, make, padded, speculation=Speculation("ngram", 3))
    for one in requests:
        it.add(one)
    seen = 0
    while it.has_work:
        it.step()
        for sequence in it.scheduler.running:
            history = sequence.history
            if history.confidence is not None and history.at_hand:
                length = len(sequence.ids)
                expected = [1 / (length + i) for i in range(1, history.at_hand + 1)]
                assert history.confidence[: history.at_hand] == pytest.approx(expected)
                seen += 1
    assert seen > 20


@LAYOUTS
@pytest.mark.parametrize("k", [0, 3, 8])
def test_stop_strings_across_tokens_and_steps(folder: Path, target: Target, k: int, padded: bool) -> None:
    tokenizer = Tokenizer(folder)
    text = "one two, three"
    script = [*tokenizer.encode(text + " four five six"), 2]
    dictated = Dictated(target, script, 3)
    for stop, include in ((", thr", False), (", thr", True), ("six", False), ("nowhere", False)):
        asked = request("a", [5, 6, 7], max_tokens=60, stop=stop, include_stop_str_in_output=include)
        make = (
            (
                lambda slots, mirror, *_: Scripted(
                    mirror if padded == "hosted" else slots, {"a": script}, lambda: 8, padded != "hosted"
                )
            )
            if k
            else (lambda *_: None)
        )
        it = engine(folder, dictated, make, padded, speculation=Speculation("ngram", k) if k else None)  # type: ignore[arg-type]
        answer = run(it, [asked])["a"]
        whole = tokenizer.decode(script[:-1])
        at = whole.find(stop)
        assert answer.text == (whole if at < 0 else whole[: at + len(stop) * include])
        assert answer.reason == "stop"
        if at >= 0:  # ends with the token that completed the stop string
            assert stop in tokenizer.decode(answer.ids) and stop not in tokenizer.decode(answer.ids[:-1])


@LAYOUTS
@pytest.mark.parametrize("k", [0, 4])
def test_mixed_requests_joining_and_leaving_equal_their_solo_runs(folder: Path, target: Target, k: int, padded: bool) -> None:
    rng = random.Random(k)
    shapes = list(PARAMS.values())
    requests = [
        request(str(i), p, **{**rng.choice(shapes), "max_tokens": rng.randint(12, 30), "seed": i})
        for i, p in enumerate(prompts(18, 3))
    ]
    solo = {}
    for one in requests:
        solo |= run(engine(folder, target), [one])
    make = (
        speculative(folder, target, solo, k, lambda: rng.randint(0, k), padded=padded)
        if k
        else engine(folder, target, padded=padded)
    )
    together = run(make, requests, [rng.randint(0, 25) for _ in requests])
    assert {n: a.ids for n, a in together.items()} == {n: a.ids for n, a in solo.items()}


@LAYOUTS
@pytest.mark.parametrize("k", [0, 4])
def test_preempted_and_resumed_requests_lose_nothing(folder: Path, target: Target, k: int, padded: bool) -> None:
    requests = [request(str(i), p, max_tokens=40, stop_ids=()) for i, p in enumerate(prompts(6, 5))]
    plain = run(engine(folder, target), requests)
    small = {"kv_cache_tokens": 160, "block_size": 8, "enable_prefix_caching": False, "padded": padded}
    it = speculative(folder, target, plain, k, lambda: 3, **small) if k else engine(folder, target, **small)
    start = it.scheduler.pages.free
    answers = run(it, requests)
    assert it.stats.preemptions > 0
    assert {n: a.ids for n, a in answers.items()} == {n: a.ids for n, a in plain.items()}
    assert it.scheduler.pages.free == start


def test_a_shared_prompt_is_computed_once_and_gives_the_same(folder: Path, target: Target) -> None:
    prompt = prompts(1, 9)[0] * 3
    it = engine(folder, target)
    first = run(it, [request("a", prompt)])
    computed = it.stats.prompt_tokens
    second = run(it, [request("b", prompt)])
    assert it.stats.cached_tokens >= len(prompt) - 17 and it.stats.prompt_tokens - computed <= 17
    assert first["a"].ids == second["b"].ids


def test_a_rejected_draft_never_enters_the_prefix_cache(folder: Path, target: Target) -> None:
    """Wrong drafts fill whole pages. A prompt that equals them must be computed."""
    asked = request("a", [5] * 8, max_tokens=30, stop_ids=())
    plain = run(engine(folder, target, block_size=8), [asked])
    wrong = {"a": [77] * 60}
    it = engine(
        folder, target, lambda slots, *_: Scripted(slots, wrong, lambda: 99), speculation=Speculation("ngram", 20), block_size=8
    )
    assert run(it, [asked])["a"].ids == plain["a"].ids
    assert len(it.scheduler.pages.match([5] * 8 + [77] * 40).pages) == 1  # the prompt's page and no other


@LAYOUTS
@pytest.mark.parametrize("when", range(5))
def test_abort_anywhere_frees_everything(folder: Path, target: Target, when: int, padded: bool) -> None:
    it = engine(folder, target, max_num_batched_tokens=16, max_num_seqs=2, padded=padded)
    start, slots = it.scheduler.pages.free, len(it.scheduler._slots)
    for i, p in enumerate(prompts(4, 2)):
        it.add(request(str(i), p * 3, stop_ids=()))
    for _ in range(when * 3):
        it.step()
    for i in range(4):
        assert it.abort(str(i))
    assert not it.abort("0") and not it.has_work
    assert (it.scheduler.pages.free, len(it.scheduler._slots)) == (start, slots)
    assert it.step() == []


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"prompt_ids": ()}, "prompt"),
        ({"prompt_ids": (5,) * 64}, "prompt='64 tokens'.*context is 64"),
        ({"prompt_ids": (5, 999_999)}, "999999"),
        ({"max_tokens": 62}, "max_tokens=62.*leaves 61"),
        ({"banned": ((999_999,),)}, "banned_token_ids"),
    ],
)
def test_what_can_never_run_is_refused(folder: Path, target: Target, changes: dict, words: str) -> None:
    it = engine(folder, target, max_model_len=64)
    with pytest.raises(SettingError, match=words):
        it.add(replace(request("a", [5, 6, 7]), **changes))
    assert not it.has_work


def test_what_the_kv_cache_cannot_hold_is_refused(folder: Path, target: Target) -> None:
    it = engine(folder, target, kv_cache_tokens=32)
    with pytest.raises(SettingError, match="the KV cache holds 32; raise kv_cache_tokens"):
        it.add(request("a", [5] * 10, max_tokens=30))


def test_an_id_in_use_is_refused(folder: Path, target: Target) -> None:
    it = engine(folder, target)
    it.add(request("a", [5]))
    with pytest.raises(SettingError, match="in use"):
        it.add(request("a", [6]))


@LAYOUTS
def test_greedy_rows_are_undisturbed_by_sampled_ones(folder: Path, target: Target, padded: bool) -> None:
    """Temperatures 0, 1e-6, 1e-4 and .7 in one batch: the greedy rows equal their solo run, and nothing is NaN."""
    temperatures = [0.0, 1e-6, 1e-4, 0.7] * 2
    requests = [
        request(str(i), p, temperature=t, seed=i, max_tokens=20, stop_ids=())
        for i, (p, t) in enumerate(zip(prompts(8, 7), temperatures, strict=True))
    ]
    solo = {}
    for one in requests:
        solo |= run(engine(folder, target), [one])
    answers = run(speculative(folder, target, solo, 4, lambda: 2, padded=padded), requests)
    assert {n: a.ids for n, a in answers.items()} == {n: a.ids for n, a in solo.items()}
    greedy = run(engine(folder, target), [replace(r, params=replace(r.params, temperature=0.0)) for r in requests])
    nearly = [r.id for r in requests if r.params.temperature < 1e-3]
    assert [answers[n].ids for n in nearly] == [greedy[n].ids for n in nearly]
