"""The engine process. It makes steps while there are requests, and between two steps it takes what has come. After each step it
sends one message with the events of all requests.

After a request that ended with an error, a request of the worker's own shows whether the engine still works. If it fails as
well, the engine is beyond repair, and the process ends with exit code 1.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from forerun.checks import SettingError
from forerun.engine.owner import Arrival
from forerun.llm import LLM, in_turn
from forerun.server.messages import (
    Abort,
    Accepted,
    Broken,
    Channel,
    Ready,
    Refused,
    Start,
    Step,
    Submit,
    Unusable,
)
from forerun.structured import StructuredOutput
from forerun.types import Request, SamplingParams

LOG = logging.getLogger("forerun")
EVERY = 1.0  # seconds between two snapshots


class Worker:
    def __init__(self, llm: LLM, channel: Channel) -> None:
        self._llm, self._channel = llm, channel
        self._stream = llm.owner.submit([])  # of all requests
        self._known: set[str] = set()
        self._later: dict[str, Sequence[Request]] = {}  # by the id of a prompt's first request
        self._preparing: dict[str, Sequence[Request]] = {}  # groups whose grammars are compiled, by their first id
        self._prepared: deque[tuple[str, SettingError | None]] = deque()
        self._to_prepare: queue.SimpleQueue[Request] = queue.SimpleQueue()
        threading.Thread(target=self._prepare, daemon=True).start()
        self._probe: str | None = None  # the id of the worker's own request
        self._broken: str | None = None
        self._told_at = 0.0

    def run(self) -> int:
        """Serve until the other end is gone or the engine is beyond repair. Return the exit code."""
        while self._broken is None:
            messages = self._channel.receive(wait=not self._known)
            if messages is None:
                return 0
            for message in messages:
                if isinstance(message, Submit):
                    self._submit(message.group)
                elif isinstance(message, Abort):
                    self._abort(message.ids)
            while self._prepared:
                name, error = self._prepared.popleft()
                if (group := self._preparing.pop(name, None)) is not None:  # it was not aborted
                    self._queue(group, error)
            if self._known:
                self._report(next(self._stream))
            if not self._known or time.perf_counter() >= self._told_at + EVERY:
                self._tell()
        self._channel.send(Broken(self._broken))
        self._channel.drain(1.0)
        return 1

    def _submit(self, group: Sequence[Request]) -> None:
        if group[0].params.structured is None:
            self._queue(group, None)
        else:
            self._preparing[group[0].id] = group
            self._to_prepare.put(group[0])

    def _prepare(self) -> None:
        """In a thread: compile grammars while steps go on."""
        while True:
            request, error = self._to_prepare.get(), None
            try:
                self._llm.engine.prepare(request)
            except SettingError as found:
                error = found
            except Exception as found:
                LOG.exception("a grammar was not compiled")
                error = SettingError("structured", request.params.structured, f"{type(found).__name__}: {found}")
            self._prepared.append((request.id, error))
            self._channel.wake()

    def _queue(self, group: Sequence[Request], error: SettingError | None) -> None:
        """Queue a prompt's requests, or refuse them."""
        first, later = in_turn(group, self._llm.engine.config)
        if error is None:
            try:
                self._add(first)
            except SettingError as found:
                error = found
        if error is not None:
            self._channel.send(Refused(group[0].id, error))
            return
        if later:
            self._later[group[0].id] = later
        self._channel.send(Accepted(group[0].id))

    def _add(self, requests: Sequence[Request]) -> None:
        self._stream.submit(requests)
        for request in requests:
            del self._stream.live[request.id]
            self._known.add(request.id)

    def _abort(self, ids: Sequence[str]) -> None:
        gone = set(ids)
        for name, group in list(self._preparing.items()):
            if any(request.id in gone for request in group):  # before they are queued they are aborted together
                del self._preparing[name]
        for first, later in list(self._later.items()):
            self._later[first] = left = [request for request in later if request.id not in gone]
            if first in gone:
                del self._later[first]
                self._add(left)
        for request_id in ids:
            if request_id in self._known:
                self._known.discard(request_id)
                self._llm.owner.abort(request_id)
        self._stream.take()  # the events of the aborted ones

    def _report(self, arrivals: Sequence[Arrival]) -> None:
        events, failed = [], False
        for _, event in arrivals:
            if event.request_id not in self._known:
                continue
            done = event.finish_reason is not None
            if done:
                self._known.discard(event.request_id)
            if event.request_id == self._probe:
                if done:
                    self._probe = None
                    self._broken = event.error if event.finish_reason == "error" else None
                continue
            failed = failed or event.finish_reason == "error"
            events.append(event)
            later = self._later.pop(event.request_id, None)
            if later:
                self._add(later)
        if events:
            self._channel.send(Step(arrivals[0].at, events))
        if failed and self._probe is None:
            ids, params = self._llm.prompts.limits.end_ids[:1] or (0,), SamplingParams(temperature=0, max_tokens=1)
            probe = replace(self._llm.prompts.requests(ids, params)[0], id="probe")
            self._probe = probe.id
            self._add([probe])


    def _tell(self) -> None:
        self._told_at = time.perf_counter()
        self._channel.send(self._llm.snapshot())


def ready(llm: LLM) -> Ready:
    model = llm.model
    return Ready(str(model.folder), model.name, llm.prompts.limits, llm.settings(), model.sampling, llm.engine.kv_tokens)


def main() -> int:
    """`python -m forerun.server.worker FD`: FD is the engine's end of the pair of sockets. The server's process decides when
    this one ends, so the signals that are sent to both are ignored."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    handler = logging.StreamHandler()
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    messages = channel.receive(wait=True)
    if messages is None:
        return 0
    (start,) = messages
    assert isinstance(start, Start)
    try:
        llm = LLM(**start.llm)
    except SettingError as error:
        channel.send(Unusable(error))
        channel.drain(1.0)
        return 2
    with contextlib.suppress(SettingError):  # the first grammar takes a second, in which it would slow the steps down
        (request,) = llm.prompts.requests((0,), SamplingParams(structured=StructuredOutput(choice=("yes",))))
        llm.engine.prepare(request)
    channel.send(ready(llm))
    return Worker(llm, channel).run()


if __name__ == "__main__":
    sys.exit(main())
