"""One HTTP/1.1 client connection on httptools: parse, bound, pause, time out.

Theory. A :class:`Connection` carries at most one :class:`Exchange` (request and response)
at a time; pipelining is never used. Whatever ends an exchange early (time-out,
cancellation, garbage, a peer that sends too much) closes the connection, because what else
is on the wire is unknown.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

import httptools

from pdcore.server.exchange import (
    ClientLimits,
    ConnectionLost,
    Exchange,
    HttpError,
    ProtocolError,
    ResponseTimeout,
    ResponseTooLarge,
    Timeout,
)


class _Watch:
    """The timer of one exchange: silence and total time, one loop timer for both."""

    __slots__ = ("_deadline_s", "_exchange", "_handle", "_loop", "_read_s", "last_s")

    def __init__(self, exchange: Exchange, timeout: Timeout) -> None:
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self.last_s = self._loop.time()
        self._read_s = timeout.read_s
        self._deadline_s = None if timeout.total_s is None else self.last_s + timeout.total_s
        self._handle: asyncio.TimerHandle | None = None
        self._arm()

    def _arm(self) -> None:
        due = self._deadline_s
        if self._read_s is not None:
            quiet_s = self.last_s + self._read_s
            due = quiet_s if due is None else min(due, quiet_s)
        if due is not None:
            self._handle = self._loop.call_at(due, self._fire)

    def _fire(self) -> None:
        now = self._loop.time()
        if self._deadline_s is not None and now >= self._deadline_s:
            self._exchange.fail(ResponseTimeout("no complete response in time", sent=True))
        elif self._read_s is not None and now >= self.last_s + self._read_s:
            if self._exchange.is_paused:  # our reader is slow, not the peer
                self.last_s = now
                self._arm()
            else:
                silent = f"no byte for {self._read_s:g} s"
                self._exchange.fail(ResponseTimeout(silent, sent=True))
        else:
            self._arm()

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class Connection(asyncio.Protocol):
    """The socket side. ``on_idle(connection)`` is called when it may be reused,
    ``on_closed(connection)`` once when it is gone."""

    __slots__ = (
        "_exchange",
        "_framed",
        "_head_bytes",
        "_limits",
        "_on_closed",
        "_on_idle",
        "_parser",
        "_poller",
        "_quiet_bytes",
        "_transport",
        "_watch",
        "idle_since_s",
    )

    def __init__(
        self,
        limits: ClientLimits,
        on_idle: Callable[[Connection], None],
        on_closed: Callable[[Connection], None],
    ) -> None:
        self._limits = limits
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._parser = httptools.HttpResponseParser(self)
        self._poller: select.poll | None = None
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._watch: _Watch | None = None
        self._framed = False
        self._head_bytes = 0
        self._quiet_bytes = 0
        self.idle_since_s = 0.0

    # --- the pool's side -----------------------------------------------------------------

    def start(self, exchange: Exchange, request: bytes, timeout: Timeout) -> bool:
        """Send one request. False: the socket took no byte, use another connection."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        self._framed = False
        self._head_bytes = self._quiet_bytes = 0
        self._exchange = exchange
        transport.write(request)
        if transport.is_closing():  # the write itself failed: nothing was handed over
            self._exchange = None
            return False
        exchange.sent = True
        exchange.attach(self)
        self._watch = _Watch(exchange, timeout)
        return True

    def is_stale(self, now_s: float) -> bool:
        """True if the peer has closed, sent something unasked, or may soon close."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return True
        if now_s - self.idle_since_s > self._limits.idle_timeout_s:
            return True
        if self._poller is None:
            self._poller = select.poll()
            self._poller.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(self._poller.poll(0))

    def abort(self) -> None:
        self._exchange = None
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    # --- asyncio.Protocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:  # bytes nobody asked for
            self.abort()
            return
        if self._watch is not None:
            self._watch.last_s = asyncio.get_running_loop().time()
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail(ProtocolError("unexpected protocol upgrade", sent=True))
        except httptools.HttpParserError as error:
            self.fail(ProtocolError(f"not an HTTP/1.1 response: {error}", sent=True))
        if self._quiet_bytes > self._limits.max_header_bytes:
            self._refuse_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        exchange = self._exchange
        if exchange is not None:
            if exchange.status and not self._framed and exc is None:
                exchange.on_complete()  # a body without length ends with the connection
            else:
                detail = "connection closed" if exc is None else f"connection lost: {exc}"
                exchange.fail(ConnectionLost(detail, sent=True))
        self._exchange = None
        if self._watch is not None:
            self._watch.cancel()
        self._on_closed(self)

    def fail(self, error: HttpError) -> None:
        """End what runs on this connection with an error, and close it."""
        if self._exchange is not None:
            self._exchange.fail(error)
        else:
            self.abort()

    def _refuse_head(self) -> None:
        limit = self._limits.max_header_bytes
        self.fail(ResponseTooLarge(f"response head exceeds {limit} bytes", sent=True))

    # --- httptools callbacks -------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._exchange is None:  # a second response to one request
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._limits.max_header_bytes:
            self._refuse_head()
        exchange = self._exchange
        if exchange is None or exchange.status:  # closed, or a trailer
            return
        key = name.lower()
        if key == b"content-length" or key == b"transfer-encoding":
            self._framed = True
        exchange.headers.append((key, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        exchange = self._exchange
        if exchange is None:
            return
        if status < 200:  # an interim answer: the real one follows
            exchange.headers.clear()
            return
        if status in (204, 304):
            self._framed = True
        self._quiet_bytes = 0
        exchange.on_head(status)

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        if self._exchange is not None and self._exchange.on_body(body) and self._transport:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or not exchange.status:
            return
        self._exchange = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        exchange.on_complete()
        transport = self._transport
        if transport is None:
            return
        transport.resume_reading()
        if self._parser.should_keep_alive() and not transport.get_write_buffer_size():
            self._on_idle(self)
        else:
            transport.close()
