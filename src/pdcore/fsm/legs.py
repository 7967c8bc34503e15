"""Facts of a sender: its legs, its votes, and the messages it answers with.

The theory stands in :mod:`pdcore.fsm.sender`; this module holds what its guards read
(:class:`SenderFacts`) and what its actions say (:class:`SenderReplies`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from pdcore.control.messages import (
    Cancel,
    CancelAck,
    Claim,
    Handshake,
    Status,
    StatusAck,
    StatusKind,
)
from pdcore.errors import failure
from pdcore.fsm.effects import Effect, SendMessage
from pdcore.fsm.states import SenderState as S
from pdcore.kv.metadata import MetadataRecord, encode_record
from pdcore.types import Failure, Incarnation, LeaseId, Nonce, PeerRef, RoomKey

#: Votes (MIN over the group). The numbers of one state never meet those of another.
FAILED, NOT_READY, READY = 0, 1, 2
PENDING, LOCALLY_DONE = 1, 2
NOT_QUIESCED, QUIESCED = 0, 1


class HandshakeFrom(msgspec.Struct, frozen=True):
    peer: PeerRef
    message: Handshake


class CancelFrom(msgspec.Struct, frozen=True):
    peer: PeerRef
    message: Cancel


class StatusAckFrom(msgspec.Struct, frozen=True):
    peer: PeerRef
    message: StatusAck


class FirstToken(msgspec.Struct, frozen=True):
    """What prefill produced: travels in STATUS Done as the metadata record (rule 5)."""

    output_token_id: int
    logprob: float | None
    num_tokens: int
    ids_hash: int
    spec_token_ids: tuple[int, ...] = ()
    #: Seconds per stage, for the client's timeline.
    timings: dict[str, float] = {}


class KvReady(msgspec.Struct, frozen=True):
    """A forward pass of this request ended: KV of the first ``num_tokens`` positions is
    complete. ``first_token`` comes with the last chunk; ``failure`` if the pass failed."""

    num_tokens: int
    first_token: FirstToken | None = None
    failure: Failure | None = None


class Leg:
    """One decode rank this sender must serve: (sender entity, decode rank)."""

    __slots__ = (
        "acked",
        "cancelled",
        "granted",
        "handshake",
        "in_doubt",
        "live",
        "nonce",
        "peer",
        "posted_tokens",
        "summed",
        "told",
    )

    def __init__(self, peer: PeerRef, handshake: Handshake, nonce: Nonce) -> None:
        self.peer = peer
        self.handshake = handshake
        self.nonce = nonce
        self.granted = False
        #: Handles ever posted that have not quiesced (rule 9).
        self.live: set[int] = set()
        #: Those of them that have ended, and may land yet.
        self.in_doubt: set[int] = set()
        self.posted_tokens = 0
        #: (one past the last token, checksums) of transfers that ended, where decode asks.
        self.summed: list[tuple[int, bytes]] = []
        #: Kind of the last status told, and whether decode acknowledged it.
        self.told: StatusKind | None = None
        self.acked = False
        #: A cancel waits for this leg to become quiet.
        self.cancelled = False

    @property
    def lease(self) -> LeaseId:
        return self.handshake.lease

    @property
    def outcome(self) -> StatusKind | None:
        """As it was told; None: not yet."""
        return None if self.told is StatusKind.QUEUED else self.told

    def __repr__(self) -> str:
        return (
            f"Leg(rank={self.peer.rank}, granted={self.granted}, posted={self.posted_tokens}, "
            f"live={sorted(self.live)})"
        )


class SenderFacts:
    """Facts are plain attributes; only events change them. Votes and guards read them."""

    __slots__ = (
        "failure",
        "first_token",
        "ids",
        "ignored",
        "incarnation",
        "is_computing",
        "key",
        "legs",
        "num_required",
        "ready_tokens",
        "state",
    )

    def __init__(self, key: RoomKey, incarnation: Incarnation, ids: Iterator[int]) -> None:
        self.state: S = S.BOOTSTRAPPING
        self.ignored = 0
        self.key = key
        self.incarnation = incarnation
        #: Mints nonces and handles; shared by all entities of the process, never reused.
        self.ids = ids
        #: Decode rank -> leg.
        self.legs: dict[int, Leg] = {}
        #: Handshakes needed in all; known from the first one (R58).
        self.num_required = 0
        self.ready_tokens = 0
        self.first_token: FirstToken | None = None
        self.is_computing = False
        self.failure: Failure | None = None

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
            return READY if self.is_handshaken else NOT_READY
        return READY if self.can_start else NOT_READY

    def received_token(self) -> None:
        """Prefill's ranks agree on tokens in their engine's step."""

    @property
    def is_handshaken(self) -> bool:
        return bool(self.legs) and len(self.legs) >= self.num_required

    @property
    def can_start(self) -> bool:
        return self.ready_tokens > 0 and any(leg.granted for leg in self.legs.values())

    @property
    def is_locally_done(self) -> bool:
        """Last chunk known, every leg granted, fully posted and quiesced (rule 9)."""
        token = self.first_token
        if token is None or self.failure is not None:
            return False
        for leg in self.legs.values():
            if not leg.granted or leg.live or leg.posted_tokens < token.num_tokens:
                return False
        return True

    @property
    def is_quiet(self) -> bool:
        return not self.is_computing and not any(leg.live for leg in self.legs.values())

    def has_failed(self, payload: object) -> bool:
        return self.failure is not None

    def has_no_failure(self, payload: object) -> bool:
        return self.failure is None

    def is_new_leg(self, payload: HandshakeFrom) -> bool:
        return payload.peer.rank not in self.legs

    def is_same_lease(self, payload: HandshakeFrom) -> bool:
        leg = self.legs.get(payload.peer.rank)
        return leg is not None and leg.lease == payload.message.lease

    def is_claimed(self, nonce: Nonce) -> bool:
        return any(leg.nonce == nonce and not leg.granted for leg in self.legs.values())

    def may_expire(self, payload: object) -> bool:
        """Completion beats a deadline of the same tick."""
        return self.failure is None and not self.is_locally_done

    def __repr__(self) -> str:
        legs = list(self.legs.values())
        return f"Sender({self.key.room}/{self.key.attempt} {self.state.value} {legs})"


class SenderReplies(SenderFacts):
    """Facts plus the messages that follow from them."""

    __slots__ = ()

    @property
    def is_unanswered(self) -> bool:
        """There is something to be resent."""
        return any(map(self._is_open, self.legs.values()))

    def unanswered(self) -> list[Effect]:
        """Messages without an answer yet, to be resent (rule 4)."""
        return [
            self._claim(leg) if leg.outcome is None else self._status(leg, leg.outcome)
            for leg in self.legs.values()
            if self._is_open(leg)
        ]

    def _is_open(self, leg: Leg) -> bool:
        if leg.outcome is not None:
            return not leg.acked
        return not leg.granted and self.state in (S.WAITING_FOR_INPUT, S.TRANSFERRING)

    def answer_again(self, payload: HandshakeFrom) -> Sequence[Effect]:
        """A repeated handshake: the claim or the outcome got lost."""
        leg = self.legs[payload.peer.rank]
        if self.state is S.BOOTSTRAPPING:
            return (self._status(leg, StatusKind.QUEUED),)
        if leg.told in (StatusKind.DONE, StatusKind.FAILED):
            return (self._status(leg, leg.told),)
        return () if leg.granted else (self._claim(leg),)

    def answer_rejected(self, payload: HandshakeFrom) -> Sequence[Effect]:
        """The attempt is bound to another lease: a forgotten receiver came back (rule 1)."""
        reason = failure(
            "handshake_rejected", "this attempt is bound to another lease; retry with a new attempt"
        )
        message = Status(self.key, payload.message.lease, StatusKind.REJECTED, failure=reason)
        return (SendMessage(payload.peer, message),)

    def answer_failed(self, payload: HandshakeFrom) -> Sequence[Effect]:
        message = Status(self.key, payload.message.lease, StatusKind.FAILED, failure=self._reason())
        return (SendMessage(payload.peer, message),)

    def _reason(self) -> Failure:
        return self.failure or failure("prefill_failed", "prefill ended without a reason")

    def _claim(self, leg: Leg) -> Effect:
        return SendMessage(leg.peer, Claim(self.key, leg.lease, leg.nonce))

    def _status(self, leg: Leg, kind: StatusKind) -> Effect:
        leg.told = kind
        reason = self._reason() if kind is StatusKind.FAILED else None
        metadata = self._metadata(leg) if kind is StatusKind.DONE else None
        nonce = leg.nonce if kind is StatusKind.DONE else None
        timings = self.first_token.timings if metadata and self.first_token else {}
        return SendMessage(
            leg.peer, Status(self.key, leg.lease, kind, nonce, reason, metadata, timings)
        )

    def _metadata(self, leg: Leg) -> bytes:
        token = self.first_token
        assert token is not None
        summed = sorted(leg.summed)
        return encode_record(
            MetadataRecord(
                room=self.key.room,
                attempt=self.key.attempt,
                nonce=leg.nonce,
                output_token_id=token.output_token_id,
                logprob=token.logprob,
                num_tokens=token.num_tokens,
                ids_hash=token.ids_hash,
                spec_token_ids=token.spec_token_ids,
                sent_until=tuple(end for end, _ in summed),
                sums=b"".join(sums for _, sums in summed),
            )
        )

    def _acks_due(self) -> list[Effect]:
        """Acknowledge cancelled legs that are quiet; a nonce once, then on each resend."""
        out: list[Effect] = []
        for leg in self.legs.values():
            if leg.cancelled and not leg.live:
                leg.cancelled = False
                leg.acked = True
                out.append(SendMessage(leg.peer, CancelAck(self.key, leg.lease, leg.nonce)))
        return out

    def _ack_unheld(self, payload: CancelFrom) -> list[Effect]:
        """Nonces that no leg holds, of a former entity or receiver life of this process:
        entities are forgotten only when quiesced, so nothing of them writes (rule 2). None
        says that nothing was ever granted where no leg will speak for itself."""
        message = payload.message
        own = {leg.nonce for leg in self.legs.values()}
        unheld: list[Nonce | None] = [
            n for n in message.nonces if n not in own and n.incarnation == self.incarnation
        ]
        leg = self.legs.get(payload.peer.rank)
        if not message.nonces and (leg is None or leg.lease != message.lease):
            unheld.append(None)
        return [
            SendMessage(payload.peer, CancelAck(self.key, message.lease, nonce)) for nonce in unheld
        ]
