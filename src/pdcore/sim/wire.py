"""HTTP between simulated processes: every exchange is an ASGI call with a network in between.

:class:`WireClient` is the router's ``Client`` (:mod:`pdcore.server.client`) and everybody
else's; what it returns is the product's own :class:`~pdcore.server.exchange.Exchange`, fed
through a :class:`Connection` instead of a socket. Bytes of one direction arrive in order,
after a delay drawn from the world's seed; a partition holds them back, as TCP does; a killed
process loses its connections, a stopped one keeps them and says nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVarTuple, Unpack

from starlette.types import ASGIApp, Message, Scope

from pdcore.server.client import ConnectFailed, ConnectionLost, Origin, ResponseTimeout, Timeout
from pdcore.server.exchange import DEFAULT_TIMEOUT, ClientLimits, Exchange
from pdcore.sim.loop import Process, SimLoop

Ts = TypeVarTuple("Ts")

_LIMITS: Final = ClientLimits()
#: Requests to one address that are remembered.
KEPT_POSTS: Final = 12


class Listener(NamedTuple):
    """Who accepts connections at an address."""

    process: Process
    app: ASGIApp


class Wire:
    """All HTTP connections of one world. ``delay_s()`` draws how long the next bytes take;
    ``trace(what, detail)`` hears of everything that arrives."""

    def __init__(
        self, loop: SimLoop, delay_s: Callable[[], float], trace: Callable[[str, str], None]
    ) -> None:
        self.loop = loop
        self.delay_s = delay_s
        self.trace = trace
        self.listeners: dict[Origin, Listener] = {}
        #: Open connections in the order of their opening.
        self.connections: dict[Connection, None] = {}
        #: Pairs of hosts between which nothing passes.
        self.cuts: set[frozenset[str]] = set()
        self._held: list[tuple[frozenset[str], Callable[[], None]]] = []
        self._count = 0
        #: The last POSTs to each address, and when they were sent: what a proxy may repeat.
        self.posts: dict[Origin, deque[tuple[float, str, bytes]]] = {}
        #: What apps raised.
        self.errors: list[str] = []

    def listen(self, origin: Origin, process: Process, app: ASGIApp) -> None:
        self.listeners[origin] = Listener(process, app)

    def unlisten(self, origin: Origin) -> None:
        """From now on connections there are refused. Idempotent."""
        self.listeners.pop(origin, None)

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between two hosts until :meth:`heal`."""
        self.cuts.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """What was held back arrives, in its order."""
        pair = frozenset((one, other))
        self.cuts.discard(pair)
        due = [again for where, again in self._held if where == pair]
        self._held = [entry for entry in self._held if entry[0] != pair]
        for again in due:
            again()

    def is_cut(self, one: Process, other: Process) -> bool:
        return frozenset((one.host, other.host)) in self.cuts

    def hold(self, one: Process, other: Process, again: Callable[[], None]) -> None:
        self._held.append((frozenset((one.host, other.host)), again))

    def lose(self, process: Process) -> None:
        """A process was killed: the other ends of its connections learn of it."""
        for connection in list(self.connections):
            if connection.server is process or connection.client is process:
                connection.break_off("the peer closed the connection")

    def next_number(self) -> int:
        self._count += 1
        return self._count


class Connection:
    """One request and its response, the client's end; ``abort`` and ``resume`` are what its
    Exchange asks of its source."""

    __slots__ = (
        "_due_s",
        "_serving",
        "_timer",
        "_wire",
        "client",
        "exchange",
        "listener",
        "number",
    )

    def __init__(self, wire: Wire, client: Process, listener: Listener, scope: Scope) -> None:
        self._wire = wire
        self.client = client
        self.listener = listener
        self.number = wire.next_number()
        self.exchange = Exchange(_LIMITS.max_body_bytes)
        #: When the latest bytes of each direction arrive, so that none overtake: (to the
        #: client, to the server).
        self._due_s = [0.0, 0.0]
        self._timer: asyncio.TimerHandle | None = None
        self._serving = _Serving(wire, self, scope)

    @property
    def server(self) -> Process:
        return self.listener.process

    def start(self, body: bytes, timeout: Timeout) -> None:
        self._wire.connections[self] = None
        self.exchange.attach(self)
        self.exchange.sent = True
        total_s = timeout.total_s
        if total_s is not None:
            loop = self._wire.loop
            self._timer = loop.call_at(loop.now_s + total_s, self._expire, total_s)
        self.post(1, self._serving.start, body)

    def abort(self) -> None:
        """The client reads no further and closes."""
        self._close()
        self.post(1, self._serving.end)

    def resume(self) -> None:
        """Answers here are small: no server is ever held up by a slow reader."""

    def break_off(self, why: str) -> None:
        """The world cuts it: both ends learn of it after a while."""
        self._wire.connections.pop(self, None)
        self.post(0, self.fail, why)
        self.post(1, self._serving.end)

    def take(self, head: Message | None, data: bytes, is_last: bool) -> None:
        """Bytes of the answer have arrived."""
        exchange = self.exchange
        self._wire.trace("answer", f"{self.number} {len(data)} {is_last}")
        if head is not None:
            exchange.headers = list(head["headers"])
            exchange.on_head(head["status"])
        if data:
            exchange.on_body(data)
        if is_last:
            self._close()
            exchange.on_complete()

    def fail(self, why: str) -> None:
        self._close()
        self.exchange.fail(ConnectionLost(why, sent=True))

    def post(self, direction: int, arrive: Callable[[Unpack[Ts]], None], *args: *Ts) -> None:
        """Let something happen at the other end: 0 at the client's, 1 at the server's."""
        wire, client, server = self._wire, self.client, self.listener.process
        if wire.cuts and wire.is_cut(client, server):
            wire.hold(client, server, lambda: self.post(direction, arrive, *args))
            return
        due_s = wire.loop.now_s + wire.delay_s()
        if due_s < self._due_s[direction]:
            due_s = self._due_s[direction]
        self._due_s[direction] = due_s
        wire.loop.call_at(due_s, arrive, *args, context=(server if direction else client).context)

    def _expire(self, total_s: float) -> None:
        self.exchange.fail(ResponseTimeout(f"no complete answer in {total_s:g} s", sent=True))

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wire.connections.pop(self, None)


class _Serving:
    """The server's end of a connection: an ASGI call. ``_is_over``: it has answered, or
    knows that nobody reads."""

    __slots__ = ("_body", "_connection", "_head", "_is_over", "_scope", "_waiter", "_wire")

    def __init__(self, wire: Wire, connection: Connection, scope: Scope) -> None:
        self._wire = wire
        self._connection = connection
        self._scope = scope
        self._body: bytes | None = None
        self._head: Message | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    def start(self, body: bytes) -> None:
        """The request has arrived."""
        self._wire.trace("request", f"{self._connection.number} {self._scope['path']}")
        self._body = body
        self._wire.loop.create_task(self._serve()).add_done_callback(self._on_served)

    def end(self) -> None:
        """The client has closed."""
        self._is_over = True
        self._wake()

    async def _serve(self) -> None:
        try:
            await self._connection.listener.app(self._scope, self._receive, self._send)
        finally:
            if not self._is_over:
                self._is_over = True
                why = "closed before the answer was complete"
                self._connection.post(0, self._connection.fail, why)

    def _on_served(self, task: asyncio.Task[None]) -> None:
        """An app that raises is a bug, whatever its client was told."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            where = f"{self._connection.server.name} {self._scope['method']} {self._scope['path']}"
            self._wire.errors.append(f"{where}: {error!r}")

    async def _receive(self) -> Message:
        while True:
            if self._body is not None:
                body, self._body = self._body, None
                return {"type": "http.request", "body": body, "more_body": False}
            if self._is_over:
                return {"type": "http.disconnect"}
            self._waiter = asyncio.Future(loop=self._wire.loop)
            await self._waiter

    async def _send(self, message: Message) -> None:
        """A head waits for the first bytes behind it, as in one segment."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self._head = message
            return
        head, self._head = self._head, None
        data = message.get("body", b"")
        is_last = not message.get("more_body", False)
        self._connection.post(0, self._connection.take, head, data, is_last)
        if is_last:
            self._is_over = True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WireClient:
    """``Client`` of one process. Nothing is pooled: each request is a connection."""

    def __init__(self, wire: Wire, process: Process) -> None:
        self._wire = wire
        self._process = process

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
        """See :meth:`pdcore.server.client.Client.request`. ``timeout.read_s`` is not used:
        nobody in pdcore sets it."""
        listener = await self._connect(origin, timeout.connect_s)
        if method == "POST":
            kept = self._wire.posts.setdefault(origin, deque(maxlen=KEPT_POSTS))
            kept.append((self._wire.loop.now_s, target, body))
        scope = make_scope(method, origin, target, body, headers)
        connection = Connection(self._wire, self._process, listener, scope)
        connection.start(body, timeout)
        await connection.exchange.head()
        return connection.exchange

    async def aclose(self) -> None:
        """Every connection of this process closes."""
        for connection in list(self._wire.connections):
            if connection.client is self._process:
                connection.exchange.fail(ConnectionLost("the client is closed", sent=True))

    async def _connect(self, origin: Origin, connect_s: float) -> Listener:
        wire = self._wire
        now_s = wire.loop.now_s
        until_s = now_s + connect_s
        arrived: asyncio.Future[None] = asyncio.Future(loop=wire.loop)
        wire.loop.call_at(now_s + wire.delay_s(), _resolve, arrived)
        await arrived
        listener = wire.listeners.get(origin)
        if listener is None:
            raise ConnectFailed(f"cannot connect to {origin.netloc}: connection refused")
        if wire.cuts and wire.is_cut(self._process, listener.process):
            opened: asyncio.Future[None] = asyncio.Future(loop=wire.loop)
            wire.hold(self._process, listener.process, lambda: _resolve(opened))
            try:
                async with asyncio.timeout_at(until_s):
                    await opened
            except TimeoutError:
                late = f"{origin.netloc} did not accept a connection in {connect_s:g} s"
                raise ConnectFailed(late) from None
            return await self._connect(origin, connect_s)
        return listener


def make_scope(
    method: str, origin: Origin, target: str, body: bytes, headers: Sequence[tuple[str, str]]
) -> Scope:
    """What an ASGI server tells an app of one request."""
    sent = [
        (b"host", origin.netloc.encode()),
        (b"content-length", b"%d" % len(body)),
        *((name.lower().encode(), value.encode()) for name, value in headers),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": target,
        "raw_path": target.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": sent,
        "client": ("127.0.0.1", 1),
        "server": (origin.host, origin.port),
    }


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
