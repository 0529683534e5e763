"""Random lives of an engine: all drafters, both layouts, sampling, grammars, stops, small pages, preemption, caching, chats of
several turns, several callers, aborts, abandoned streams, interrupts, and an error thrown into any operation. Every answer
equals that of the request alone. No answer, page or slot is lost, and the engine goes on. FORERUN_TRIALS=2000 runs 2000 lives.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Drafter
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine import commit
from forerun.engine.engine import Engine
from forerun.engine.owner import Owner
from forerun.engine.scheduler import PlanRow, Scheduler
from forerun.types import Draft, Event, Request, SamplingParams, Verdict
from forerun.verify import accept
from forerun.verify.grammar import Block, Grammars, Matcher
from tests.ledger import LETTERS, POISON, VOCAB, Ledger, Letters, LetterTokens

TRIALS = int(os.environ.get("FORERUN_TRIALS", "60"))
FIRST = int(os.environ.get("FORERUN_FIRST_TRIAL", "0"))
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "ngram_gpu": {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 3},
    "prediction": {"method": "prediction"},
    "draft_model": {"method": "draft_model", "model": "drafter"},
    "drawn": {"method": "draft_model", "model": "drafter", "draft_sample_method": "probabilistic"},
    "block": {
        "method": "draft_model", "model": "drafter", "draft_sample_method": "probabilistic", "rejection_sample_method": "block"
    },
}  # fmt: skip

GRAMMARS = Grammars(LetterTokens(), VOCAB, [2])  # type: ignore[arg-type]
FORMS = (  # the letters c and x are no text
    {"regex": "((ab|de|f[g-k]{1,3}|lm)n?)+"}, {"regex": "[ad-i]{3,12}"}, {"regex": "de(fghijkl|ghijklm)mnop[a-b]{0,9}"},
    {"choice": ["defghij", "defghab", "q", "ab"]}, {"grammar": 'start: "a" start "b" | "d" | "e" start'},
)  # fmt: skip


class Injected(RuntimeError):
    pass


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    counted: int = 0
    reason: str | None = None
    error: str | None = None

    def take(self, event: Event) -> None:
        assert self.reason is None, "an event after the end"
        self.ids += event.tokens
        self.text += event.text
        self.logprobs += [(one.token, round(one.logprob, 5)) for one in event.logprobs]
        if event.counts is not None:
            assert event.counts[1] <= event.counts[0] and event.counts[1] <= len(event.tokens)
            self.counted += event.counts[1]
        self.reason, self.error = event.finish_reason, event.error

    def begins(self, whole: Answer) -> bool:
        """Whether this is a prefix of another answer."""
        n = len(self.ids)
        return self.ids == whole.ids[:n] and self.logprobs == whole.logprobs[:n] and whole.text.startswith(self.text)


def engine(config: EngineConfig, padded: bool) -> Engine:
    def make(slots: Any, mirror: Any, sampling: Any, kv: Any, padded: bool) -> Drafter | None:
        if config.speculation is None:
            return None
        around = DrafterContext(slots, mirror, sampling, kv, config, padded, VOCAB, Ledger(salt=1))  # type: ignore[arg-type]
        return TABLE[config.speculation.method](config.speculation, around)

    return Engine(Ledger(), config, make, Letters, padded, GRAMMARS)  # type: ignore[arg-type]


def alone(config: EngineConfig, padded: bool, request: Request) -> Answer:
    """The answer of the request alone, with enough pages: with drawn drafts on the same layout, else without speculation."""
    if config.speculation is None or config.speculation.draft_sample_method == "greedy":
        config, padded = replace(config, speculation=None), False
    config = replace(config, kv_cache_tokens=None, enable_prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=None)
    it, answer = engine(config, padded), Answer()
    it.add(request)
    while it.has_work:
        for event in it.step():
            answer.take(event)
    return answer


def some_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.7, 1.2]), "max_tokens": rng.randint(1, 24)}
    for name, value in {
        "top_k": rng.randint(1, 12), "top_p": rng.choice([0.5, 0.9]), "min_p": 0.1, "repetition_penalty": 1.3,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {3: 4.0, 5: -100}, "logprobs": rng.randint(0, 3),
        "banned_token_ids": ((4,), (6, 7)), "stop": (rng.choice(LETTERS[:20]) + rng.choice(LETTERS[:20]),),
        "stop_token_ids": (rng.randrange(3, 20),), "include_stop_str_in_output": True,
    }.items():  # fmt: skip
        if rng.random() < 0.12:
            params[name] = value
    if rng.random() < 0.1:
        params["min_tokens"] = rng.randint(0, params["max_tokens"])
    return params


def some_request(rng: random.Random, name: str, before: list[int], most: int, poison: float) -> Request:
    """A request, often the next turn of an earlier one."""
    word = [rng.randrange(3, 20) for _ in range(rng.randint(1, 5))]
    prompt = [*before, *(word * rng.randint(1, 4))][: most - 26]
    params = SamplingParams(**some_params(rng), seed=rng.randrange(1 << 40))
    own = random.Random(params.seed)
    if own.random() < 0.15:
        params = replace(params, structured=own.choice(FORMS))
    if rng.random() < poison:
        prompt[rng.randrange(len(prompt))] = POISON
    tokens = min(params.max_tokens or 1, most - len(prompt))
    params = replace(params, max_tokens=tokens, min_tokens=min(params.min_tokens, tokens))
    prediction = tuple(word * 3) if rng.random() < 0.7 else ()
    stops = (2, *params.stop_token_ids)
    return Request(name, tuple(prompt), params, tokens, params.seed or 0, stops, params.banned_token_ids, prediction)


@contextmanager
def trouble(it: Engine, rng: random.Random, kinds: list[str], where: str | None = None) -> Iterator[list[str]]:
    """Throw one exception or interrupt in some operation of the engine. Return which it was."""
    places: list[tuple[Any, str]] = [
        (it.state, "map_pages"), (it.state, "apply"), (it.sampling, "shape"), (it.sampling, "features"),
        (it.scheduler, "plan"), (it.scheduler, "commit"), (it.scheduler, "finish"), (it.scheduler, "_admit"),
        (it.scheduler, "_leave"), (it.scheduler.pages, "allocate"), (it.scheduler.pages, "release"),
        (it.scheduler.pages, "publish"), (it.scheduler.pages, "match"), (it._step, "launch"), (it._step, "draft"),
        (it._step, "admit"), (it._step, "release"), (it._step.layout, "arrange"), (it._step.cycle, "_commit"),
        (it, "_cut"), (it, "_commit"), (it, "_leave"), (it, "_admit"),
    ]  # fmt: skip
    places += [(it._step.cycle.target, "forward")] * 4
    if it.drafter is not None:
        places += [(it.drafter, name) for name in ("admit", "release", "observe", "propose", "propose", "propose")]
    owner, name = rng.choice(places)
    kind, left, late = rng.choice(kinds), rng.randint(1, 30), rng.random() < 0.5
    real, happened = getattr(owner, name), []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        given = real(*args, **kwargs) if late or left != 0 else None
        if left == 0:
            happened.append(f"{kind} in {type(owner).__name__}.{name}, {'after' if late else 'before'} its work")
            if kind == "error":
                raise Injected("injected")
            if kind == "interrupt":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
            return given if late else real(*args, **kwargs)
        return given

    had = name in vars(owner)
    setattr(owner, name, wrapped)
    try:
        yield happened
    finally:
        if had:
            setattr(owner, name, real)
        else:
            delattr(owner, name)


def whole(it: Engine) -> None:
    """All pages and slots are free."""
    scheduler = it.scheduler
    assert not it.has_work and not scheduler.running and not scheduler.waiting and not scheduler.suspects
    assert len(scheduler._slots) == it.config.max_num_seqs == len(set(scheduler._slots))
    assert scheduler.pages.free == scheduler.pages.count and not any(scheduler.pages._holders)
    assert sorted([*scheduler.pages._blank, *scheduler.pages._idle]) == list(range(1, scheduler.pages.count + 1))


def some_engine(rng: random.Random) -> tuple[Engine, EngineConfig, bool, str]:
    name = rng.choice(list(DRAFTERS))
    padded = rng.random() < 0.6
    settings = DRAFTERS[name]
    k = rng.choice([1, 3, 7])
    speculation = Speculation.parse(settings | {"num_speculative_tokens": k}) if settings is not None else None
    rows = rng.randint(1, 5)
    drawn = name in ("drawn", "block")
    config = EngineConfig(
        max_model_len=96, max_num_seqs=rows, block_size=8, kv_cache_tokens=rng.choice([104, 160, 400]),
        max_num_batched_tokens=rng.choice([max(rows, k + 1), 16, 64]) if not drawn else rng.choice([rows * (k + 1), 64]),
        enable_prefix_caching=rng.random() < 0.7, adaptive_drafts=rng.random() < 0.5, speculation=speculation,
    )  # fmt: skip
    if (config.max_num_batched_tokens or 64) < (rows * (k + 1) if drawn else max(rows, k + 1)):
        config = replace(config, max_num_batched_tokens=64)
    return engine(config, padded), config, padded, name


def live(seed: int, seen: set[str]) -> None:
    rng = random.Random(seed)
    it, config, padded, drafter = some_engine(rng)
    seen |= {drafter, "padded" if padded else "exact"}
    owner = Owner(it)
    most = min(96, config.kv_cache_tokens or 96)
    expected: dict[str, Answer] = {}
    history: list[list[int]] = [[]]
    lock = threading.Lock()
    failures: list[BaseException] = []
    errors: list[Answer] = []
    poison = rng.choice([0.0, 0.0, 0.15])
    calls = rng.randint(1, 3)
    threaded = calls > 1 and rng.random() < 0.4
    kinds = ["error"] if threaded else ["error", "interrupt", "signal"]

    def request(rng: random.Random, name: str) -> Request:
        with lock:
            before = rng.choice(history[-4:]) if rng.random() < 0.7 else []
        one = some_request(rng, name, before[: most - 40], most, poison)
        answer = alone(config, padded, one)
        with lock:
            expected[name] = answer
        return one

    def check(name: str, answer: Answer, live: Any, given_up: bool) -> None:
        want = expected[name]
        if answer.reason == "error" and want.reason != "error":
            assert answer.error and ("injected" in answer.error or "interrupted" in answer.error), answer
            with lock:
                errors.append(answer)
            assert answer.begins(want), (name, answer, want)
        elif answer.reason is None or answer.reason == "abort":
            assert given_up and answer.begins(want), (name, answer, want)
        else:
            assert (answer.ids, answer.text, answer.reason) == (want.ids, want.text, want.reason), (name, answer, want)
            assert answer.logprobs == want.logprobs and live.stats.accepted == answer.counted
        with lock:
            turn = [*live.request.prompt_ids, *answer.ids]
            history.extend([turn] if POISON not in turn else [])

    def caller(number: int, interrupted: Callable[[], bool]) -> None:
        """Submit batches of requests one after the other. Each is read to its end or abandoned."""
        rng = random.Random(seed * 7 + number)
        for turn in range(rng.randint(1, 3)):
            requests = [request(rng, f"{number}.{turn}.{i}") for i in range(rng.randint(1, 4))]
            stream = None
            while stream is None:
                try:
                    stream = owner.submit(requests)
                except KeyboardInterrupt:
                    assert interrupted()
            answers = {one.id: Answer() for one in requests}
            lives, left, given_up = stream.live, rng.choice([3, 1000, 1000]), False
            while any(answer.reason is None for answer in answers.values()):
                try:
                    for arrival in next(stream):
                        answers[arrival.event.request_id].take(arrival.event)
                except KeyboardInterrupt:
                    assert interrupted()
                    for arrival in stream.take():
                        answers[arrival.event.request_id].take(arrival.event)
                left -= 1
                if left == 0:
                    given_up = True
                    if rng.random() < 0.3:
                        for name in lives:
                            undisturbed(lambda name=name: owner.abort(name), interrupted)  # type: ignore[misc]
                        continue
                    break
            if rng.random() < 0.5:
                undisturbed(stream.close, interrupted)
            del stream
            for name, answer in answers.items():
                check(name, answer, lives[name], given_up)

    def undisturbed(work: Callable[[], object], interrupted: Callable[[], bool]) -> None:
        try:
            work()
        except KeyboardInterrupt:  # after it, or it is made up for before the next step
            assert interrupted()

    def guarded(number: int, interrupted: Callable[[], bool]) -> None:
        try:
            caller(number, interrupted)
        except BaseException as error:
            failures.append(error)

    def interleaved(interrupted: Callable[[], bool]) -> None:
        """Read several open streams alternately in one thread."""
        rng = random.Random(seed * 11)
        requests = {str(i): request(rng, str(i)) for i in range(calls * 2)}
        streams, answers = {}, {name: Answer() for name in requests}
        for name, one in requests.items():
            while name not in streams:
                try:
                    streams[name] = owner.submit([one])
                except KeyboardInterrupt:
                    assert interrupted()
        lives = {name: stream.live[name] for name, stream in streams.items()}
        while streams:
            name = rng.choice(list(streams))
            try:
                for arrival in next(streams[name]):
                    answers[name].take(arrival.event)
            except KeyboardInterrupt:
                assert interrupted()
                for arrival in streams[name].take():
                    answers[name].take(arrival.event)
            if answers[name].reason is not None:
                del streams[name]
            elif rng.random() < 0.01:
                del streams[name]  # abandoned
        for name, answer in answers.items():
            check(name, answer, lives[name], True)

    troubled = rng.random() < 0.7
    with trouble(it, rng, kinds) if troubled else _calm() as happened:
        interrupted = lambda: bool(happened) and "error" not in happened[0]  # noqa: E731
        if threaded:
            threads = [threading.Thread(target=guarded, args=(i, interrupted)) for i in range(calls)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "a caller hangs"
        elif rng.random() < 0.4:
            interleaved(interrupted)
        else:
            caller(0, interrupted)
    seen |= {"threads"} if threaded else set()
    seen |= {happened[0].split(" ")[0]} if happened else set()
    seen |= {"preempted"} if it.stats.preemptions else set()
    seen |= {"cached"} if it.stats.cached_tokens else set()
    seen |= {"poisoned"} if any("NaN" in (answer.error or "") for answer in expected.values()) else set()
    if failures:
        raise failures[0]
    assert len(errors) <= 1, (happened, errors)
    gc.collect()
    owner.drain()
    whole(it)
    last = request(rng, "last")  # the engine goes on
    answer, stream = Answer(), owner.submit([last])
    for arrivals in stream:
        for arrival in arrivals:
            answer.take(arrival.event)
    want = expected["last"]
    assert (answer.ids, answer.reason) == (want.ids, want.reason)
    whole(it)


@contextmanager
def _calm() -> Iterator[list[str]]:
    yield []


def test_random_lives(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="forerun")
    seen: set[str] = set()
    for seed in range(FIRST, FIRST + TRIALS):
        try:
            live(seed, seen)
        except BaseException as error:
            error.add_note(f"in the life of seed {seed}")
            raise
    if TRIALS >= 60:
        troubles = {"threads", "error", "interrupt", "signal", "preempted", "cached", "poisoned"}
        assert seen >= {*DRAFTERS, "padded", "exact", *troubles}


def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are published when their step is launched."""
    real = Scheduler.commit

    def commit(self: Scheduler, row: PlanRow, tokens: list[int]) -> None:
        row.sequence.settled = row.sequence.computed - row.pending
        real(self, row, tokens)

    monkeypatch.setattr(Scheduler, "commit", commit)


def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step accepts one draft more than the target's choices allow."""
    real = accept.accept_matching

    def matching(choice: Tensor, draft: Draft) -> Verdict:
        verdict = real(choice, draft)
        return Verdict(choice, verdict.count + (verdict.count <= draft.size))

    monkeypatch.setattr(commit, "accept_matching", matching)


def batched_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of a drawn draft depends on its place in the batch."""
    real = accept.block_noise
    monkeypatch.setattr(
        accept, "block_noise", lambda seed, start, *rest: real(seed + torch.arange(len(seed)), start, *rest)
    )


def unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of a block's first position holds for all of them."""
    real = Matcher.block

    def block(self: Matcher, draft: list[int], most: int, drawn: bool) -> Block:
        found = real(self, draft, most, drawn)
        return found._replace(masks=found.masks[[0] * len(found.masks)])

    monkeypatch.setattr(Matcher, "block", block)


def unrecovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that a failed step held are not freed."""
    monkeypatch.setattr(Engine, "_recover", lambda self, error: self._fail(self._blamed, error or "interrupted"))


@pytest.mark.parametrize("fault", [early, greedy, batched_noise, unmasked, unrecovered])
def test_random_lives_notice_faults(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="forerun")
    fault(monkeypatch)
    with pytest.raises((AssertionError, Injected, KeyError, IndexError, ValueError)):
        for seed in range(120):
            live(seed, set())
