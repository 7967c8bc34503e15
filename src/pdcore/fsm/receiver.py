"""Receiver: the decode half of one (room, attempt) on one rank.

Theory
------
  Bootstrapping     which prefill ranks serve this request is not known yet;
  WaitingForInput   mapped; waiting for blocks and a metadata slot (admission);
  Transferring      the lease is published: prefill ranks may claim, be granted and write;
  Draining          the client has its answer already; blocks and slot stay out of the pool
                    until every granted nonce is acknowledged, reported Done, or its process
                    is dead *and* fenced (rule 3);
  Done, Failed      terminal; lingers only to answer late messages, and until its cancels
                    are answered.

Grants are given only for the current lease, only while Transferring without a local
failure, and at most one nonce per (lease, prefill rank), ever: neither Done nor a lost
sender frees the place (rule 1). STATUS Done with a valid metadata record is the only
completion (rule 5); an early Failed is news and ends no claim. Committed state moves only
by a tick, as in :mod:`pdcore.fsm.sender`.

Not modelled here: time, block ids, admission itself (the core votes for it), the
quarantine clock (the core feeds ``quarantine_s`` down).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcore.control.messages import Grant, StatusKind
from pdcore.errors import failure
from pdcore.fsm.effects import (
    Effect,
    FencePeer,
    GrantLease,
    ReleaseLease,
    RevokeLease,
    SendMessage,
)
from pdcore.fsm.machine import Event, lifecycle
from pdcore.fsm.states import ReceiverState as S
from pdcore.fsm.table import Lifecycle, Row, StateInfo
from pdcore.fsm.targets import (
    Admission,
    CancelAckFrom,
    ClaimFrom,
    ReceiverReplies,
    StatusFrom,
    Target,
)
from pdcore.types import Failure, Incarnation, LeaseId, PeerRef

_LIVE = (S.BOOTSTRAPPING, S.WAITING_FOR_INPUT, S.TRANSFERRING)
_OPEN = (S.TRANSFERRING, S.DRAINING)

RECEIVER = Lifecycle(
    name="receiver",
    states=S,
    initial=S.BOOTSTRAPPING,
    terminal=frozenset({S.DONE, S.FAILED}),
    events=(
        "topology_mapped",
        "advanced",
        "claim_received",
        "status_received",
        "cancel_acked",
        "writer_fenced",
        "lease_revoked",
        "failed_locally",
        "deadline_expired",
        "failed",
        "completed",
        "quiesced",
        "drain_expired",
    ),
    rows=(
        Row(
            S.BOOTSTRAPPING,
            "topology_mapped",
            S.BOOTSTRAPPING,
            ("record_targets",),
            "has_no_failure",
        ),
        Row(S.BOOTSTRAPPING, "advanced", S.WAITING_FOR_INPUT),
        Row(S.WAITING_FOR_INPUT, "advanced", S.TRANSFERRING, ("publish_lease",)),
        Row(S.TRANSFERRING, "claim_received", S.TRANSFERRING, ("grant",), "may_grant"),
        *(Row(s, "claim_received", s, ("refuse",)) for s in S),
        *(Row(s, "status_received", s, ("record_done",), "is_done_of_grant") for s in _OPEN),
        Row(S.TRANSFERRING, "status_received", S.TRANSFERRING, ("record_news",), "is_news"),
        *(Row(s, "status_received", s, ("acknowledge",)) for s in S),
        # Cancels are sent from Draining on, and from an end that comes before the lease.
        *(
            Row(s, "cancel_acked", s, ("record_ack",), "is_own_lease")
            for s in (S.DRAINING, S.FAILED)
        ),
        *(
            Row(s, "writer_fenced", s, ("record_fenced",))
            for s in (S.WAITING_FOR_INPUT, *_OPEN, S.FAILED)
        ),
        Row(S.DRAINING, "lease_revoked", S.DRAINING, ("record_revoked",), "is_this_lease"),
        *(Row(s, "failed_locally", s, ("record_failure",), "has_no_failure") for s in _LIVE),
        *(Row(s, "deadline_expired", s, ("record_failure",), "may_expire") for s in _LIVE),
        *(
            Row(s, "failed", S.FAILED, ("adopt_failure", "cancel_targets"))
            for s in (S.BOOTSTRAPPING, S.WAITING_FOR_INPUT)
        ),
        Row(
            S.TRANSFERRING,
            "failed",
            S.DRAINING,
            ("adopt_failure", "revoke_lease", "cancel_targets"),
        ),
        Row(S.TRANSFERRING, "completed", S.DONE, ("release_lease",)),
        Row(S.DRAINING, "quiesced", S.FAILED, ("release_lease",)),
        Row(S.DRAINING, "drain_expired", S.DRAINING, ("fence_writers",)),
    ),
    info={
        S.BOOTSTRAPPING: StateInfo(
            "topology of the prefill instance not known yet",
            awaits="bootstrap server (route)",
            deadline="request deadline",
        ),
        S.WAITING_FOR_INPUT: StateInfo(
            "mapped; waiting for blocks and a metadata slot",
            awaits="own pool (admission)",
            deadline="request deadline",
        ),
        S.TRANSFERRING: StateInfo(
            "lease published; KV on the way",
            awaits="every required prefill rank (CLAIM, STATUS Done)",
            deadline="request deadline",
        ),
        S.DRAINING: StateInfo(
            "client answered; blocks and slot quarantined",
            awaits="every granted nonce (ACK, STATUS Done, or proof of death and fence)",
            deadline="drain_timeout_s, then the writers are fenced",
        ),
        S.DONE: StateInfo("KV and metadata complete; the request runs"),
        S.FAILED: StateInfo("ended; blocks and slot are back"),
    },
)


@lifecycle(RECEIVER)
class Receiver(ReceiverReplies):
    """See the module's theory."""

    __slots__ = ()

    topology_mapped: Event[Sequence[PeerRef]]
    advanced: Event[Admission | None]
    claim_received: Event[ClaimFrom]
    status_received: Event[StatusFrom]
    cancel_acked: Event[CancelAckFrom]
    writer_fenced: Event[Incarnation]
    lease_revoked: Event[LeaseId]
    failed_locally: Event[Failure]
    deadline_expired: Event[Failure]
    failed: Event[None]
    completed: Event[None]
    quiesced: Event[None]
    drain_expired: Event[None]

    def record_targets(self, peers: Sequence[PeerRef]) -> Sequence[Effect]:
        self.targets = {peer.rank: Target(peer) for peer in peers}
        return ()

    def publish_lease(self, admission: Admission | None) -> Sequence[Effect]:
        """Open the lease to the transport before any peer can hear of it."""
        assert admission is not None
        self.admission = admission
        out: list[Effect] = [GrantLease(self.lease, admission.ranges)]
        out.extend(self._handshake(t) for t in self.targets.values())
        return out

    def grant(self, payload: ClaimFrom) -> Sequence[Effect]:
        target = self.targets[payload.peer.rank]
        target.nonce = payload.message.nonce
        target.answered = True
        return (SendMessage(payload.peer, Grant(self.key, payload.message.nonce)),)

    def record_done(self, payload: StatusFrom) -> Sequence[Effect]:
        """Done ends the claim whatever its metadata is worth; bad metadata fails this
        request only (D12, D13, D19)."""
        target = self.targets[payload.peer.rank]
        target.over = True
        target.answered = True
        problem = self._check(target, payload.message)
        if problem is not None and self.failure is None:
            self.failure = failure("bad_metadata", problem)
        return self.acknowledge(payload)

    def record_news(self, payload: StatusFrom) -> Sequence[Effect]:
        """Handshakes go to real targets only, so a rank that calls itself a dummy belongs to
        another topology: as good as a failure."""
        target = self.targets[payload.peer.rank]
        message = payload.message
        if message.kind is StatusKind.QUEUED:
            return ()
        target.answered = True
        if self.failure is None:
            self.failure = message.failure or failure(
                "prefill_failed", f"prefill answered {message.kind.name} without a reason"
            )
        return self.acknowledge(payload)

    def record_ack(self, payload: CancelAckFrom) -> Sequence[Effect]:
        target = self.targets[payload.peer.rank]
        nonce = payload.message.nonce
        if nonce is not None and nonce == target.nonce:
            target.over = True
        target.cancel_answered = True
        return ()

    def record_fenced(self, incarnation: Incarnation) -> Sequence[Effect]:
        for target in self.targets.values():
            if target.peer.incarnation == incarnation:
                target.died = target.died or not target.over
                target.over = True
                target.cancel_answered = True
        return ()

    def record_revoked(self, lease: LeaseId) -> Sequence[Effect]:
        """The transport itself refuses further writes: no writer is left (RECEIVER_ENFORCED)."""
        for target in self.targets.values():
            target.over = True
        return ()

    def record_failure(self, reason: Failure) -> Sequence[Effect]:
        self.failure = reason
        return ()

    def adopt_failure(self, payload: None) -> Sequence[Effect]:
        """Another rank of the group failed: the request ends here too, with a reason."""
        if self.failure is None:
            self.failure = failure(
                "transfer_failed", "another rank of the decode group failed this request"
            )
        return ()

    def revoke_lease(self, payload: None) -> Sequence[Effect]:
        return (RevokeLease(self.lease),)

    def cancel_targets(self, payload: None) -> Sequence[Effect]:
        """Also before the lease: whoever told both halves may be gone, and prefill's would wait
        for this one until its deadline. Nobody tells the dead."""
        return [self._cancel(t) for t in self.targets.values() if not t.cancel_answered]

    def release_lease(self, payload: None) -> Sequence[Effect]:
        return (ReleaseLease(self.lease),)

    def fence_writers(self, payload: None) -> Sequence[Effect]:
        return tuple(
            FencePeer(t.peer) for t in self.targets.values() if t.nonce is not None and not t.over
        )
