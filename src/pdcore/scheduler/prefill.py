"""PrefillCore: the prefill queues of one rank, without I/O, clock or threads.

A request passes through three queues, each a view of the rooms by what they wait for:
  bootstrap queue   sender in Bootstrapping: waiting for the handshakes of decode;
  waiting queue     sender bound to destinations, tokens left to compute (FIFO, R87);
  in-flight queue   sender Transferring: writes posted, more chunks may be computed. KV blocks go
                    back only when the sender is terminal on all ranks of the group (D4).

Drive it: ``submit``/``abort``/``handle_event``/``handle_timeout`` in, ``schedule`` for the
next batch, ``tick`` once per loop, ``poll_effects`` out, ``poll_deadline`` for how long to
sleep. Not thread-safe: one thread owns a core.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict

import msgspec

from pdcore.errors import EngineError, failure
from pdcore.fsm.commit import commit_sender
from pdcore.fsm.effects import Effect, ReportAccepted
from pdcore.fsm.events import (
    ConnectFailed,
    Event,
    HandleEnded,
    MessageReceived,
    PeerLost,
    RequestRefused,
    StepCompleted,
    VotesReduced,
)
from pdcore.fsm.legs import FirstToken, KvReady
from pdcore.fsm.sender import Sender
from pdcore.fsm.states import SenderState as S
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.batch import (
    PrefillChunk,
    build_prefill_batch,
    commit_prefill,
    select_prefill,
)
from pdcore.scheduler.peers import drop_silent, give_up
from pdcore.scheduler.prefill_losses import fail_unconnected, shed_waiting
from pdcore.scheduler.prefill_rooms import PrefillInbox, PrefillRecord, PrefillRooms
from pdcore.scheduler.queues import Tombstone, finish_reason_of, ledger_totals, refusal
from pdcore.scheduler.setup import CoreSetup
from pdcore.types import Batch, Failure, FinishReason, GenerateRequest, RoomKey


class PrefillSnapshot(msgspec.Struct, frozen=True):
    """Queue lengths, for metrics and the step log (R67)."""

    bootstrap: int
    waiting: int
    inflight: int
    draining: int
    #: Of these, the ones whose peer has not acknowledged for ``drain_timeout_s`` (rule 6).
    stuck: int
    num_ignored: int
    is_diverged: bool
    kv_free: int
    kv_held: int
    kv_leased: int
    kv_quarantined: int
    kv_usage: str


class PrefillCore:
    """See the module. Raises only for the caller's own mistakes."""

    def __init__(self, setup: CoreSetup, blocks: KVBlocks) -> None:
        self.setup = setup
        self.blocks = blocks
        self.rooms = PrefillRooms(setup, blocks)
        self.inbox = PrefillInbox(self.rooms)
        #: Bound to destinations, tokens left to compute; FIFO.
        self.waiting: OrderedDict[RoomKey, PrefillRecord] = OrderedDict()
        #: Of nonces and handles, which are this rank's own.
        self._ids = itertools.count(1)
        #: The same on all ranks of a group: they speak of sequences and batches.
        self._seq_ids = itertools.count(1)
        self._batch_ids = itertools.count(1)
        self._batch: tuple[Batch, list[PrefillChunk]] | None = None
        # Early sends end on a block boundary, and only where no block is recycled while
        # a write may still read it (sliding windows send once, at the end).
        windows = any(e.sliding_window is not None for e in setup.spec.entries)
        self._align = 0 if windows else math.lcm(*setup.spec.block_sizes.values())

    # --- in -----------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, now: float) -> None:
        """Queue one request. Raises RoomInUse or Overloaded; a prompt that can never run
        is refused with its one result, and a handshake for it is told so (D11, R66)."""
        self.rooms.check_new(request, now)
        reason = refusal(request, self.setup, self.blocks, new_tokens=0)
        if reason is not None:
            self.rooms.refuse(request, reason, now)
            self.inbox.answer_parked(request.key, now)
            return
        if request.replaces is not None:
            gone = failure("cancelled", "replaced by a new attempt")
            self.abort(RoomKey(request.key.room, request.replaces), gone, now)
        sender = Sender(request.key, self.setup.me.incarnation, self._ids)
        self.rooms.add(PrefillRecord(request, sender, next(self._seq_ids), now))
        self.rooms.arm_heartbeat(now)
        self.rooms.out.append(ReportAccepted(request.key))
        self.inbox.answer_parked(request.key, now)

    def abort(
        self, key: RoomKey, reason: Failure, now: float, *, unless_received: bool = False
    ) -> bool:
        """End this dispatch; False when it is unknown or already over. Prefill never
        receives KV, so ``unless_received`` changes nothing here."""
        record = self.rooms.records.get(key)
        if record is None:
            return False
        effects = record.sender.failed_locally(reason)
        self.rooms.emit(record, effects, now)
        return effects is not None

    def handle_event(self, event: Event, now: float) -> None:
        """Feed one event. Total: an event about nothing known is counted, never an error."""
        # In the order of how often they come, and not by match, which builds objects for each.
        if isinstance(event, VotesReduced):
            if event.failures:
                for record, why in self.rooms.failures_of(event):
                    self.rooms.emit(record, record.sender.failed_locally(why), now)
            for record, outcome in self.rooms.end_tick(event):
                self._commit(record, outcome, now)
        elif isinstance(event, MessageReceived):
            self.inbox.receive(event, now)
        elif isinstance(event, HandleEnded):
            self.rooms.end_handle(event, now)
        elif isinstance(event, StepCompleted):
            self._complete_step(event, now)
        elif isinstance(event, RequestRefused) and event.key not in self.rooms.records:
            self.rooms.tombstones.put(event.key, Tombstone(event.failure), now)
            self.inbox.answer_parked(event.key, now)
        elif isinstance(event, PeerLost):
            self.inbox.lose_peer(event.incarnation, event.detail, now, event.fenced)
        elif isinstance(event, ConnectFailed):
            fail_unconnected(self.rooms, event, now)
        else:
            self.inbox.num_ignored += 1
        if self.rooms.shed:
            shed_waiting(self.rooms, now)

    def handle_timeout(self, now: float) -> None:
        """Deadlines, resends and drains that are due at ``now``."""
        for kind, key in self.rooms.timers.pop_due(now):
            if not isinstance(key, RoomKey):
                self.rooms.beat(now)
                continue
            record = self.rooms.records.get(key)
            if record is None:
                continue
            sender = record.sender
            if kind == "deadline":
                for peer in record.failing(now, self.setup.limits.silence_s):
                    self.rooms.peer_failed(peer, "a claim went unanswered", now)
                late = record.overdue(now)
                self.rooms.emit(record, sender.deadline_expired(late), now)
            elif kind == "resend":
                self.rooms.resend(record, now)
            elif kind == "drain":
                record.is_stuck = True
                self.rooms.emit(record, sender.drain_expired(), now)
                self.rooms.timers.arm("drain", key, now + self.setup.drain_timeout_s)
            elif now < record.deadline_s and sender.is_unanswered:
                # Decode may be cut off: the outcome is told until its own deadline.
                self.rooms.timers.arm("linger", key, record.deadline_s)
            else:
                give_up(self.rooms, record)
        drop_silent(self.rooms)
        if self.rooms.shed:
            shed_waiting(self.rooms, now)

    def tick(self, now: float) -> None:
        """Start the vote of this loop iteration (architecture, section 9)."""
        self.rooms.begin_tick()

    # --- out ----------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | None:
        """The next prefill batch, or None. Feed ``StepCompleted`` before asking again."""
        if self._batch is not None or not self.waiting:
            return None
        limits = self.setup.limits
        chunks = select_prefill(
            (record.seq for record in self.waiting.values()),
            self.blocks,
            limits.prefill_chunk_tokens,
            limits.max_running,
            align=self._align or 1,
        )
        if not chunks:
            return None
        batch = build_prefill_batch(next(self._batch_ids), chunks, self.blocks)
        self._batch = (batch, chunks)
        for chunk in chunks:
            record = self.rooms.records[chunk.seq.key]
            record.mark("prefill_start", now)
            record.sender.compute_started()
        return batch

    def poll_effects(self) -> list[Effect]:
        """Effects since the last call, to be executed in order."""
        return self.rooms.poll_effects()

    def poll_deadline(self) -> float | None:
        """When ``handle_timeout`` has something to do, in monotonic seconds."""
        return self.rooms.timers.next_s

    def live_keys(self) -> list[RoomKey]:
        """Requests without a result, rooms that still drain, and deliveries that decode has
        not acknowledged: it must not lose a request whose KV it has (D59)."""
        return [
            key
            for key, record in self.rooms.records.items()
            if not record.is_over or (record.sender.state is S.DONE and record.sender.is_unanswered)
        ]

    @property
    def wants_tick(self) -> bool:
        return self.rooms.wants_tick

    def snapshot(self) -> PrefillSnapshot:
        states = [record.sender.state for record in self.rooms.records.values()]
        return PrefillSnapshot(
            bootstrap=states.count(S.BOOTSTRAPPING),
            waiting=len(self.waiting),
            inflight=states.count(S.TRANSFERRING),
            draining=states.count(S.DRAINING),
            stuck=sum(r.is_stuck and not r.is_over for r in self.rooms.records.values()),
            num_ignored=self.inbox.num_ignored,
            is_diverged=self.rooms.is_diverged,
            **ledger_totals(self.blocks),
            kv_usage=self.blocks.format_usage(),
        )

    # --- inside -------------------------------------------------------------------------

    def _complete_step(self, event: StepCompleted, now: float) -> None:
        if self._batch is None or self._batch[0].batch_id != event.batch_id:
            self.inbox.num_ignored += 1
            return
        (_, chunks), self._batch = self._batch, None
        reason, output = event.failure, event.output
        if output is not None:
            try:
                commit_prefill(chunks, output, self.setup.eos_token_ids, self.setup.max_model_len)
            except EngineError as error:
                reason = failure("internal", str(error))
        elif reason is None:
            reason = failure("internal", "the engine returned nothing for a prefill step")
        for chunk in chunks:
            record = self.rooms.records.get(chunk.seq.key)
            if record is not None:
                is_spared = bool(event.blamed) and chunk.seq.seq_id not in event.blamed
                if reason is None:
                    ready = _ready(record, chunk, self._align, now)
                elif is_spared:
                    # Not its fault: the same chunk is computed again.
                    ready = KvReady(record.sender.ready_tokens)
                else:
                    ready = KvReady(0, failure=reason)
                if chunk.is_last and not is_spared:
                    self.waiting.pop(record.key, None)
                self.rooms.emit(record, record.sender.compute_ended(ready), now)

    def _commit(self, record: PrefillRecord, outcome: int, now: float) -> None:
        """Apply the group's outcome and what follows from the new state, in one tick."""
        sender, key = record.sender, record.key
        before = sender.state
        effects = commit_sender(sender, outcome)
        if effects is not None:
            self.rooms.emit(record, effects, now)
        after = sender.state
        if after is S.WAITING_FOR_INPUT and before is S.BOOTSTRAPPING:
            self.waiting[key] = record
            record.claimed_s = now
        if after in (S.DRAINING, S.FAILED) and before is not after:
            self.waiting.pop(key, None)
            self.rooms.report(record, finish_reason_of(sender.failure), sender.failure, now)
        if after is S.DRAINING and before is not S.DRAINING:
            self.blocks.quarantine(record.seq.seq_id)
            self.rooms.timers.arm("drain", key, now + self.setup.drain_timeout_s)
        if after in (S.DONE, S.FAILED):
            if before is not after:
                self.blocks.release(record.seq.seq_id)
                self.rooms.timers.disarm("drain", key)
                self.rooms.timers.arm("linger", key, now + self.setup.limits.linger_s)
                if after is S.DONE:
                    for peer in record.peers():
                        self.rooms.breakers.succeeded(peer.incarnation)
                    self.rooms.report(record, FinishReason.STOP, None, now)
            if not sender.is_unanswered:
                self.rooms.forget(key)


def _ready(record: PrefillRecord, chunk: PrefillChunk, align: int, now: float) -> KvReady:
    """What a finished chunk makes sendable."""
    end = chunk.start + chunk.num_tokens
    if not chunk.is_last:
        return KvReady(end // align * align if align else 0)
    record.mark("prefill_end", now)
    line, seq = record.timeline, record.seq
    token = FirstToken(
        output_token_id=seq.output_token_ids[-1],
        logprob=seq.output_logprobs[-1] if seq.output_logprobs else None,
        num_tokens=seq.num_prompt_tokens,
        ids_hash=record.ids_hash,
        timings={
            "queue": line["prefill_start"],
            "prefill": line["prefill_end"] - line["prefill_start"],
        },
    )
    return KvReady(seq.num_prompt_tokens, token)
