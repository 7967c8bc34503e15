"""The sending end of a torchdist pair: its queue and the thread that works it off.

Every handle of a session is ended by this thread alone, so each ends once. A chunk that was
sent and not yet reported as placed may land until the peer says so, or is gone: for that
long a handle that ended otherwise is not quiesced. That is waited for, however long it
takes, and asked for over new connections; a session in this state takes no more jobs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import attrs

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import Completion, HandleStatus, PeerSession, RemoteLease
from pdcore.transports.check import plan_copies
from pdcore.transports.descriptor import EndpointDescriptor
from pdcore.transports.regions import RegionTable
from pdcore.transports.torchdist_channel import Channel, End, LinkOver, NobodyListens, dial
from pdcore.transports.torchdist_courier import Job, Limits, Line, Stop, start
from pdcore.transports.torchdist_group import Backend
from pdcore.transports.torchdist_hub import Ended, Hub
from pdcore.transports.torchdist_wire import (
    MAX_PAYLOAD_BYTES,
    Address,
    Hello,
    Kind,
    decode_address,
    decode_welcome,
)
from pdcore.transports.torchdist_witness import Witness, stamp
from pdcore.types import Incarnation

#: Transfers that may wait for one peer.
MAX_QUEUED: Final = 4096
#: A chunk in doubt: how long its answer is waited for before the peer is asked anew, over
#: another connection; each time twice as long, up to the second.
ASK_FIRST_S: Final = 0.5
ASK_AT_MOST_S: Final = 30.0
#: Part of ``close`` that peers have to say what became of their last chunk.
CONFIRM_SHARE: Final = 0.6


class Refused(TransportError):
    """Somebody answers there, and does not let us in."""


def open_channel(
    mine: Incarnation,
    descriptor: EndpointDescriptor,
    address: Address,
    timeout_s: float,
    *,
    number: int = 0,
    drops: int = 0,
) -> tuple[Channel, dict[int, int]]:
    """Dial, prove that we were given the descriptor, and learn the peer's regions.

    Raises PeerGone when nobody answers in time, Refused, TransportError. See Hello.
    """
    deadline = time.monotonic() + timeout_s
    channel = dial(address, timeout_s)
    try:
        hello = Hello(mine, descriptor.incarnation, address.token, stamp(), number, drops)
        channel.send(Kind.HELLO, hello.encode(), timeout_s=timeout_s)
        answer = channel.receive(None, deadline)
        if answer is None:
            raise PeerGone("the peer did not answer in time: stopped, or overloaded")
        kind, body = answer
        if kind is Kind.REFUSED:
            raise Refused(f"the peer refused: {body.decode(errors='replace')}")
        if kind is not Kind.WELCOME:
            raise TransportError(f"the peer answered {kind.name} instead of WELCOME")
        welcome = decode_welcome(body)
        channel.witness = Witness(welcome.stamp)
        if not descriptor.regions.items() <= welcome.regions.items():
            raise TransportError("stale descriptor: it names regions the peer does not have")
    except LinkOver as over:
        # Or the peer would take this end for our death, should the way to it have been cut.
        channel.farewell(Kind.DISCONNECT)
        channel.close()
        raise PeerGone(f"the peer closed the connection: {over.detail}") from None
    except OSError as error:
        channel.farewell(Kind.DISCONNECT)
        channel.close()
        raise TransportError(f"this process is at its limits: {error.strerror}") from error
    except TransportError as error:
        channel.farewell(Kind.DISCONNECT, str(error))
        channel.close()
        raise
    return channel, welcome.regions


def has_dropped(
    mine: Incarnation, descriptor: EndpointDescriptor, address: Address, session: int, wait_s: float
) -> bool:
    """Tell the peer, over a connection of its own, that our ``session`` is given up.
    True: nothing of that can land any more; False: nobody answered."""
    try:
        whatever = attrs.evolve(descriptor, regions={})
        channel, _ = open_channel(mine, whatever, address, wait_s, drops=session)
    except (Refused, NobodyListens):
        # That life is over, or it has no link of ours any more.
        return True
    except TransportError:
        return False
    channel.farewell(Kind.DISCONNECT)
    channel.close()
    return True


class Outgoing:
    """A session. The owner's thread submits and stops; ``sizes`` are the peer's regions in
    bytes, ``ask`` is has_dropped. Takes the channel over, unless this raises OSError or
    RuntimeError: no descriptor, or no thread, is left for it."""

    def __init__(
        self,
        channel: Channel,
        descriptor: EndpointDescriptor,
        sizes: dict[int, int],
        backend: Backend,
        hub: Hub,
        limits: Limits,
        ask: Callable[[], bool],
    ) -> None:
        self.incarnation = descriptor.incarnation
        self._ask = ask
        self.sizes = sizes
        self._hub = hub
        self._queue: deque[Job] = deque()
        #: Guards the queue, together with whether the link still takes jobs and may be rung.
        self._taking = threading.Lock()
        self._is_open = True
        self._farewell: Kind | None = None
        self._thread = threading.Thread(
            target=self._run, args=(backend, limits), name="pdcore-torchdist-out", daemon=True
        )
        with contextlib.ExitStack() as unless_made:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            unless_made.callback(os.close, self._wake)
            self._line = Line(channel, self._wake, limits.stall_timeout_s)
            self._thread.start()
            unless_made.pop_all()

    @property
    def is_in_doubt(self) -> bool:
        """A chunk may still land, and nobody can tell; once the thread has ended."""
        return self._line.is_in_doubt

    @property
    def is_open(self) -> bool:
        return self._is_open and self._farewell is None

    def submit(self, job: Job) -> None:
        """Raises PeerGone when the session is over, TransportError when too much waits."""
        with self._taking:
            if not self.is_open:
                raise PeerGone("the session is closed or its peer is gone: connect again")
            if len(self._queue) >= MAX_QUEUED:
                raise TransportError(
                    f"{MAX_QUEUED} transfers wait for this peer: stopped, or overloaded"
                )
            self._queue.append(job)
            os.eventfd_write(self._wake, 1)

    def stop(self, status: HandleStatus, why: str, farewell: Kind) -> None:
        """End every handle so, say ``farewell`` and end the thread; does not wait."""
        with self._taking:
            for job in self._queue:
                if job.stop is None:
                    job.stop = status, why
            if self._farewell is None:
                self._farewell = farewell
            self._line.is_leaving = True
            self._ring()

    def hurry(self) -> None:
        """Do not wait for the peer any more."""
        with self._taking:
            self._line.is_hurried = True
            self._ring()

    def join(self, timeout_s: float) -> bool:
        """True when nothing more comes of it."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """In a forked child, where the thread is not: close what is a copy."""
        if self._wake >= 0:
            self._line.channel.close()
            os.close(self._wake)
            self._wake = -1

    def _ring(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self, backend: Backend, limits: Limits) -> None:
        end, detail = End.DISCONNECTED, "its thread failed"
        try:
            backend.enter_thread()
            courier = start(self._line, backend, limits)
            while (job := self._next()) is not None:
                self._end(job, courier.carry(job))
            detail = "closed"
        except LinkOver as over:
            end, detail = over.end, over.detail
        except (TransportError, RuntimeError, OSError) as error:
            detail = str(error)
        finally:
            self._finish(end, detail)

    def _next(self) -> Job | None:
        """Wait for a job; None when there will be none. Raises LinkOver."""
        while True:
            with self._taking:
                if self._queue:
                    return self._queue[0]
                if self._farewell is not None:
                    return None
            self._line.idle()

    def _end(self, job: Job, stop: Stop) -> None:
        with self._taking:
            self._queue.popleft()
        self._hub.put(Ended(job.handle, stop[0], True, stop[1]))

    def _finish(self, end: End, detail: str) -> None:
        with self._taking:
            self._is_open = False
            jobs = list(self._queue)
        ends = [(job.handle, *(job.stop or (HandleStatus.FAILED, detail))) for job in jobs]
        is_doubtful = self._line.is_in_doubt
        for i, (handle, status, why) in enumerate(ends):
            self._hub.put(Ended(handle, status, i > 0 or not is_doubtful, why))
        if is_doubtful:
            over = self._settle()
            if over is not None:
                end, detail = over.end, over.detail
            if not self._line.is_in_doubt:
                handle, status, why = ends[0]
                self._hub.put(Ended(handle, status, True, why))
        self._line.channel.farewell(self._farewell or Kind.DISCONNECT, detail)
        with self._taking:
            self._line.channel.close()
            os.close(self._wake)
            self._wake = -1
        self._hub.ended(self.incarnation, end, detail)

    def _settle(self) -> LinkOver | None:
        """Wait for the end of the doubt, as long as it takes; how the connection ended, if it
        did. A connection that was cut, or lets nothing through, says nothing: so the peer is
        asked anew, but not by who closes."""
        over: LinkOver | None = None
        pause_s = ASK_FIRST_S
        while self.is_in_doubt and not self._line.is_hurried:
            until = time.monotonic() + pause_s
            if over is None:
                over = self._line.resolve(until)
            else:
                self._line.rest(until)
            if self._line.is_in_doubt and self._farewell is not Kind.BYE and self._ask():
                self._line.is_in_doubt = False
            pause_s = min(2 * pause_s, ASK_AT_MOST_S)
        return over


@attrs.define(eq=False)
class _Posted:
    link: Outgoing
    job: Job
    #: Local regions that are pinned for it.
    regions: tuple[int, ...]


class Sender:
    """Sessions and handles of one transport. Calls come from the owner's thread."""

    def __init__(
        self,
        incarnation: Incarnation,
        regions: RegionTable,
        hub: Hub,
        backend: Backend,
        limits: Limits,
    ) -> None:
        self._incarnation = incarnation
        self._regions = regions
        self._hub = hub
        self._backend = backend
        self._limits = limits
        self._ids = itertools.count(1)
        self._sessions: dict[int, Outgoing] = {}
        #: Every link whose thread may still be there, its session disconnected or not.
        self._links: list[Outgoing] = []
        self._posted: dict[int, _Posted] = {}

    def connect(self, descriptor: EndpointDescriptor) -> PeerSession:
        """Raises PeerGone, TransportError."""
        self._links = [link for link in self._links if not link.join(0.0)]
        address = decode_address(descriptor.blob)
        if address.backend != self._backend.name:
            raise TransportError(
                f"the peer's backend is {address.backend!r}, ours is {self._backend.name!r}: "
                "configure the same on both sides"
            )
        timeout_s = self._limits.connect_timeout_s
        mine, number = self._incarnation, next(self._ids)
        channel, sizes = open_channel(mine, descriptor, address, timeout_s, number=number)
        if not self._hub.opened(descriptor.incarnation):
            channel.farewell(Kind.DISCONNECT)
            channel.close()
            raise PeerGone("the peer's process is gone")
        ask = partial(has_dropped, mine, descriptor, address, number, timeout_s)
        try:
            link = Outgoing(channel, descriptor, sizes, self._backend, self._hub, self._limits, ask)
        except (OSError, RuntimeError) as error:
            channel.farewell(Kind.DISCONNECT)
            channel.close()
            self._hub.ended(descriptor.incarnation, End.DISCONNECTED, "")
            raise TransportError(f"this process is at its limits: {error}") from error
        self._links.append(link)
        session = PeerSession(number, descriptor.incarnation)
        self._sessions[session.session_id] = link
        return session

    def disconnect(self, session: PeerSession) -> None:
        link = self._sessions.pop(session.session_id, None)
        if link is not None:
            link.stop(HandleStatus.FAILED, "disconnected", Kind.DISCONNECT)

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
        plan = plan_copies(batches, self._regions.sizes, link.sizes, lease)
        regions = tuple(pair.local_region for pair in plan.pairs)
        arrays = {region: self._regions.arrays[region] for region in regions}
        job = Job(next(self._ids), lease.lease, plan, arrays, notify)
        link.submit(job)
        self._regions.pin(regions)
        self._posted[job.handle] = _Posted(link, job, regions)
        return job.handle

    def cancel(self, handle: int) -> None:
        posted = self._posted.get(handle)
        if posted is not None and posted.job.stop is None:
            posted.job.stop = HandleStatus.CANCELLED, "cancelled"

    def ended(self, end: Ended) -> Completion:
        """What a link's thread said of a handle; its regions are free when it is quiesced."""
        if end.quiesced:
            self._regions.unpin(self._posted.pop(end.handle).regions)
        return Completion(end.handle, end.status, end.quiesced, end.detail)

    def close(self, deadline: float) -> list[str]:
        """End every handle and say goodbye; what is left at ``deadline``. Peers have most
        of that time to say what became of the last chunk."""
        for link in self._links:
            link.stop(HandleStatus.CANCELLED, "closed", Kind.BYE)
        patience = time.monotonic() + CONFIRM_SHARE * (deadline - time.monotonic())
        left = []
        for link in self._links:
            if not link.join(patience - time.monotonic()):
                link.hurry()
        for link in self._links:
            if not link.join(deadline - time.monotonic()):
                left.append("a thread that sends")
            elif link.is_in_doubt:
                left.append("a chunk that the receiver has not confirmed")
        self._sessions.clear()
        return left

    def abandon(self) -> None:
        """In a forked child: close the descriptors that are copies of the parent's."""
        for link in self._links:
            link.abandon()
