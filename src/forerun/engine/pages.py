"""The pages of the KV cache, by number: which are free, how many sequences hold each, and the prefix cache. The tensors are in
models/decoder.py's KVCache. This module does not use torch.

A page that is full of committed tokens can be published: it is then found by its tokens and those before it. Its key is (the
serial of the page before it, its own tokens) and is compared exactly, so two texts never collide. In place of a serial, the
first page of a request with a cache salt has the salt, so requests with other salts find none of its pages. A published page
without a holder stays in the cache until its memory is needed, least recently used first.
Page 0 is the dummy page: padding rows and inactive rows write there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Ids
from typing import NamedTuple

ROOT = 0  # the serial before the first page, without a salt
Before = int | str  # the serial of the page before, or a salt


class Prefix(NamedTuple):
    """Published pages that hold the beginning of some tokens, and the serial of the last of them."""

    pages: list[int]
    serial: Before


class Pages:
    def __init__(self, count: int, block_size: int, caching: bool = True) -> None:
        """count: usable pages, numbered 1 .. count."""
        self.count, self.block_size, self.caching = count, block_size, caching
        self._serial = ROOT
        self.restart()

    def restart(self) -> None:
        """Make all pages free and publish none."""
        self._holders = [0] * (self.count + 1)
        self._blank: list[int] = list(range(self.count, 0, -1))  # free and not published
        self._idle: OrderedDict[int, None] = OrderedDict()  # free but published, least recently used first
        self._found: dict[tuple[Before, tuple[int, ...]], tuple[int, int]] = {}  # key -> page, serial
        self._key: dict[int, tuple[Before, tuple[int, ...]]] = {}  # page -> its key

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.block_size)

    def match(self, ids: Ids[int], recomputed: int = 0, salt: str | None = None) -> Prefix:
        """The longest prefix of ids that was published with this salt, in whole pages, at least one token shorter than ids;
        without its last `recomputed` pages."""
        pages, size = list[int](), self.block_size
        serials: list[Before] = [salt or ROOT]
        for begin in range(0, len(ids) - size, size):
            found = self._found.get((serials[-1], tuple(ids[begin : begin + size])))
            if found is None:
                break
            pages.append(found[0])
            serials.append(found[1])
        kept = max(len(pages) - recomputed, 0)
        return Prefix(pages[:kept], serials[kept])

    def hold(self, pages: list[int]) -> None:
        """Add a holder to each of these published pages."""
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)

    def allocate(self, count: int) -> list[int]:
        """Take so many free pages, with one holder each. Raises MemoryError if `free` is less."""
        if count > self.free:
            raise MemoryError(f"{count} pages wanted, {self.free} free")
        taken = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._found[self._key.pop(page)]
            self._holders[page] = 1
            taken.append(page)
        return taken

    def release(self, pages: list[int]) -> None:
        """Remove a holder from each. Later pages are reused first, since more texts share a beginning than an end."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def publish(self, page: int, before: Before, ids: Ids[int]) -> int:
        """Publish a page of committed tokens after the page with serial `before`, or as the first one with that salt. Return
        its serial. If another page with the same tokens is published there, that one stays."""
        if not self.caching:
            return ROOT
        key = (before, tuple(ids))
        _, serial = self._found.setdefault(key, (page, self._serial + 1))
        if serial > self._serial:  # it is new
            self._serial = serial
            self._key[page] = key
        return serial

    def clear(self) -> None:
        """Unpublish all pages. Held pages stay held."""
        self._found.clear()
        self._key.clear()
        self._blank.extend(self._idle)
        self._idle.clear()
