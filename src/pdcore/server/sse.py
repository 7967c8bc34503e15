"""Server-sent events: framing what we send, and never cutting an event in two.

The router passes a decode stream through byte for byte, but only whole events: when decode
is lost in mid-stream, what the client has is complete and an error event can follow it.
"""

from __future__ import annotations

from typing import Final

from pdcore.errors import PdcoreError

#: Ends every stream that succeeded; a stream that failed ends with an error event instead.
DONE: Final = b"data: [DONE]\n\n"
CONTENT_TYPE: Final = b"text/event-stream"


class EventTooLarge(PdcoreError):
    """An event without end: more bytes than any event should have."""


def event(data: bytes) -> bytes:
    """One event. ``data`` is JSON and therefore has no line break."""
    return b"data: " + data + b"\n\n"


class EventSplitter:
    """Hands on whole events and holds back what is still incomplete.

    ``feed(chunk)`` returns zero or more complete events, unchanged; ``rest`` is what was held
    back. Raises EventTooLarge past ``max_event_bytes``.
    """

    __slots__ = ("_max_event_bytes", "rest")

    def __init__(self, max_event_bytes: int = 1 << 20) -> None:
        self._max_event_bytes = max_event_bytes
        self.rest = b""

    def feed(self, chunk: bytes) -> bytes:
        data = self.rest + chunk if self.rest else chunk
        if data.endswith(b"\n\n"):  # the usual case: chunks are whole events
            self.rest = b""
            return data
        end = max(_end(data, b"\n\n"), _end(data, b"\r\n\r\n"))
        self.rest = data[end:]
        if len(self.rest) > self._max_event_bytes:
            raise EventTooLarge(f"an event exceeds {self._max_event_bytes} bytes")
        return data[:end]


def last_data(events: bytes) -> bytes:
    """The data of the last event of ``events``, which ends with one; empty where it has none."""
    lines = events.replace(b"\r\n", b"\n").strip(b"\n").rpartition(b"\n\n")[2].split(b"\n")
    return b"\n".join(
        line.removeprefix(b"data:").lstrip(b" ") for line in lines if line.startswith(b"data:")
    )


def _end(data: bytes, mark: bytes) -> int:
    """Index after the last ``mark``; 0 where there is none."""
    at = data.rfind(mark)
    return at + len(mark) if at >= 0 else 0
