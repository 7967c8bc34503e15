"""The rooms of a prefill rank and the messages that reach them.

:class:`PrefillRooms` turns what senders emit into executable effects (descriptors filled
in, handles tracked, resends armed); :class:`PrefillInbox` answers the peers. A message for
an unknown or finished room changes no lifecycle; a handshake or a cancel that comes before
its request is parked, bounded and expiring; a cancel for an unknown room is acknowledged,
because no entity that could write holds its nonces (rule 2).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from pdcore.control.messages import (
    Cancel,
    CancelAck,
    Grant,
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
from pdcore.errors import CodecError, IncompatibleError, failure
from pdcore.fsm.effects import Effect, PostTransfer, SendMessage
from pdcore.fsm.events import HandleEnded, MessageReceived
from pdcore.fsm.legs import CancelFrom, HandshakeFrom, StatusAckFrom
from pdcore.fsm.sender import SENDER, Sender
from pdcore.fsm.states import SenderState
from pdcore.kv.cache import KVBlocks
from pdcore.kv.metadata import hash_token_ids
from pdcore.scheduler.parked import Parked
from pdcore.scheduler.peers import PeeredRooms
from pdcore.scheduler.posting import PlanError, fill_transfer
from pdcore.scheduler.queues import RoomRecord
from pdcore.scheduler.sequence import Sequence
from pdcore.scheduler.setup import CoreSetup, Destination, read_endpoint
from pdcore.scheduler.waiting import overdue
from pdcore.types import Failure, GenerateRequest, Incarnation, Nonce, PeerRef, Role, RoomKey

#: Decoded endpoints kept; one per decode rank and life, so small.
MAX_DESTINATIONS: Final = 1024


class PrefillRecord(RoomRecord):
    """One (room, attempt) on this prefill rank."""

    __slots__ = ("claimed_s", "ids_hash", "sender", "seq")

    def __init__(self, request: GenerateRequest, sender: Sender, seq_id: int, now: float) -> None:
        super().__init__(request, now)
        self.sender = sender
        self.seq = Sequence(seq_id, request)
        self.ids_hash = hash_token_ids(request.prompt_token_ids)
        #: When its claims went out.
        self.claimed_s = now

    @property
    def entity(self) -> Sender:
        return self.sender

    @property
    def is_over(self) -> bool:
        """Reported, and nothing of it can touch blocks any more."""
        return self.sender.state in (SenderState.DONE, SenderState.FAILED)

    @property
    def is_settled(self) -> bool:
        return self.is_over

    @property
    def is_draining(self) -> bool:
        return self.sender.state is SenderState.DRAINING

    @property
    def seq_id(self) -> int:
        return self.seq.seq_id

    def peers(self) -> list[PeerRef]:
        return [leg.peer for leg in self.sender.legs.values()]

    def awaited(self) -> list[PeerRef]:
        return [leg.peer for leg in self.sender.legs.values() if leg.live]

    def overdue(self, now: float) -> Failure:
        """Why its deadline passed: what it waited for, and whom."""
        state = self.sender.state
        owing = [leg.peer for leg in self.sender.legs.values() if not leg.granted]
        info, waited_s = SENDER.info[state], now - self.accepted_s
        return overdue(Role.PREFILL, state.value, info, waited_s, owing, self.request.decode)

    def unheard(self) -> list[PeerRef]:
        """Claims that decode did not answer with a grant or a refusal."""
        if self.sender.state is not SenderState.WAITING_FOR_INPUT:
            return []
        return [leg.peer for leg in self.sender.legs.values() if not leg.granted]

    def failing(self, now: float, silence_s: float) -> list[PeerRef]:
        """At its deadline: who had a fair time to answer a claim. A client's short deadline is
        no fault of a peer (D25)."""
        return self.unheard() if now - self.claimed_s >= silence_s else []

    def __repr__(self) -> str:
        return f"PrefillRecord({self.sender!r}, {self.seq!r})"


class PrefillRooms(PeeredRooms[PrefillRecord]):
    """Rooms plus what sending needs: destinations, live handles, block tables."""

    def __init__(self, setup: CoreSetup, blocks: KVBlocks) -> None:
        super().__init__(setup, blocks)
        self._handles: dict[int, RoomKey] = {}
        self._destinations: OrderedDict[Incarnation, tuple[bytes, Destination]] = OrderedDict()

    def destination(self, peer: PeerRef, endpoint: bytes) -> Destination:
        """Decoded once per process life. Raises CodecError or IncompatibleError."""
        known = self._destinations.get(peer.incarnation)
        if known is not None and known[0] == endpoint:
            return known[1]
        decoded = read_endpoint(self.setup, endpoint)
        self._destinations[peer.incarnation] = (endpoint, decoded)
        while len(self._destinations) > MAX_DESTINATIONS:
            self._destinations.popitem(last=False)
        return decoded

    def emit(self, record: PrefillRecord, effects: Iterable[Effect] | None, now: float) -> None:
        """Queue a sender's effects; None means the event was ignored."""
        if effects is None:
            return
        for effect in effects:
            if isinstance(effect, PostTransfer):
                self._post(record, effect, now)
            else:
                self.out.append(with_transfer_time(effect, record.timeline))
        self.touch(record.key)
        self.arm_resend(record, now)

    def end_handle(self, event: HandleEnded, now: float) -> None:
        """From the shell, for every handle ever posted; repeats are ignored."""
        key = self._handles.get(event.handle)
        if key is None:
            return
        if event.quiesced:
            del self._handles[event.handle]
        record = self.records.get(key)
        if record is not None:
            self._judge(record, event, now)
            record.timeline["transfer_end"] = now - record.accepted_s  # of the last one
            self.emit(record, record.sender.handle_ended(event), now)

    def _judge(self, record: PrefillRecord, event: HandleEnded, now: float) -> None:
        """A write that failed by itself counts against its peer (D25), one that was called
        back does not."""
        if event.failure is None or record.sender.failure is not None:
            return
        for leg in record.sender.legs.values():
            if event.handle in leg.live and event.failure.code == "transfer_failed":
                self.peer_failed(leg.peer, event.failure.detail, now)

    def _post(self, record: PrefillRecord, effect: PostTransfer, now: float) -> None:
        """Live from here on, executed or not (section 3)."""
        self._handles[effect.handle] = record.key
        if record.sender.failure is not None:
            # An earlier leg of the same list could not be planned (rule 9).
            self.end_handle(HandleEnded(effect.handle, True), now)
            return
        handshake = record.sender.legs[effect.peer.rank].handshake
        try:
            destination = self.destination(effect.peer, handshake.endpoint)
            filled = fill_transfer(
                effect,
                self.setup,
                destination,
                handshake,
                self.blocks.get_block_ids(record.seq.seq_id),
            )
        except (PlanError, CodecError, IncompatibleError) as error:
            reason = failure("transfer_failed", f"the transfer cannot be planned: {error}")
            self.end_handle(HandleEnded(effect.handle, True, reason), now)
            return
        self.blocks.lease(record.seq.seq_id)
        record.mark("transfer_start", now)
        self.out.append(filled)


def with_transfer_time(effect: Effect, timeline: Mapping[str, float]) -> Effect:
    """STATUS Done tells decode how long the writes took, from the first post to the last
    completion; every other effect is left as it is."""
    if (
        not isinstance(effect, SendMessage)
        or not isinstance(effect.message, Status)
        or effect.message.kind is not StatusKind.DONE
        or "transfer_start" not in timeline
    ):
        return effect
    took_s = timeline.get("transfer_end", 0.0) - timeline["transfer_start"]
    timings = {**effect.message.timings, "transfer": max(0.0, took_s)}
    return SendMessage(effect.to, msgspec.structs.replace(effect.message, timings=timings))


class PrefillInbox:
    """Answers decode ranks. Total: whatever a peer sends, the loop goes on."""

    def __init__(self, rooms: PrefillRooms) -> None:
        self.rooms = rooms
        self.me = rooms.setup.me
        self.parked = Parked(rooms.limits)
        #: Messages that changed nothing: stale, unknown room, wrong direction.
        self.num_ignored = 0

    def receive(self, event: MessageReceived, now: float) -> None:
        peer, message = event.sender, event.message
        self.rooms.heard(peer.incarnation)
        if event.to_incarnation not in (b"", self.me.incarnation):
            self._answer_stale(peer, event.to_incarnation, message)
            return
        if isinstance(message, Handshake):
            self._handshake(HandshakeFrom(peer, message), now)
        elif isinstance(message, (Grant, Refuse)):
            self._to_sender(message, now)
        elif isinstance(message, StatusAck):
            record = self.rooms.records.get(message.key)
            if record is not None:
                acked = record.sender.status_acked(StatusAckFrom(peer, message))
                self.rooms.emit(record, acked, now)
        elif isinstance(message, Cancel):
            self._cancel(CancelFrom(peer, message), now)
        elif isinstance(message, Heartbeat):
            self.rooms.out.append(SendMessage(peer, HeartbeatAck(message.sequence)))
        elif isinstance(message, HeartbeatAck):
            self._alive(peer, message, now)
        elif isinstance(message, Stale):
            # Decode restarted: nobody will ever grant or acknowledge this again.
            self._peer_restarted(peer, message, now)
        else:
            self.num_ignored += 1

    def answer_parked(self, key: RoomKey, now: float) -> None:
        """The request of an early message has arrived (or was refused)."""
        for early in self.parked.pop(key, now) or ():
            if isinstance(early, CancelFrom):
                self._cancel(early, now)
            else:
                self._handshake(early, now)

    # --- per message --------------------------------------------------------------------

    def _handshake(self, payload: HandshakeFrom, now: float) -> None:
        key = payload.message.key
        record = self.rooms.records.get(key)
        if record is None:
            tombstone = self.rooms.tombstones.get(key, now)
            if tombstone is None and self._is_oversized(payload.message):
                why = failure("incompatible", "the handshake lists more blocks than any prompt has")
                self._status(payload, StatusKind.REJECTED, why)
            elif tombstone is None:
                self.parked.park_handshake(payload, now)
                self._status(payload, StatusKind.QUEUED, None)
            elif tombstone.failure is not None:
                self._status(payload, StatusKind.REJECTED, tombstone.failure)
            return
        if payload.message.is_dummy:
            self._status(payload, StatusKind.DUMMY, None)
            return
        problem = self._problem(record, payload, now)
        if problem is not None:
            self._status(payload, StatusKind.REJECTED, problem)
            if problem.code in ("incompatible", "unavailable"):
                self.rooms.emit(record, record.sender.failed_locally(problem), now)
            return
        self.rooms.breakers.begin(payload.peer.incarnation, key, now)
        self.rooms.emit(record, record.sender.handshake_received(payload), now)

    def _is_oversized(self, message: Handshake) -> bool:
        """More block ids than the longest prompt has: parking it would be a stranger's memory
        on our account (habit 8)."""
        setup = self.rooms.setup
        # Decode's blocks may be as small as a token, and decode may have more layers than this
        # stage, with managers of their own.
        is_stage = bool(setup.spec.model_digest)
        return (not is_stage and message.blocks.keys() != setup.spec.block_sizes.keys()) or sum(
            map(len, message.blocks.values())
        ) > 4 * (setup.max_model_len + 1) * max(1, len(setup.spec.block_sizes))

    def _problem(self, record: PrefillRecord, payload: HandshakeFrom, now: float) -> Failure | None:
        """Why this handshake cannot be served, or None (D14, D19, D25, section 2)."""
        message = payload.message
        if not self._is_expected(record, payload.peer):
            return failure(
                "handshake_rejected",
                f"the request names decode instance {record.request.decode}, "
                f"not {payload.peer.instance}",
            )
        if (message.num_tokens, message.ids_hash) != (
            record.seq.num_prompt_tokens,
            record.ids_hash,
        ):
            return failure(
                "incompatible",
                f"prefill has {record.seq.num_prompt_tokens} prompt tokens, decode "
                f"{message.num_tokens}, or their ids differ: use one tokenizer on both",
            )
        try:
            self.rooms.destination(payload.peer, message.endpoint)
        except (CodecError, IncompatibleError) as error:
            return failure("incompatible", str(error))
        if payload.peer.rank in record.sender.legs:
            return None  # a repeated one: its work has begun
        return self.rooms.why_no_work(payload.peer, record.key, now)

    def _is_expected(self, record: PrefillRecord, peer: PeerRef) -> bool:
        """Both legs name the chosen instances; nobody else decides anything (section 2)."""
        return record.request.decode in ("", peer.instance)

    def _cancel(self, payload: CancelFrom, now: float) -> None:
        """Nonces of other incarnations are STALE, never acknowledged (rule 2)."""
        message = payload.message
        foreign = [n for n in message.nonces if n.incarnation != self.me.incarnation]
        for nonce in foreign:
            stale = Stale(message.key, nonce.incarnation)
            self.rooms.out.append(SendMessage(payload.peer, stale))
        record = self.rooms.records.get(message.key)
        if record is not None and self._is_expected(record, payload.peer):
            self.rooms.emit(record, record.sender.cancel_received(payload), now)
            return
        if record is None and self.rooms.tombstones.get(message.key, now) is None:
            self.parked.park_cancel(payload, now)
        own: list[Nonce | None] = [n for n in message.nonces if n not in foreign]
        for held in own or [None]:
            ack = CancelAck(message.key, message.lease, held)
            self.rooms.out.append(SendMessage(payload.peer, ack))

    def _to_sender(self, message: Grant | Refuse, now: float) -> None:
        record = self.rooms.records.get(message.key)
        if record is None or message.nonce.incarnation != self.me.incarnation:
            self.num_ignored += 1
            return
        if isinstance(message, Grant):
            record.mark("granted", now)
            self.rooms.emit(record, record.sender.claim_granted(message.nonce), now)
        else:
            self.rooms.emit(record, record.sender.claim_refused(message.nonce), now)

    def _peer_restarted(self, peer: PeerRef, message: Stale, now: float) -> None:
        """Only the successor at the same place can prove a restart."""
        if not self.rooms.is_place_of(peer, message.addressed):
            self.num_ignored += 1
            return
        self.lose_peer(message.addressed, f"{peer.instance} rank {peer.rank} restarted", now)

    def _answer_stale(self, peer: PeerRef, addressed: Incarnation, message: PeerMessage) -> None:
        """Proves our restart, nothing else. Answers are never answered."""
        self.num_ignored += 1
        if isinstance(message, Handshake | Cancel):
            self.rooms.out.append(SendMessage(peer, Stale(message.key, addressed)))
        elif isinstance(message, Heartbeat):
            self.rooms.out.append(SendMessage(peer, HeartbeatAck(message.sequence)))

    def _alive(self, peer: PeerRef, message: HeartbeatAck, now: float) -> None:
        died = self.rooms.peers.answered(peer, message.sequence)
        if died is not None:
            self.lose_peer(died.peer.incarnation, died.detail, now)

    def lose_peer(
        self, incarnation: Incarnation, detail: str, now: float, fenced: bool = False
    ) -> None:
        """Fails exactly the rooms of that process life (architecture, section 2)."""
        self.rooms.peer_died(incarnation, detail, fenced)
        for record in self.rooms.records_of(incarnation):
            lost = failure("peer_lost", f"a decode rank is gone: {detail}")
            self.rooms.emit(record, record.sender.failed_locally(lost), now)
            for leg in record.sender.legs.values():
                if leg.peer.incarnation == incarnation and leg.told is not None:
                    # Nobody is left to acknowledge the outcome.
                    ack = StatusAck(record.key, leg.lease, leg.told)
                    acked = record.sender.status_acked(StatusAckFrom(leg.peer, ack))
                    self.rooms.emit(record, acked, now)

    def _status(self, payload: HandshakeFrom, kind: StatusKind, reason: Failure | None) -> None:
        message = payload.message
        self.rooms.out.append(
            SendMessage(payload.peer, Status(message.key, message.lease, kind, failure=reason))
        )
