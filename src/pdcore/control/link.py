"""The leader link: one ROUTER in the leader's parent process, one DEALER in each worker.

ROUTER_MANDATORY makes a request for a worker that is not there a refusal at once instead of
a silence of 1,800 s (D42); a full queue is a refusal too, never a lost message. Results are
handed to the event loop's own thread, no thread pool in between (D43), and both ends are
bounded. A worker's identity carries its rank and incarnation, so that a restarted worker is
another worker, and a secret of the leader, so that no other process of the host can pose as
one (D40). The secret is part of the link's address, ``tcp://host:port#secret``, which
workers are told on their standard input.

The leader waits on the socket's descriptor with ``loop.add_reader`` (2-3x the rate of
``zmq.asyncio``, measured). It is edge-triggered, and a send may swallow the edge of a
receive; hence the look after every send and the unhurried periodic one.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import attrs
import zmq

from pdcore.control.codec import (
    MAX_LINK_BYTES,
    decode_leader_message,
    decode_worker_message,
    encode_link,
)
from pdcore.control.messages import LeaderMessage, WorkerHealth, WorkerMessage, WorkerReady
from pdcore.control.zmq import (
    ChannelOptions,
    Context,
    OwnerCheck,
    Socket,
    bind_tcp,
    configure,
    is_tcp_address,
    new_context,
)
from pdcore.errors import CodecError, ConfigError, Overloaded
from pdcore.types import Incarnation

_SECRET_BYTES: Final = 16
_IDENTITY: Final = struct.Struct(f"<B{_SECRET_BYTES}s16sI")
#: ROUTER reserves identities that start with a zero byte.
_IDENTITY_MARK: Final = 0x50

#: Token messages are small and frequent; a leader that is busy for a second must not lose
#: one of 32 sequences' tokens.
LINK_OPTIONS: Final = ChannelOptions(
    send_high_water_mark=4096,
    receive_high_water_mark=4096,
    max_message_bytes=MAX_LINK_BYTES,
    reconnect_max_s=0.5,
)


class WorkerId(NamedTuple):
    """One life of one worker of this leader."""

    rank: int
    incarnation: Incarnation


def pack_identity(worker: WorkerId, secret: bytes) -> bytes:
    return _IDENTITY.pack(_IDENTITY_MARK, secret, worker.incarnation, worker.rank)


def unpack_identity(identity: bytes, secret: bytes) -> WorkerId | None:
    """None for anything that is not one of ours."""
    if len(identity) != _IDENTITY.size:
        return None
    mark, found, incarnation, rank = _IDENTITY.unpack(identity)
    if mark != _IDENTITY_MARK or not hmac.compare_digest(found, secret):
        return None
    return WorkerId(rank, Incarnation(incarnation))


def split_address(address: str) -> tuple[str, bytes]:
    """``tcp://host:port#secret`` -> (where to connect, the secret). Raises ConfigError."""
    where, _, secret = address.partition("#")
    try:
        raw = bytes.fromhex(secret)
    except ValueError:
        raw = b""
    if len(raw) != _SECRET_BYTES or not is_tcp_address(where):
        raise ConfigError(
            f"link address {where!r} must be tcp://host:port#secret, as the leader's link has it"
        )
    return where, raw


class WorkerLink:
    """A worker's end. The worker loop owns it; nothing here blocks.

    ``leader_address`` is :attr:`LeaderLink.address`. Messages that the socket does not take
    wait in a backlog of at most ``max_backlog``: a result is never dropped while there is a
    leader that may still read it. Raises ConfigError for a malformed address.
    """

    def __init__(
        self,
        leader_address: str,
        worker: WorkerId,
        *,
        max_backlog: int = 65_536,
        options: ChannelOptions = LINK_OPTIONS,
        context: Context | None = None,
        thread_id: Callable[[], int] | None = None,
    ) -> None:
        where, secret = split_address(leader_address)
        self._owner = OwnerCheck("the leader link", thread_id)
        self._owned_context = None if context else new_context(16)
        used = context or self._owned_context or new_context(16)
        self._socket: Socket = used.socket(zmq.DEALER)
        configure(self._socket, options)
        self._socket.setsockopt(zmq.ROUTING_ID, pack_identity(worker, secret))
        self._socket.connect(where)
        self._backlog: deque[bytes] = deque()
        self._max_backlog = max_backlog
        self._max_bytes = options.max_message_bytes
        self.num_garbage = 0

    @property
    def num_backlog(self) -> int:
        """Messages that the socket has not taken yet."""
        return len(self._backlog)

    def send(self, message: WorkerMessage) -> None:
        """Never blocks. Raises Overloaded when the backlog is full (the leader has not read
        for long: the worker should stop) and CodecError for a message over the limit."""
        self._owner.check()
        data = encode_link(message, self._max_bytes)
        self.flush()
        if not self._backlog and self._offer(data):
            return
        if len(self._backlog) >= self._max_backlog:
            raise Overloaded(f"the leader has not read {len(self._backlog)} messages")
        self._backlog.append(data)

    def flush(self) -> None:
        """Hand over what waits, as far as the socket takes it."""
        while self._backlog and self._offer(self._backlog[0]):
            self._backlog.popleft()

    def receive(self, limit: int = 256) -> list[LeaderMessage]:
        """What the leader sent, oldest first; garbage is counted in ``num_garbage``.
        Also flushes the backlog."""
        self._owner.check()
        self.flush()
        messages: list[LeaderMessage] = []
        for _ in range(limit):
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                messages.append(decode_leader_message(data, self._max_bytes))
            except CodecError:
                self.num_garbage += 1
        return messages

    def poll_interest(self) -> tuple[Socket, int]:
        """For :class:`pdcore.control.zmq.Poller`: writability too while a backlog waits."""
        return self._socket, zmq.POLLIN | (zmq.POLLOUT if self._backlog else 0)

    def close(self, linger_s: float = 0.0) -> None:
        """Idempotent. ``linger_s`` bounds the wait for last results to leave."""
        self._owner.check()
        if not self._socket.closed:
            self.flush()
        self._socket.close(linger=int(linger_s * 1000))
        if self._owned_context is not None:
            self._owned_context.term()

    def _offer(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True


@attrs.define
class LinkCounters:
    """What the leader's end dropped or refused; for metrics."""

    num_received: int = 0
    num_sent: int = 0
    num_unknown_identity: int = 0
    num_garbage: int = 0
    #: Messages of a process life that another one of the same rank has replaced.
    num_stale: int = 0
    num_not_connected: int = 0
    num_overloaded: int = 0


class LeaderLink:
    """The leader's end, owned by one asyncio loop.

    ``on_message(rank, message)`` is called in the loop, in order per worker. A rank is
    reachable from its first message on; the latest life of a rank to say WorkerReady is the
    one that counts, and what a former life still had under way is counted and dropped. Who
    is ready is kept by the dispatcher.

    The socket is bound here, so that ``address`` can be handed to workers; ``start`` begins
    to deliver. Raises ConfigError when the address cannot be bound.
    """

    def __init__(
        self,
        on_message: Callable[[int, WorkerMessage], None],
        *,
        bind_host: str = "127.0.0.1",
        advertise_host: str | None = None,
        port: int = 0,
        options: ChannelOptions = LINK_OPTIONS,
        drain_budget: int = 256,
        safety_interval_s: float = 0.5,
    ) -> None:
        self._on_message = on_message
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._lives: dict[int, _Lives] = {}
        self._options = options
        self._drain_budget = drain_budget
        self._safety_interval_s = safety_interval_s
        self._socket: Socket = new_context(16).socket(zmq.ROUTER)
        configure(self._socket, options)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A worker whose TCP connection broke comes back under the same identity.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None
        self._look: asyncio.Handle | None = None
        self.counters = LinkCounters()
        try:
            where = bind_tcp(self._socket, bind_host, port, advertise_host)
        except ConfigError:
            self._socket.close(linger=0)
            self._socket.context.term()
            raise
        #: Where workers connect; holds the secret, so it belongs in no log and no argv.
        self.address = f"{where}#{self._secret.hex()}"

    async def start(self) -> None:
        """Begin to deliver, in the running loop. Workers may have connected before."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(self._socket.getsockopt(zmq.FD)), self._drain)
        self._tick()

    def send(self, rank: int, message: LeaderMessage) -> bool:
        """Never blocks, never loses in silence: False when the rank has no connection or its
        queue is full (D42). Raises CodecError for a message over the size limit."""
        data = encode_link(message, self._options.max_message_bytes)
        lives = self._lives.get(rank)
        if lives is None or self._socket.closed:
            self.counters.num_not_connected += 1
            return False
        identity = pack_identity(WorkerId(rank, lives.current), self._secret)
        try:
            self._socket.send_multipart([identity, data], zmq.DONTWAIT)
        except zmq.Again:
            self.counters.num_overloaded += 1
            return False
        except zmq.ZMQError:  # EHOSTUNREACH: mandatory routing found no connection
            lives.is_gone = True
            self.counters.num_not_connected += 1
            return False
        self.counters.num_sent += 1
        self._look_soon()
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """Idempotent. ``linger_s`` bounds how long last messages (Stop) may still leave."""
        if self._socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(int(self._socket.getsockopt(zmq.FD)))
        for handle in (self._timer, self._look):
            if handle is not None:
                handle.cancel()
        self._socket.close(linger=int(linger_s * 1000))
        self._socket.context.term()

    def _tick(self) -> None:
        """An edge that got lost costs ``safety_interval_s``, never a hang (pyzmq #2173)."""
        if self._loop is not None:
            self._timer = self._loop.call_later(self._safety_interval_s, self._tick)
            self._look_soon()

    def _look_soon(self) -> None:
        if self._look is None and self._loop is not None:
            self._look = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """At most ``drain_budget`` messages, so that HTTP is not starved; then again soon."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        is_empty = False
        try:
            for _ in range(self._drain_budget):
                if self._socket.closed:  # by the callback
                    return
                try:
                    parts = self._socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    is_empty = True
                    return
                self._deliver(parts)
        finally:
            if not is_empty and not self._socket.closed:
                self._look_soon()

    def _deliver(self, parts: list[bytes]) -> None:
        worker = unpack_identity(parts[0], self._secret)
        if worker is None:
            self.counters.num_unknown_identity += 1
            return
        message: WorkerMessage | None = None
        if len(parts) == 2:
            try:
                message = decode_worker_message(parts[1], self._options.max_message_bytes)
            except CodecError:
                message = None
        if message is None or not _is_from(worker, message):
            self.counters.num_garbage += 1
        elif not self._is_current(worker, isinstance(message, WorkerReady)):
            self.counters.num_stale += 1
        else:
            self.counters.num_received += 1
            self._on_message(worker.rank, message)

    def _is_current(self, worker: WorkerId, is_ready: bool) -> bool:
        lives = self._lives.get(worker.rank)
        if lives is None:
            self._lives[worker.rank] = _Lives(worker.incarnation)
            return True
        if lives.current == worker.incarnation:
            return True
        if not lives.is_gone and (not is_ready or worker.incarnation in lives.replaced):
            return False
        lives.replaced.append(lives.current)
        lives.current = worker.incarnation
        lives.is_gone = False
        return True


@attrs.define
class _Lives:
    """The process life of a rank that counts, and former ones that must not come back."""

    current: Incarnation
    replaced: deque[Incarnation] = attrs.field(factory=lambda: deque(maxlen=8))
    #: A send found no connection. Then whoever of this rank still speaks is the living one:
    #: two lives' first words may have been read in the wrong order.
    is_gone: bool = False


def _is_from(worker: WorkerId, message: WorkerMessage) -> bool:
    """A message that names its sender must name the one whose connection it came by."""
    if isinstance(message, WorkerReady):
        return worker == (message.rank, message.incarnation)
    return not isinstance(message, WorkerHealth) or message.rank == worker.rank
