"""What is said beside a vendor's engine: the opening, notifications, goodbyes, and whose
process is dead. All of it is the socket transport's (socket_loop and its parts), of which
only the bytes of KV are missing; so a vendor's transport has the same authentication, the
same answer to hostile callers and the same proofs of death, between hosts, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import attrs

from pdcore.errors import TransportError
from pdcore.transports.base import PeerSession
from pdcore.transports.descriptor import EndpointDescriptor
from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_address import TCP, UNIX, Home, encode_home, this_origin
from pdcore.transports.socket_auth import check_secret
from pdcore.transports.socket_bell import Inbox
from pdcore.transports.socket_greeting import Identity, Published
from pdcore.transports.socket_links import Link, Told
from pdcore.transports.socket_loop import Bind, Loop
from pdcore.transports.socket_outgoing import Job
from pdcore.transports.socket_sender import Sender
from pdcore.transports.socket_table import MAX_TOLD
from pdcore.transports.socket_wire import MAX_PAYLOAD_BYTES
from pdcore.types import Incarnation, LeaseId

CONNECT_TIMEOUT_S: Final = 1.0
STALL_TIMEOUT_S: Final = 30.0


@attrs.frozen
class SideOptions:
    """The options that every vendor's transport has: see SocketTransport.
    ``stall_timeout_s``: also how long one call of the engine may take."""

    families: Sequence[str] = (UNIX, TCP)
    host: str = "127.0.0.1"
    advertise: str | None = None
    port: int = 0
    secret: str | None = attrs.field(default=None, repr=False)
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    stall_timeout_s: float = STALL_TIMEOUT_S


class SideChannel:
    """``notify`` and ``hang_up`` may be called from any thread, the rest from the owner's."""

    def __init__(
        self, incarnation: Incarnation, regions: RegionTable, options: SideOptions
    ) -> None:
        """Raises TransportError for addresses that cannot be used, and a short secret."""
        here = this_origin()
        secret = None if options.secret is None else options.secret.encode()
        families = tuple(options.families)
        self._bind = Bind(here, families, options.host, options.advertise, options.port)
        self._me = Identity(incarnation, encode_home(incarnation, Home(here)), check_secret(secret))
        self.inbox: Inbox[Told] = Inbox()
        #: Replaced at once: the side channel's thread reads it.
        self._published = Published()
        try:
            self._loop = Loop(
                self._me,
                here,
                regions,
                lambda: self._published,
                self.inbox,
                options.stall_timeout_s,
            )
        except OSError as error:
            self.inbox.close()
            raise TransportError(f"this process is at its limits: {error.strerror}") from error
        self._sender = Sender(self._me, here, regions, self._loop, options.connect_timeout_s)
        self._notes = itertools.count(1)

    def publish(self, regions: dict[int, int], extra: bytes) -> None:
        """What callers are told from now on: our target regions in bytes, and whatever is to be
        known of at least those."""
        self._published = Published(regions, extra)

    def listen(self) -> bytes:
        """Where peers reach us. Idempotent. Raises TransportError."""
        self._bind.begin(self._me, self._loop)
        return self._me.home

    def connect(self, descriptor: EndpointDescriptor) -> tuple[PeerSession, Link]:
        """Raises PeerGone, TransportError."""
        # So that the peer can ask whether we live, should the connection break.
        self.listen()
        session = self._sender.connect(descriptor)
        return session, self._sender.link_of(session)

    def disconnect(self, session: PeerSession) -> None:
        self._sender.disconnect(session)

    def hang_up(self, link: Link) -> None:
        """End a session after what was said before."""
        self._loop.disconnect(link)

    def notify(self, link: Link, lease: LeaseId, payload: bytes) -> None:
        """First in, first out for each peer; lost when the session is over."""
        self._loop.submit(link, Job(next(self._notes), lease, iter(()), payload))

    def drain(self) -> list[Told]:
        """What happened since the last call, of lanes, too."""
        told = self.inbox.drain()
        if len(told) >= MAX_TOLD:
            self._loop.resume()
        return told

    def revoke(self, lease: LeaseId) -> None:
        """Ask every sender to stop; when they have, only they can say."""
        self._loop.settle(lease, tell_senders=True)

    def release(self, lease: LeaseId) -> None:
        """It is over: nobody is asked about it any more."""
        self._loop.settle(lease)

    def close(self, timeout_s: float) -> bool:
        """Say goodbye for our whole incarnation; False when the thread did not end in time."""
        self._sender.close()
        ended = self._loop.close(timeout_s)
        self.inbox.close()
        return ended

    def abandon(self) -> None:
        """In a forked child: close the descriptors, which are copies."""
        self._loop.abandon()
        self.inbox.abandon()


def check_notify(payload: bytes | None) -> None:
    """Raises TransportError."""
    if payload is not None and len(payload) > MAX_PAYLOAD_BYTES:
        raise TransportError(f"notify has {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}")
