"""One request on a decode rank: its receiver, its sequence, and whom it waits for."""

from __future__ import annotations

from pdcore.config import CoreLimits
from pdcore.errors import failure
from pdcore.fsm.receiver import RECEIVER, Receiver
from pdcore.fsm.states import ReceiverState
from pdcore.kv.metadata import hash_token_ids
from pdcore.kv.slots import MetadataSlot
from pdcore.scheduler.queues import RoomRecord
from pdcore.scheduler.sequence import Sequence
from pdcore.scheduler.verifying import Verification
from pdcore.scheduler.waiting import overdue
from pdcore.types import Failure, GenerateRequest, Incarnation, LeaseId, PeerRef, Role


class DecodeRecord(RoomRecord):
    """One (room, attempt) on this decode rank (R68)."""

    __slots__ = (
        "aged_s",
        "num_required",
        "queued_at",
        "receiver",
        "seq",
        "slot",
        "verification",
    )

    def __init__(
        self, request: GenerateRequest, lease: LeaseId, seq_id: int, now: float, quarantine_s: float
    ) -> None:
        super().__init__(request, now)
        prompt = request.prompt_token_ids
        self.receiver = Receiver(
            request.key, lease, len(prompt), hash_token_ids(prompt), quarantine_s
        )
        if request.is_local:  # nothing to receive: that half is over before it begins
            self.receiver.state = ReceiverState.DONE
        self.seq = Sequence(seq_id, request)
        self.slot: MetadataSlot | None = None
        #: Handshakes each prefill rank waits for (R58).
        self.num_required = 1
        #: Prefill ranks that have said that the handshake waits for its request there.
        #: When each of them said so first, and last.
        self.queued_at: dict[int, tuple[float, float]] = {}
        self.verification = Verification()
        #: When the quarantine was last counted down; None before it runs.
        self.aged_s: float | None = None

    @property
    def entity(self) -> Receiver:
        return self.receiver

    @property
    def is_over(self) -> bool:
        """Reported, and no writer can touch its blocks any more."""
        state = self.receiver.state
        return state is ReceiverState.FAILED or (state is ReceiverState.DONE and self.is_reported)

    @property
    def is_settled(self) -> bool:
        return self.receiver.state in (ReceiverState.DONE, ReceiverState.FAILED)

    @property
    def is_draining(self) -> bool:
        return self.receiver.state is ReceiverState.DRAINING

    @property
    def seq_id(self) -> int:
        return self.seq.seq_id

    def peers(self) -> list[PeerRef]:
        return [target.peer for target in self.receiver.targets.values()]

    def awaited(self) -> list[PeerRef]:
        targets = self.receiver.targets.values()
        return [t.peer for t in targets if t.nonce is not None and not t.over]

    def overdue(self, now: float) -> Failure:
        """Why its deadline passed: what it waited for, and whom."""
        state = self.receiver.state
        owing = [t.peer for t in self.receiver.targets.values() if t.record is None]
        info, waited_s = RECEIVER.info[state], now - self.accepted_s
        return overdue(Role.DECODE, state.value, info, waited_s, owing, self.request.prefill)

    def unheard(self) -> list[PeerRef]:
        """Handshakes that nobody answered with a claim or an outcome."""
        if self.receiver.state is not ReceiverState.TRANSFERRING:
            return []
        return [t.peer for t in self.receiver.targets.values() if not t.answered]

    def hear_queued(self, rank: int, now: float) -> None:
        self.queued_at[rank] = (self.queued_at.get(rank, (now, now))[0], now)

    def lost_half(self, now: float, limits: CoreLimits) -> Failure | None:
        """A prefill rank has said all along, and just now, that it waits for its half of this
        request, which both were sent at once: it went to a process that is gone (to the last life
        of that rank, perhaps, that had taken it), and nobody else knows. Who is silent meanwhile
        may have it unread. The same pair serves the next attempt."""
        for peer in self.unheard():
            first_s, last_s = self.queued_at.get(peer.rank, (now, now))
            is_heard = now - last_s <= 1.5 * limits.resend_max_s
            if now - first_s >= limits.prefill_arrival_s and is_heard:
                detail = (
                    f"{peer.instance} rank {peer.rank} has waited {now - first_s:.0f} s for its "
                    "half of this request, or for the other decode ranks of it"
                )
                return failure("stale_route", detail)
        return None

    def failing(self, now: float, silence_s: float) -> list[PeerRef]:
        """At its deadline: who had a fair time to answer a handshake and said nothing at all.
        A client's short deadline is no fault of a peer, and Queued is an answer (D25)."""
        admitted = self.timeline.get("admitted")
        if admitted is None or now - self.accepted_s - admitted < silence_s:
            return []
        return [peer for peer in self.unheard() if peer.rank not in self.queued_at]

    def loss_of(self, incarnation: Incarnation, detail: str) -> Failure:
        """Why this request ends with that prefill life. Where it never said a word about the
        request, only the route was old: the life may have been over before the request came,
        and its successor may have the prefill half already. Nothing is lost then, and the same
        pair serves the next attempt (architecture, section 2: new requests work)."""
        for target in self.receiver.targets.values():
            peer = target.peer
            if peer.incarnation == incarnation and (target.answered or peer.rank in self.queued_at):
                return failure("peer_lost", f"a prefill rank is gone: {detail}")
        return failure("stale_route", f"the route led to a prefill rank that is gone: {detail}")

    def __repr__(self) -> str:
        return f"DecodeRecord({self.receiver!r}, {self.seq!r})"
