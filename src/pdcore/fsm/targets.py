"""Facts of a receiver: its targets, its votes, and the messages it answers with.

The theory stands in :mod:`pdcore.fsm.receiver`; this module holds what its guards read
(:class:`ReceiverFacts`) and what its actions say (:class:`ReceiverReplies`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdcore.control.messages import (
    Cancel,
    CancelAck,
    Claim,
    Handshake,
    Refuse,
    Status,
    StatusAck,
    StatusKind,
)
from pdcore.errors import CodecError
from pdcore.fsm.effects import Effect, SendMessage
from pdcore.fsm.legs import (
    FAILED,
    LOCALLY_DONE,
    NOT_QUIESCED,
    NOT_READY,
    PENDING,
    QUIESCED,
    READY,
)
from pdcore.fsm.states import ReceiverState as S
from pdcore.kv.metadata import MetadataRecord, decode_record
from pdcore.kv.plan import Int64Array
from pdcore.types import Failure, LeaseId, Nonce, PeerRef, RoomKey


class Admission(msgspec.Struct, frozen=True):
    """What admission gave: the handshake to publish and the byte ranges it opens."""

    handshake: Handshake
    ranges: dict[int, Int64Array]


class ClaimFrom(msgspec.Struct, frozen=True):
    peer: PeerRef
    message: Claim


class StatusFrom(msgspec.Struct, frozen=True):
    peer: PeerRef
    message: Status


class CancelAckFrom(msgspec.Struct, frozen=True):
    peer: PeerRef
    message: CancelAck


class Target:
    """One prefill rank this receiver needs."""

    __slots__ = ("answered", "cancel_answered", "died", "nonce", "over", "peer", "record")

    def __init__(self, peer: PeerRef) -> None:
        self.peer = peer
        #: The one nonce granted, ever.
        self.nonce: Nonce | None = None
        #: That nonce can write no more: acknowledged, Done, or dead and fenced.
        self.over = False
        #: It ended by the death of its writer, and not by the writer's own word.
        self.died = False
        self.record: MetadataRecord | None = None
        #: The handshake was answered by a claim or a terminal status.
        self.answered = False
        self.cancel_answered = False

    def __repr__(self) -> str:
        nonce = self.nonce.counter if self.nonce else None
        return f"Target(rank={self.peer.rank}, nonce={nonce}, over={self.over})"


class ReceiverFacts:
    """Facts are plain attributes; only events change them. ``num_tokens`` and ``ids_hash``
    are the local prompt's, to be matched by the metadata record (D19)."""

    __slots__ = (
        "admission",
        "failure",
        "ids_hash",
        "ignored",
        "key",
        "lease",
        "num_tokens",
        "quarantine_s",
        "state",
        "targets",
        "wants_admission",
    )

    def __init__(
        self,
        key: RoomKey,
        lease: LeaseId,
        num_tokens: int,
        ids_hash: int,
        quarantine_s: float = 0.0,
    ) -> None:
        self.state: S = S.BOOTSTRAPPING
        self.ignored = 0
        self.key = key
        self.lease = lease
        self.num_tokens = num_tokens
        self.ids_hash = ids_hash
        #: Prefill rank -> target.
        self.targets: dict[int, Target] = {}
        self.admission: Admission | None = None
        #: Set by the core each tick: blocks and a slot are there for this request.
        self.wants_admission = False
        self.failure: Failure | None = None
        #: Left on QUARANTINE transports; 0 elsewhere.
        self.quarantine_s = quarantine_s

    def vote(self) -> int:
        state = self.state
        if state is S.TRANSFERRING:
            if self.is_locally_done:
                return LOCALLY_DONE
            return FAILED if self.failure is not None else PENDING
        if state is S.DRAINING:
            return QUIESCED if self.is_quiet else NOT_QUIESCED
        if self.failure is not None:
            return FAILED
        if state is S.BOOTSTRAPPING:
            return READY if self.targets else NOT_READY
        return READY if self.wants_admission else NOT_READY

    @property
    def is_locally_done(self) -> bool:
        """Every required rank reported Done with valid metadata."""
        return (
            self.failure is None
            and bool(self.targets)
            and all(t.record is not None for t in self.targets.values())
        )

    @property
    def is_quiet(self) -> bool:
        return self.quarantine_s <= 0 and self.are_writers_over

    @property
    def are_writers_over(self) -> bool:
        """Every granted nonce is acknowledged, Done, or of a dead writer (rule 3)."""
        return all(t.nonce is None or t.over for t in self.targets.values())

    @property
    def record(self) -> MetadataRecord | None:
        """The record of the lowest required rank (rule 5)."""
        for rank in sorted(self.targets):
            target = self.targets[rank]
            if target.record is not None:
                return target.record
        return None

    def has_no_failure(self, payload: object) -> bool:
        return self.failure is None

    def may_expire(self, payload: object) -> bool:
        """Completion beats a deadline of the same tick."""
        return self.failure is None and not self.is_locally_done

    def may_grant(self, payload: ClaimFrom) -> bool:
        """Rule 1: current lease, no local failure, the first nonce of that rank or its echo."""
        target = self.targets.get(payload.peer.rank)
        return (
            target is not None
            and self.failure is None
            and payload.message.lease == self.lease
            and target.peer.incarnation == payload.peer.incarnation
            # Only that life can ever acknowledge it.
            and payload.message.nonce.incarnation == payload.peer.incarnation
            and target.nonce in (None, payload.message.nonce)
        )

    def is_done_of_grant(self, payload: StatusFrom) -> bool:
        target = self.targets.get(payload.peer.rank)
        return (
            target is not None
            and target.peer.incarnation == payload.peer.incarnation
            and payload.message.kind is StatusKind.DONE
            and payload.message.lease == self.lease
            and target.nonce is not None
            and target.nonce == payload.message.nonce
        )

    def is_news(self, payload: StatusFrom) -> bool:
        """Anything but Done about the current lease from a target."""
        return (
            self._is_target(payload.peer)
            and payload.message.kind is not StatusKind.DONE
            and payload.message.lease == self.lease
        )

    def is_own_lease(self, payload: CancelAckFrom) -> bool:
        return payload.message.lease == self.lease and self._is_target(payload.peer)

    def _is_target(self, peer: PeerRef) -> bool:
        """That very process life: nobody else speaks for it (section 2)."""
        target = self.targets.get(peer.rank)
        return target is not None and target.peer.incarnation == peer.incarnation

    def is_this_lease(self, lease: LeaseId) -> bool:
        return lease == self.lease

    def __repr__(self) -> str:
        targets = list(self.targets.values())
        return f"Receiver({self.key.room}/{self.key.attempt} {self.state.value} {targets})"


class ReceiverReplies(ReceiverFacts):
    """Facts plus the messages that follow from them."""

    __slots__ = ()

    def received_token(self) -> int | None:
        """Of the record, when all of it is here."""
        record = self.record if self.state is S.TRANSFERRING and self.is_locally_done else None
        return None if record is None else record.output_token_id

    @property
    def is_unanswered(self) -> bool:
        """There is something to be resent."""
        return any(map(self._is_open, self.targets.values()))

    def unanswered(self) -> list[Effect]:
        """Messages without an answer yet, to be resent (rule 4)."""
        ask = self._handshake if self.state is S.TRANSFERRING else self._cancel
        return [ask(target) for target in self.targets.values() if self._is_open(target)]

    def _is_open(self, target: Target) -> bool:
        if self.state is S.TRANSFERRING:
            return self.failure is None and not target.answered
        if self.state not in (S.DRAINING, S.FAILED):
            return False
        return not (target.cancel_answered if target.nonce is None else target.over)

    def refuse(self, payload: ClaimFrom) -> Sequence[Effect]:
        reason = f"no grant in {self.state.value} for this claim"
        return (SendMessage(payload.peer, Refuse(self.key, payload.message.nonce, reason)),)

    def acknowledge(self, payload: StatusFrom) -> Sequence[Effect]:
        message = payload.message
        if message.kind is StatusKind.QUEUED:
            return ()
        return (SendMessage(payload.peer, StatusAck(self.key, message.lease, message.kind)),)

    def _check(self, target: Target, message: Status) -> str | None:
        """Why the metadata record cannot be accepted, or None (then it is recorded)."""
        if message.metadata is None:
            return "STATUS Done came without a metadata record"
        try:
            record = decode_record(message.metadata)
        except CodecError as error:
            return f"metadata record unreadable: {error}"
        if (record.room, record.attempt) != self.key or record.nonce != message.nonce:
            return "metadata record belongs to another request"
        if (record.num_tokens, record.ids_hash) != (self.num_tokens, self.ids_hash):
            return (
                f"prefill computed {record.num_tokens} prompt tokens, decode has "
                f"{self.num_tokens}, or their ids differ: check that both use one tokenizer"
            )
        target.record = record
        return None

    def _handshake(self, target: Target) -> Effect:
        assert self.admission is not None
        return SendMessage(target.peer, self.admission.handshake)

    def _cancel(self, target: Target) -> Effect:
        nonces = () if target.nonce is None else (target.nonce,)
        return SendMessage(target.peer, Cancel(self.key, self.lease, nonces))
