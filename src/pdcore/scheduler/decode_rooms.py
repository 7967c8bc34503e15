"""The rooms of a decode rank and the messages that reach them.

:class:`DecodeRooms` holds what a published handshake pins (blocks, metadata slot, lease)
and gives it back when the receiver is quiet; :class:`DecodeInbox` answers prefill ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdcore.control.codec import pack_block_ids
from pdcore.control.messages import (
    CancelAck,
    Claim,
    Handshake,
    Heartbeat,
    HeartbeatAck,
    PeerMessage,
    Refuse,
    Stale,
    Status,
    StatusAck,
    StatusKind,
)
from pdcore.errors import failure
from pdcore.fsm.effects import Effect, FencePeer, SendMessage
from pdcore.fsm.events import BlocksVerified, LeaseRevoked, MessageReceived
from pdcore.fsm.states import ReceiverState
from pdcore.fsm.targets import Admission, CancelAckFrom, ClaimFrom, StatusFrom, Target
from pdcore.kv.cache import KVBlocks
from pdcore.kv.metadata import MetadataRecord
from pdcore.kv.plan import lease_ranges
from pdcore.kv.slots import MetadataSlots
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.peers import PeeredRooms, name_of
from pdcore.scheduler.setup import CoreSetup
from pdcore.scheduler.topologies import Topologies
from pdcore.types import Failure, Incarnation, PeerRef

#: How long blocks wait on a QUARANTINE transport once every writer has said that nothing of it
#: lands any more: what is left is on its way through this process's own buffers, which empty
#: while it runs. The declared period is for writers that died without a word.
ACKNOWLEDGED_S: Final = 2.0
#: No prefill rank may write under a lease of these.
_WITHOUT_LEASE: Final = (ReceiverState.WAITING_FOR_INPUT, ReceiverState.FAILED)
#: Most that one look at the clock may age a quarantine, in seconds.
MAX_AGE_S: Final = 1.0


class DecodeRooms(PeeredRooms[DecodeRecord]):
    """Rooms plus what a lease pins."""

    def __init__(self, setup: CoreSetup, blocks: KVBlocks) -> None:
        super().__init__(setup, blocks)
        self.slots = MetadataSlots(setup.limits.num_metadata_slots)
        self.topologies = Topologies(setup)
        self._endpoint = setup.endpoint()

    def emit(self, record: DecodeRecord, effects: Iterable[Effect] | None, now: float) -> None:
        """Queue a receiver's effects; None means the event was ignored."""
        if effects is None:
            return
        self.out.extend(effects)
        self.touch(record.key)
        self.arm_resend(record, now)

    def admit(self, record: DecodeRecord, now: float) -> Admission | None:
        """Take blocks and a slot and write the handshake; None when there is no room now.
        The vote promised it, so that is a rank that lost its promise, not a failure."""
        seq, request = record.seq, record.request
        num_tokens = seq.num_prompt_tokens
        if not self.slots.available or not self.blocks.allocate_slots(seq.seq_id, num_tokens, 1):
            return None
        record.slot = self.slots.alloc()
        self.blocks.lease(seq.seq_id)
        published: dict[str, list[int]] = {}
        for key, size in self.setup.spec.block_sizes.items():
            # The block of the first generated token is ours alone: not published.
            needed = -(-num_tokens // size)
            published[key] = self.blocks.get_block_ids(seq.seq_id)[key][:needed]
        receiver = record.receiver
        handshake = Handshake(
            key=request.key,
            lease=receiver.lease,
            endpoint=self._endpoint,
            blocks={key: pack_block_ids(ids) for key, ids in published.items()},
            num_cached_tokens=0,
            num_tokens=num_tokens,
            ids_hash=receiver.ids_hash,
            num_required=record.num_required,
            expires_at_s=request.expires_at_s,
            remaining_s=max(0.0, record.deadline_s - now),
        )
        record.mark("admitted", now)
        ranges = lease_ranges(self.setup.placement, self.setup.spec, published)
        return Admission(handshake, ranges)

    def refused_peers(self, now: float) -> dict[str, str]:
        """Also the prefill instances whose layout or model does not fit this one's."""
        return {**self.topologies.refused(now), **super().refused_peers(now)}

    def quarantine(self, record: DecodeRecord) -> None:
        """The client has its answer; writers may still be alive (D3), if there are any."""
        if not _granted(record):
            record.receiver.quarantine_s = 0.0
        self.blocks.quarantine(record.seq.seq_id)
        if record.slot is not None:
            self.slots.quarantine(record.slot)

    def arm_quarantine(self, now: float) -> None:
        """QUARANTINE transports only: count the period down, step by step."""
        period_s = self.setup.quarantine_s
        if period_s > 0 and not self.timers.is_armed("quarantine", "clock"):
            self.timers.arm("quarantine", "clock", now + min(MAX_AGE_S, period_s))

    def age_quarantine(self, now: float) -> None:
        """The period runs from the moment at which no writer can post any more: it covers
        what was posted before, and is short where every writer has said itself that nothing of
        it lands. At most a second per look, so that a stopped process does not age it (rule 6)."""
        draining = [
            record
            for record in self.records.values()
            if record.receiver.state is ReceiverState.DRAINING and record.receiver.quarantine_s > 0
        ]
        for record in draining:
            if not record.receiver.are_writers_over:
                continue
            if record.aged_s is not None:
                record.receiver.quarantine_s -= min(now - record.aged_s, MAX_AGE_S)
                self.touch(record.key)
            elif not any(target.died for target in _granted(record)):
                period_s = min(self.setup.quarantine_s, ACKNOWLEDGED_S)
                record.receiver.quarantine_s = period_s
            record.is_stuck = False
            record.aged_s = now
        if draining:
            self.arm_quarantine(now)

    def release(self, record: DecodeRecord) -> None:
        """No writer is left: everything goes back, whatever state it was in."""
        self.blocks.release(record.seq.seq_id)
        self.free_slot(record)

    def free_slot(self, record: DecodeRecord) -> None:
        if record.slot is not None:
            self.slots.free(record.slot)
            record.slot = None

    def accept(self, record: DecodeRecord) -> MetadataRecord:
        """KV is complete: the lease ends well, the record is what prefill reported."""
        metadata = record.receiver.record
        assert metadata is not None
        self.blocks.unlease(record.seq.seq_id)
        self.free_slot(record)
        return metadata


class DecodeInbox:
    """Answers prefill ranks. Total: whatever a peer sends, the loop goes on."""

    def __init__(self, rooms: DecodeRooms) -> None:
        self.rooms = rooms
        self.me = rooms.setup.me
        self.num_ignored = 0
        #: Prefill process lives proved over: their routes are asked for again.
        self.restarted: list[Incarnation] = []

    def receive(self, event: MessageReceived, now: float) -> None:
        peer, message = event.sender, event.message
        self.rooms.heard(peer.incarnation)
        if event.to_incarnation not in (b"", self.me.incarnation):
            self._answer_stale(peer, event.to_incarnation, message)
            return
        if isinstance(message, Status):
            self._status(StatusFrom(peer, message), now)
        elif isinstance(message, Claim):
            self._claim(ClaimFrom(peer, message), now)
        elif isinstance(message, CancelAck):
            record = self.rooms.records.get(message.key)
            if record is not None:
                acked = record.receiver.cancel_acked(CancelAckFrom(peer, message))
                self.rooms.emit(record, acked, now)
        elif isinstance(message, Stale):
            self._restarted(peer, message, now)
        elif isinstance(message, Heartbeat):
            self.rooms.out.append(SendMessage(peer, HeartbeatAck(message.sequence)))
        elif isinstance(message, HeartbeatAck):
            self._alive(peer, message, now)
        else:
            self.num_ignored += 1

    def revoke(self, event: LeaseRevoked, now: float) -> None:
        for record in list(self.rooms.records.values()):
            if record.receiver.lease == event.lease:
                self.rooms.emit(record, record.receiver.lease_revoked(event.lease), now)

    def _claim(self, payload: ClaimFrom, now: float) -> None:
        """A claim for an unknown or finished room is refused (section 2)."""
        message = payload.message
        record = self.rooms.records.get(message.key)
        if record is None:
            refuse = Refuse(message.key, message.nonce, "this room is not known here")
            self.rooms.out.append(SendMessage(payload.peer, refuse))
            return
        target = record.receiver.targets.get(payload.peer.rank)
        is_granted = target is not None and target.nonce == message.nonce
        out = [] if is_granted else self.rooms.kept_out(payload.peer.incarnation)
        if out and not any(one.is_stuck for one in out):
            # An ordinary drain, perhaps of one large request: it ends in a moment, and the
            # claim is resent. Nobody else's request fails for it.
            record.queued_at.pop(payload.peer.rank, None)
            record.hear_queued(payload.peer.rank, now)
            return
        if out:
            refuse = Refuse(message.key, message.nonce, "too much of the pool waits for this peer")
            self.rooms.out.append(SendMessage(payload.peer, refuse))
            why = failure(
                "unavailable",
                f"prefill {name_of(payload.peer)} does not acknowledge earlier transfers; it "
                "gets no new ones until it does",
            )
            self.rooms.emit(record, record.receiver.failed_locally(why), now)
            return
        effects = record.receiver.claim_received(payload)
        if target is not None and target.nonce == message.nonce:
            record.mark("granted", now)
        self.rooms.emit(record, effects, now)

    def verified(self, event: BlocksVerified, now: float) -> None:
        """What a rank wrote has been compared: its Done goes on, after what is wrong with it."""
        record = self.rooms.records.get(event.key)
        if record is None or record.receiver.lease != event.lease:
            return
        held = record.verification.end(event)
        if held is not None:
            # Of a request that is over, the blocks were free while they were read.
            if event.problem and not record.is_settled:
                self._corrupted(record, held.peer, failure("corrupted", event.problem), now)
            self._status(held, now)

    def _corrupted(self, record: DecodeRecord, peer: PeerRef, why: Failure, now: float) -> None:
        """Fails this request alone, and counts against its peer (D25)."""
        self.rooms.peer_failed(peer, why.detail, now)
        self.rooms.emit(record, record.receiver.failed_locally(why), now)

    def _is_held_back(self, record: DecodeRecord, payload: StatusFrom, now: float) -> bool:
        setup, verification = self.rooms.setup, record.verification
        step = verification.begin(setup, record.receiver, payload)
        if isinstance(step, Failure):
            self._corrupted(record, payload.peer, step, now)
        elif step is not None:
            self.rooms.out.append(step)
        return verification.is_held(payload.peer.rank)

    def _status(self, payload: StatusFrom, now: float) -> None:
        message = payload.message
        record = self.rooms.records.get(message.key)
        if record is not None:
            if self._is_held_back(record, payload, now):
                return
            if record.receiver.is_done_of_grant(payload):
                failed = record.receiver.failure
                if failed is None or failed.code != "corrupted":
                    self.rooms.breakers.succeeded(payload.peer.incarnation)
                for stage, seconds in message.timings.items():
                    record.timeline.setdefault(f"prefill_{stage}", seconds)
                record.mark("received", now)
            if message.kind is StatusKind.QUEUED and record.receiver.is_news(payload):
                record.hear_queued(payload.peer.rank, now)
                if not self.rooms.timers.is_armed("arrival", record.key):
                    arrival_s = now + self.rooms.setup.limits.prefill_arrival_s
                    self.rooms.timers.arm("arrival", record.key, arrival_s)
            had_failed = record.receiver.failure is not None
            self.rooms.emit(record, record.receiver.status_received(payload), now)
            why = record.receiver.failure
            if not had_failed and why is not None and why.code == "transfer_failed":
                self.rooms.peer_failed(payload.peer, why.detail, now)
        elif message.kind is not StatusKind.QUEUED:
            # Nothing of the room is left here: let the sender stop resending.
            ack = StatusAck(message.key, message.lease, message.kind)
            self.rooms.out.append(SendMessage(payload.peer, ack))

    def _restarted(self, peer: PeerRef, message: Stale, now: float) -> None:
        """The prefill rank lives in another process: its old life will not answer. Proof
        of death, not of quiescence: ask the transport to fence it (rule 2). Only the
        successor at the same place can prove it, and only to a room that asked it something:
        a queue of them may get as many answers, and each look is one at all rooms."""
        record = self.rooms.records.get(message.key)
        is_awaited = record is not None and (not record.is_settled or record.receiver.is_unanswered)
        if not is_awaited or not self.rooms.is_place_of(peer, message.addressed):
            self.num_ignored += 1
            return
        former = PeerRef(peer.instance, peer.rank, message.addressed, peer.address)
        self.lose_peer(former, f"{peer.instance} rank {peer.rank} restarted", False, now)

    def _answer_stale(self, peer: PeerRef, addressed: Incarnation, message: PeerMessage) -> None:
        self.num_ignored += 1
        if isinstance(message, Claim | Status):
            self.rooms.out.append(SendMessage(peer, Stale(message.key, addressed)))
        elif isinstance(message, Heartbeat):
            self.rooms.out.append(SendMessage(peer, HeartbeatAck(message.sequence)))

    def _alive(self, peer: PeerRef, message: HeartbeatAck, now: float) -> None:
        died = self.rooms.peers.answered(peer, message.sequence)
        if died is not None:
            self.lose_peer(died.peer, died.detail, False, now)

    def lose_peer(self, peer: PeerRef, detail: str, fenced: bool, now: float) -> None:
        """Fails exactly the rooms of that process life (architecture, section 2). Without
        a fence its claims stay open: ask the transport for one (rule 2). It can answer,
        because a prefill rank connects before it claims."""
        self.restarted.append(peer.incarnation)
        self.rooms.peer_died(peer.incarnation, detail, fenced)
        for record in self.rooms.records_of(peer.incarnation):
            receiver = record.receiver
            # Where nobody can fence, a dead writer posts nothing more, and the period that
            # follows is the rule for what it had posted. Where nothing is published, or all of
            # it is back, there is nothing to be fenced.
            if fenced or self.rooms.setup.quarantine_s > 0 or receiver.state in _WITHOUT_LEASE:
                self.rooms.emit(record, receiver.writer_fenced(peer.incarnation), now)
            lost = record.loss_of(peer.incarnation, detail)
            self.rooms.emit(record, receiver.failed_locally(lost), now)
        if not fenced:
            self.rooms.out.append(FencePeer(peer))

    def shed(self, now: float) -> None:
        """Peers that get no new work from now on: who only waits for one of them fails at
        once, while another pair may still serve it (D25). Who was granted waits on: what is
        on its way may arrive, and silence frees nothing (D3)."""
        peers, self.rooms.shed = self.rooms.shed, []
        for peer in peers:
            for record in self.rooms.records_of(peer.incarnation):
                receiver = record.receiver
                is_early = receiver.state in (
                    ReceiverState.BOOTSTRAPPING,
                    ReceiverState.WAITING_FOR_INPUT,
                )
                if is_early or peer in record.unheard():
                    why = self.rooms.why_no_work(peer, record.key, now)
                    if why is not None:
                        self.rooms.emit(record, receiver.failed_locally(why), now)

    def evict(self, incarnation: Incarnation, detail: str, now: float) -> None:
        """That life left its place in the route: its rooms fail (D32). No proof of death, so
        no block comes back for it: their claims end by an acknowledgement or a fence."""
        for record in self.rooms.records_of(incarnation):
            lost = record.loss_of(incarnation, detail)
            self.rooms.emit(record, record.receiver.failed_locally(lost), now)


def _granted(record: DecodeRecord) -> list[Target]:
    """Whom a nonce was granted: nobody else can have written."""
    return [target for target in record.receiver.targets.values() if target.nonce is not None]
