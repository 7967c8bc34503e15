"""Sockets between any two processes that reach each other: AF_UNIX on one host, TCP (IPv4 and
IPv6) also between hosts. The fallback that works everywhere, without any vendor's library.

The sender's kernel takes KV straight from the blocks, the receiver's puts it straight into
the blocks it is for: nothing is copied in between by us. One thread of our own moves it
(socket_loop), so that transfers go on while the owner computes.

Revocation is RECEIVER_ENFORCED: every byte is put in place by the receiver's own thread,
which looks at the lease before each call. What the peer says is checked before anything is
done on its word (socket_wire, socket_incoming), a caller must know our incarnation, and the
secret where one is configured (socket_auth).
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from typing import Final

import attrs

from pdcore.errors import TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import (
    DeviceBuffer,
    Notification,
    PeerSession,
    Region,
    RemoteLease,
    Revocation,
    TransportCaps,
    TransportEvent,
)
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.regions import RegionTable, zeroed_pages
from pdcore.transports.registry import TransportPlugin, WorkerPlace
from pdcore.transports.socket_address import (
    TCP,
    UNIX,
    Home,
    encode_home,
    free_port,
    this_origin,
)
from pdcore.transports.socket_auth import check_secret
from pdcore.transports.socket_bell import Inbox
from pdcore.transports.socket_greeting import Identity, Published
from pdcore.transports.socket_links import NoteCame, Told
from pdcore.transports.socket_loop import Bind, Loop
from pdcore.transports.socket_outgoing import Ended
from pdcore.transports.socket_sender import Sender
from pdcore.transports.socket_table import MAX_TOLD
from pdcore.transports.socket_wire import MAX_PIECES
from pdcore.types import Incarnation, LeaseId

NAME: Final = "socket"
CONNECT_TIMEOUT_S: Final = 1.0
#: Transfers fail when nothing moved for so long; the peer is not called dead for it.
STALL_TIMEOUT_S: Final = 30.0

CAPS: Final = TransportCaps(
    one_sided=True,
    native_notify=True,
    revocation=Revocation.RECEIVER_ENFORCED,
    submit_blocks=False,
    max_batch=MAX_PIECES,
    alignment=1,
    detects_peer_death=True,
    death_fences=True,
    cross_host=True,
)


def why_unavailable() -> str | None:
    """One sentence for ``pdcore doctor``, or None when socket works on this machine."""
    if sys.platform != "linux":
        return f"socket needs Linux (epoll, eventfd, pidfd); this is {sys.platform}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"pidfd_open does not work here ({error.strerror}): Linux 5.3 or later is needed"
    return None


class SocketTransport:
    """See :class:`pdcore.transports.base.Transport`. One thread uses it; one of its own moves
    bytes and answers callers.

    ``families``: where to listen, "unix" (this network namespace) and "tcp", on ``host`` and
    ``port`` (0: a free one), which peers know as ``advertise`` (default ``host``; numeric).
    ``secret``: at least 16 bytes that both ends must have; None: none is asked for.
    ``stall_timeout_s``: transfers fail when nothing moved for so long.
    Raises TransportError where it does not work, or for addresses that cannot be used.
    """

    name = NAME

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        families: Sequence[str] = (UNIX, TCP),
        host: str = "127.0.0.1",
        advertise: str | None = None,
        port: int = 0,
        secret: str | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        reason = why_unavailable()
        if reason is not None:
            raise TransportError(reason)
        here = this_origin()
        self._bind = Bind(here, tuple(families), host, advertise, port)
        self.incarnation = incarnation
        self.caps = attrs.evolve(CAPS, cross_host=TCP in self._bind.families)
        key = check_secret(None if secret is None else secret.encode())
        self._me = Identity(incarnation, encode_home(incarnation, Home(here)), key)
        self._regions = RegionTable()
        self._inbox: Inbox[Told] = Inbox()
        #: Replaced, never changed: the transport's thread reads it.
        self._published: dict[int, int] = {}
        try:
            self._loop = Loop(
                self._me,
                here,
                self._regions,
                lambda: Published(self._published),
                self._inbox,
                stall_timeout_s,
            )
        except OSError as error:
            self._inbox.close()
            raise TransportError(f"this process is at its limits: {error.strerror}") from error
        self._sender = Sender(self._me, here, self._regions, self._loop, connect_timeout_s)
        self.counts = self._loop.counts
        self._closed = False
        _living.add(self)

    def allocate(self, size_bytes: int) -> Region:
        _check_open(self._closed)
        return self.register(zeroed_pages(size_bytes))

    def register(self, buffer: memoryview | DeviceBuffer) -> Region:
        """Peers may be granted parts of it, unless it is read-only."""
        _check_open(self._closed)
        region = self._regions.add(buffer, target=not buffer.readonly)
        self._published = self._regions.targets()
        return region

    def deregister(self, region: Region) -> None:
        self._regions.remove(region)
        self._published = self._regions.targets()

    def descriptor(self) -> bytes:
        _check_open(self._closed)
        self._bind.begin(self._me, self._loop)
        return EndpointDescriptor(NAME, self.incarnation, self._published, self._me.home).encode()

    def connect(self, descriptor: bytes) -> PeerSession:
        _check_open(self._closed)
        # So that the peer can ask whether we live, should the connection break.
        self._bind.begin(self._me, self._loop)
        return self._sender.connect(decode(descriptor, NAME))

    def disconnect(self, session: PeerSession) -> None:
        if not self._closed:
            self._sender.disconnect(session)

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        _check_open(self._closed)
        return self._sender.submit(session, batches, lease, notify)

    def cancel(self, handle: int) -> None:
        self._sender.cancel(handle)

    def grant(self, lease: RemoteLease) -> None:
        self._regions.grant(lease)

    def revoke(self, lease: LeaseId) -> bool:
        self._regions.revoke(lease)
        self._loop.settle(lease)
        return True

    def release(self, lease: LeaseId) -> None:
        self._regions.release(lease)
        self._loop.settle(lease)

    def poll(self) -> list[TransportEvent]:
        told = self._inbox.drain()
        if len(told) >= MAX_TOLD and not self._closed:
            self._loop.resume()
        events: list[TransportEvent] = []
        for one in told:
            if isinstance(one, Ended):
                events.append(self._sender.ended(one))
            elif not isinstance(one, NoteCame):
                events.append(one)
            elif self._regions.granted(one.lease) is not None:
                events.append(Notification(one.incarnation, one.payload))
        return events

    def fileno(self) -> int | None:
        return None if self._closed else self._inbox.fileno()

    def close(self, timeout_s: float = 5.0) -> list[str]:
        if self._closed:
            return []
        self._closed = True
        self._sender.close()
        ended = self._loop.close(timeout_s)
        self._inbox.close()
        if not ended:
            return ["the thread that moves bytes"]
        # Whoever polls afterwards still hears of every handle.
        left = self._sender.unsettled(self._inbox.peek())
        self._regions.clear()
        return left


def _check_open(closed: bool) -> None:
    if closed:
        raise TransportError("this transport is closed")


#: For forked children, which must hold none of the sockets, or their parent's end would not
#: show as the end of its connections.
_living: weakref.WeakSet[SocketTransport] = weakref.WeakSet()
_kept_in_child: list[SocketTransport] = []


def _abandon_all() -> None:
    for transport in list(_living):
        _kept_in_child.append(transport)
        if not transport._closed:
            transport._closed = True
            transport._loop.abandon()
            transport._inbox.abandon()


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_abandon_all)

PLUGIN = TransportPlugin(
    create=SocketTransport,
    why_unavailable=why_unavailable,
    caps=CAPS,
    remedy="Linux 5.3 or later is needed",
    options_at=WorkerPlace.options,
    variants={UNIX: {"families": [UNIX]}, TCP: {"families": [TCP]}},
    fixed_address=lambda: {"port": free_port("127.0.0.1")},
)
