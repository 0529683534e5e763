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

from forerun.bench.endpoint import Ask, Endpoint, Piece, RequestFailed
from forerun.bench.record import NOT_COUNTED, Answer, Chunk, Load
from forerun.types import require


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
) -> tuple[tuple[Answer, ...], float]:
    """Send all of them; the answers in their order, and the seconds from the begin to the last one's end. due: when each is to
    be sent, from `arrivals`; None keeps load.concurrency in flight."""
    exchanges: list[Exchange | None] = [None] * len(asks)
    gc.collect()
    gc.disable()  # a collection would stop every stream for a moment, and its length grows with the samples kept
    try:
        begin = clock()
        async with asyncio.TaskGroup() as group:
            if due is None:
                waiting = iter(range(len(asks)))
                for _ in range(min(load.concurrency, len(asks))):
                    group.create_task(_worker(endpoint, asks, waiting, begin, clock, exchanges))
            else:
                for index, at in enumerate(due):
                    group.create_task(_timed(endpoint, asks, index, begin + at, clock, exchanges))
        wall = clock() - begin
    finally:
        gc.enable()
    return tuple(answer_of(ask, one, begin) for ask, one in zip(asks, exchanges, strict=True) if one is not None), wall


async def _worker(
    endpoint: Endpoint,
    asks: Sequence[Ask],
    waiting: Iterator[int],
    begin: float,
    clock: Callable[[], float],
    exchanges: list[Exchange | None],
) -> None:
    free = begin
    for index in waiting:
        exchanges[index] = await exchange(endpoint, asks[index], free, clock)
        free = clock()


async def _timed(
    endpoint: Endpoint,
    asks: Sequence[Ask],
    index: int,
    at: float,
    clock: Callable[[], float],
    exchanges: list[Exchange | None],
) -> None:
    while (left := at - clock()) > 0:
        await asyncio.sleep(left)
    exchanges[index] = await exchange(endpoint, asks[index], at, clock)


class Exchange(NamedTuple):
    """What happened to one request, on the clock. failure: why it failed, None if it did not."""

    due: float
    sent: float
    end: float
    pieces: list[Piece]
    failure: str | None


async def exchange(endpoint: Endpoint, ask: Ask, due: float, clock: Callable[[], float]) -> Exchange:
    """One request from end to end. Nothing is worked out here: while others still stream, that would delay them."""
    sent = clock()
    pieces: list[Piece] = []
    failure = None
    try:
        async for piece in endpoint.generate(ask):
            pieces.append(piece)
    except RequestFailed as error:
        failure = str(error)
    return Exchange(due, sent, clock(), pieces, failure)


def answer_of(ask: Ask, what: Exchange, begin: float) -> Answer:
    """What an exchange adds up to, times from when it was due. The end is when the piece with the finish reason came, not
    when the connection closed. A failure is an answer too, with its reason and no tokens credited."""
    due, sent, end, pieces, failure = what
    usage = next((p.usage for p in reversed(pieces) if p.usage is not None), None)
    counts = next((p.counts for p in reversed(pieces) if p.counts is not None), NOT_COUNTED)
    reason = next((p.finish_reason for p in reversed(pieces) if p.finish_reason is not None), "")
    prompt_tokens = next((p.prompt_tokens for p in reversed(pieces) if p.prompt_tokens is not None), 0)
    queued = next((p.queued_s for p in reversed(pieces) if p.queued_s is not None), None)
    ids = tuple(i for p in pieces for i in p.token_ids or ())
    chunks = _chunks(pieces, due)
    if failure is not None:
        first = chunks[0].at_s if chunks else end - due
        return Answer(
            ask.name, prompt_tokens, (), "failed", None, first, end - due, NOT_COUNTED, "".join(p.text for p in pieces), 0,
            due - begin, sent - due, chunks, failure, None if usage is None else dict(usage),
        )  # fmt: skip
    last = next((p.at_s for p in reversed(pieces) if p.finish_reason is not None), end)
    produced = None if usage is None else usage.get("completion_tokens")
    return Answer(
        ask.name, prompt_tokens, ids, reason, queued, chunks[0].at_s, last - due, counts, "".join(p.text for p in pieces),
        len(ids) if produced is None else int(produced), due - begin, sent - due, chunks, None,
        None if usage is None else dict(usage),
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
