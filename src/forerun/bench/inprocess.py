"""The engine in this process as an endpoint: requests are added between two of its steps, as in a server. Knows the engine's
events; speaks no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import forerun
from forerun.bench.endpoint import Ask, Piece, RequestFailed, TokenLogprob
from forerun.bench.record import Counts, Facts, ServerCounters
from forerun.types import Event, SamplingParams, SettingError

if TYPE_CHECKING:
    from forerun.engine.owner import Stream
    from forerun.engine.scheduler import Sequence
    from forerun.llm import LLM


class InProcess:
    """Steps the engine for as long as it has work. A step keeps the loop from running, so a request that falls due meanwhile
    waits for the next one; its latency counts from when it was due."""

    def __init__(self, llm: LLM, clock: Callable[[], float] = time.perf_counter) -> None:
        self.llm, self._clock = llm, clock
        self._streams: dict[Stream, asyncio.Event] = {}  # open ones, and what says that something has come
        self._driver: asyncio.Task[None] | None = None
        self._read_at = 0.0  # when the last step was read

    async def generate(self, ask: Ask) -> AsyncIterator[Piece]:
        """As in endpoint.Endpoint."""
        llm = self.llm
        try:
            prompt: str | list[int] = ask.text or "" if ask.ids is None else list(ask.ids)
            if ask.messages is not None:
                prompt = llm.chat_ids(ask.messages)
            request = llm.prepare(prompt, _params(ask))
            stream = llm.owner.submit([request])
        except SettingError as error:
            raise RequestFailed(str(error)) from None
        live = stream.live[request.id]
        start, produced = self._clock(), 0
        self._streams[stream] = asyncio.Event()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            async for at, event in self._events(stream):
                if event.error is not None:
                    raise RequestFailed(event.error)
                produced += len(event.tokens)
                logprobs = tuple(
                    TokenLogprob(str(one.token), one.logprob, tuple((str(token), value) for token, value in one.top))
                    for one in event.logprobs
                )
                if event.finish_reason is None:
                    yield Piece(at, event.text, event.tokens, logprobs=logprobs)
                    continue
                usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": produced}
                counts, queued = _counts(live), max(live.admitted_at - start, 0.0)
                yield Piece(
                    at, event.text, event.tokens, event.finish_reason, usage, counts, len(request.prompt_ids), logprobs, queued,
                    produced,
                )  # fmt: skip
                return
        finally:
            del self._streams[stream]
            stream.close()

    async def _events(self, stream: Stream) -> AsyncIterator[tuple[float, Event]]:
        while True:
            await self._streams[stream].wait()
            self._streams[stream].clear()
            for arrival in stream.take():
                yield self._read_at, arrival.event

    async def _drive(self) -> None:
        while self.llm.engine.has_work:
            self.llm.owner.advance()
            self._read_at = self._clock()
            for come in self._streams.values():
                come.set()
            await asyncio.sleep(0)

    async def facts(self) -> Facts:
        """Of this package's engine."""
        return Facts("forerun", forerun.__version__, kv_tokens=self.llm.engine.kv_tokens)

    async def counters(self) -> ServerCounters | None:
        """None: everything is counted request by request."""
        return None


def _params(ask: Ask) -> SamplingParams:
    return SamplingParams(
        temperature=ask.temperature,
        max_tokens=ask.max_tokens,
        ignore_eos=ask.ignore_eos,
        seed=ask.seed,
        prediction=ask.prediction,
        logprobs=ask.logprobs,
    )


def _counts(live: Sequence) -> Counts:
    s = live.stats
    return Counts(s.steps, s.drafting_steps, s.drafted, s.accepted, tuple(s.drafted_at), tuple(s.accepted_at))
