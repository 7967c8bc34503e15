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
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
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


class StartFailed(PdcoreError):
    """An app's lifespan did not start."""


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; ``port`` 0 takes a free one. Raises ConfigError naming the
    address when it cannot be had."""
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


class _Protocol(HttpToolsProtocol):
    """uvicorn's, which closes the connection of an unfinished answer and then waits for ever
    until a client that does not read has taken what is buffered."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._inner = self.app
        self.app = self._serve

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

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self.port = port_of(listener)
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
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
        )
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

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no new connection, let running requests finish for ``drain_s`` (at least 1 s),
        then cancel them; returns when the app's lifespan is over."""
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(drain_s))
        self._server.should_exit = True
        if self._task is not None:
            await self._task
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
