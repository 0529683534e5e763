"""A request fails alone, an engine has one owner, early ends are counted correctly: on tiny random models and the ledger."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams, SettingError
from forerun.config import EngineConfig, Speculation
from forerun.drafters.ngram import DeviceNgram, Ngram
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.engine import Engine
from forerun.engine.owner import Owner
from forerun.engine.policy import AcceptanceHistory, Offers, Policy
from forerun.kernels import cpu, reference
from forerun.models.decoder import Target
from forerun.models.tokenizer import Tokenizer
from forerun.types import Event, Request
from tests.ledger import Ledger, Letters
from tests.tiny import tiny_model

NGRAM = Speculation("ngram", 4, 1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, speculative_config={"method": "ngram"}, max_num_seqs=4, dtype="float32")


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def request(name: str, prompt: list[int], tokens: int, stops: tuple[int, ...] = (), **params: Any) -> Request:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens} | params)
    return Request(name, tuple(prompt), given, tokens, given.seed or 0, stops)


def run(it: Engine, *requests: Request) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {one.id: [] for one in requests}
    for one in requests:
        it.add(one)
    while it.has_work:
        for event in it.step():
            events[event.request_id].append(event)
    return events


def ids(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


# One owner, any number of callers


def test_two_streams_in_turn_lose_nothing(llm: LLM) -> None:
    prompts = ["one two", "three four"]
    alone = [out.token_ids for out in llm.generate(prompts, greedy(20))]
    streams = [llm.stream(prompt, greedy(20)) for prompt in prompts]
    got: list[list[int]] = [[], []]
    open_ = [0, 1]
    while open_:
        for i in list(open_):
            chunk = next(streams[i], None)
            if chunk is None:
                open_.remove(i)
            else:
                got[i] += chunk.token_ids
    assert [tuple(one) for one in got] == alone


def test_generate_inside_a_stream_and_inside_progress(llm: LLM) -> None:
    alone = llm.generate("one two", greedy(12))[0].token_ids
    other = llm.generate("three", greedy(5))[0].token_ids
    found: list[int] = []
    for chunk in llm.stream("one two", greedy(12)):
        found += chunk.token_ids
        assert llm.generate("three", greedy(5))[0].token_ids == other
    assert tuple(found) == alone
    inner: list[tuple[int, ...]] = []
    done = llm.generate("one two", greedy(12), lambda *_: inner.append(llm.generate("three", greedy(5))[0].token_ids))
    assert done[0].token_ids == alone and set(inner) == {other} and inner


def test_threads_share_an_llm(llm: LLM) -> None:
    prompts = [f"prompt {i} of some length"[: 8 + i] for i in range(8)]
    alone = [llm.generate(prompt, greedy(16))[0].token_ids for prompt in prompts]
    got: dict[int, Any] = {}

    def ask(i: int) -> None:
        try:
            for _ in range(3):
                if i % 2:
                    got[i] = tuple(t for chunk in llm.stream(prompts[i], greedy(16)) for t in chunk.token_ids)
                else:
                    got[i] = llm.generate(prompts[i], greedy(16))[0].token_ids
        except BaseException as error:
            got[i] = error

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [got[i] for i in range(8)] == alone


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_an_abandoned_stream_aborts_its_request(llm: LLM, chunks: int) -> None:
    stream: Iterator[Any] | None = llm.stream("one two three", greedy(200))
    assert stream is not None and llm.engine.has_work
    for _ in range(chunks):
        next(stream)
    stream = None
    gc.collect()
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pages.free == llm.engine.scheduler.pages.count


def test_streams_refuse_at_once_what_cannot_run(llm: LLM) -> None:
    with pytest.raises(SettingError, match="max_tokens"):
        llm.stream("one", greedy(10_000))
    assert not llm.engine.has_work


def test_an_engine_that_cannot_recover_ends_all_requests() -> None:
    it = Engine(Ledger(), EngineConfig(max_num_seqs=2), lambda *_: None, Letters, False)  # type: ignore[arg-type]
    owner = Owner(it)
    stream = owner.submit([request(str(i), [3, 4], 5) for i in range(5)])

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    it._step.launch = it._step.restart = fail  # type: ignore[method-assign, assignment]
    events = [arrival.event for arrivals in stream for arrival in arrivals]
    assert len(events) == 5 and all(event.finish_reason == "error" and "is gone" in (event.error or "") for event in events)


# A request fails alone


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_an_operation_that_always_fails_for_one_request_ends_that_one(padded: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A forward pass with a certain prompt token raises, so the engine does not know which request is at fault."""
    caplog.set_level(logging.CRITICAL, logger="forerun")
    model = Ledger()
    it = Engine(model, EngineConfig(max_num_seqs=4, speculation=NGRAM), ngram, Letters, padded)  # type: ignore[arg-type]
    requests = [request(str(i), [3 + i, 4, 5, 3 + i, 4], 14) for i in range(6)]
    want = {name: ids(events) for name, events in run(it, *requests).items()}
    real = model.forward
    bad = next(token for token in range(8, 23) if not any(token in answer for answer in want.values()))

    def forward(batch: Any, *rest: Any, **named: Any) -> Any:
        if ((batch.ids == bad) & (batch.positions == 1)).any():  # elsewhere it may be padding
            raise RuntimeError("no such token")
        return real(batch, *rest, **named)

    model.forward = forward  # type: ignore[method-assign]
    events = run(it, *requests[:3], request("bad", [3, bad, 5], 14), *requests[3:])
    assert events["bad"][-1].finish_reason == "error" and "no such token" in (events["bad"][-1].error or "")
    assert {name: ids(events[name]) for name in want} == want
    assert it.scheduler.pages.free == it.scheduler.pages.count


def ngram(slots: Any, mirror: Any, sampling: Any, kv: Any, padded: bool) -> Any:
    return (DeviceNgram if padded else Ngram)(slots, NGRAM, 24)


def test_an_interrupt_at_any_line_of_a_step_leaves_the_engine_whole() -> None:
    """KeyboardInterrupt is thrown at many lines of the engine's files, one a run, while requests are admitted, stepped,
    preempted and released. The answers stay the same. FORERUN_EVERY_LINE: it is thrown at every line."""
    config = EngineConfig(max_model_len=64, max_num_seqs=3, kv_cache_tokens=64, block_size=8, speculation=NGRAM)
    requests = [request(str(i), [3 + i, 4, 5, 3 + i, 4], 16, logprobs=0) for i in range(4)]

    def lived(padded: bool, at: int) -> tuple[dict[str, list[int]], set[str], bool]:
        it = Engine(Ledger(), config, ngram, Letters, padded)  # type: ignore[arg-type]
        for one in requests:
            it.add(one)
        left, thrown = at, False

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left, thrown
            # `step` itself returns events; a keyboard interrupt is held back meanwhile
            excluded = ("step", "_recover", "_guard", "restart")
            if "/forerun/engine/" not in frame.f_code.co_filename or frame.f_code.co_name in excluded:
                return trace
            if event == "line" and "interrupts" not in frame.f_code.co_filename:
                left -= 1
                if left == 0:
                    thrown = True
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        answers: dict[str, list[int]] = {one.id: [] for one in requests}
        failed = set()
        while it.has_work:
            before = sys.gettrace()
            sys.settrace(trace if not thrown else None)
            try:
                events = it.step()
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(before)
            for event in events:
                answers[event.request_id] += event.tokens
                failed |= {event.request_id} if event.finish_reason == "error" else set()
        assert it.scheduler.pages.free == it.scheduler.pages.count and len(it.scheduler._slots) == 3
        return answers, failed, thrown

    for padded in (False, True):
        want, _, _ = lived(padded, -1)
        at, thrown = 1, True
        while thrown:
            answers, failed, thrown = lived(padded, at)
            assert len(failed) <= 1
            for name, tokens in answers.items():
                assert tokens == want[name] or (name in failed and tokens == want[name][: len(tokens)]), (at, name)
            at += 1 if at < 60 or "FORERUN_EVERY_LINE" in os.environ else 251


BAD = 7  # a token whose embedding is broken


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kernels", ["reference", "compiled"])
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_broken_logits_end_their_request_and_no_other(folder: Path, value: float, kernels: str, padded: bool) -> None:
    """A checkpoint has one broken embedding. Prompts with that token fail, and their pages harm no other request."""
    made = reference if kernels == "reference" else cpu.kernels(torch.bfloat16)
    dtype = torch.float32 if kernels == "reference" else torch.bfloat16
    good = Target.load(folder, dtype, kernels=made)  # type: ignore[arg-type]
    bad = Target.load(folder, dtype, kernels=made)  # type: ignore[arg-type]
    bad.weights.embedding.dense()[BAD] = value
    config = EngineConfig(max_num_seqs=3, kv_cache_tokens=160, block_size=8, speculation=NGRAM)
    rng = random.Random(0)
    requests = [
        request(
            str(i), [rng.randrange(10, 200) for _ in range(rng.randint(2, 20))], 12, logprobs=2,
            **rng.choice([{}, {"temperature": 0.9, "top_k": 5, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01}]),
        )
        for i in range(8)
    ]  # fmt: skip
    broken = [
        replace(one, id=f"bad {one.id}", prompt_ids=(*one.prompt_ids[:1], BAD, *one.prompt_ids[1:])) for one in requests[::2]
    ]
    tokenizer = Tokenizer(folder)

    def make(slots: Any, mirror: Any, sampling: Any, kv: Any, padded: bool) -> Any:
        return (DeviceNgram if padded else Ngram)(slots, NGRAM, tokenizer.size)

    def engine(target: Target) -> Engine:
        from forerun.models.tokenizer import Detokenizer

        return Engine(target, config, make, lambda: Detokenizer(tokenizer), padded)

    want = run(engine(good), *requests)
    it = engine(bad)
    mixed = [one for pair in zip(broken, requests[::2], requests[1::2], strict=True) for one in pair]
    for _ in range(2):  # the second time on pages that broken requests have used
        got = run(it, *mixed)
        for one in broken:
            last = got[one.id][-1]
            assert last.finish_reason == "error" and "NaN" in (last.error or "") and not ids(got[one.id])
            assert not any(event.logprobs for event in got[one.id])
        for one in requests:
            if BAD not in ids(want[one.id])[:-1]:
                assert ids(got[one.id]) == ids(want[one.id])
                assert got[one.id][-1].finish_reason == want[one.id][-1].finish_reason


# Counts and pages


def test_an_accepted_stop_is_counted_alike_on_both_layouts() -> None:
    """Drafts hold stop ids, which are accepted."""
    model, prompt = Ledger(), [3, 4, 5]
    want = ids(run(Engine(model, EngineConfig(), lambda *_: None, Letters, False), request("a", prompt, 30))["a"])  # type: ignore[arg-type]
    for at in range(2, 20):
        stop = want[at]
        if stop in want[:at]:
            continue
        seen = []
        for padded in (False, True):
            it = Engine(
                model, EngineConfig(speculation=Speculation("ngram", 4)), Right(want, len(prompt)), Letters, padded  # type: ignore[arg-type]
            )
            sequence = it.add(request("a", prompt, 30, (stop,)))
            while it.has_work:
                it.step()
            assert sequence.ids == prompt + want[: at + 1]
            seen.append(it.stats.drafts)
            assert sequence.stats == it.stats.drafts
        assert seen[0] == seen[1]
        drafts, without_bonus = seen[0], (at - 1) % 5 < 4  # blocks of 4 drafts and a bonus token, after the first token
        assert drafts.accepted + drafts.steps == at + without_bonus


class Right:
    """Makes drafters that know the answer."""

    def __init__(self, answer: list[int], prompt: int) -> None:
        self.answer, self.prompt = answer, prompt

    def __call__(self, slots: Any, *_: Any) -> Any:
        from tests.test_engine import Scripted

        return Scripted(slots, {"a": self.answer}, lambda: 99)


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_without_adaptive_drafts_all_drafts_are_verified(padded: bool) -> None:
    """Each step verifies the drafter's whole draft, even if all earlier drafts were wrong, except at the end of an answer."""
    model, prompt = Ledger(), [3, 4, 5]
    want = ids(run(Engine(model, EngineConfig(), lambda *_: None, Letters, False), request("a", prompt, 40))["a"])  # type: ignore[arg-type]
    wrong = [(token + 1) % 20 + 3 for token in want]
    config = EngineConfig(adaptive_drafts=False, speculation=Speculation("ngram", 4))
    it = Engine(model, config, Right(wrong, 3), Letters, padded)  # type: ignore[arg-type]
    requests = [request("a", prompt, 40), request("b", [9], 40)]  # nothing is known of the second one
    run(it, *requests)
    drafts = it.stats.drafts
    assert drafts.accepted == 0 and drafts.drafted_at[0] == 38 and drafts.drafting_steps == 38, drafts


def test_without_adaptive_drafts_the_padded_layout_takes_the_widest_offer() -> None:
    """For any cost of steps and any result of earlier drafts."""
    plan = Policy(Speculation("ngram", 8), adaptive=False)
    row = AcceptanceHistory()
    row.at_hand, row.rate = 0, 0.001

    def chosen(widths: list[int], most: list[int], seconds: list[float]) -> tuple[int, list[int]]:
        """The widest offer is as wide as the widest draft. Shared offers come after it."""
        offers = Offers([*widths, widths[-1]], [*[-1] * len(widths), 3], [*seconds, 1.0])
        choice = plan.choose(offers, Policy.survival([row] * len(most), most), most)
        return offers.width[choice.offer] if offers.drafts[choice.offer] < 0 else -1, choice.drafts

    assert chosen([0, 4, 8], [8], [1.0, 401.0, 801.0]) == (8, [8])
    assert chosen([0, 4], [3, 0], [float("nan")] * 2) == (4, [3, 0])
    assert chosen([0], [0], [1.0]) == (0, [0])


def test_a_drafter_with_a_shorter_context_is_refused_on_the_padded_layout() -> None:
    """A context that is one position too short is refused. One that is long enough is accepted."""
    for context, refused in ((96, False), (95, True), (40, True)):
        settings = {"method": "draft_model", "model": "x", "num_speculative_tokens": 3, "max_model_len": context}
        config = EngineConfig(max_model_len=96, kv_cache_tokens=256, speculation=Speculation.parse(settings))

        def make(slots: Any, mirror: Any, sampling: Any, kv: Any, padded: bool, config: EngineConfig = config) -> Any:
            around = DrafterContext(slots, mirror, sampling, kv, config, padded, 24, Ledger(1))  # type: ignore[arg-type]
            assert config.speculation is not None
            return TABLE["draft_model"](config.speculation, around)

        if refused:
            with pytest.raises(SettingError, match=f"max_model_len=96.*max_model_len={context}"):
                Engine(Ledger(), config, make, Letters, True)  # type: ignore[arg-type]
        else:
            Engine(Ledger(), config, make, Letters, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_cached_pages_hold_the_drafters_keys_and_values(padded: bool) -> None:
    """The target is its own drafter, so every draft is right. Answers end with fully accepted drafts at page boundaries. The
    drafts of the next turn are as good as those of the first."""
    drafter = Ledger()
    settings = {"method": "draft_model", "model": "x", "num_speculative_tokens": 4}
    config = EngineConfig(
        max_model_len=96, max_num_seqs=2, kv_cache_tokens=512, block_size=8, adaptive_drafts=False,
        speculation=Speculation.parse(settings),
    )  # fmt: skip

    def make(slots: Any, mirror: Any, sampling: Any, kv: Any, padded: bool) -> Any:
        around = DrafterContext(slots, mirror, sampling, kv, config, padded, 24, drafter)  # type: ignore[arg-type]
        assert config.speculation is not None
        return TABLE["draft_model"](config.speculation, around)

    hits = 0
    for prompt in range(3, 12):
        for tokens in range(5, 14):
            it = Engine(Ledger(), config, make, Letters, padded)  # type: ignore[arg-type]
            first = list(range(3, 3 + prompt))
            answer = ids(run(it, request("a", first, tokens))["a"])
            before = it.stats.cached_tokens
            run(it, request("b", [*first, *answer, 4, 5], 21))
            hits += it.stats.cached_tokens > before
            drafts = it.stats.drafts
            assert drafts.accepted == drafts.drafted > 0, (prompt, tokens)
    assert hits > 30


class Unsound(Ledger):
    """A drafter with many logits that are not finite."""

    def say(self, text: Any) -> Any:
        logits = super().say(text)
        if len(text) % 3 == 0:
            logits[5:9] = (float("nan"), float("inf"), -float("inf"), float("nan"))
        return logits


@pytest.mark.parametrize("sampled", ["greedy", "probabilistic"])
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_broken_logits_of_a_drafter_cost_time_and_nothing_else(padded: bool, sampled: str) -> None:
    settings = {"method": "draft_model", "model": "x", "num_speculative_tokens": 3, "draft_sample_method": sampled}
    config = EngineConfig(max_model_len=96, max_num_seqs=3, kv_cache_tokens=400, speculation=Speculation.parse(settings))

    def make(slots: Any, mirror: Any, sampling: Any, kv: Any, padded: bool) -> Any:
        around = DrafterContext(slots, mirror, sampling, kv, config, padded, 24, Unsound(0))  # type: ignore[arg-type]
        assert config.speculation is not None
        return TABLE["draft_model"](config.speculation, around)

    requests = [request(str(i), [3 + i, 9, 4], 20) for i in range(4)]
    want = run(Engine(Ledger(), EngineConfig(), lambda *_: None, Letters, False), *requests)  # type: ignore[arg-type]
    it = Engine(Ledger(), config, make, Letters, padded)  # type: ignore[arg-type]
    got = run(it, *requests, request("drawn", [4, 4], 20, temperature=1.0, seed=1))
    for one in requests:
        assert ids(got[one.id]) == ids(want[one.id]) and got[one.id][-1].finish_reason == "length"
    assert got["drawn"][-1].finish_reason == "length" and it.stats.drafts.accepted > 0
