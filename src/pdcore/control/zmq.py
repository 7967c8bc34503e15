"""The control channel over ZeroMQ, and the poller that lets one loop wait for everything.

Every socket belongs to one thread, the worker loop. One PULL socket is bound to a random
port; one PUSH socket per peer address is kept, least recently used first out, so that
thousands of peers that come and go cannot use up file descriptors (D24; SGLang #31766).
A send never blocks: past the high-water mark it is refused and the core's timers resend.

The context is made by whoever makes the channel, after the process was spawned: contexts
do not survive a fork, and a cache on the class would be shared by every channel of the
process and closed by the first (D49).
"""

from __future__ import annotations

import ipaddress
import math
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import attrs
import zmq

from pdcore.control.codec import MAX_FRAME_BYTES
from pdcore.errors import ConfigError, OwnershipError

_TCP_ADDRESS: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[\w.-]+):(\d{1,5})", re.A)

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


@attrs.frozen
class ChannelOptions:
    """Bounds of one socket or channel (habit 8).

    A frame may carry many messages, so 512 queued frames are a burst of thousands: a peer
    that has not read those gains nothing from more. ``max_peers`` must be at least the
    number of ranks that this one talks to at once; two descriptors each.
    """

    max_peers: int = 256
    send_high_water_mark: int = 512
    receive_high_water_mark: int = 4096
    max_message_bytes: int = MAX_FRAME_BYTES
    reconnect_s: float = 0.05
    reconnect_max_s: float = 2.0
    #: A peer whose host vanished without a word is disconnected after this.
    heartbeat_timeout_s: float = 15.0


@attrs.define
class ChannelCounters:
    """What happened so far; for metrics."""

    num_sent: int = 0
    num_refused: int = 0
    num_received: int = 0
    num_evicted: int = 0


def new_context(max_sockets: int = 1024) -> Context:
    """A context of this process. Call it after spawn, never at import (D49).

    A closed socket counts against ``max_sockets`` until the context's own thread has
    reaped it: leave room for peers that come and go."""
    context: Context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, max_sockets)
    return context


def configure(sock: Socket, options: ChannelOptions) -> None:
    """What every socket has: no lingering, bounded queues and messages, a dead TCP peer
    is noticed."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.SNDHWM, options.send_high_water_mark)
    sock.setsockopt(zmq.RCVHWM, options.receive_high_water_mark)
    sock.setsockopt(zmq.MAXMSGSIZE, options.max_message_bytes)
    sock.setsockopt(zmq.RECONNECT_IVL, math.ceil(options.reconnect_s * 1000))
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, math.ceil(options.reconnect_max_s * 1000))
    heartbeat_ms = math.ceil(options.heartbeat_timeout_s * 1000)
    sock.setsockopt(zmq.HEARTBEAT_IVL, max(1, heartbeat_ms // 3))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat_ms)
    sock.setsockopt(zmq.HEARTBEAT_TTL, heartbeat_ms)


def bracketed(host: str) -> str:
    """``::1`` -> ``[::1]``; everything else as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_tcp_address(address: str) -> bool:
    """Whether this is ``tcp://host:port`` with a real port. A peer's ``reply_to`` goes
    through here before anything connects to it: no ipc, no inproc, no wildcard (D41)."""
    match = _TCP_ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        return False
    host = match[1]
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            return False
    return True


def bind_tcp(sock: Socket, host: str, port: int, advertise_host: str | None) -> str:
    """Bind to ``host:port`` (0: any free port); returns the address to tell others.

    Raises ConfigError when the address is not ours or taken, and when it is a wildcard
    that nobody could connect to and ``advertise_host`` is missing (R15, D40).
    """
    if advertise_host is None and host in ("0.0.0.0", "::", "*", ""):
        raise ConfigError(
            f"bind_host {host!r} listens everywhere but is no address to connect to: "
            "set advertise_host to the address that other hosts use"
        )
    try:
        # libzmq binds to numbers only; "localhost" is what people write.
        family, _, _, _, found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        numeric = f"[{found[0]}]" if family == socket.AF_INET6 else str(found[0])
        sock.bind(f"tcp://{numeric}:{port if port else '*'}")
    except (zmq.ZMQError, OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {bracketed(host)}:{port}: {error}") from None
    bound_port = sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"tcp://{bracketed(advertise_host or str(found[0]))}:{bound_port}"


def is_numeric_address(address: str) -> bool:
    """A TCP address whose host needs no resolver. libzmq resolves names on the one thread
    that moves all frames, again at every reconnect: one name that does not resolve would
    stop every peer, so names are resolved before they get here."""
    match = _TCP_ADDRESS.fullmatch(address)
    if match is None or not is_tcp_address(address):
        return False
    try:
        ipaddress.ip_address(match[1].strip("[]"))
    except ValueError:
        return match[1] == "localhost"
    return True


class OwnerCheck:
    """Sockets are not thread-safe: a call from another thread is a bug found at once.

    ``thread_id`` is ``threading.get_ident``; without it nothing is checked (a layer-5
    module starts no threads and knows none)."""

    __slots__ = ("_owner", "_thread_id", "_what")

    def __init__(self, what: str, thread_id: Callable[[], int] | None) -> None:
        self._what = what
        self._thread_id = thread_id
        self._owner = thread_id() if thread_id is not None else 0

    def check(self) -> None:
        """Raises OwnershipError when called from another thread than the constructor."""
        if self._thread_id is not None and self._thread_id() != self._owner:
            raise OwnershipError(f"{self._what} belongs to the thread that made it")


class ZmqChannel:
    """A :class:`pdcore.control.base.ControlChannel` over TCP.

    Binds to loopback unless told otherwise (D40). ``context`` is shared with a
    :class:`pdcore.control.link.WorkerLink` of the same process if given, else owned.
    """

    def __init__(
        self,
        bind_host: str = "127.0.0.1",
        advertise_host: str | None = None,
        *,
        port: int = 0,
        options: ChannelOptions | None = None,
        context: Context | None = None,
        thread_id: Callable[[], int] | None = None,
    ) -> None:
        self._options = options or ChannelOptions()
        self._owner = OwnerCheck("the control channel", thread_id)
        self._owned_context = None if context else new_context(2 * self._options.max_peers + 64)
        self._context = context or self._owned_context or new_context()
        self._inbound: Socket = self._context.socket(zmq.PULL)
        configure(self._inbound, self._options)
        self._peers: OrderedDict[str, Socket] = OrderedDict()
        self.counters = ChannelCounters()
        try:
            self._address = bind_tcp(self._inbound, bind_host, port, advertise_host)
        except ConfigError:
            self.close()
            raise

    @property
    def address(self) -> str:
        return self._address

    @property
    def num_peers(self) -> int:
        """Addresses with a socket; at most ``options.max_peers``."""
        return len(self._peers)

    def send(self, to: str, frame: bytes) -> bool:
        """False: queue full, bad address, frame over the limit, no descriptor left, or
        closed. Frames to an address nobody listens on are queued up to the mark."""
        self._owner.check()
        sock = self._peer(to)
        if sock is None or len(frame) > self._options.max_message_bytes:
            self.counters.num_refused += 1
            return False
        try:
            sock.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError:  # Again past the mark; anything else is as good as lost
            self.counters.num_refused += 1
            return False
        self.counters.num_sent += 1
        return True

    def receive(self, limit: int = 256) -> list[bytes]:
        self._owner.check()
        frames: list[bytes] = []
        if self._inbound.closed:
            return frames
        try:
            while len(frames) < limit:
                frames.append(self._inbound.recv(zmq.DONTWAIT))
        except zmq.Again:
            pass
        self.counters.num_received += len(frames)
        return frames

    def fileno(self) -> int | None:
        """Edge-triggered: use :class:`Poller`, or drain ``receive`` until it returns
        fewer than ``limit`` after every send and receive."""
        return None if self._inbound.closed else int(self._inbound.getsockopt(zmq.FD))

    def poll_interest(self) -> tuple[Socket, int]:
        return self._inbound, zmq.POLLIN

    def forget(self, to: str) -> None:
        self._owner.check()
        sock = self._peers.pop(to, None)
        if sock is not None:
            sock.close(linger=0)

    def close(self, linger_s: float = 0.0) -> None:
        """Idempotent. ``linger_s`` bounds how long last frames (an acknowledgement before
        the exit) may still leave; 0 drops them."""
        self._owner.check()
        linger_ms = math.ceil(linger_s * 1000)
        for sock in self._peers.values():
            sock.close(linger=linger_ms)
        self._peers.clear()
        self._inbound.close(linger=0)
        if self._owned_context is not None:
            self._owned_context.term()

    def _peer(self, to: str) -> Socket | None:
        sock = self._peers.get(to)
        if sock is not None:
            self._peers.move_to_end(to)
            return sock
        if self._inbound.closed or not is_numeric_address(to):
            return None
        try:
            sock = self._context.socket(zmq.PUSH)
        except zmq.ZMQError:  # out of descriptors: as a full queue, the core resends
            return None
        try:
            configure(sock, self._options)
            sock.connect(to)
        except zmq.ZMQError:
            sock.close(linger=0)
            return None
        while len(self._peers) >= self._options.max_peers:
            _, oldest = self._peers.popitem(last=False)
            oldest.close(linger=0)
            self.counters.num_evicted += 1
        self._peers[to] = sock
        return sock

    def __repr__(self) -> str:
        return f"ZmqChannel({self._address}, peers={len(self._peers)})"


class ZmqSource(Protocol):
    """What a :class:`Poller` can wait for: a channel or a link."""

    def poll_interest(self) -> tuple[Socket, int]:
        """The socket, and the ``zmq.POLLIN | zmq.POLLOUT`` it wants to be woken for."""
        ...


class Poller:
    """Blocks until any of several channels, links and plain descriptors has something.

    ZMQ descriptors are edge-triggered: reading from one hides what was left unread. Here
    the sockets are asked for their state before anything blocks, so a wake-up is never
    lost, however little of it the last ``receive`` took. Plain descriptors (a transport's
    doorbell, an eventfd of a thread) are level-triggered; their owner reads them.
    """

    def __init__(self, sources: Iterable[ZmqSource] = (), fds: Iterable[int] = ()) -> None:
        self._poller = zmq.Poller()
        self._sources = list(sources)
        for fd in fds:
            self._poller.register(fd, zmq.POLLIN | zmq.POLLERR)

    def wait(self, timeout_s: float | None) -> bool:
        """True when something is ready; False when ``timeout_s`` passed (None: for ever).
        Rounded up to whole milliseconds, so that a loop never spins before a deadline."""
        for source in self._sources:
            self._poller.register(*source.poll_interest())
        timeout_ms = None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))
        return bool(self._poller.poll(timeout_ms))
