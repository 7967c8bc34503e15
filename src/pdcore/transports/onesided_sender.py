"""The sending half of a transport over a vendor's engine: sessions, handles, their ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Final

import attrs

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import Completion, HandleStatus, PeerDied, PeerSession, RemoteLease
from pdcore.transports.check import plan_copies
from pdcore.transports.descriptor import EndpointDescriptor
from pdcore.transports.engines import Engine
from pdcore.transports.onesided_chunks import CHUNK_BYTES, base_of, cut, decode_welcome
from pdcore.transports.onesided_lane import Clock, Job, Lane, Surroundings
from pdcore.transports.onesided_side import SideChannel, SideOptions, check_notify
from pdcore.transports.regions import RegionTable

#: Part of ``close`` in which late bytes may land.
_LANDING_SHARE: Final = 0.6
#: Sessions to one life that are over and whose threads the vendor keeps; no more are opened.
MAX_LEAVING: Final = 64


@attrs.frozen(eq=False)
class _Session:
    session: PeerSession
    lane: Lane
    #: The peer's regions: where they begin, and their bytes.
    bases: dict[int, int]
    sizes: dict[int, int]


class Sender:
    """Calls come from the owner's thread."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        regions: RegionTable,
        side: SideChannel,
        options: SideOptions,
    ) -> None:
        self._regions = regions
        self._side = side
        self._connect_timeout_s = options.connect_timeout_s
        self._around = Surroundings(
            name,
            engine,
            Clock(options.stall_timeout_s, f"pdcore-{name}-clock"),
            side.inbox.put,
            side.notify,
            side.hang_up,
        )
        self._ids = itertools.count(1)
        self._sessions: dict[int, _Session] = {}
        #: Disconnected, but their threads may still be there.
        self._leaving: list[_Session] = []
        self._jobs: dict[int, Job] = {}

    def connect(self, descriptor: EndpointDescriptor) -> PeerSession:
        """Waits until the engine has met the peer's: what it says of one that has stopped since
        may take long. Raises PeerGone, TransportError."""
        self._reap()
        over = [s for s in self._leaving if s.session.incarnation == descriptor.incarnation]
        if len(over) >= MAX_LEAVING:
            raise PeerGone(
                f"the peer's engine cannot be reached: {len(over)} earlier sessions are still in "
                "calls of it, or wait for their bytes to land"
            )
        deadline = time.monotonic() + self._connect_timeout_s
        session, link = self._side.connect(attrs.evolve(descriptor, transport="socket"))
        try:
            welcome = decode_welcome(link.welcome.extra, link.welcome.regions)
            lane = Lane(self._around, link, welcome.address)
        except TransportError:
            self._side.disconnect(session)
            raise
        except RuntimeError as error:
            self._side.disconnect(session)
            raise TransportError(f"this process is at its limits: {error}") from error
        found = _Session(session, lane, welcome.bases, link.welcome.regions)
        if not lane.met.wait(max(0.0, deadline - time.monotonic())) or lane.why is not None:
            why = lane.why or "it did not answer in time: stopped, or overloaded"
            lane.stop(HandleStatus.FAILED, why)
            self._leaving.append(found)
            raise PeerGone(f"the peer's engine cannot be reached: {why}")
        self._sessions[session.session_id] = found
        return session

    def disconnect(self, session: PeerSession) -> None:
        found = self._sessions.pop(session.session_id, None)
        if found is not None:
            found.lane.stop(HandleStatus.FAILED, "disconnected")
            self._leaving.append(found)
        self._reap()

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None,
    ) -> int:
        """Raises PeerGone, TransportError."""
        found = self._sessions.get(session.session_id)
        if found is None:
            raise PeerGone("the session is closed or its peer is gone: connect again")
        check_notify(notify)
        plan = plan_copies(batches, self._regions.sizes, found.sizes, lease)
        local = {pair.local_region for pair in plan.pairs}
        limits = self._around.engine.limits
        chunks = cut(
            plan,
            {region: base_of(self._regions.arrays[region]) for region in local},
            found.bases,
            limits.max_batch,
            min(limits.max_bytes, CHUNK_BYTES),
        )
        job = Job(next(self._ids), lease.lease, chunks, notify, tuple(local))
        self._regions.pin(job.local_regions)
        self._jobs[job.handle] = job
        try:
            found.lane.submit(job)
        except TransportError:
            self._forget(job.handle)
            raise
        return job.handle

    def cancel(self, handle: int) -> None:
        job = self._jobs.get(handle)
        if job is not None and job.stop is None:
            job.stop = HandleStatus.CANCELLED, "cancelled"

    def ended(self, event: Completion) -> None:
        """A lane said so; the sources are let go with the quiesced mark."""
        if event.quiesced:
            self._forget(event.handle)

    def lost(self, event: PeerDied) -> None:
        """Its sessions are over; nothing that is on its way to it matters."""
        for found in [*self._sessions.values(), *self._leaving]:
            if found.session.incarnation == event.incarnation:
                found.lane.peer_is_gone(event.detail)
                if self._sessions.pop(found.session.session_id, None) is not None:
                    self._leaving.append(found)
        self._reap()

    def close(self, deadline: float) -> tuple[list[str], bool]:
        """End every handle; what is left at ``deadline`` (monotonic), and whether a thread is
        still inside a call of the engine."""
        self._leaving += self._sessions.values()
        self._sessions.clear()
        lanes = [found.lane for found in self._leaving]
        for lane in lanes:
            lane.stop(HandleStatus.CANCELLED, "closed", is_last=True)
        patience = time.monotonic() + _LANDING_SHARE * (deadline - time.monotonic())
        for lane in lanes:
            if not lane.join(patience - time.monotonic()):
                lane.hurry()
        stuck = [lane for lane in lanes if not lane.join(deadline - time.monotonic())]
        left = ["a thread inside a call of the vendor's engine"] * len(stuck)
        doubtful = [lane for lane in lanes if lane not in stuck and lane.is_in_doubt]
        left += ["a write that may still land"] * len(doubtful)
        self._around.clock.close()
        return left, bool(stuck)

    def _reap(self) -> None:
        """Let go of sessions whose threads have ended."""
        kept = []
        for found in self._leaving:
            if found.lane.join(0.0):
                self._side.disconnect(found.session)
            else:
                kept.append(found)
        self._leaving = kept

    def _forget(self, handle: int) -> None:
        self._regions.unpin(self._jobs.pop(handle).local_regions)
