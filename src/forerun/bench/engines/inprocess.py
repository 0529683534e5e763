"""The engine in this process as an endpoint. As in a server, requests are added between two steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import forerun
from forerun.bench.engines.endpoint import Piece, Request, RequestFailed, TokenLogprob
from forerun.bench.records.record import Counts, Facts, ServerCounters
from forerun.types import Event, SamplingParams, SettingError

if TYPE_CHECKING:
    from forerun.engine.owner import Stream
    from forerun.llm import LLM

LOG = logging.getLogger("forerun")


class InProcess:
    """Steps the engine while it has work. The event loop is blocked during a step, so a request that falls due then is added
    after it. Its latency counts from when it was due.

    broken: the exception that the engine's owner raised. The engine's state is unknown then, and every request fails. Faults of
    a single request end that request only and are not kept here.
    """

    def __init__(self, llm: LLM, clock: Callable[[], float] = time.perf_counter) -> None:
        self.llm, self._clock = llm, clock
        self.broken: str | None = None
        self._waiting: dict[Stream, _Waiting] = {}
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> AsyncIterator[Piece]:
        """All pieces are given when the request has ended, each with the time of its step. Giving each one at once would take
        time from the steps."""
        if self.broken is not None:
            raise RequestFailed(self.broken)
        llm = self.llm
        try:
            prompt: str | list[int] = request.text or "" if request.ids is None else list(request.ids)
            if request.messages is not None:
                prompt = llm.chat_ids(request.messages)
            prepared = llm.prepare(prompt, _params(request))
        except Exception as error:
            raise RequestFailed(
                str(error) if isinstance(error, SettingError) else f"{type(error).__name__}: {error}"
            ) from error
        try:
            stream = llm.owner.submit([prepared])
        except SettingError as error:
            raise RequestFailed(str(error)) from None
        except Exception as error:
            self.broken = f"the engine raised {type(error).__name__}: {error}"
            raise RequestFailed(self.broken) from error
        start, live = self._clock(), stream.live[prepared.id]
        waiting = self._waiting[stream] = _Waiting()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            await waiting.ended.wait()
        finally:
            del self._waiting[stream]
            stream.close()
        produced, prompt_tokens = 0, len(prepared.prompt_ids)
        for at, event in waiting.events:
            produced += len(event.tokens)
            piece = Piece(at, event.text, event.tokens, logprobs=_logprobs(event))
            if event.finish_reason is None:
                yield piece
                continue
            if event.finish_reason not in ("stop", "length"):
                raise RequestFailed(event.error or f"the engine ended it with the reason {event.finish_reason!r}")
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": produced}
            yield piece._replace(
                finish_reason=event.finish_reason, usage=usage, counts=Counts.of(live.stats), prompt_tokens=prompt_tokens,
                queued_s=max(live.admitted_at - start, 0.0), output_tokens=produced,
            )  # fmt: skip
            return
        raise RequestFailed(waiting.failure or "the engine did not end it")

    async def _drive(self) -> None:
        llm = self.llm
        try:
            while llm.engine.has_work:
                llm.owner.advance()
                now = self._clock()
                for stream, waiting in self._waiting.items():
                    for arrival in stream.take():
                        waiting.add(now, arrival.event)
                await asyncio.sleep(0)
        except Exception as error:
            LOG.debug("the engine failed", exc_info=True)
            self.broken = f"the engine raised {type(error).__name__}: {error}"
        for waiting in self._waiting.values():
            waiting.fail(self.broken or "the engine has no work left and did not end it")

    async def facts(self) -> Facts:
        return Facts("forerun", forerun.__version__, kv_tokens=self.llm.engine.kv_tokens)

    async def counters(self) -> ServerCounters | None:
        """None: the counts come with each request."""
        return None


class _Waiting:
    """A request in the engine: its events so far, each with the time of its step, and whether it has ended."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.ended = asyncio.Event()
        self.failure: str | None = None

    def add(self, at: float, event: Event) -> None:
        self.events.append((at, event))
        if event.finish_reason is not None:
            self.ended.set()

    def fail(self, why: str) -> None:
        """Has no effect on a request that has ended."""
        if not self.ended.is_set():
            self.failure = why
            self.ended.set()


def _params(request: Request) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        seed=request.seed,
        prediction=request.prediction,
        logprobs=request.logprobs,
    )


def _logprobs(event: Event) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(str(one.token), one.logprob, tuple((str(token), value) for token, value in one.top))
        for one in event.logprobs
    )
