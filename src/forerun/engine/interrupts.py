"""Keyboard interrupts are held back while the engine changes its state."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Uninterrupted:
    """A context that delays a first SIGINT until its end. A second SIGINT is not delayed. It does nothing outside the main
    thread, where Python delivers no signals, or if SIGINT has no Python handler."""

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
