"""The HTTP process's side of the engine process: starts it, submits requests, and gives each caller the events of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.engine.stats import EngineSnapshot
from forerun.server.messages import (
    Abort,
    Accepted,
    Broken,
    Frames,
    Ready,
    Refused,
    Start,
    Step,
    Submit,
    Unusable,
    frame,
)
from forerun.server.metrics import Metrics
from forerun.types import Event, Request

LOG = logging.getLogger("forerun")


class Busy(Exception):
    """The queue is full."""


class Gone(Exception):
    """The engine does not work any more, or the server is shutting down. The message says which."""


class Answers:
    """The events of some requests. `close` must be called at the end."""

    def __init__(self, client: Client, groups: Sequence[Sequence[Request]]) -> None:
        self._client = client
        self._open = {request.id for group in groups for request in group}
        self._unqueued = {group[0].id for group in groups}
        self._arrived: list[Event] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def accepted(self) -> None:
        """Wait until the engine has queued all of them. Raises SettingError if it refuses one, or Gone."""
        while self._unqueued and not self._error:
            await self._wait()
        if self._error:
            raise self._error

    async def next(self) -> list[Event]:
        """The events that have come since the last call, at least one; [] when all requests have ended. Raises Gone."""
        while not self._arrived:
            if self._error:
                raise self._error
            if not self._open:
                return []
            await self._wait()
        arrived, self._arrived = self._arrived, []
        return arrived

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def add(self, event: Event) -> None:
        self._arrived.append(event)
        if event.finish_reason is not None:
            self._open.discard(event.request_id)
        self._news.set()

    def queued(self, request_id: str) -> None:
        self._unqueued.discard(request_id)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End it with this error: `accepted` and `next` raise it once the events that have come are taken."""
        self._error = self._error or error
        self._news.set()

    def close(self) -> None:
        """End the requests that have not ended."""
        if self._open:
            self._client.abandon(self._open)
            self._open = set()


class Client(asyncio.Protocol):
    """most: requests under way at most, running and waiting. on_broken: called once if the engine breaks.

    broken: why the engine does not work any more. metrics: of this server, with the engine's last snapshot."""

    def __init__(self, most: int, on_broken: Callable[[], None] = lambda: None) -> None:
        self.most, self._on_broken = most, on_broken
        self.broken: str | None = None
        self.closing = False
        self.metrics = Metrics()
        self._frames = Frames()
        self._answers: dict[str, Answers] = {}  # by request id, of requests that have not ended
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[Ready] | None = None

    async def start(self, llm: Mapping[str, Any]) -> Ready:
        """Start the engine process and wait until the model is loaded. llm: the arguments of LLM. Raises SettingError for
        arguments that cannot be used, and Gone if the process ends otherwise."""
        ours, its = socket.socketpair()
        with its:
            command = [sys.executable, "-m", "forerun.server.worker", str(its.fileno())]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self._process = subprocess.Popen(command, pass_fds=[its.fileno()], env=environment, stdin=subprocess.DEVNULL)
        await self.attach(ours)
        self._send(Start(llm))
        assert self._ready is not None
        return await self._ready

    async def attach(self, sock: socket.socket) -> None:
        """Take this end of a pair of sockets whose other end an engine has."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=sock)

    def submit(self, groups: Sequence[Sequence[Request]]) -> Answers:
        """Submit the requests of some prompts, all or none; a group is the n requests of a prompt. Raises Busy or Gone."""
        if self.broken is not None or self.closing:
            raise Gone(self.broken or "the server is shutting down")
        if len(self._answers) + sum(map(len, groups)) > self.most:
            raise Busy
        answers = Answers(self, groups)
        for group in groups:
            self._answers.update(dict.fromkeys((request.id for request in group), answers))
            self.metrics.submitted(group)
            self._send(Submit(tuple(group)))
        return answers

    def abandon(self, ids: set[str]) -> None:
        """End requests; their events are not wanted any more."""
        for request_id in ids:
            self._answers.pop(request_id, None)
        self.metrics.forget(ids)
        if self.broken is None:
            self._send(Abort(tuple(ids)))

    @property
    def under_way(self) -> int:
        """Requests that have not ended, running and waiting."""
        return len(self._answers)

    def fail_all(self, why: str) -> None:
        """End all requests with this error."""
        for answers in set(self._answers.values()):
            answers.fail(Gone(why))

    async def stop(self, seconds: float = 5.0) -> None:
        """End the engine process; kill it if it does not end by itself."""
        self.closing = True
        self.fail_all("the server is shutting down")
        if self._transport is not None:
            self._transport.close()
        process = self._process
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, Step):
                self.metrics.observe(message.at, message.events)
                for event in message.events:
                    answers = self._answers.get(event.request_id)
                    if answers is not None:
                        answers.add(event)
                        if event.finish_reason is not None:
                            del self._answers[event.request_id]
            elif isinstance(message, Accepted):
                if (answers := self._answers.get(message.id)) is not None:
                    answers.queued(message.id)
            elif isinstance(message, Refused):
                if (answers := self._answers.get(message.id)) is not None:
                    answers.fail(message.error)
            elif isinstance(message, EngineSnapshot):
                self.metrics.snapshot = message
            elif isinstance(message, Broken):
                self._break(f"the engine is beyond repair: {message.error}")
            elif isinstance(message, Ready):
                self._settle(message)
            else:
                assert isinstance(message, Unusable)
                self.closing = True
                self._settle(message.error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closing:
            self._break("the engine process has ended")

    def _settle(self, what: Ready | Exception) -> None:
        assert self._ready is not None
        if self._ready.done():
            return
        if isinstance(what, Exception):
            self._ready.set_exception(what)
        else:
            self._ready.set_result(what)

    def _break(self, why: str) -> None:
        if self.broken is None:
            self.broken = why
            LOG.error(why)
            self._settle(Gone(why))
            self.fail_all(why)
            self._on_broken()

    def _send(self, message: object) -> None:
        assert self._transport is not None
        self._transport.write(frame(message))
