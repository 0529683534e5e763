"""Interrupts from the keyboard, held back while state is half changed."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Uninterrupted:
    """A context in which SIGINT waits until its end. A second one does not wait. Does nothing outside the main thread, to which
    Python delivers no signals, and where SIGINT has no Python handler."""

    __slots__ = ("_handler", "_held")

    def __enter__(self) -> None:
        self._held: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, self._hold)
            if callable(before):
                self._handler = before
            else:
                signal.signal(signal.SIGINT, before)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._held is not None:
                self._handler(*self._held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is not None:
            self._handler(number, frame)
        self._held = (number, frame)
