"""The pages of the KV cache: which are free, who holds them, and which already hold a prompt's beginning. Page numbers
only; the tensors lie in models/decoder.py's KVCache. Knows no torch.

A page that is full of committed tokens can be published: it is then found by its tokens and those before it. The key of
a published page is (the serial of the page before it, its own tokens), compared exactly, so no two texts are mistaken
for each other. A published page without a holder stays findable until it is needed, least recently used first.
Page 0 is the dummy page: padding rows and inactive rows write there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Ids
from typing import NamedTuple

ROOT = 0  # the serial before the first page


class Prefix(NamedTuple):
    """Published pages that hold the beginning of some tokens, and the serial of the last of them."""

    pages: list[int]
    serial: int


class Pages:
    def __init__(self, count: int, block_size: int, caching: bool = True) -> None:
        """count: usable pages, numbered 1 .. count."""
        self.count, self.block_size, self.caching = count, block_size, caching
        self._serial = ROOT
        self.restart()

    def restart(self) -> None:
        """All pages are free and nothing is published, whatever was before."""
        self._holders = [0] * (self.count + 1)
        self._blank: list[int] = list(range(self.count, 0, -1))  # free, holding nothing of use
        self._idle: OrderedDict[int, None] = OrderedDict()  # free but published, least recently used first
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> page, serial
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}  # page -> its key

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.block_size)

    def match(self, ids: Ids[int], again: int = 0) -> Prefix:
        """The longest published beginning of ids, whole pages, at least one token short of all of ids, without its last `again`
        pages."""
        pages, serials, size = list[int](), [ROOT], self.block_size
        for begin in range(0, len(ids) - size, size):
            found = self._found.get((serials[-1], tuple(ids[begin : begin + size])))
            if found is None:
                break
            pages.append(found[0])
            serials.append(found[1])
        kept = max(len(pages) - again, 0)
        return Prefix(pages[:kept], serials[kept])

    def hold(self, pages: list[int]) -> None:
        """One more holder for each of these published pages."""
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)

    def allocate(self, count: int) -> list[int]:
        """So many pages of one's own. Ask `free` first: raises MemoryError if there are fewer."""
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
        """One holder less for each. Later pages become reusable first: a beginning serves more texts than an end."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def publish(self, page: int, before: int, ids: Ids[int]) -> int:
        """Make a page full of committed tokens findable behind the page with serial `before`; returns its serial.
        If another page already holds the same, that one stays the one to be found."""
        if not self.caching:
            return ROOT
        key = (before, tuple(ids))
        _, serial = self._found.setdefault(key, (page, self._serial + 1))
        if serial > self._serial:  # it was not there
            self._serial = serial
            self._key[page] = key
        return serial

    def clear(self) -> None:
        """Forget what is published; pages that are held stay held."""
        self._found.clear()
        self._key.clear()
        self._blank.extend(self._idle)
        self._idle.clear()
