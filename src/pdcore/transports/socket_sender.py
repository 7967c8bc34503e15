"""The owner's side of sending: sessions, handles, and their ends."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Sequence

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import Completion, HandleStatus, PeerSession, RemoteLease
from pdcore.transports.check import plan_copies
from pdcore.transports.descriptor import EndpointDescriptor
from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_address import Address, Origin, decode_home, dial, reachable
from pdcore.transports.socket_greeting import Identity, greet
from pdcore.transports.socket_links import Link, Told
from pdcore.transports.socket_loop import Loop
from pdcore.transports.socket_outgoing import MAX_JOBS, Ended, Job, Outgoing, write_frames
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_wire import FROM_RECEIVER, MAX_PAYLOAD_BYTES, Welcome
from pdcore.transports.socket_witness import open_proof
from pdcore.types import Incarnation


class Sender:
    """Calls come from the owner's thread."""

    def __init__(
        self,
        me: Identity,
        here: Origin,
        regions: RegionTable,
        loop: Loop,
        connect_timeout_s: float,
    ) -> None:
        self._me = me
        self._here = here
        self._regions = regions
        self._loop = loop
        self._connect_timeout_s = connect_timeout_s
        self._sessions: dict[int, Link] = {}
        self._jobs: dict[int, Job] = {}
        self._ids = itertools.count(1)

    def connect(self, descriptor: EndpointDescriptor) -> PeerSession:
        """Raises PeerGone, TransportError."""
        deadline = time.monotonic() + self._connect_timeout_s
        target = descriptor.incarnation
        home = decode_home(target, descriptor.blob)
        number = next(self._ids)
        oldest = self._oldest(target, number)
        *others, last = reachable(home, self._here)
        for address in others:
            # Whatever keeps us out there (another user's AF_UNIX) may not elsewhere.
            with contextlib.suppress(TransportError):
                opened = self._open(address, descriptor, (number, oldest), deadline)
                break
        else:
            opened = self._open(last, descriptor, (number, oldest), deadline)
        sock, welcome = opened
        try:
            pidfd = open_proof(self._here, home.origin)
        except TransportError:
            sock.close()
            raise
        sock.setblocking(False)
        reader = FrameReader(FROM_RECEIVER)
        link = Link(sock, Outgoing(), reader, target, home, number, welcome)
        self._loop.adopt(link, pidfd, oldest)
        self._sessions[number] = link
        return PeerSession(number, target)

    def _open(
        self,
        address: Address,
        descriptor: EndpointDescriptor,
        numbers: tuple[int, int],
        deadline: float,
    ) -> tuple[socket.socket, Welcome]:
        sock = dial(address, deadline)
        try:
            welcome = greet(sock, self._me, descriptor.incarnation, numbers, deadline)
            if not descriptor.regions.items() <= welcome.regions.items():
                raise TransportError("stale descriptor: it names regions the peer does not have")
        except TransportError:
            sock.close()
            raise
        return sock, welcome

    def link_of(self, session: PeerSession) -> Link:
        """Of a session that is not disconnected."""
        return self._sessions[session.session_id]

    def disconnect(self, session: PeerSession) -> None:
        link = self._sessions.pop(session.session_id, None)
        if link is not None:
            self._loop.disconnect(link)

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None,
    ) -> int:
        """Raises PeerGone, TransportError."""
        link = self._sessions.get(session.session_id)
        if link is None or not link.is_open:
            raise PeerGone("the session is closed or its peer is gone: connect again")
        if notify is not None and len(notify) > MAX_PAYLOAD_BYTES:
            raise TransportError(f"notify has {len(notify)} bytes, at most {MAX_PAYLOAD_BYTES}")
        if isinstance(link.half, Outgoing) and link.half.num_waiting >= MAX_JOBS:
            raise TransportError(
                f"{MAX_JOBS} transfers wait for the peer: it is stopped, or overloaded"
            )
        plan = plan_copies(batches, self._regions.sizes, link.welcome.regions, lease)
        handle = next(self._ids)
        frames = write_frames(handle, lease.lease, plan, self._regions.arrays)
        local = tuple(pair.local_region for pair in plan.pairs)
        job = Job(handle, lease.lease, frames, notify, local)
        self._regions.pin(local)
        self._jobs[handle] = job
        self._loop.submit(link, job)
        return handle

    def cancel(self, handle: int) -> None:
        job = self._jobs.get(handle)
        if job is not None and job.stop is None:
            job.stop = HandleStatus.CANCELLED, "cancelled"

    def ended(self, ended: Ended) -> Completion:
        """The transport's thread says so; the sources are let go with the quiesced mark."""
        job = ended.job
        if ended.quiesced:
            del self._jobs[job.handle]
            self._regions.unpin(job.local_regions)
        return Completion(job.handle, ended.status, ended.quiesced, ended.detail)

    def close(self) -> None:
        self._sessions.clear()

    def unsettled(self, told: Sequence[Told]) -> list[str]:
        """Handles that have no quiesced mark, also not among what the owner has yet to take;
        for people."""
        quiesced = {one.job.handle for one in told if isinstance(one, Ended) and one.quiesced}
        return [f"handle {handle}: may still land" for handle in self._jobs.keys() - quiesced]

    def _oldest(self, target: Incarnation, number: int) -> int:
        """The number of our oldest session to that life which is in use."""
        live = [n for n, link in self._sessions.items() if link.is_open]
        return min([n for n in live if self._sessions[n].incarnation == target] + [number])
