"""DecodeCore: the decode queues of one rank, without I/O, clock or threads.

A request passes through
  preallocation queue   receiver in Bootstrapping (``pending``: topology not known) or in
                        WaitingForInput: waiting for blocks and a metadata slot. Whoever
                        does not fit is skipped, not waited for (R69, R70);
  transfer queue        lease published, KV on the way;
  running               decoding; retracted sequences give up their blocks and come back
                        by re-prefilling here, into fresh blocks (R72, D8).

Drive it like :class:`pdcore.scheduler.prefill.PrefillCore`. Not thread-safe.
"""

from __future__ import annotations

import itertools

import msgspec

from pdcore.errors import failure
from pdcore.fsm.commit import commit_receiver
from pdcore.fsm.effects import Effect, ReportAccepted
from pdcore.fsm.events import (
    BlocksVerified,
    Event,
    LeaseRevoked,
    MessageReceived,
    PeerLost,
    StepCompleted,
    TopologyFetched,
    VotesReduced,
)
from pdcore.fsm.states import ReceiverState as S
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.decode_rooms import DecodeInbox, DecodeRooms
from pdcore.scheduler.peers import drop_silent, give_up
from pdcore.scheduler.prealloc import Preallocation
from pdcore.scheduler.queues import finish_reason_of, ledger_totals, refusal
from pdcore.scheduler.running import Running
from pdcore.scheduler.setup import CoreSetup
from pdcore.types import Batch, Failure, GenerateRequest, LeaseId, PeerRef, RoomKey


class DecodeSnapshot(msgspec.Struct, frozen=True):
    """Queue lengths, for metrics and the step log (R73)."""

    pending: int
    prealloc: int
    transfer: int
    draining: int
    #: Of these, the ones whose peer has not acknowledged for ``drain_timeout_s`` (rule 6).
    stuck: int
    running: int
    num_ignored: int
    is_diverged: bool
    kv_free: int
    kv_held: int
    kv_leased: int
    kv_quarantined: int
    kv_usage: str


class DecodeCore:
    """See the module. Raises only for the caller's own mistakes."""

    def __init__(self, setup: CoreSetup, blocks: KVBlocks) -> None:
        self.setup = setup
        self.blocks = blocks
        self.rooms = DecodeRooms(setup, blocks)
        self.inbox = DecodeInbox(self.rooms)
        self.prealloc = Preallocation(self.rooms)
        self.running = Running(self.rooms)
        self._ids = itertools.count(1)

    # --- in -----------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, now: float) -> None:
        """Queue one request. Raises RoomInUse or Overloaded; a prompt that can never run
        is refused with its one result."""
        self.rooms.check_new(request, now)
        reason = refusal(request, self.setup, self.blocks, new_tokens=1)
        if reason is None and not request.bootstrap and not request.is_local:
            reason = failure("invalid_request", "bootstrap: the request names no prefill instance")
        if reason is not None:
            self.rooms.refuse(request, reason, now)
            return
        if request.replaces is not None:
            gone = failure("cancelled", "replaced by a new attempt")
            self.abort(RoomKey(request.key.room, request.replaces), gone, now)
        lease = LeaseId(self.setup.me.incarnation, next(self._ids))
        record = DecodeRecord(request, lease, next(self._ids), now, self.setup.quarantine_s)
        self.rooms.add(record)
        self.rooms.out.append(ReportAccepted(request.key))
        if request.is_local:
            self.running.prefill_here(record)
            return
        self.rooms.arm_heartbeat(now)
        self.prealloc.add(record, now)

    def abort(
        self, key: RoomKey, reason: Failure, now: float, *, unless_received: bool = False
    ) -> bool:
        """End this dispatch; False when unknown, over, or (``unless_received``) when its KV
        is here already: then decode decides (architecture, section 10)."""
        record = self.rooms.records.get(key)
        if record is None or record.is_reported:
            return False
        if record.receiver.state is S.DONE:
            if unless_received:
                return False
            self.running.stop(record, finish_reason_of(reason), reason, now)
            return True
        effects = record.receiver.failed_locally(reason)
        self.rooms.emit(record, effects, now)
        return effects is not None

    def handle_event(self, event: Event, now: float) -> None:
        """Feed one event. Total: an event about nothing known is counted, never an error."""
        # In the order of how often they come, and not by match, which builds objects for each.
        if isinstance(event, VotesReduced):
            if event.failures:
                for record, why in self.rooms.failures_of(event):
                    self.rooms.emit(record, record.receiver.failed_locally(why), now)
            for record, outcome in self.rooms.end_tick(event):
                self._commit(record, outcome, now)
        elif isinstance(event, MessageReceived):
            self.inbox.receive(event, now)
        elif isinstance(event, StepCompleted):
            self.running.complete(event, now)
        elif isinstance(event, BlocksVerified):
            self.inbox.verified(event, now)
        elif isinstance(event, TopologyFetched):
            self.prealloc.record(event, now)
            evicted, topologies = self.prealloc.topologies.evicted, self.prealloc.topologies
            topologies.evicted = []
            for incarnation in evicted:
                self.inbox.evict(incarnation, "another process has its place", now)
        elif isinstance(event, PeerLost):
            gone = PeerRef("", 0, event.incarnation, "")
            self.inbox.lose_peer(gone, event.detail, event.fenced, now)
        elif isinstance(event, LeaseRevoked):
            self.inbox.revoke(event, now)
        else:
            self.inbox.num_ignored += 1
        while self.inbox.restarted:
            # At once: the next request must not be sent to a process that is gone.
            self.prealloc.topologies.end(self.inbox.restarted.pop(0))
        if self.rooms.shed:
            self.inbox.shed(now)

    def handle_timeout(self, now: float) -> None:
        """Deadlines, resends, drains and route retries that are due at ``now``."""
        for kind, key in self.rooms.timers.pop_due(now):
            if not isinstance(key, RoomKey):
                self._handle_common_timer(kind, str(key), now)
                continue
            record = self.rooms.records.get(key)
            if record is None:
                continue
            receiver = record.receiver
            if kind == "deadline":
                late = record.overdue(now)
                if receiver.state is S.DONE:
                    self.running.stop(record, finish_reason_of(late), late, now)
                else:
                    for peer in record.failing(now, self.setup.limits.silence_s):
                        self.rooms.peer_failed(peer, "a handshake went unanswered", now)
                    self.rooms.emit(record, receiver.deadline_expired(late), now)
            elif kind == "resend":
                self.rooms.resend(record, now)
            elif kind == "drain":
                # Nobody is to blame for a period that runs.
                record.is_stuck = bool(record.awaited())
                self.rooms.emit(record, receiver.drain_expired(), now)
                self.rooms.timers.arm("drain", key, now + self.setup.drain_timeout_s)
            elif kind == "arrival":
                limits = self.setup.limits
                if (why := record.lost_half(now, limits)) is not None:
                    self.rooms.emit(record, receiver.failed_locally(why), now)
                elif record.unheard():
                    self.rooms.timers.arm("arrival", key, now + limits.prefill_arrival_s)
            else:
                give_up(self.rooms, record)
        drop_silent(self.rooms)
        if self.rooms.shed:
            self.inbox.shed(now)

    def tick(self, now: float) -> None:
        """Offer admission, then start the vote of this loop iteration."""
        if self.prealloc.waiting:
            self.prealloc.offer(self.running.owed(), self.running.num_unseated)
        self.rooms.begin_tick()

    # --- out ----------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | None:
        """The next batch: re-prefill of retracted sequences first, else decode. Feed
        ``StepCompleted`` before asking again."""
        return self.running.schedule(now)

    def poll_effects(self) -> list[Effect]:
        """Effects since the last call, to be executed in order."""
        return self.rooms.poll_effects()

    def poll_deadline(self) -> float | None:
        """When ``handle_timeout`` has something to do, in monotonic seconds."""
        return self.rooms.timers.next_s

    def live_keys(self) -> list[RoomKey]:
        """Requests without a result, and rooms that still drain."""
        return [k for k, r in self.rooms.records.items() if not r.is_over]

    @property
    def wants_tick(self) -> bool:
        if not self.prealloc.waiting:
            return self.rooms.wants_tick
        return self.rooms.wants_tick or (
            self.prealloc.may_offer(len(self.running.resuming), self.running.num_unseated)
            and not self.rooms.is_diverged
        )

    def snapshot(self) -> DecodeSnapshot:
        states = [record.receiver.state for record in self.rooms.records.values()]
        return DecodeSnapshot(
            pending=states.count(S.BOOTSTRAPPING),
            prealloc=len(self.prealloc.waiting),
            transfer=states.count(S.TRANSFERRING),
            draining=states.count(S.DRAINING),
            stuck=sum(r.is_stuck and not r.is_over for r in self.rooms.records.values()),
            running=len(self.running),
            num_ignored=self.inbox.num_ignored,
            is_diverged=self.rooms.is_diverged,
            **ledger_totals(self.blocks),
            kv_usage=self.blocks.format_usage(),
        )

    # --- inside -------------------------------------------------------------------------

    def _handle_common_timer(self, kind: str, key: str, now: float) -> None:
        """Timers that belong to no room: a route to retry, quarantine, the heartbeat."""
        if kind == "topology":
            self.prealloc.resolve(key, now)
            return
        if kind == "quarantine":
            self.rooms.age_quarantine(now)
            return
        for peer in self.rooms.beat(now):
            # Whoever comes next asks for the route again: the rank may have moved.
            self.prealloc.topologies.forget(peer.incarnation)

    def _commit(self, record: DecodeRecord, outcome: int, now: float) -> None:
        """Apply the group's outcome and what follows from the new state, in one tick."""
        receiver = record.receiver
        before = receiver.state
        effects = commit_receiver(receiver, outcome, lambda: self.rooms.admit(record, now))
        if effects is not None:
            self.rooms.emit(record, effects, now)
        after = receiver.state
        if after is not before:
            self._enter(record, after, now)
        if after in (S.DONE, S.FAILED) and record.is_reported and not receiver.is_unanswered:
            self.rooms.forget(record.key)

    def _enter(self, record: DecodeRecord, state: S, now: float) -> None:
        """Move between queues; blocks change hands only here."""
        key, reason = record.key, record.receiver.failure
        self.prealloc.leave(key)
        if state is S.WAITING_FOR_INPUT:
            self.prealloc.enter(record)
        elif state is S.DONE:
            self.running.start(record, self.rooms.accept(record), now)
        elif state is S.DRAINING:
            self.rooms.quarantine(record)
            self.rooms.arm_quarantine(now)
            self.rooms.timers.arm("drain", key, now + self.setup.drain_timeout_s)
        elif state is S.FAILED:
            self.rooms.release(record)
            self.rooms.timers.disarm("drain", key)
            self.rooms.timers.arm("linger", key, now + self.setup.limits.linger_s)
        if state in (S.DRAINING, S.FAILED):
            self.rooms.report(record, finish_reason_of(reason), reason, now)
