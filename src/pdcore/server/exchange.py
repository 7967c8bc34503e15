"""One response as its reader sees it: head, chunks, end, or exactly one error.

The exchange outlives the connection's use: once the response is complete the connection
goes back to its pool while the reader still takes buffered bytes.

Every failure says whether a byte of the request may have reached the peer (``sent``):
only a request that certainly did not arrive may be sent again (protocol models, Q5 UNK).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, NamedTuple, Protocol

import attrs

from pdcore.errors import PdcoreError

#: Bytes buffered for a slow reader before the socket is paused, and where it resumes.
HIGH_WATER_BYTES: Final = 128 * 1024
LOW_WATER_BYTES: Final = 32 * 1024


class HttpError(PdcoreError):
    """A request that got no usable answer. ``sent``: a byte of it may have arrived."""

    def __init__(self, detail: str, *, sent: bool) -> None:
        super().__init__(detail)
        self.sent = sent


class ConnectFailed(HttpError):
    """No connection, hence nothing sent."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, sent=False)


class OutOfConnections(ConnectFailed):
    """For want of a connection, a descriptor or a port of ours: it says nothing of the peer."""


class PoolTimeout(OutOfConnections):
    """Every connection to that peer stayed busy; nothing sent."""


class ConnectionLost(HttpError):
    """The connection broke before the response was complete."""


class ResponseTimeout(HttpError):
    """No head, no further byte, or no end of the response in time."""


class ProtocolError(HttpError):
    """The peer's bytes are not an HTTP/1.1 response."""


class ResponseTooLarge(HttpError):
    """Head or body exceed the configured bound."""


class Timeout(NamedTuple):
    """Seconds; None means unbounded by this timer. ``read_s`` bounds silence between
    bytes, ``total_s`` the whole exchange from the first byte sent."""

    connect_s: float = 5.0
    read_s: float | None = None
    total_s: float | None = None


@attrs.frozen
class ClientLimits:
    """Bounds of a client (habit 8), per origin where not said otherwise."""

    #: Connections to one origin; more requests wait in order.
    max_connections: int = 2048
    #: Idle connections kept.
    max_idle: int = 256
    #: Shorter than a server's keep-alive (75 s in serve.py), so that we close first.
    idle_timeout_s: float = 15.0
    max_header_bytes: int = 64 * 1024
    #: Default bound of :meth:`Exchange.read`.
    max_body_bytes: int = 64 * 1024 * 1024


#: What a request gets that names none.
DEFAULT_TIMEOUT: Final = Timeout()


class Source(Protocol):
    """The connection that feeds an exchange."""

    def resume(self) -> None: ...

    def abort(self) -> None: ...


class Exchange:
    """One response as it arrives. ``status`` and ``headers`` (lower-case names) are set
    once :meth:`head` has returned."""

    __slots__ = (
        "_buffered",
        "_chunks",
        "_complete",
        "_connection",
        "_error",
        "_head_done",
        "_waiter",
        "headers",
        "max_body_bytes",
        "sent",
        "status",
    )

    def __init__(self, max_body_bytes: int) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.sent = False
        self.max_body_bytes = max_body_bytes
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._head_done = False
        self._complete = False
        self._error: HttpError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._connection: Source | None = None

    # --- the reader's side ---------------------------------------------------------------

    def header(self, name: bytes) -> bytes | None:
        """First value of a header; ``name`` in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def head(self) -> None:
        """Wait for status and headers. Raises HttpError."""
        while not self._head_done:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def next_chunk(self) -> bytes:
        """Everything that has arrived, at least one byte; b"" at the end of the body.

        Raises HttpError when the response cannot be completed, but only after every byte
        that did arrive was returned.
        """
        while True:
            if self._chunks:
                return self._take()
            if self._error is not None:
                raise self._error
            if self._complete:
                return b""
            await self._wait()

    async def read(self, limit_bytes: int | None = None) -> bytes:
        """The whole body. Raises ResponseTooLarge (and closes) past the limit."""
        limit = self.max_body_bytes if limit_bytes is None else limit_bytes
        parts: list[bytes] = []
        size = 0
        while chunk := await self.next_chunk():
            size += len(chunk)
            if size > limit:
                self.close()
                raise ResponseTooLarge(f"response body exceeds {limit} bytes", sent=True)
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Stop reading. An unfinished exchange closes its connection; idempotent."""
        if not self._complete:
            self.fail(ConnectionLost("closed by the reader", sent=self.sent))
        self._chunks.clear()
        self._buffered = 0

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        if self._connection is not None:
            self._connection.resume()
        return data

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            # Nobody reads any more: the peer must learn it, and the bytes still to come
            # must not be taken for the next response.
            self.close()
            raise
        finally:
            self._waiter = None

    # --- the connection's side -----------------------------------------------------------

    def attach(self, connection: Source) -> None:
        self._connection = connection

    def on_head(self, status: int) -> None:
        self.status = status
        self._head_done = True
        self._wake()

    def on_body(self, data: bytes) -> bool:
        """True when the reader is too far behind: pause the socket."""
        self._chunks.append(data)
        self._buffered += len(data)
        self._wake()
        return self._buffered > HIGH_WATER_BYTES

    def on_complete(self) -> None:
        self._complete = True
        self._connection = None
        self._wake()

    def fail(self, error: HttpError) -> None:
        if self._complete or self._error is not None:
            return
        self._error = error
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def is_paused(self) -> bool:
        return self._buffered > LOW_WATER_BYTES
