"""Server-sent events from bytes, as much of section 9.2 of the WHATWG HTML standard as language model servers use: the fields
`event` and `data`, lines that end in LF or CR LF, comments. Knows nothing of what the data means.
"""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """kind: of the `event` field, message if there was none. data: its `data` lines, joined by line feeds."""

    kind: str
    data: bytes


class EventReader:
    """Feed it bytes as they come; an event is given out once the blank line behind it has arrived."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def unfinished(self) -> bool:
        """Whether an event was begun and not ended."""
        return bool(self._rest.strip())

    def feed(self, data: bytes) -> list[Event]:
        buffer = self._rest + data
        if b"\r" in buffer:  # a CR at the very end may be half of a CR LF
            buffer = buffer.replace(b"\r\n", b"\n")
        *blocks, self._rest = buffer.split(b"\n\n")
        return [event for block in blocks if (event := _event(block)) is not None]


def _event(block: bytes) -> Event | None:
    kind, data = "message", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            kind = value.decode("utf-8", "replace")
        elif field not in (b"", b"id", b"retry"):
            data.append(line)  # no field of the standard, for instance a bare JSON error: kept, so that it is seen
    return Event(kind, b"\n".join(data)) if data else None
