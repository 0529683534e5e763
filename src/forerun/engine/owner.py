"""An owner shares one engine among any number of callers and threads. It takes requests and gives each caller the events of its
own requests. A caller that waits for an event makes the next step, or waits for the step that another caller is making.

    submit, abort --> between steps, under the lock
    step          --> by one caller at a time, without the lock; its events go to the streams of their requests
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from forerun.engine.engine import Engine
from forerun.engine.interrupts import Uninterrupted
from forerun.engine.scheduler import Sequence as Live
from forerun.engine.stats import EngineSnapshot, EngineStats, RequestStats
from forerun.types import Event, Request

LOG = logging.getLogger("forerun")


class Arrival(NamedTuple):
    """An event and the time when its step was read (perf_counter seconds)."""

    at: float
    event: Event


class Stream:
    """The events of some requests. Each iteration gives the events since the last one, until all requests have ended. `close`
    aborts requests that have not ended. So does dropping the last reference to the stream."""

    def __init__(self, owner: Owner) -> None:
        """A stream without requests. live: sequences by request id."""
        self.live: dict[str, Live] = {}
        self._owner = owner
        self._arrived: deque[Arrival] = deque()  # the owner appends events here
        self._open: set[str] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Their events come here. Raises SettingError if one can never run."""
        for request in requests:  # grammars are compiled while steps go on
            self._owner.engine.prepare(request)
        with self._owner.between_steps(), Uninterrupted():
            live = self._owner.queue(requests, self._arrived)
            self.live.update(live)
            self._open.update(live)

    def __iter__(self) -> Iterator[list[Arrival]]:
        return self

    def __next__(self) -> list[Arrival]:
        """The events that have come, at least one. Steps the engine if there are none."""
        if not self._open:
            raise StopIteration
        self._owner.advance(self._arrived)
        return self.take()

    def take(self) -> list[Arrival]:
        """The events that have come, without a step."""
        taken = []
        while self._arrived:
            one = self._arrived.popleft()
            taken.append(one)
            if one.event.finish_reason is not None:
                self._open.discard(one.event.request_id)
        return taken

    def close(self) -> None:
        """Abort requests that have not ended. Never waits: if a step is being made, they end after it."""
        open_, self._open = self._open, set()
        if open_:
            self._owner.abandon(open_)

    def __del__(self) -> None:
        self.close()


class Owner:
    def __init__(self, engine: Engine) -> None:
        """engine: from now on only this owner may use it."""
        self.engine = engine
        self._queues: dict[str, deque[Arrival]] = {}  # by request id, of requests under way
        self._abandoned: deque[str] = deque()
        self._state = threading.Condition(threading.Lock())
        self._stepping = False  # whether a caller is making a step
        self._waiting = 0  # callers that wait for the time between two steps

    def submit(self, requests: Sequence[Request]) -> Stream:
        """Queue requests, all or none. Raises SettingError if one can never run."""
        stream = Stream(self)
        stream.submit(requests)
        return stream

    def queue(self, requests: Sequence[Request], arrived: deque[Arrival]) -> dict[str, Live]:
        """Queue requests, all or none, and append their events to `arrived`. To be called between steps."""
        live: dict[str, Live] = {}
        try:
            for request in requests:
                live[request.id] = self.engine.add(request)
                self._queues[request.id] = arrived
        except BaseException:
            for request_id in live:
                self._drop(request_id)
            raise
        return live

    def abort(self, request_id: str) -> bool:
        """End a request of any stream, with finish reason "abort". Return False if no request has that id."""
        with self.between_steps():
            arrived = self._queues.get(request_id)
            if arrived is None:
                return False
            stats = self._drop(request_id)
            arrived.append(Arrival(time.perf_counter(), Event(request_id, (), "", (), "abort", stats=stats)))
            return True

    def abandon(self, request_ids: set[str]) -> None:
        """End requests whose stream is closed: at once, or after the step that is being made. May be called at any time, even
        by the garbage collector in the middle of any of these methods."""
        self._abandoned.extend(request_ids)
        if self._state.acquire(blocking=False):
            try:
                if not self._stepping:
                    self._drop_abandoned()
            finally:
                self._state.release()

    def stats(self) -> EngineStats:
        """A copy of the engine's statistics."""
        with self.between_steps():
            return self.engine.stats.copy()

    def snapshot(self) -> EngineSnapshot:
        """Engine.snapshot."""
        with self.between_steps():
            return self.engine.snapshot()

    def drain(self) -> None:
        """Step until no request is under way."""
        while self.engine.has_work:
            self.advance()

    def advance(self, awaited: Collection[Arrival] = ()) -> None:
        """If this queue is empty, make a step, or wait until another caller has made one."""
        with self._state:
            while not awaited and (self._stepping or self._waiting):
                self._state.wait()
            if awaited:
                return
            self._drop_abandoned()
            self._stepping = True
        with Uninterrupted():
            events: list[Event] = []
            try:
                events = self.engine.step()
            except Exception as error:  # one that the engine did not handle
                LOG.exception("the engine failed")
                text = f"{type(error).__name__}: {error}"
                events = [
                    Event(name, (), "", (), "error", error=text, stats=self.engine.abort(name)) for name in self._queues
                ]
            finally:
                with self._state:
                    self._stepping = False
                    self._deliver(events)
                    self._drop_abandoned()
                    self._state.notify_all()

    def _deliver(self, events: list[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            arrived = self._queues.get(event.request_id)
            if arrived is not None:
                arrived.append(Arrival(now, event))
            if event.finish_reason is not None:
                self._queues.pop(event.request_id, None)

    def _drop(self, request_id: str) -> RequestStats | None:
        self._queues.pop(request_id, None)
        return self.engine.abort(request_id)

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            self._drop(self._abandoned.popleft())

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """A context in which no step is made. Callers that wait for it go before the next step."""
        with self._state:
            self._waiting += 1
            try:
                while self._stepping:
                    self._state.wait()
            finally:
                self._waiting -= 1
                self._state.notify_all()
            try:
                yield
            finally:
                self._drop_abandoned()
