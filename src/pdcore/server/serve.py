"""Several ASGI apps in one event loop, each on its own socket, with uvicorn.

The sockets are bound before anything starts, so that port 0 is known in time to be
advertised (D44) and a port in use is one sentence instead of a traceback. Signals are the
caller's: uvicorn would take them for each of its servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from pdcore.errors import ConfigError, PdcoreError

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope

#: Longer than the idle time of our own client (15 s), so that the client closes first and
#: never sends a request into a closing connection.
KEEP_ALIVE_S: Final = 75
_BACKLOG: Final = 2048
#: What is still in the buffer of a connection that we close has this long to leave.
CLOSE_TIMEOUT_S: Final = 10.0
#: What an app that gives up may take to say so.
ANSWER_S: Final = 1.0


class StartFailed(PdcoreError):
    """An app's lifespan did not start."""


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; ``port`` 0 takes a free one. Raises ConfigError naming the
    address when it cannot be had."""
    if not host:  # the kernel would take it for all interfaces
        raise ConfigError("the host to listen on is empty: 127.0.0.1, or 0.0.0.0 for all of them")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because accepted sockets inherit it, and asyncio sets TCP_NODELAY
    # only where it reads IPPROTO_TCP: without, each answer in two writes waits 40 ms for the
    # client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another address, or port 0 for "
            "any free port"
        ) from None
    return listener


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@attrs.frozen
class HeadLimits:
    """What a client may cost before its request is known (habit 8)."""

    #: Request line and headers; more is answered 431 and closed.
    max_bytes: int = 64 * 1024
    #: From the connection, or the first byte of a later request, to the end of its headers;
    #: then 408 and closed. Between requests the keep-alive time rules.
    timeout_s: float = 30.0


class _Config(uvicorn.Config):
    """uvicorn's, with what :class:`_Protocol` needs besides."""

    head_limits: HeadLimits = HeadLimits()


class _Protocol(HttpToolsProtocol):
    """uvicorn's, which closes the connection of an unfinished answer and then waits for ever
    until a client that does not read has taken what is buffered; and which buffers headers
    without end, for as long as the client likes."""

    def __init__(
        self,
        config: _Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._inner = self.app
        self.app = self._serve
        self._limits = config.head_limits
        self._is_in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._arm()

    # --- the head of a request: most arrive in one piece, and cost two comparisons ----------

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Never feeds the parser more than what is left of the head's bytes at once."""
        while self._is_in_head:
            left = self._limits.max_bytes - self._head_bytes
            if len(data) <= left:
                self._head_bytes += len(data)
                break
            if left == 0:
                self._refuse(431, b"the request's headers are too large")
                return
            self._head_bytes += left
            super().data_received(data[:left])
            if self.transport.is_closing():
                return
            data = data[left:]
        super().data_received(data)
        is_partial = self._is_in_head and self._head_bytes and self._head_timer is None
        if is_partial and not self.transport.is_closing():
            self._arm()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True
        self._head_bytes = 0

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.timeout_s, self._on_head_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_late(self) -> None:
        self._head_timer = None
        if _is_running(self.cycle):
            self._arm()  # the next request waits for this answer, not for its client
        elif self._head_bytes:
            self._refuse(408, b"the request's headers did not arrive in time")
        else:
            self.transport.close()  # nothing was asked

    def _refuse(self, status: int, why: bytes) -> None:
        """Answer and close; in the middle of another answer only close."""
        self._disarm()
        if not _is_running(self.cycle):
            head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            length = b"content-length: %d\r\n\r\n" % len(why)
            self.transport.write(STATUS_LINE[status] + head + length + why)
        self.transport.close()
        self._watch()

    # --- the end of an answer ---------------------------------------------------------------

    async def _serve(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        try:
            await self._inner(scope, receive, send)
        finally:
            self._watch()

    def _watch(self) -> None:
        if self.transport.get_write_buffer_size():
            self.loop.call_later(CLOSE_TIMEOUT_S, self._cut)

    def _cut(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        else:
            self._watch()


def _is_running(cycle: RequestResponseCycle | None) -> bool:
    """Whether a connection's last request is being answered; None: it had none yet."""
    return cycle is not None and not cycle.response_complete


class _Server(uvicorn.Server):
    """Without uvicorn's signal handlers, and with a way to wait until it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class AppServer:
    """One app on one listening socket. ``start``, then ``stop`` once; both may be awaited
    from one task only."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, head_limits: HeadLimits | None = None
    ) -> None:
        self.port = port_of(listener)
        self._listener = listener
        config = _Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,  # the library configures no logging
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.head_limits = head_limits or HeadLimits()
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once requests are served. Raises StartFailed."""
        self._task = asyncio.create_task(self._run(), name=f"http-{self.port}")
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({self._task, up}, return_when=asyncio.FIRST_COMPLETED)
        if not self._server.up.is_set():
            up.cancel()
            self._listener.close()
            await self._task
            raise StartFailed(f"the server on port {self.port} ended while it started")

    async def ended(self) -> str:
        """Wait until it has ended although nobody told it to; says why. It serves nobody
        then, and whoever runs it must not go on as if it did (D45)."""
        if self._task is None:
            raise RuntimeError("start() it first")
        await asyncio.wait([self._task])
        error = None if self._task.cancelled() else self._task.exception()
        why = f": {error}" if error is not None else ""
        return f"the HTTP server on port {self.port} has ended{why}"

    async def stop(self, drain_s: float = 0.0, give_up: Callable[[], None] | None = None) -> None:
        """Take no new connection, let running requests finish for ``drain_s`` (at least 1 s),
        then cancel them; returns when the app's lifespan is over. ``give_up`` tells the app
        when ``drain_s`` is over: it has a second more to answer what is left, and what is
        cancelled after that gets a bare 500."""
        spare_s = 0.0
        timer = None
        if give_up is not None:
            spare_s = ANSWER_S
            timer = asyncio.get_running_loop().call_later(drain_s, give_up)
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(drain_s + spare_s))
        self._server.should_exit = True
        try:
            if self._task is not None:
                await self._task
        finally:
            if timer is not None:
                timer.cancel()
        self._listener.close()

    async def _run(self) -> None:
        try:
            await self._server.serve(sockets=[self._listener])
        except SystemExit:
            # uvicorn's way to say that the lifespan failed; it must not end the process.
            raise StartFailed(f"the app on port {self.port} did not start") from None


async def serve(
    apps: Sequence[tuple[ASGIApp, socket.socket]], stopping: asyncio.Event, *, drain_s: float
) -> None:
    """Serve all apps until ``stopping`` is set, then drain them together."""
    servers = [AppServer(app, listener) for app, listener in apps]
    started: list[AppServer] = []
    try:
        for server in servers:
            started.append(server)
            await server.start()
        await stopping.wait()
    finally:
        await asyncio.gather(*(server.stop(drain_s) for server in started))
