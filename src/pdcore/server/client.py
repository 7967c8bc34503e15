"""A small asyncio HTTP/1.1 client: a keep-alive pool over :mod:`pdcore.server.http1`.

The router spends most of its time here, so there is no general-purpose client in between
(measured: 12-18 us a request against 900-23,000 for httpx). Users of the router depend on
the :class:`Client` protocol; a simulation supplies its own.

A request is sent again only when the socket of a kept connection took no byte of it. POSTs
to a leg are never repeated after that: the attempt decides what happens (rule 1 of Q5).
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from pdcore.server.exchange import (
    DEFAULT_TIMEOUT,
    ClientLimits,
    ConnectFailed,
    ConnectionLost,
    Exchange,
    HttpError,
    OutOfConnections,
    PoolTimeout,
    ProtocolError,
    ResponseTimeout,
    ResponseTooLarge,
    Timeout,
)
from pdcore.server.http1 import Connection

__all__ = [
    "Client",
    "ClientLimits",
    "ConnectFailed",
    "ConnectionLost",
    "HttpClient",
    "HttpError",
    "Origin",
    "OutOfConnections",
    "PoolTimeout",
    "ProtocolError",
    "Response",
    "ResponseTimeout",
    "ResponseTooLarge",
    "Timeout",
]

#: What a connection may lack on our side: descriptors, kernel memory, a free port.
_SHORTAGES: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)
_METHODS: Final = frozenset({"GET", "POST", "PUT", "DELETE"})
_TARGET: Final = re.compile(r"/[!-~]*\Z")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_HEADER_VALUE: Final = re.compile(r"[\t -~\x80-\xff]*\Z")


class Origin(NamedTuple):
    """Where to connect; ``host`` without brackets for IPv6."""

    host: str
    port: int

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Response(Protocol):
    """What the router needs of a response; :class:`Exchange` is the real one."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def header(self, name: bytes) -> bytes | None: ...

    async def next_chunk(self) -> bytes: ...

    async def read(self, limit_bytes: int | None = None) -> bytes: ...

    def close(self) -> None: ...


class Client(Protocol):
    async def request(
        self,
        method: str,
        origin: Origin,
        target: str,
        body: bytes = b"",
        *,
        headers: Sequence[tuple[str, str]] = (),
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Response:
        """Send one request and wait for the response's head. Raises HttpError. A cancelled
        call closes its connection."""
        ...

    async def aclose(self) -> None: ...


class _Pool:
    """Connections to one origin. ``count`` includes those being opened; ``waiters`` are
    served in order when one is freed."""

    __slots__ = ("count", "idle", "waiters")

    def __init__(self) -> None:
        self.count = 0
        self.idle: list[Connection] = []
        self.waiters: deque[asyncio.Future[None]] = deque()

    def wake_one(self) -> None:
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


class HttpClient:
    """The real client. One per event loop; not thread-safe."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self._limits = limits or ClientLimits()
        self._pools: dict[Origin, _Pool] = {}
        self._open: dict[Connection, Origin] = {}
        self._heads: dict[tuple[str, Origin, str], bytes] = {}
        self._closed = False
        #: Connections opened and stale ones thrown away, for tests and metrics.
        self.num_opened = 0
        self.num_stale = 0

    @property
    def num_connections(self) -> int:
        return len(self._open)

    async def request(
        self,
        method: str,
        origin: Origin,
        target: str,
        body: bytes = b"",
        *,
        headers: Sequence[tuple[str, str]] = (),
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Exchange:
        """See :meth:`Client.request`. Raises ValueError for a method, target or header that
        could change the meaning of the request (header injection)."""
        request = self._encode(method, origin, target, body, headers)
        exchange = Exchange(self._limits.max_body_bytes)
        while True:
            connection = self._take_idle(origin)
            fresh = connection is None
            if connection is None:
                connection = await self._connect(origin, timeout.connect_s)
            if connection.start(exchange, request, timeout):
                break
            connection.abort()
            if fresh:
                raise ConnectFailed(f"{origin.netloc} closed the connection at once")
        await exchange.head()
        return exchange

    async def aclose(self) -> None:
        """Close every connection; requests in flight fail with ConnectionLost."""
        self._closed = True
        for connection in list(self._open):
            connection.fail(ConnectionLost("the client is closed", sent=True))
        for pool in self._pools.values():
            for waiter in pool.waiters:
                if not waiter.done():
                    waiter.set_exception(ConnectFailed("the client is closed"))

    # --- connections ---------------------------------------------------------------------

    def _pool(self, origin: Origin) -> _Pool:
        pool = self._pools.get(origin)
        if pool is None:
            pool = self._pools[origin] = _Pool()
        return pool

    def _take_idle(self, origin: Origin) -> Connection | None:
        """The most recently used live connection; stale ones are closed on the way."""
        idle = self._pool(origin).idle
        now_s = asyncio.get_running_loop().time() if idle else 0.0
        while idle:
            connection = idle.pop()
            if not connection.is_stale(now_s):
                return connection
            self.num_stale += 1
            connection.abort()
        return None

    async def _connect(self, origin: Origin, connect_s: float) -> Connection:
        pool = self._pool(origin)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(connect_s):
                while pool.count >= self._limits.max_connections:
                    waiter: asyncio.Future[None] = loop.create_future()
                    pool.waiters.append(waiter)
                    try:
                        await waiter
                    except asyncio.CancelledError:
                        if waiter.done() and not waiter.cancelled():
                            pool.wake_one()  # the turn we were given goes to the next
                        raise
                    connection = self._take_idle(origin)
                    if connection is not None:
                        return connection
        except TimeoutError:
            raise PoolTimeout(
                f"all {self._limits.max_connections} connections to {origin.netloc} stayed "
                f"busy for {connect_s:g} s"
            ) from None
        if self._closed:
            raise ConnectFailed("the client is closed")
        return await self._open_connection(pool, origin, connect_s)

    async def _open_connection(self, pool: _Pool, origin: Origin, connect_s: float) -> Connection:
        opened: list[Connection] = []

        def make() -> Connection:
            # Counted from here on, so that a peer that closes at once is not counted twice.
            connection = Connection(self._limits, self._on_idle, self._on_closed)
            self._open[connection] = origin
            opened.append(connection)
            return connection

        pool.count += 1
        where = origin.netloc
        try:
            async with asyncio.timeout(connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    make, origin.host, origin.port
                )
        except TimeoutError:
            raise ConnectFailed(f"{where} did not accept a connection in {connect_s:g} s") from None
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in _SHORTAGES:
                raise OutOfConnections(f"cannot open a connection to {where}: {reason}") from None
            raise ConnectFailed(f"cannot connect to {where}: {reason}") from None
        except (ValueError, OverflowError) as error:  # IDNA's UnicodeError, a NUL, a huge port
            raise ConnectFailed(f"{where!r} is no address: {error}") from None
        finally:
            if not opened:
                pool.count -= 1
                pool.wake_one()
        self.num_opened += 1
        return connection

    def _on_idle(self, connection: Connection) -> None:
        pool = self._pools[self._open[connection]]
        if self._closed or len(pool.idle) >= self._limits.max_idle:
            connection.abort()
            return
        connection.idle_since_s = asyncio.get_running_loop().time()
        pool.idle.append(connection)
        pool.wake_one()

    def _on_closed(self, connection: Connection) -> None:
        origin = self._open.pop(connection, None)
        if origin is None:
            return
        pool = self._pools[origin]
        pool.count -= 1
        if connection in pool.idle:
            pool.idle.remove(connection)
        pool.wake_one()

    # --- bytes ---------------------------------------------------------------------------

    def _encode(
        self,
        method: str,
        origin: Origin,
        target: str,
        body: bytes,
        headers: Sequence[tuple[str, str]],
    ) -> bytes:
        key = (method, origin, target)
        head = self._heads.get(key)
        if head is None:
            if method not in _METHODS:
                raise ValueError(f"method {method!r} is not one of {sorted(_METHODS)}")
            if not _TARGET.match(target):
                raise ValueError(f"target {target!r} must start with / and be printable ASCII")
            if not origin.host.isascii():
                raise ConnectFailed(f"{origin.host!r} is no address: write it in ASCII (xn--...)")
            head = f"{method} {target} HTTP/1.1\r\nhost: {origin.netloc}\r\n".encode("ascii")
            if len(self._heads) < 1024:  # targets are few; a caller that varies them pays
                self._heads[key] = head
        parts = [head]
        if body or method != "GET":
            parts.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body))
        for name, value in headers:
            if not _HEADER_NAME.match(name) or not _HEADER_VALUE.match(value):
                raise ValueError(f"header {name!r} has a name or value that HTTP does not allow")
            parts.append(f"{name}: {value}\r\n".encode("latin-1"))
        parts.append(b"\r\n")
        parts.append(body)
        return b"".join(parts)
