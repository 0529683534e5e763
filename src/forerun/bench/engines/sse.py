"""Server-sent events from bytes, by section 9.2 of the WHATWG HTML standard. Only the fields `event` and `data` are used. Lines
end in LF, CR LF or CR and in nothing else. Knows nothing of the data's meaning.
"""

from __future__ import annotations

from typing import NamedTuple

BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """kind: the field `event`, "message" without one. data: the `data` lines, joined by line feeds."""

    kind: str
    data: bytes


class EventReader:
    """`feed` takes bytes as they arrive and returns an event when the blank line behind it has arrived. pending: the number of
    bytes held of an unfinished event."""

    def __init__(self) -> None:
        self.pending = 0
        self._line_parts: list[bytes] = []  # of the unfinished line
        self._kind, self._data = "message", list[bytes]()
        self._after_cr, self._first = False, True

    @property
    def rest(self) -> bytes:
        """The data of the unfinished event."""
        begun = EventReader()
        begun._first, begun._data = self._first, list(self._data)
        begun._take(b"".join(self._line_parts))
        return b"\n".join(begun._data)

    @property
    def unfinished(self) -> bool:
        """Whether there is an unfinished event with data."""
        return bool(self.rest.strip())

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]  # the second half of a CR LF whose first half ended the line
        if not data:
            return []
        self._after_cr = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        events = []
        if lines and self._line_parts:
            lines[0] = b"".join([*self._line_parts, lines[0]])
            self._line_parts, self.pending = [], sum(map(len, self._data))
        for line in lines:
            if line:
                self._take(line)
                continue
            if self._data:
                events.append(Event(self._kind, b"\n".join(self._data)))
            self._kind, self._data, self.pending = "message", [], 0
        if rest:
            self._line_parts.append(rest)
            self.pending += len(rest)
        return events

    def _take(self, line: bytes) -> None:
        if self._first:
            line, self._first = line.removeprefix(BOM), False
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._kind = value.removeprefix(b" ").decode("utf-8", "replace") or "message"
        elif field not in (b"", b"id", b"retry"):
            self._data.append(line)  # not a field of the standard, for instance a JSON error without `data:`
        else:
            return
        self.pending += len(line)
