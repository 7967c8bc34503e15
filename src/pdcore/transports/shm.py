"""Shared memory between processes of one host: the peer's memory is mapped, a write is a
copy.

The receiver owns the memory (memfd, see shm_segment) and hands it over an AF_UNIX socket
(shm_wire, shm_door), which also carries notifications and ends with its process; the
sender copies in chunks on one thread (shm_mover). Nothing in the shared pages controls
anything: leases and regions live in private memory, since a peer can write to those
pages at any time. Memory that was there already, and only registered, is written by the
kernel for us where it is willing to (shm_attach).

Revocation is SENDER_ACK: nobody can call a copy back, but the sender looks at a stop mark
every chunk, and a dead sender is a fence, because its mapping was not inherited by any
child (MADV_DONTFORK), its calls into the kernel end before it does, and its pidfd says that
it is gone.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Final

from pdcore.errors import TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports import shm_attach
from pdcore.transports.base import (
    DeviceBuffer,
    PeerDied,
    PeerSession,
    Region,
    RemoteLease,
    Revocation,
    TransportCaps,
    TransportEvent,
)
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.regions import RegionTable, zeroed_pages
from pdcore.transports.registry import TransportPlugin
from pdcore.transports.shm_links import (
    BYE,
    BellRang,
    FrameCame,
    LinkEnded,
    LinkSet,
    ProcessDied,
    Signal,
)
from pdcore.transports.shm_receiver import Receiver
from pdcore.transports.shm_segment import NAMED_DIRECTORY, memfd_works, sweep_stale
from pdcore.transports.shm_sender import Sender
from pdcore.transports.shm_wire import Kind, unpack_lease
from pdcore.types import Incarnation, LeaseId

NAME: Final = "shm"
CONNECT_TIMEOUT_S: Final = 1.0
#: What a prefill worker may have resident of all its decode peers' pools. Their blocks are
#: taken first in, first out, so that a pool's pages come by once per round whatever the
#: limit (copies were as fast with 96 MiB); mapping those of 1,000 tokens again takes some
#: milliseconds where computing them takes a second.
WORKER_PEER_RESIDENT_BYTES: Final = 32 << 20

CAPS: Final = TransportCaps(
    one_sided=True,
    native_notify=True,
    revocation=Revocation.SENDER_ACK,
    submit_blocks=False,
    max_batch=shm_attach.MAX_ROWS,
    alignment=1,
    detects_peer_death=True,
    death_fences=True,
)


def why_unavailable() -> str | None:
    """One sentence for ``pdcore doctor``, or None when shm works on this machine."""
    if sys.platform != "linux":
        return f"shm needs Linux (memfd, pidfd, epoll); this is {sys.platform}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"pidfd_open does not work here ({error.strerror}): Linux 5.3 or later is needed"
    if not memfd_works() and not os.access(NAMED_DIRECTORY, os.W_OK):
        return f"memfd_create does not work here and {NAMED_DIRECTORY} is not writable"
    return None


class ShmTransport:
    """See :class:`pdcore.transports.base.Transport`. One thread uses it; two of its own
    copy and answer connections.

    ``named_directory`` forces the named fallback (tests, systems without memfd).
    ``shared`` False: ``allocate`` gives ordinary private memory, written as what is registered.
    ``peer_resident_bytes``: how much of all peers' memory may count as resident here, at
    least 1 MiB, None for no limit (see shm_pages; a limit costs about a third of the copy
    rate where transfers go round in more memory than that).
    Raises TransportError where shm does not work.
    """

    name = NAME
    caps = CAPS

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        named_directory: str | None = None,
        shared: bool = True,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        peer_resident_bytes: int | None = None,
    ) -> None:
        reason = why_unavailable()
        if reason is not None:
            raise TransportError(reason)
        sweep_stale(named_directory or NAMED_DIRECTORY)
        self.incarnation = incarnation
        self._shared = shared
        self._events: list[TransportEvent] = []
        self._regions = RegionTable()
        self._links = LinkSet()
        self._receiver = Receiver(incarnation, self._regions, self._links, named_directory)
        self._sender = Sender(
            incarnation,
            self._regions,
            self._links,
            self._events,
            connect_timeout_s,
            peer_resident_bytes,
        )
        self._closed = False
        _living.add(self)

    def allocate(self, size_bytes: int) -> Region:
        _check_open(self._closed)
        if not self._shared:
            return self._receiver.register(zeroed_pages(size_bytes))
        return self._receiver.allocate(size_bytes)

    def register(self, buffer: memoryview | DeviceBuffer) -> Region:
        """Any memory of this process. Peers may write it where it is writable and the kernel
        lets them; one that it does not let is refused with the reason, at ``connect`` when
        there is nothing else to write, else at ``submit``."""
        _check_open(self._closed)
        return self._receiver.register(buffer)

    def deregister(self, region: Region) -> None:
        self._regions.remove(region)
        self._receiver.withdraw(region)

    def descriptor(self) -> bytes:
        _check_open(self._closed)
        regions = self._regions.targets()
        blob = self._receiver.address()
        return EndpointDescriptor(NAME, self.incarnation, regions, blob).encode()

    def connect(self, descriptor: bytes) -> PeerSession:
        _check_open(self._closed)
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
        if not self._closed:
            self._receiver.revoke(lease)
        return False

    def release(self, lease: LeaseId) -> None:
        self._regions.release(lease)

    def poll(self) -> list[TransportEvent]:
        if not self._closed:
            for signal in self._links.poll():
                self._events += _react(signal, self._links, self._sender, self._receiver)
        events = self._events.copy()
        self._events.clear()
        return events

    def fileno(self) -> int | None:
        return None if self._closed else self._links.fileno()

    def close(self, timeout_s: float = 5.0) -> list[str]:
        if self._closed:
            return []
        self._closed = True
        left = self._sender.close(timeout_s)
        left += self._receiver.close(timeout_s)
        # BYE promises that nothing of this incarnation lands any more. Whatever thread
        # is left over may still ring the bell.
        self._links.close(None if left else BYE, keep_bell=bool(left))
        self._regions.clear()
        return left


def _check_open(closed: bool) -> None:
    if closed:
        raise TransportError("this transport is closed")


def _react(
    signal: Signal, links: LinkSet, sender: Sender, receiver: Receiver
) -> Iterator[TransportEvent]:
    if isinstance(signal, BellRang):
        sender.collect()
        receiver.welcome()
    elif isinstance(signal, LinkEnded):
        sender.lost(signal.link, signal.detail)
    elif isinstance(signal, ProcessDied):
        yield PeerDied(signal.incarnation, fenced=True, detail="its process is dead")
    else:
        try:
            yield from _read(signal, links, sender, receiver)
        except TransportError as error:
            links.drop(signal.link)
            sender.lost(signal.link, f"the peer sent nonsense: {error}")


def _read(
    frame: FrameCame, links: LinkSet, sender: Sender, receiver: Receiver
) -> Iterator[TransportEvent]:
    link = frame.link
    if frame.kind is Kind.NOTIFY:
        notification = receiver.notified(link, frame.body)
        if notification is not None:
            yield notification
    elif frame.kind is Kind.REVOKE:
        sender.revoked(link, unpack_lease(frame.body)[0])
    elif frame.kind is Kind.DISCONNECT or frame.kind is Kind.BYE:
        links.drop(link)
        sender.lost(link, "the peer closed")
        others = any(other.incarnation == link.incarnation for other in links.links())
        if frame.kind is Kind.BYE and not others:
            links.forget(link.process, link.incarnation)
            yield PeerDied(link.incarnation, fenced=True, detail="closed its transport")
    else:
        raise TransportError(f"unexpected {frame.kind.name} frame")


#: For forked children. A child must hold none of the sockets, or its parent's death
#: would not show as their end; and it must never unmap what MADV_DONTFORK left out of
#: it, since something else may be mapped there by now.
_living: weakref.WeakSet[ShmTransport] = weakref.WeakSet()
_kept_in_child: list[ShmTransport] = []


def _abandon_all() -> None:
    for transport in list(_living):
        _kept_in_child.append(transport)
        if not transport._closed:
            transport._closed = True
            transport._links.abandon()
            transport._receiver.abandon()


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_abandon_all)


def _variants() -> dict[str, dict[str, object]]:
    """With memory that is registered, where no rule of this machine forbids to write it."""
    if why_unavailable() is not None or shm_attach.why_unavailable() is not None:
        return {}
    return {"attach": {"shared": False}}


PLUGIN = TransportPlugin(
    create=ShmTransport,
    why_unavailable=why_unavailable,
    worker_options={"peer_resident_bytes": WORKER_PEER_RESIDENT_BYTES},
    caps=CAPS,
    variants_here=_variants,
    remedy="Linux 5.3 or later with memfd_create, or a writable /dev/shm, is needed",
)
