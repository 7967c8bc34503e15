"""The wires between the loopback transports of one process, and their faults.

Everything that can happen to a transfer is one *action*: move one chunk, land one chunk
of a write that outlived its handle, deliver one notification. ``step`` does one action
of the caller's choice, so that a test decides the order; ``run`` does them all.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import attrs

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import (
    Completion,
    HandleStatus,
    Notification,
    PeerDied,
    Revocation,
    TransportCaps,
    TransportEvent,
)
from pdcore.transports.check import CopyPlan, plan_copies
from pdcore.transports.copy import copy_steps, written_byte
from pdcore.transports.doorbell import Doorbell
from pdcore.transports.regions import RegionTable
from pdcore.types import Incarnation, LeaseId


@attrs.define
class Faults:
    """What goes wrong with the transfers one endpoint sends; set the fields in a test."""

    #: Moves (stepped) or polls that pass without progress.
    delay: int = 0
    #: No progress at all while True: a stopped process.
    stopped: bool = False
    #: The next transfer fails after so many chunks.
    fail_after_chunks: int | None = None
    #: So many notifications are lost.
    drop_notifications: int = 0
    #: One byte of the next transfer that has any arrives inverted: this one of them (modulo).
    corrupt_next: bool = False
    corrupt_byte: int = -1
    #: Writes outlive cancel, failure and, with ``die``, their process.
    late_landing: bool = False


@attrs.define(eq=False)
class Endpoint:
    """One transport as the fabric sees it."""

    incarnation: Incarnation
    address: str
    caps: TransportCaps
    regions: RegionTable = attrs.field(factory=RegionTable)
    faults: Faults = attrs.field(factory=Faults)
    events: list[TransportEvent] = attrs.field(factory=list, repr=False)
    #: Whoever connected to us or we to them: they hear of our death.
    peers: list[Endpoint] = attrs.field(factory=list, repr=False)
    bell: Doorbell | None = attrs.field(default=None, repr=False)
    alive: bool = True

    def push(self, event: TransportEvent) -> None:
        if self.alive:
            self.events.append(event)
            if self.bell is not None:
                self.bell.ring()


@attrs.define(eq=False)
class Job:
    """One handle and what is left of its copies."""

    handle: int
    link: Link = attrs.field(repr=False)
    plan: CopyPlan = attrs.field(repr=False)
    steps: Iterator[int] = attrs.field(repr=False)
    batches: list[WriteBatch] = attrs.field(repr=False)
    lease: LeaseId
    notify: bytes | None
    chunks: int = 0
    status: HandleStatus | None = None
    detail: str = ""


@attrs.define(eq=False)
class Link:
    """One session: transfers run first in, first out, and so do their notifications."""

    sender: Endpoint
    receiver: Endpoint
    jobs: deque[Job] = attrs.field(factory=deque)
    outbox: deque[tuple[LeaseId, bytes]] = attrs.field(factory=deque)
    open: bool = True

    def movable(self) -> bool:
        if not self.jobs or self.sender.faults.stopped:
            return False
        enforced = self.sender.caps.revocation is Revocation.RECEIVER_ENFORCED
        return not (enforced and self.receiver.faults.stopped)


class Action(NamedTuple):
    """``kind`` is move, deliver or land; ``handle`` is 0 for deliver."""

    kind: str
    sender: Incarnation
    receiver: Incarnation
    handle: int


#: An action, and the link or the late write that it moves.
Choice = tuple[Action, Link | Job]


class LoopbackFabric:
    """Shared by the transports it connects; calls are serialised by one lock.

    ``stepped``: nothing moves by itself, call :meth:`step`. Otherwise every ``poll``
    of any transport moves everything (late writes land one poll later).
    """

    def __init__(self, *, stepped: bool = False, chunk_bytes: int = 64 * 1024) -> None:
        self.lock = threading.RLock()
        self.stepped = stepped
        self.chunk_bytes = chunk_bytes
        self._endpoints: dict[str, Endpoint] = {}
        self._links: list[Link] = []
        self._late: list[Job] = []
        self._names = itertools.count(1)

    def attach(self, incarnation: Incarnation, caps: TransportCaps, address: str) -> Endpoint:
        """Raises TransportError while another live endpoint has this address."""
        with self.lock:
            address = address or f"loopback-{next(self._names)}"
            if address in self._endpoints:
                raise TransportError(f"loopback address {address!r} is in use")
            endpoint = Endpoint(incarnation, address, caps)
            endpoint.faults.late_landing = caps.revocation is Revocation.QUARANTINE
            self._endpoints[address] = endpoint
            return endpoint

    def connect(self, sender: Endpoint, address: str, incarnation: Incarnation) -> Link:
        receiver = self._endpoints.get(address)
        if receiver is None:
            raise PeerGone(f"nobody answers at loopback address {address!r}")
        if receiver.incarnation != incarnation:
            raise TransportError(
                f"stale descriptor: {address!r} is incarnation {receiver.incarnation.hex()} now, "
                f"the descriptor names {incarnation.hex()}"
            )
        link = Link(sender, receiver)
        self._links.append(link)
        for one, other in ((sender, receiver), (receiver, sender)):
            if all(peer is not other for peer in one.peers):
                one.peers.append(other)
        return link

    def faults(self, incarnation: Incarnation) -> Faults:
        """Raises KeyError for an incarnation that is not attached."""
        return _find(self._endpoints, incarnation).faults

    def pending(self) -> list[Action]:
        """What could happen next; the index of an entry is the argument of ``step``."""
        with self.lock:
            return [action for action, _ in self.choices()]

    def step(self, choice: int = 0) -> Action | None:
        """Do one pending action (``choice`` modulo their number); None: there is none."""
        with self.lock:
            choices = self.choices()
            return self.do(choices[choice % len(choices)]) if choices else None

    def do(self, choice: Choice) -> Action:
        """Do one of :meth:`choices`, before anything else has happened."""
        action, subject = choice
        with self.lock:
            if isinstance(subject, Job):
                self._land(subject)
            elif action.kind == "deliver":
                _deliver(subject)
            elif subject.sender.faults.delay:
                subject.sender.faults.delay -= 1
            else:
                self._move(subject)
            return action

    def run(self) -> None:
        """Do everything that is pending, late writes of earlier calls included."""
        with self.lock:
            for job in list(self._late):
                while job in self._late:
                    self._land(job)
            delayed = [e for e in self._endpoints.values() if e.faults.delay]
            for link in list(self._links):
                while link.movable() and link.sender not in delayed:
                    self._move(link)
                while link.outbox:
                    _deliver(link)
            for endpoint in delayed:
                endpoint.faults.delay -= 1

    def late_writes(self, sender: Endpoint) -> list[str]:
        """What of this endpoint still lands although its handles ended."""
        with self.lock:
            return [f"handle {j.handle}: late" for j in self._late if j.link.sender is sender]

    def die(
        self,
        incarnation: Incarnation,
        *,
        late: bool = False,
        behind_writes: bool = False,
        detail: str = "killed",
    ) -> None:
        """End an endpoint as SIGKILL would. ``late``: what it had posted still lands; peers learn
        of a death, and of its fence behind the last byte; ``behind_writes``: of both there."""
        with self.lock:
            dead = _find(self._endpoints, incarnation)
            dead.alive = False
            del self._endpoints[dead.address]
            mine = [link for link in self._links if link.sender is dead]
            posted = [job for job in self._late if job.link.sender is dead]
            posted += [job for link in mine for job in link.jobs]
            self._links = [link for link in self._links if link.sender is not dead]
            self._late = [job for job in self._late if job.link.sender is not dead]
            if late:
                self._late += posted
            else:
                for job in posted:
                    _unpin(job)
            for link in [k for k in self._links if k.receiver is dead]:
                self.close_link(link, "the peer is gone")
            for peer in dead.peers:
                # Fenced for whom nothing is on its way: to him nothing of this life comes.
                is_awaited = late and any(job.link.receiver is peer for job in posted)
                fenced = dead.caps.death_fences and not is_awaited
                if fenced or not behind_writes or not dead.caps.death_fences:
                    peer.push(PeerDied(incarnation, fenced, detail))
                peer.peers = [other for other in peer.peers if other is not dead]

    def close_link(self, link: Link, why: str) -> None:
        link.open = False
        for job in list(link.jobs):
            self.end(job, HandleStatus.FAILED, why)
        if link in self._links:
            self._links.remove(link)

    def end(self, job: Job, status: HandleStatus, detail: str) -> None:
        """Report a terminal status; with late landing the rest of the bytes follow."""
        link = job.link
        link.jobs.remove(job)
        job.status, job.detail = status, detail
        late = link.sender.faults.late_landing and status is not HandleStatus.DONE
        link.sender.push(Completion(job.handle, status, quiesced=not late, detail=detail))
        if late:
            self._late.append(job)
        else:
            _unpin(job)

    def choices(self) -> list[Choice]:
        """What could happen next, as :meth:`pending` has it, each with what it happens to."""
        found: list[Choice] = []
        for link in self._links:
            if not link.jobs and not link.outbox:
                continue
            ends = link.sender.incarnation, link.receiver.incarnation
            if link.movable():
                found.append((Action("move", *ends, link.jobs[0].handle), link))
            if link.outbox:
                found.append((Action("deliver", *ends, 0), link))
        for job in self._late:
            ends = job.link.sender.incarnation, job.link.receiver.incarnation
            found.append((Action("land", *ends, job.handle), job))
        return found

    def _move(self, link: Link) -> None:
        job, faults = link.jobs[0], link.sender.faults
        refusal = _refusal(job)
        if refusal:
            self.end(job, HandleStatus.FAILED, refusal)
        elif faults.fail_after_chunks is not None and job.chunks >= faults.fail_after_chunks:
            faults.fail_after_chunks = None
            self.end(job, HandleStatus.FAILED, "injected failure")
        elif next(job.steps, None) is None:
            if faults.corrupt_next and job.plan.pairs:
                faults.corrupt_next = False
                _corrupt(job, faults.corrupt_byte)
            if job.notify is not None:
                link.outbox.append((job.lease, job.notify))
            self.end(job, HandleStatus.DONE, "")
        else:
            job.chunks += 1

    def _land(self, job: Job) -> None:
        if not _refusal(job) and next(job.steps, None) is not None:
            job.chunks += 1
            return
        self._late.remove(job)
        _unpin(job)
        sender, receiver = job.link.sender, job.link.receiver
        if job.status is not None:
            sender.push(Completion(job.handle, job.status, quiesced=True, detail=job.detail))
        more = any(
            other.link.sender is sender and other.link.receiver is receiver for other in self._late
        )
        if not sender.alive and not more and sender.caps.death_fences:
            receiver.push(PeerDied(sender.incarnation, fenced=True, detail="last write landed"))


def _find(endpoints: dict[str, Endpoint], incarnation: Incarnation) -> Endpoint:
    for endpoint in endpoints.values():
        if endpoint.incarnation == incarnation:
            return endpoint
    raise KeyError(incarnation.hex())


def new_job(
    link: Link,
    handle: int,
    batches: list[WriteBatch],
    plan: CopyPlan,
    lease: LeaseId,
    notify: bytes | None,
    chunk_bytes: int,
) -> Job:
    sender, receiver = link.sender.regions, link.receiver.regions
    steps = copy_steps(plan, dict(sender.arrays), dict(receiver.arrays), chunk_bytes)
    job = Job(handle, link, plan, steps, batches, lease, notify)
    sender.pin(pair.local_region for pair in plan.pairs)
    receiver.pin(pair.remote_region for pair in plan.pairs)
    return job


def _deliver(link: Link) -> None:
    lease, payload = link.outbox.popleft()
    if link.sender.faults.drop_notifications:
        link.sender.faults.drop_notifications -= 1
    elif link.receiver.regions.granted(lease) is not None:
        link.receiver.push(Notification(link.sender.incarnation, payload))


def _unpin(job: Job) -> None:
    job.link.sender.regions.unpin(pair.local_region for pair in job.plan.pairs)
    job.link.receiver.regions.unpin(pair.remote_region for pair in job.plan.pairs)


def _refusal(job: Job) -> str:
    """Why the receiver would not place the next chunk (RECEIVER_ENFORCED), or ""."""
    link = job.link
    if link.sender.caps.revocation is not Revocation.RECEIVER_ENFORCED:
        return ""
    lease = link.receiver.regions.granted(job.lease)
    if lease is None:
        return "the receiver holds no such lease (any more)"
    if job.chunks == 0:
        # The receiver trusts its own table, not the lease the sender named.
        try:
            sizes = link.sender.regions.sizes, link.receiver.regions.targets()
            plan_copies(job.batches, *sizes, lease)
        except TransportError as error:
            return str(error)
    return ""


def _corrupt(job: Job, index: int) -> None:
    region, offset = written_byte(job.plan, index)
    job.link.receiver.regions.arrays[region][offset] ^= 0xFF
