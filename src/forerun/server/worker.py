"""The engine process. It makes steps while there are requests, and between two steps it takes what has come. After each step it
sends one message with the events of all requests.

After a request that ended with an error, a request of the worker's own shows whether the engine still works. If it fails as
well, the engine is beyond repair, and the process ends with exit code 1.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
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
from forerun.types import Request, SamplingParams

LOG = logging.getLogger("forerun")
EVERY = 1.0  # seconds between two snapshots


class Worker:
    def __init__(self, llm: LLM, channel: Channel) -> None:
        self._llm, self._channel = llm, channel
        self._stream = llm.owner.submit([])  # of all requests
        self._known: set[str] = set()
        self._later: dict[str, Sequence[Request]] = {}  # by the id of a prompt's first request
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
            if self._known:
                self._report(next(self._stream))
            if not self._known or time.perf_counter() >= self._told_at + EVERY:
                self._tell()
        self._channel.send(Broken(self._broken))
        self._channel.drain(1.0)
        return 1

    def _submit(self, group: tuple[Request, ...]) -> None:
        first, later = in_turn(group, self._llm.engine.config)
        try:
            self._add(first)
        except SettingError as error:
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
    channel.send(ready(llm))
    return Worker(llm, channel).run()


if __name__ == "__main__":
    sys.exit(main())
