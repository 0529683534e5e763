"""Sends the requests of a batch as its load says and writes down what came back and when. Knows endpoints and clocks; neither
what kind of engine answers nor what the figures mean.

Every time counts from when the request was due, not from when it was sent: with a client that falls behind, or a server
that is full, the wait belongs to the latency. (Leaving it out is known as coordinated omission.)
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from forerun.bench.engines.endpoint import Ask, Endpoint, Piece, RequestFailed
from forerun.bench.engines.fields import joined, readable
from forerun.bench.load.patience import Patience
from forerun.bench.records.record import FINISHED, NOT_COUNTED, Answer, Chunk, Load
from forerun.bench.records.redaction import hide
from forerun.types import require

FINISHES = {
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "model_length": "length",
    "max_tokens": "length",
}  # what some servers call the finish reasons of the OpenAI API


def arrivals(load: Load, seed: int, trace: Sequence[float] = ()) -> list[float] | None:
    """Seconds after the batch's begin at which its requests are due; None: as earlier ones end. Poisson arrivals are drawn
    from the seed, so that every arm gets the same ones; trace: the recorded seconds, from 0."""
    if load.kind == "poisson":
        assert load.rate is not None
        draw, at, times = random.Random(seed), 0.0, []
        for _ in range(load.requests):
            times.append(at)
            at += draw.expovariate(load.rate)
        return times
    if load.kind == "trace":
        require(len(trace) >= load.requests, "trace", len(trace), f"it is shorter than the {load.requests} requests")
        return [at / load.speed for at in trace[: load.requests]]
    return None


async def drive(
    endpoint: Endpoint,
    asks: Sequence[Ask],
    load: Load,
    due: Sequence[float] | None,
    clock: Callable[[], float] = time.perf_counter,
    patience: Patience | None = None,
) -> tuple[tuple[Answer, ...], float]:
    """Send all of them; the answers in their order, and the seconds from the begin to the last one's end. due: when each is to
    be sent, from `arrivals`; None keeps load.concurrency in flight. Once patience has given up, no further request is sent: the
    rest count as failed, with that as their reason."""
    gc.collect()
    gc.disable()  # a collection would stop every stream for a moment, and its length grows with the samples kept
    try:
        sending = _Sending(endpoint, asks, clock, Patience() if patience is None else patience)
        async with asyncio.TaskGroup() as group:
            if due is None:
                waiting = iter(range(len(asks)))
                for _ in range(min(load.concurrency, len(asks))):
                    group.create_task(sending.one_after_another(waiting))
            else:
                for index, at in enumerate(due):
                    group.create_task(sending.at(index, sending.begin + at))
        wall = clock() - sending.begin
    finally:
        gc.enable()
    sending.patience.batch_ended()
    return tuple(answer_of(ask, one, sending.begin) for ask, one in zip(asks, sending.exchanges(due), strict=True)), wall


class _Sending:
    """A batch as it is sent."""

    def __init__(
        self, endpoint: Endpoint, asks: Sequence[Ask], clock: Callable[[], float], patience: Patience
    ) -> None:
        self._endpoint, self._asks, self._clock, self.patience = endpoint, asks, clock, patience
        self._done: dict[int, Exchange] = {}
        self._not_due: set[asyncio.Task[None]] = set()
        self.begin = clock()

    async def one_after_another(self, waiting: Iterator[int]) -> None:
        """A stream of a closed loop: a request is due when the one before it has ended."""
        free = self.begin
        for index in waiting:
            if self.patience.lost is not None:
                return
            await self._send(index, free)
            free = self._clock()

    async def at(self, index: int, due: float) -> None:
        """A request of an open loop."""
        if self.patience.lost is not None:
            return
        task = asyncio.current_task()
        assert task is not None
        self._not_due.add(task)
        while (left := due - self._clock()) > 0:
            await asyncio.sleep(left)
        self._not_due.remove(task)
        await self._send(index, due)

    async def _send(self, index: int, due: float) -> None:
        what = await exchange(self._endpoint, self._asks[index], due, self._clock)
        self._done[index] = what
        self.patience.saw(what.failure, what.unanswered)
        if self.patience.lost is not None:
            for task in self._not_due:
                task.cancel()  # those who wait for their time would wait for nothing
            self._not_due.clear()

    def exchanges(self, due: Sequence[float] | None) -> list[Exchange]:
        """What happened to each request; those that were not sent have failed."""
        found = []
        for index in range(len(self._asks)):
            at = self.begin + (0.0 if due is None else due[index])
            found.append(self._done.get(index) or Exchange(at, at, at, [], f"not sent: {self.patience.lost}"))
        return found


class Exchange(NamedTuple):
    """What happened to one request, on the clock. failure: why it failed, None if it did not. unanswered: as in
    RequestFailed."""

    due: float
    sent: float
    end: float
    pieces: list[Piece]
    failure: str | None
    unanswered: bool = False


async def exchange(endpoint: Endpoint, ask: Ask, due: float, clock: Callable[[], float]) -> Exchange:
    """One request from end to end. Nothing is worked out here: while others still stream, that would delay them. Whatever it
    makes fail is its failure alone."""
    sent = clock()
    pieces: list[Piece] = []
    failure, unanswered = None, False
    try:
        async for piece in endpoint.generate(ask):
            pieces.append(piece)
    except RequestFailed as error:
        failure, unanswered = str(error), error.unanswered
    except Exception as error:
        failure = f"{type(error).__name__}: {readable(str(error), 300)}"
    return Exchange(due, sent, clock(), pieces, failure, unanswered)


def answer_of(ask: Ask, what: Exchange, begin: float) -> Answer:
    """What an exchange adds up to, times from when it was due. The end is when the last piece with content or a finish reason
    came, not when the connection closed. A failure is an answer too, with its reason and no tokens credited."""
    due, sent, end, pieces, failure, _ = what
    usage = next((p.usage for p in reversed(pieces) if p.usage is not None), None)
    counts = next((p.counts for p in reversed(pieces) if p.counts is not None), NOT_COUNTED)
    reason = next((p.finish_reason for p in reversed(pieces) if p.finish_reason is not None), "")
    prompt_tokens = next((p.prompt_tokens for p in reversed(pieces) if p.prompt_tokens is not None), 0)
    queued = next((p.queued_s for p in reversed(pieces) if p.queued_s is not None), None)
    produced = next((p.output_tokens for p in reversed(pieces) if p.output_tokens is not None), None)
    hidden = next((p.hidden_tokens for p in reversed(pieces) if p.hidden_tokens), 0)
    ids = tuple(i for p in pieces for i in p.token_ids or ())
    chunks, said = _chunks(pieces, due), "".join(p.text for p in pieces)
    text = joined(said)
    halves = ("the text holds half of a character (a lone surrogate), which is � here",)
    notes = tuple(dict.fromkeys(note for p in pieces for note in p.notes)) + halves * (text.count("�") > said.count("�"))
    tokens = len(ids) if produced is None else produced
    reason = FINISHES.get(reason, reason)
    if failure is None and reason not in FINISHED:
        failure = f"it ended with the finish reason {readable(reason, 40)!r}"
    if failure is None and (not chunks or not tokens):
        failure = "an answer with nothing in it"
    failure, notes = hide(failure), hide(notes)  # servers repeat a key that they refuse
    kept = None if usage is None else dict(usage)
    if failure is not None:
        first = chunks[0].at_s if chunks else end - due
        return Answer(
            ask.name, prompt_tokens, (), "failed", None, first, end - due, NOT_COUNTED, text, 0, due - begin, sent - due,
            chunks, failure, kept, 0, notes,
        )  # fmt: skip
    last = next((p.at_s for p in reversed(pieces) if p.finish_reason is not None or p.text or p.token_ids), end)
    return Answer(
        ask.name, prompt_tokens, ids, reason, queued, chunks[0].at_s, last - due, counts, text, tokens, due - begin, sent - due,
        chunks, None, kept, hidden, notes,
    )  # fmt: skip


def _chunks(pieces: Sequence[Piece], due: float) -> tuple[Chunk, ...]:
    """The pieces with content. Tokens that came without any text before the first text belong to the first chunk with text:
    until then a user has seen nothing."""
    chunks: list[Chunk] = []
    early = 0
    any_text = any(p.text for p in pieces)
    for p in pieces:
        if not p.text and not p.token_ids:
            continue
        tokens = None if p.token_ids is None else len(p.token_ids)
        if any_text and not chunks and not p.text:
            early += tokens or 0
            continue
        if early and tokens is not None:
            tokens, early = tokens + early, 0
        chunks.append(Chunk(p.at_s - due, tokens, len(p.text)))
    return tuple(chunks)
