"""Loopback: the reference transport, inside one process, deterministic.

Not a mock: it moves the bytes and passes the same conformance suite as every other
transport. What a test wants to see happen it does through :class:`LoopbackFabric`:
single steps in any order, and faults. Three kinds of revocation can be chosen, so that
code above can be tested against each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import (
    DeviceBuffer,
    HandleStatus,
    PeerSession,
    Region,
    RemoteLease,
    Revocation,
    TransportCaps,
    TransportEvent,
)
from pdcore.transports.check import plan_copies
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.doorbell import Doorbell
from pdcore.transports.loopback_fabric import Endpoint, Job, Link, LoopbackFabric, new_job
from pdcore.transports.registry import TransportPlugin
from pdcore.transports.shm_segment import FEWER_BLOCKS
from pdcore.types import Incarnation, LeaseId

NAME = "loopback"
#: Stands for the engine time-out of a vendor whose writes nobody can call back.
QUARANTINE_S = 30.0

#: Transports created by name share this one.
_default_fabric = LoopbackFabric()


def loopback_caps(revocation: Revocation) -> TransportCaps:
    quarantined = revocation is Revocation.QUARANTINE
    return TransportCaps(
        one_sided=revocation is not Revocation.RECEIVER_ENFORCED,
        native_notify=True,
        revocation=revocation,
        submit_blocks=False,
        max_batch=1 << 20,
        alignment=1,
        detects_peer_death=True,
        death_fences=not quarantined,
        quarantine_s=QUARANTINE_S if quarantined else 0.0,
    )


class LoopbackTransport:
    """See :class:`pdcore.transports.base.Transport`. Peers must share the fabric.

    ``address`` lets a restarted peer take over a place, as a port would; empty means
    one of its own.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        fabric: LoopbackFabric | None = None,
        *,
        revocation: Revocation = Revocation.SENDER_ACK,
        address: str = "",
    ) -> None:
        self.name = NAME
        self.caps = loopback_caps(revocation)
        self.incarnation = incarnation
        self.fabric = _default_fabric if fabric is None else fabric
        self._endpoint = self.fabric.attach(incarnation, self.caps, address)
        self._ids = itertools.count(1)
        self._links: dict[int, Link] = {}
        self._jobs: dict[int, Job] = {}

    def allocate(self, size_bytes: int) -> Region:
        _check_open(self._endpoint)
        if size_bytes <= 0:
            raise TransportError(f"size_bytes must be positive, got {size_bytes}")
        try:
            memory = bytearray(size_bytes)
        except (MemoryError, OverflowError):
            raise TransportError(
                f"not enough memory for {size_bytes} bytes; {FEWER_BLOCKS}"
            ) from None
        return self._endpoint.regions.add(memoryview(memory), target=True)

    def register(self, buffer: memoryview | DeviceBuffer) -> Region:
        return self._endpoint.regions.add(buffer, target=not buffer.readonly)

    def deregister(self, region: Region) -> None:
        with self.fabric.lock:
            self._endpoint.regions.remove(region)

    def descriptor(self) -> bytes:
        endpoint = self._endpoint
        regions = endpoint.regions.targets()
        blob = endpoint.address.encode()
        return EndpointDescriptor(NAME, self.incarnation, regions, blob).encode()

    def connect(self, descriptor: bytes) -> PeerSession:
        found = decode(descriptor, NAME)
        with self.fabric.lock:
            _check_open(self._endpoint)
            address = found.blob.decode(errors="replace")
            link = self.fabric.connect(self._endpoint, address, found.incarnation)
            if not found.regions.items() <= link.receiver.regions.targets().items():
                self.fabric.close_link(link, "refused")
                raise TransportError("stale descriptor: it names regions the peer does not have")
            session = PeerSession(next(self._ids), found.incarnation)
            self._links[session.session_id] = link
            return session

    def disconnect(self, session: PeerSession) -> None:
        with self.fabric.lock:
            link = self._links.pop(session.session_id, None)
            if link is not None:
                self.fabric.close_link(link, "disconnected")

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        with self.fabric.lock:
            _check_open(self._endpoint)
            link = self._links.get(session.session_id)
            if link is None or not link.open:
                raise PeerGone("the session is closed or its peer is gone: connect again")
            regions, remote = self._endpoint.regions, link.receiver.regions
            plan = plan_copies(batches, regions.sizes, remote.targets(), lease)
            job = new_job(
                link,
                next(self._ids),
                [
                    WriteBatch(b.local_region, b.remote_region, b.descriptors.copy())
                    for b in batches
                ],
                plan,
                lease.lease,
                notify,
                self.fabric.chunk_bytes,
            )
            link.jobs.append(job)
            self._jobs[job.handle] = job
            if self._endpoint.bell is not None and not self.fabric.stepped:
                self._endpoint.bell.ring()
            return job.handle

    def cancel(self, handle: int) -> None:
        with self.fabric.lock:
            job = self._jobs.get(handle)
            if job is not None and job.status is None:
                self.fabric.end(job, HandleStatus.CANCELLED, "cancelled")

    def grant(self, lease: RemoteLease) -> None:
        with self.fabric.lock:
            self._endpoint.regions.grant(lease)

    def revoke(self, lease: LeaseId) -> bool:
        with self.fabric.lock:
            self._endpoint.regions.revoke(lease)
        return self.caps.revocation is Revocation.RECEIVER_ENFORCED

    def release(self, lease: LeaseId) -> None:
        with self.fabric.lock:
            self._endpoint.regions.release(lease)

    def poll(self) -> list[TransportEvent]:
        endpoint = self._endpoint
        with self.fabric.lock:
            if endpoint.bell is not None:
                endpoint.bell.clear()
            if not self.fabric.stepped:
                self.fabric.run()
            events, endpoint.events = endpoint.events, []
            if events and self._jobs:  # the end of each job is an event
                self._jobs = {h: j for h, j in self._jobs.items() if j.status is None}
            return events

    def fileno(self) -> int | None:
        """A bell for waiting loops, made on first use; None once closed."""
        endpoint = self._endpoint
        with self.fabric.lock:
            if endpoint.bell is None and endpoint.alive:
                endpoint.bell = Doorbell()
                endpoint.bell.ring()
            return None if endpoint.bell is None else endpoint.bell.fileno()

    def close(self, timeout_s: float = 5.0) -> list[str]:
        endpoint = self._endpoint
        with self.fabric.lock:
            left: list[str] = []
            if endpoint.alive:
                for link in self._links.values():
                    for job in list(link.jobs):
                        self.fabric.end(job, HandleStatus.CANCELLED, "closed")
                if not self.fabric.stepped:
                    self.fabric.run()
                left = self.fabric.late_writes(endpoint)
                self.fabric.die(self.incarnation, late=bool(left), detail="closed")
            if endpoint.bell is not None:
                endpoint.bell.close()
                endpoint.bell = None
            return left


def _check_open(endpoint: Endpoint) -> None:
    if not endpoint.alive:
        raise TransportError("this transport is closed")


PLUGIN = TransportPlugin(
    create=LoopbackTransport,
    why_unavailable=lambda: None,
    caps=loopback_caps(Revocation.SENDER_ACK),
    variants={kind.value: {"revocation": kind} for kind in Revocation},
)
