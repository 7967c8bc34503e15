"""The sending half of the shm transport: sessions, handles, and their ends."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from typing import Final

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import (
    Completion,
    HandleStatus,
    PeerSession,
    RemoteLease,
    TransportEvent,
)
from pdcore.transports.check import plan_copies
from pdcore.transports.descriptor import EndpointDescriptor
from pdcore.transports.process_proof import ProcessKey, boot_id, open_pidfd, this_process
from pdcore.transports.regions import RegionTable
from pdcore.transports.shm_attach import AttachedMemory, PeerSpace
from pdcore.transports.shm_links import DISCONNECT, MAX_OUTBOX, Link, LinkSet
from pdcore.transports.shm_mover import Ended, Job, Mover, advance
from pdcore.transports.shm_pages import PeerMemory, PeerPages, copy_paged
from pdcore.transports.shm_segment import attach_segment
from pdcore.transports.shm_wire import (
    MAX_PAYLOAD_BYTES,
    Hello,
    Offer,
    credentials,
    decode_address,
    dial,
    pack_hello,
    pack_notify,
    receive_offer,
)
from pdcore.types import Incarnation, LeaseId

#: ``submit`` itself copies for so long (and one chunk more): a few MiB are in place before
#: another thread would have woken up. The rest is the mover's.
INLINE_S: Final = 0.001


class Sender:
    """Calls come from the owner's thread; ``events`` is the owner's list to append to."""

    def __init__(
        self,
        incarnation: Incarnation,
        regions: RegionTable,
        links: LinkSet,
        events: list[TransportEvent],
        connect_timeout_s: float,
        peer_resident_bytes: int | None,
    ) -> None:
        self._incarnation = incarnation
        self._regions = regions
        self._links = links
        self._events = events
        self._connect_timeout_s = connect_timeout_s
        self._pages = PeerPages(peer_resident_bytes)
        self._mover = Mover(links.ring)
        self._sessions: dict[int, Link] = {}
        self._jobs: dict[int, tuple[Link, Job]] = {}
        self._ids = itertools.count(1)

    def connect(self, descriptor: EndpointDescriptor) -> PeerSession:
        mine, timeout_s = self._incarnation, self._connect_timeout_s
        link, pidfd = _open_link(mine, descriptor, timeout_s, self._pages)
        self._links.add(link, pidfd)
        session = PeerSession(next(self._ids), descriptor.incarnation)
        self._sessions[session.session_id] = link
        return session

    def disconnect(self, session: PeerSession) -> None:
        link = self._sessions.pop(session.session_id, None)
        if link is None:
            return
        self._stop_jobs(link, HandleStatus.FAILED, "disconnected")
        if link.open:
            self._links.send(link, DISCONNECT)
            self._links.drop(link)
        if all(other.incarnation != link.incarnation for other in self._links.links()):
            self._links.forget(link.process, link.incarnation)

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None,
    ) -> int:
        link = self._sessions.get(session.session_id)
        if link is None or not link.open:
            raise PeerGone("the session is closed or its peer is gone: connect again")
        if lease.lease in link.revoked:
            raise TransportError(f"{lease.lease} was revoked by the receiver")
        for batch in batches:
            if batch.remote_region in link.refused:
                raise TransportError(link.refused[batch.remote_region])
        if notify is not None:
            _check_notify(link, notify)
        plan = plan_copies(batches, self._regions.sizes, link.sizes, lease)
        job = Job(
            next(self._ids),
            link,
            copy_paged(plan, self._regions.arrays, link.memory),
            lease.lease,
            notify,
            tuple(pair.local_region for pair in plan.pairs),
        )
        # Not ahead of what waits already: a session's transfers end in order.
        ended = None if link.jobs else _advance_for(job, INLINE_S)
        if ended is not None:
            self._report(link, ended)
            self._links.ring()
        else:
            self._regions.pin(job.local_regions)
            link.jobs[job.handle] = job
            self._jobs[job.handle] = link, job
            self._mover.submit(job)
        return job.handle

    def cancel(self, handle: int) -> None:
        found = self._jobs.get(handle)
        if found is not None and found[1].stop is None:
            found[1].stop = HandleStatus.CANCELLED, "cancelled"

    def collect(self) -> None:
        """Report what the mover finished; notifications go out in the same order."""
        for ended in self._mover.drain():
            link, job = self._jobs.pop(ended.job.handle)
            del link.jobs[job.handle]
            self._regions.unpin(job.local_regions)
            self._report(link, ended)

    def lost(self, link: Link, why: str) -> None:
        """The connection is over: whatever is left of its handles fails, and its memory is
        unmapped with the last of them, whether or not anybody disconnects."""
        self._stop_jobs(link, HandleStatus.FAILED, why)
        self._sessions = {key: other for key, other in self._sessions.items() if other is not link}

    def revoked(self, link: Link, lease: LeaseId) -> None:
        """The receiver wants a lease back: stop now, refuse later. What was written
        already, only our completions can tell."""
        link.note_revoked(lease)
        for job in link.jobs.values():
            if job.lease == lease and job.stop is None:
                job.stop = HandleStatus.FAILED, "the receiver revoked the lease"

    def close(self, timeout_s: float) -> list[str]:
        for _, job in self._jobs.values():
            if job.stop is None:
                job.stop = HandleStatus.CANCELLED, "closed"
        ended = self._mover.close(timeout_s)
        self.collect()
        self._sessions.clear()
        if ended:
            return []
        return [f"handle {handle}: still copying" for handle in self._jobs]

    def _report(self, link: Link, ended: Ended) -> None:
        job = ended.job
        if ended.status is HandleStatus.DONE and job.notify is not None:
            self._links.send(link, pack_notify(job.lease, job.notify))
        self._events.append(Completion(job.handle, ended.status, True, ended.detail))

    def _stop_jobs(self, link: Link, status: HandleStatus, why: str) -> None:
        for job in link.jobs.values():
            if job.stop is None:
                job.stop = status, why


def _advance_for(job: Job, seconds: float) -> Ended | None:
    deadline = time.monotonic() + seconds
    while True:
        ended = advance(job)
        if ended is not None or time.monotonic() >= deadline:
            return ended


def _check_notify(link: Link, notify: bytes) -> None:
    if len(notify) > MAX_PAYLOAD_BYTES:
        raise TransportError(f"notify has {len(notify)} bytes, at most {MAX_PAYLOAD_BYTES}")
    waiting = len(link.outbox) + len(link.jobs)
    if waiting >= MAX_OUTBOX:
        raise TransportError(
            f"the peer has not read {waiting} notifications: stopped, or overloaded"
        )


def _open_link(
    mine: Incarnation, descriptor: EndpointDescriptor, timeout_s: float, pages: PeerPages
) -> tuple[Link, int]:
    """Dial, prove who answers, take over its segments. Raises PeerGone, TransportError."""
    address = decode_address(descriptor.blob)
    if address.boot_id != boot_id():
        raise TransportError("the peer is on another host: shm works within one host only")
    deadline = time.monotonic() + timeout_s
    sock = dial(address.name, timeout_s)
    pidfd = -1
    try:
        pid, uid = credentials(sock)
        if uid != os.geteuid():
            raise TransportError(f"the peer runs as uid {uid}, this process as {os.geteuid()}")
        process = ProcessKey(pid, address.process.start_ticks)
        pidfd = open_pidfd(process)
        hello = Hello(mine, descriptor.incarnation, this_process().start_ticks)
        sock.sendall(pack_hello(hello))
        offer = receive_offer(sock, deadline)
        link = Link(sock, descriptor.incarnation, process)
        link.memory.update(_map(offer, descriptor.regions, pages))
        _attach(link, offer, pidfd)
    except OSError as error:
        _hang_up(sock, pidfd)
        raise PeerGone(f"the peer closed the connection: {error.strerror}") from error
    except TransportError:
        _hang_up(sock, pidfd)
        raise
    link.sizes.update((region, memory.size_bytes) for region, memory in link.memory.items())
    return link, pidfd


def _hang_up(sock: socket.socket, pidfd: int) -> None:
    sock.close()
    if pidfd >= 0:
        os.close(pidfd)


def _map(offer: Offer, published: dict[int, int], pages: PeerPages) -> dict[int, PeerMemory]:
    """Map what the peer handed over. Raises TransportError when the descriptor names
    other regions than it has; no descriptor stays open then."""
    fds = [fd for _, fd in offer.shared]
    found = {region.region_id: region.size_bytes for region, _ in offer.shared}
    found |= {region.region_id: region.size_bytes for region in offer.attached}
    memory: dict[int, PeerMemory] = {}
    try:
        if not published.items() <= found.items():
            raise TransportError("stale descriptor: it names regions the peer does not have")
        for region, fd in offer.shared:
            fds.remove(fd)
            segment = attach_segment(fd, region.size_bytes, region.offset, sealed=region.sealed)
            memory[region.region_id] = PeerMemory(segment, pages)
    finally:
        for fd in fds:
            os.close(fd)
    return memory


def _attach(link: Link, offer: Offer, pidfd: int) -> None:
    """Try whether what the peer registered can be written from here; ``link.refused`` says of
    what cannot why. Raises PeerGone, and TransportError when there is nothing else to write."""
    if offer.key is None:
        return
    space = PeerSpace(link.process, pidfd, offer.key)
    for region in offer.attached:
        try:
            space.probe(region.latch)
            link.memory[region.region_id] = AttachedMemory(region, space)
        except PeerGone:
            raise
        except TransportError as error:
            link.refused[region.region_id] = (
                "this target's memory was registered, not allocated, and the kernel does not let "
                f"us write it: {error}; use allocate() there, or transport socket"
            )
    if not link.memory:
        raise TransportError(next(iter(link.refused.values())))
