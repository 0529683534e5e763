"""The messages between the HTTP process and the engine process, and their frames on a pair of sockets: a length of four bytes,
then a pickle. Both ends are processes of one server, so the pickles are its own.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from forerun.checks import SettingError
from forerun.prompts import Limits
from forerun.types import Event, Request, SamplingParams

READ = 1 << 18  # bytes of one read


class Start(NamedTuple):
    """To the engine: load it. llm: the arguments of LLM."""

    llm: Mapping[str, Any]


class Submit(NamedTuple):
    """To the engine: queue the n requests of one prompt."""

    group: tuple[Request, ...]


class Abort(NamedTuple):
    """To the engine: end these requests. Their last events may not come."""

    ids: tuple[str, ...]


class Ready(NamedTuple):
    """From the engine: it takes requests. folder: the model's; settings: LLM.settings; sampling: the model's recommendation;
    kv_tokens: capacity of the KV cache."""

    folder: str
    name: str
    limits: Limits
    settings: Mapping[str, Any]
    sampling: SamplingParams
    kv_tokens: int


class Unusable(NamedTuple):
    """From the engine: it could not be started with these settings."""

    error: SettingError


class Broken(NamedTuple):
    """From the engine: it is beyond repair, and its process ends."""

    error: str


class Accepted(NamedTuple):
    """From the engine: the group of this first request is queued."""

    id: str


class Refused(NamedTuple):
    """From the engine: the group of this first request can never run."""

    id: str
    error: SettingError


class Step(NamedTuple):
    """From the engine: all that one step did. at: when it was read (perf_counter seconds, which both processes share); events:
    of all requests in it. Besides, the engine sends an EngineSnapshot about once a second while it works, and when it has no
    more work."""

    at: float
    events: list[Event]


def frame(message: object) -> bytes:
    data = pickle.dumps(message, protocol=5)
    return len(data).to_bytes(4, "little") + data


class Frames:
    """Collects bytes and gives the messages in them."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that these bytes complete."""
        self._data += data
        found, at = [], 0
        while len(self._data) - at >= 4:
            end = at + 4 + int.from_bytes(self._data[at : at + 4], "little")
            if end > len(self._data):
                break
            found.append(pickle.loads(self._data[at + 4 : end]))
            at = end
        del self._data[:at]
        return found


class Channel:
    """The engine's end. Sending never waits for the other end: what its socket does not take goes out later."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._frames, self._out = sock, Frames(), bytearray()
        self._waking, self._woken = socket.socketpair()
        for one in (sock, self._waking, self._woken):
            one.setblocking(False)

    def wake(self) -> None:
        """Make a `receive` that waits return. Any thread may call this."""
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._waking.send(b".")

    def send(self, message: object) -> None:
        self._out += frame(message)
        self._flush()

    def receive(self, wait: bool) -> list[Any] | None:
        """The messages that have come; None if the other end is gone. wait: until there is one, or `wake` is called."""
        while True:
            sources = [self._sock, self._woken]
            readable, _, _ = select.select(sources, [self._sock] if self._out else [], [], None if wait else 0)
            self._flush()
            if self._woken in readable:
                self._woken.recv(READ)
                wait = False
            if self._sock not in readable:
                if wait:
                    continue
                return []
            try:
                data = self._sock.recv(READ)
            except BlockingIOError:
                continue
            except OSError:
                return None
            if not data:
                return None
            found = self._frames.feed(data)
            if found or not wait:
                return found

    def drain(self, seconds: float) -> None:
        """Send what is left, for at most so long."""
        self._sock.settimeout(seconds)
        with contextlib.suppress(OSError):
            self._sock.sendall(self._out)
        self._out.clear()

    def _flush(self) -> None:
        if self._out:
            try:
                del self._out[: self._sock.send(self._out)]
            except BlockingIOError:
                pass
            except OSError:  # the other end is gone; `receive` tells
                self._out.clear()
