"""Sends the requests of a batch at the times of its load, and records what came back and when. Knows endpoints and clocks, and
no kind of engine.

All times of a request count from when it was due, not from when it was sent. If the client is late or the server is full, the
wait is part of the latency. (Leaving it out is known as coordinated omission.)
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from forerun.bench.engines.endpoint import Endpoint, Piece, Request, RequestFailed
from forerun.bench.engines.fields import joined, readable
from forerun.bench.load.patience import Patience
from forerun.bench.records.record import FINISHED, NOT_COUNTED, Answer, Chunk, Load
from forerun.bench.records.redaction import hide
from forerun.checks import require

FINISHES = {
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "model_length": "length",
    "max_tokens": "length",
}  # other names of the API's finish reasons, used by some servers


def arrivals(load: Load, seed: int, trace: Sequence[float] = ()) -> list[float] | None:
    """The seconds after the start of the batch at which its requests are due; None for a closed loop. Poisson arrivals are
    drawn from the seed, so that they are the same for every arm. trace: the recorded times in seconds, from 0."""
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
    requests: Sequence[Request],
    load: Load,
    due: Sequence[float] | None,
    clock: Callable[[], float] = time.perf_counter,
    patience: Patience | None = None,
) -> tuple[tuple[Answer, ...], float]:
    """Send all requests. Returns the answers in the order of the requests, and the seconds until the last answer ended. due:
    the times from `arrivals`; None: load.concurrency requests are kept in flight. When patience gives up, the requests that
    are left are not sent and count as failed for that reason."""
    gc.collect()
    gc.disable()  # a collection stops all streams, for longer the more samples are kept
    try:
        sending = _Sending(endpoint, requests, clock, Patience() if patience is None else patience)
        async with asyncio.TaskGroup() as group:
            if due is None:
                waiting = iter(range(len(requests)))
                for _ in range(min(load.concurrency, len(requests))):
                    group.create_task(sending.one_after_another(waiting))
            else:
                for index, at in enumerate(due):
                    group.create_task(sending.at(index, sending.begin + at))
        wall = clock() - sending.begin
    finally:
        gc.enable()
    sending.patience.batch_ended()
    exchanges = zip(requests, sending.exchanges(due), strict=True)
    return tuple(answer_of(request, one, sending.begin) for request, one in exchanges), wall


class _Sending:
    """The state of a batch during sending."""

    def __init__(self, endpoint: Endpoint, requests: Sequence[Request], clock: Callable[[], float], patience: Patience) -> None:
        self._endpoint, self._requests, self._clock, self.patience = endpoint, requests, clock, patience
        self._done: dict[int, Exchange] = {}
        self._not_due: set[asyncio.Task[None]] = set()
        self.begin = clock()

    async def one_after_another(self, waiting: Iterator[int]) -> None:
        """One of the concurrent loops of a closed loop: a request is due when the one before it has ended."""
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
        what = await exchange(self._endpoint, self._requests[index], due, self._clock)
        self._done[index] = what
        self.patience.saw(what.failure, what.unanswered)
        if self.patience.lost is not None:
            for task in self._not_due:
                task.cancel()  # they would wait for their times and then not be sent
            self._not_due.clear()

    def exchanges(self, due: Sequence[float] | None) -> list[Exchange]:
        """The exchange of each request. Requests that were not sent have failed."""
        found = []
        for index in range(len(self._requests)):
            at = self.begin + (0.0 if due is None else due[index])
            found.append(self._done.get(index) or Exchange(at, at, at, [], f"not sent: {self.patience.lost}"))
        return found


class Exchange(NamedTuple):
    """One request and what came back. due, sent, end: times of the clock. failure: why it failed, None if it did not.
    unanswered: as in RequestFailed."""

    due: float
    sent: float
    end: float
    pieces: list[Piece]
    failure: str | None
    unanswered: bool = False


async def exchange(endpoint: Endpoint, request: Request, due: float, clock: Callable[[], float]) -> Exchange:
    """Send one request and collect its pieces. Nothing is computed here, since that would delay the other streams. Every
    exception is a failure of this request alone."""
    sent = clock()
    pieces: list[Piece] = []
    failure, unanswered = None, False
    try:
        async for piece in endpoint.generate(request):
            pieces.append(piece)
    except RequestFailed as error:
        failure, unanswered = str(error), error.unanswered
    except Exception as error:
        failure = f"{type(error).__name__}: {readable(str(error), 300)}"
    return Exchange(due, sent, clock(), pieces, failure, unanswered)


def answer_of(request: Request, what: Exchange, begin: float) -> Answer:
    """The answer in an exchange, with times from when the request was due. Its end is the last piece with content or a finish
    reason, not the end of the connection. A failed answer has a reason and is credited no tokens."""
    due, sent, end, pieces, failure, _ = what
    chunks, text = _chunks(pieces, due), "".join(p.text for p in pieces)
    ids = tuple(i for p in pieces for i in p.token_ids or ())
    usage: Mapping[str, Any] | None = _last(pieces, "usage")
    reason = _last(pieces, "finish_reason", "")
    last = next((p.at_s for p in reversed(pieces) if p.finish_reason is not None or p.text or p.token_ids), end)
    notes = [note for p in pieces for note in p.notes]
    if (whole := joined(text)).count("�") > text.count("�"):
        notes.append("the text holds half of a character (a lone surrogate), which is � here")
    answer = Answer(
        request.name,
        prompt_tokens=_last(pieces, "prompt_tokens", 0),
        token_ids=ids,
        finish_reason=FINISHES.get(reason, reason),
        queued_s=_last(pieces, "queued_s"),
        ttft_s=chunks[0].at_s if chunks else end - due,
        e2e_s=last - due,
        counts=_last(pieces, "counts", NOT_COUNTED),
        text=whole,
        output_tokens=_last(pieces, "output_tokens", len(ids)),
        scheduled_s=due - begin,
        sent_s=sent - due,
        chunks=chunks,
        usage=None if usage is None else dict(usage),
        hidden_tokens=_last(pieces, "hidden_tokens", 0),
        notes=hide(tuple(dict.fromkeys(notes))),
    )
    if failure is None and answer.finish_reason not in FINISHED:
        failure = f"it ended with the finish reason {readable(answer.finish_reason, 40)!r}"
    if failure is None and (not chunks or not answer.tokens):
        failure = "an answer with nothing in it"
    if failure is None:
        return answer
    return replace(
        answer, token_ids=(), finish_reason="failed", queued_s=None, e2e_s=end - due, counts=NOT_COUNTED, output_tokens=0,
        failure=hide(failure),  # servers repeat a key that they refuse
        hidden_tokens=0,
    )  # fmt: skip


def _last(pieces: Sequence[Piece], field: str, default: Any = None) -> Any:
    """The last value of a field that is not None."""
    return next((value for p in reversed(pieces) if (value := getattr(p, field)) is not None), default)


def _chunks(pieces: Sequence[Piece], due: float) -> tuple[Chunk, ...]:
    """The pieces with content. Tokens that came before the first text belong to the first chunk with text, since a user has
    seen nothing before it."""
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
