"""Sender: the prefill half of one (room, attempt) on one rank.

Theory
------
A one-sided write cannot be refused by its target and cannot be called back, so the right
to write is claimed first. The sender walks through
  Bootstrapping     the request is here, not every decode rank has published its blocks;
  WaitingForInput   destinations known, one claim per leg sent, KV not computed yet;
  Transferring      at least one leg granted and KV ready: writes are posted;
  Draining          the outcome is already a failure, told to decode; what is left is to be
                    sure that no handle writes their blocks and no forward pass uses ours;
  Done, Failed      terminal; the entity lingers only to answer and to be acknowledged.

Who moves it: the state is *committed* state, equal on all ranks of the group, moved only by
a tick (events ``advanced``, ``completed``, ``failed``, ``quiesced``; architecture, section 9).
Everything else that happens sets sticky facts, and :meth:`Sender.vote` answers the question
of the committed state. No row of a tick asks what only this rank knows, or the ranks of a
group would part: what ``failed`` finds running is waited for in Draining. Posting needs
Transferring and no local failure; an acknowledgement needs a failure (or a terminal state)
and nothing live on that leg (rules 2 and 9).

Not modelled here: time (the core owns timers and resends :meth:`unanswered`), block ids
and bytes (the core turns ``PostTransfer`` into descriptors), who owns the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcore.control.messages import StatusKind
from pdcore.errors import failure
from pdcore.fsm.effects import CancelTransfer, ConnectPeer, Effect, FencePeer, PostTransfer
from pdcore.fsm.events import HandleEnded
from pdcore.fsm.legs import (
    CancelFrom,
    HandshakeFrom,
    KvReady,
    Leg,
    SenderReplies,
    StatusAckFrom,
)
from pdcore.fsm.machine import Event, lifecycle
from pdcore.fsm.states import SenderState as S
from pdcore.fsm.table import Lifecycle, Row, StateInfo
from pdcore.types import Failure, Nonce

_LIVE = (S.BOOTSTRAPPING, S.WAITING_FOR_INPUT, S.TRANSFERRING)
_BOUND = (S.WAITING_FOR_INPUT, S.TRANSFERRING)

SENDER = Lifecycle(
    name="sender",
    states=S,
    initial=S.BOOTSTRAPPING,
    terminal=frozenset({S.DONE, S.FAILED}),
    events=(
        "handshake_received",
        "advanced",
        "claim_granted",
        "claim_refused",
        "compute_started",
        "compute_ended",
        "handle_ended",
        "failed_locally",
        "deadline_expired",
        "cancel_received",
        "status_acked",
        "failed",
        "completed",
        "quiesced",
        "drain_expired",
    ),
    rows=(
        *(
            Row(s, "handshake_received", s, ("answer_failed",), "has_failed")
            for s in (*_LIVE, S.DRAINING, S.FAILED)
        ),
        Row(S.BOOTSTRAPPING, "handshake_received", S.BOOTSTRAPPING, ("add_leg",), "is_new_leg"),
        *(
            Row(s, "handshake_received", s, ("answer_again",), "is_same_lease")
            for s in (*_LIVE, S.DONE)
        ),
        *(Row(s, "handshake_received", s, ("answer_rejected",)) for s in (*_LIVE, S.DONE)),
        Row(S.BOOTSTRAPPING, "advanced", S.WAITING_FOR_INPUT, ("send_claims",)),
        Row(S.WAITING_FOR_INPUT, "advanced", S.TRANSFERRING, ("post_ready",)),
        Row(
            S.WAITING_FOR_INPUT,
            "claim_granted",
            S.WAITING_FOR_INPUT,
            ("mark_granted",),
            "is_claimed",
        ),
        Row(
            S.TRANSFERRING,
            "claim_granted",
            S.TRANSFERRING,
            ("mark_granted", "post_ready"),
            "is_claimed",
        ),
        *(Row(s, "claim_refused", s, ("mark_refused",), "is_claimed") for s in _BOUND),
        *(Row(s, "compute_started", s, ("begin_compute",)) for s in _BOUND),
        Row(S.WAITING_FOR_INPUT, "compute_ended", S.WAITING_FOR_INPUT, ("record_compute",)),
        Row(S.TRANSFERRING, "compute_ended", S.TRANSFERRING, ("record_compute", "post_ready")),
        Row(S.DRAINING, "compute_ended", S.DRAINING, ("record_compute",)),
        *(Row(s, "handle_ended", s, ("record_end",)) for s in (S.TRANSFERRING, S.DRAINING)),
        *(Row(s, "failed_locally", s, ("record_failure",), "has_no_failure") for s in _LIVE),
        *(Row(s, "deadline_expired", s, ("record_failure",), "may_expire") for s in _LIVE),
        *(Row(s, "cancel_received", s, ("record_cancel",)) for s in S),
        *(Row(s, "status_acked", s, ("mark_acked",)) for s in S),
        Row(S.BOOTSTRAPPING, "failed", S.FAILED, ("adopt_failure",)),
        # A forward pass may run, on this rank or on another of the group: all drain.
        Row(S.WAITING_FOR_INPUT, "failed", S.DRAINING, ("adopt_failure",)),
        Row(S.TRANSFERRING, "failed", S.DRAINING, ("adopt_failure", "cancel_handles")),
        Row(S.TRANSFERRING, "completed", S.DONE, ("send_done",)),
        Row(S.DRAINING, "quiesced", S.FAILED),
        Row(S.DRAINING, "drain_expired", S.DRAINING, ("fence_legs",)),
    ),
    info={
        S.BOOTSTRAPPING: StateInfo(
            "request accepted; not all decode ranks have published their blocks",
            awaits="decode (HANDSHAKE)",
            deadline="request deadline",
        ),
        S.WAITING_FOR_INPUT: StateInfo(
            "destinations known, claims sent; KV not computed or no leg granted yet",
            awaits="own engine and decode (GRANT)",
            deadline="request deadline",
        ),
        S.TRANSFERRING: StateInfo(
            "writes posted; more chunks may follow",
            awaits="transport and own engine",
            deadline="request deadline",
        ),
        S.DRAINING: StateInfo(
            "failed and reported; a handle or a forward pass may still touch blocks",
            awaits="transport (quiescence)",
            deadline="drain_timeout_s, then the session is fenced",
        ),
        S.DONE: StateInfo("KV delivered, reported with the metadata record"),
        S.FAILED: StateInfo("ended without delivery; nothing of it can write"),
    },
)


@lifecycle(SENDER)
class Sender(SenderReplies):
    """See the module's theory."""

    __slots__ = ()

    handshake_received: Event[HandshakeFrom]
    advanced: Event[None]
    claim_granted: Event[Nonce]
    claim_refused: Event[Nonce]
    compute_started: Event[None]
    compute_ended: Event[KvReady]
    handle_ended: Event[HandleEnded]
    failed_locally: Event[Failure]
    deadline_expired: Event[Failure]
    cancel_received: Event[CancelFrom]
    status_acked: Event[StatusAckFrom]
    failed: Event[None]
    completed: Event[None]
    quiesced: Event[None]
    drain_expired: Event[None]

    def add_leg(self, payload: HandshakeFrom) -> Sequence[Effect]:
        nonce = Nonce(self.incarnation, next(self.ids))
        leg = Leg(payload.peer, payload.message, nonce)
        self.legs[payload.peer.rank] = leg
        self.num_required = max(self.num_required, payload.message.num_required)
        # The last handshake is answered by the claim that the next tick sends.
        return () if self.is_handshaken else (self._status(leg, StatusKind.QUEUED),)

    def send_claims(self, payload: None) -> Sequence[Effect]:
        """Connect first: whoever claims can be seen to die."""
        out: list[Effect] = []
        for leg in self.legs.values():
            out.append(ConnectPeer(leg.peer, leg.handshake.endpoint))
            out.append(self._claim(leg))
        return out

    def mark_granted(self, nonce: Nonce) -> Sequence[Effect]:
        for leg in self.legs.values():
            if leg.nonce == nonce:
                leg.granted = True
        return ()

    def mark_refused(self, nonce: Nonce) -> Sequence[Effect]:
        if self.failure is not None:
            return ()
        return self.record_failure(
            failure("cancelled", "decode refused the claim: its half of the request is over")
        )

    def post_ready(self, payload: object) -> Sequence[Effect]:
        """Post what is computed and not posted yet on every granted leg (rule 9)."""
        if self.failure is not None:
            return ()
        out: list[Effect] = []
        for leg in self.legs.values():
            if leg.granted and leg.posted_tokens < self.ready_tokens:
                handle = next(self.ids)
                start = leg.posted_tokens
                leg.live.add(handle)
                leg.posted_tokens = self.ready_tokens
                out.append(
                    PostTransfer(
                        handle, self.key, leg.peer, leg.lease, start, self.ready_tokens - start
                    )
                )
        return out

    def begin_compute(self, payload: None) -> Sequence[Effect]:
        self.is_computing = True
        return ()

    def record_compute(self, ready: KvReady) -> Sequence[Effect]:
        self.is_computing = False
        if ready.failure is not None:
            return () if self.failure is not None else self.record_failure(ready.failure)
        self.ready_tokens = ready.num_tokens
        self.first_token = ready.first_token
        return ()

    def record_end(self, ended: HandleEnded) -> Sequence[Effect]:
        for leg in self.legs.values():
            if ended.handle not in leg.live:
                continue
            if not ended.quiesced:
                leg.in_doubt.add(ended.handle)
            else:
                leg.live.discard(ended.handle)
                leg.in_doubt.discard(ended.handle)
                if ended.summed is not None:
                    leg.summed.append(ended.summed)
        if ended.failure is not None and self.failure is None:
            return self.record_failure(ended.failure)
        return self._acks_due() if self.failure is not None else ()

    def record_failure(self, reason: Failure) -> Sequence[Effect]:
        """Sticky; decode and the client hear of it at once."""
        self.failure = reason
        out: list[Effect] = [self._status(leg, StatusKind.FAILED) for leg in self.legs.values()]
        out.extend(self._acks_due())
        return out

    def adopt_failure(self, payload: None) -> Sequence[Effect]:
        """Another rank of the group failed: this one tells its own decode ranks."""
        if self.failure is not None:
            return ()
        return self.record_failure(
            failure("prefill_failed", "another rank of the prefill group failed this request")
        )

    def record_cancel(self, payload: CancelFrom) -> Sequence[Effect]:
        """Bind first (no further chunk can be posted), acknowledge what is quiet (rule 2)."""
        leg = self.legs.get(payload.peer.rank)
        message = payload.message
        out = self._ack_unheld(payload)
        if leg is not None and leg.lease != message.lease:
            return out
        if leg is not None:
            leg.cancelled = True
        if self.failure is None and self.state is not S.DONE:
            gone = failure("cancelled", "decode cancelled the request")
            out.extend(self.record_failure(gone))
        else:
            out.extend(self._acks_due())
        return out

    def mark_acked(self, payload: StatusAckFrom) -> Sequence[Effect]:
        """Only the leg's own decode rank, about what it was told last, silences the resends."""
        leg = self.legs.get(payload.peer.rank)
        if (
            leg is not None
            and payload.peer.incarnation == leg.peer.incarnation
            and payload.message.lease == leg.lease
            and payload.message.kind == leg.told
        ):
            leg.acked = True
        return ()

    def cancel_handles(self, payload: None) -> Sequence[Effect]:
        return tuple(
            CancelTransfer(handle) for leg in self.legs.values() for handle in sorted(leg.live)
        )

    def send_done(self, payload: None) -> Sequence[Effect]:
        return tuple(self._status(leg, StatusKind.DONE) for leg in self.legs.values())

    def fence_legs(self, payload: None) -> Sequence[Effect]:
        """Draining took too long: destroy the session; if that does not fence, the blocks
        stay out of the pool, counted. What has ended, and may land yet, is not on the session
        that this life has now, which others use."""
        return tuple(
            FencePeer(leg.peer) for leg in self.legs.values() if not leg.live <= leg.in_doubt
        )
