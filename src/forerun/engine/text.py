"""The text of one output as it grows, and the stop strings in it. Knows tokens only through a detokenizer."""

from __future__ import annotations

from typing import Protocol


class Detokenizer(Protocol):
    def push(self, ids: list[int]) -> str:
        """The text that these ids complete; the bytes of an unfinished character are held back."""

    def finish(self) -> str:
        """What is still held back, as well as it can be shown."""


class TextStream:
    """Text comes out as soon as it cannot become part of a stop string any more."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...], include_stop: bool) -> None:
        """without: no stop string is looked for, and `pass_on` gives the text of any tokens at once."""
        self._detokenizer, self._stop, self._include = detokenizer, stop, include_stop
        self.without, self.pass_on = not stop, detokenizer.push
        self._held = ""  # text not given out yet: it might be the beginning of a stop string

    def push(self, token: int, may_stop: bool) -> tuple[str, bool]:
        """The text that one more token sets free, and whether a stop string ended it (checked only if may_stop)."""
        self._held += self._detokenizer.push([token])
        if self.without:
            return self._take(len(self._held)), False
        if may_stop:
            found = [(at, len(s)) for s in self._stop if (at := self._held.find(s)) >= 0]
            if found:
                at, length = min(found)
                return self._take(at + length if self._include else at), True
        return self._take(len(self._held) - self._open()), False

    def finish(self) -> str:
        """The rest, once no more tokens come (not to be called after a stop string)."""
        self._held += self._detokenizer.finish()
        return self._take(len(self._held))

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _open(self) -> int:
        """How many of the last held characters are the beginning of some stop string."""
        longest = min(len(self._held), max(len(s) for s in self._stop) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)
