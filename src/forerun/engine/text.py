"""The text of one output while tokens are added, and its stop strings. Tokens become text in a detokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    def push(self, ids: list[int]) -> str:
        """The text that these ids complete. The bytes of an unfinished character are held back."""

    def finish(self) -> str:
        """The bytes that are held back, decoded as well as possible."""

    def mark(self, strings: Collection[str]) -> Sequence[tuple[int, str, str]]:
        """The special tokens that these strings name: id, text, and a character that stands for it. No text contains that
        character, and `push` returns it for the token from now on."""


class NoText:
    """In place of a detokenizer where no text is wanted."""

    def push(self, ids: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def mark(self, strings: Collection[str]) -> Sequence[tuple[int, str, str]]:
        return ()


class TextStream:
    """Text is given out as soon as it cannot become part of a stop string. A stop string may name special tokens, which are no
    part of the text: it is found where these tokens come, and where ordinary tokens spell their names. In the search a special
    token that a stop string names counts as one character. Other special tokens are ignored."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...], include_stop: bool) -> None:
        """without: there is no stop string, and `pass_on` gives the text of any number of tokens."""
        self._detokenizer, self._include = detokenizer, include_stop
        self.without, self.pass_on = not stop, detokenizer.push
        marks = detokenizer.mark(stop) if stop else ()
        marked = list(stop)
        for _, text, character in marks:
            marked = [s.replace(text, character) for s in marked]
        self._stop = tuple(dict.fromkeys((*stop, *marked)))
        self._marked = frozenset(token for token, _, _ in marks)
        self._hidden = str.maketrans({character: None for _, _, character in marks})
        self._shown = str.maketrans({character: text for _, text, character in marks})
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int, may_stop: bool) -> tuple[str, bool]:
        """Add a token. Return the text given out, and whether a stop string ended it (checked only if may_stop)."""
        self._held += self._detokenizer.push([token])
        if self.without:
            return self._take(len(self._held)), False
        if may_stop:
            found = [(at, len(s)) for s in self._stop if (at := self._held.find(s)) >= 0]
            if found:
                at, length = min(found)
                text, stop = self._take(at), self._held[:length]
                return text + stop.translate(self._shown) if self._include else text, True
        return self._take(len(self._held) - self._open()), False

    def finish(self, stop: int | None = None) -> str:
        """The rest of the text. Not to be called after a stop string. stop: the stop token that ended the output, if one did;
        it may complete a stop string, and has no text otherwise."""
        text = ""
        if stop in self._marked and stop is not None:
            text, stopped = self.push(stop, True)
            if stopped:
                return text
        self._held += self._detokenizer.finish()
        return text + self._take(len(self._held))

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text.translate(self._hidden) if self._marked else text

    def _open(self) -> int:
        """How many of the last held characters are the beginning of a stop string."""
        longest = min(len(self._held), max(len(s) for s in self._stop) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)
