"""Receiver: one grant per lease and rank, one kind of completion, release after the last writer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdcore.control.messages import (
    Cancel,
    CancelAck,
    Claim,
    Grant,
    Handshake,
    Refuse,
    Status,
    StatusAck,
    StatusKind,
)
from pdcore.errors import failure
from pdcore.fsm.effects import (
    Effect,
    FencePeer,
    GrantLease,
    ReleaseLease,
    RevokeLease,
    SendMessage,
)
from pdcore.fsm.legs import (
    FAILED,
    LOCALLY_DONE,
    NOT_QUIESCED,
    NOT_READY,
    PENDING,
    QUIESCED,
    READY,
)
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.states import ReceiverState as S
from pdcore.fsm.targets import Admission, CancelAckFrom, ClaimFrom, StatusFrom
from pdcore.kv.metadata import MetadataRecord, encode_record
from pdcore.types import Failure, Incarnation, LeaseId, Nonce, PeerRef, RoomKey

KEY = RoomKey(5, 7)
DECODE, PREFILL = Incarnation(b"d" * 16), Incarnation(b"p" * 16)
LEASE = LeaseId(DECODE, 1)
GONE = failure("cancelled", "the client went away")


def peer(rank: int = 0, incarnation: Incarnation = PREFILL) -> PeerRef:
    return PeerRef("prefill:8001", rank, incarnation, f"tcp://prefill:{9000 + rank}")


def nonce(rank: int = 0, life: int = 0) -> Nonce:
    return Nonce(PREFILL, 100 + 10 * life + rank)


def claim(rank: int = 0, life: int = 0, lease: LeaseId = LEASE) -> ClaimFrom:
    return ClaimFrom(peer(rank), Claim(KEY, lease, nonce(rank, life)))


def done(rank: int = 0, life: int = 0, **changes: object) -> StatusFrom:
    fields = {
        "room": KEY.room,
        "attempt": KEY.attempt,
        "nonce": nonce(rank, life),
        "output_token_id": 42,
        "logprob": None,
        "num_tokens": 64,
        "ids_hash": 99,
        "spec_token_ids": (),
    }
    data = encode_record(MetadataRecord(**(fields | changes)))
    return status(rank, StatusKind.DONE, nonce(rank, life), metadata=data)


def status(
    rank: int,
    kind: StatusKind,
    of: Nonce | None = None,
    *,
    reason: Failure | None = None,
    metadata: bytes | None = None,
    lease: LeaseId = LEASE,
) -> StatusFrom:
    message = Status(KEY, lease, kind, of, reason, metadata)
    return StatusFrom(peer(rank), message)


def ack(rank: int = 0, of: Nonce | None = None) -> CancelAckFrom:
    return CancelAckFrom(peer(rank), CancelAck(KEY, LEASE, of))


ADMISSION = Admission(
    Handshake(
        key=KEY,
        lease=LEASE,
        endpoint=b"endpoint",
        blocks={"full": b"\x01\x00\x00\x00"},
        num_cached_tokens=0,
        num_tokens=64,
        ids_hash=99,
        num_required=1,
        expires_at_s=1e9,
        remaining_s=30.0,
    ),
    ranges={},
)


def bootstrapping(cls: type[Receiver] = Receiver, quarantine_s: float = 0.0) -> Receiver:
    return cls(KEY, LEASE, num_tokens=64, ids_hash=99, quarantine_s=quarantine_s)


def waiting(cls: type[Receiver] = Receiver, ranks: int = 1, quarantine_s: float = 0.0) -> Receiver:
    receiver = bootstrapping(cls, quarantine_s)
    receiver.topology_mapped([peer(rank) for rank in range(ranks)])
    receiver.advanced(None)
    assert receiver.state is S.WAITING_FOR_INPUT
    return receiver


def published(
    cls: type[Receiver] = Receiver, ranks: int = 1, quarantine_s: float = 0.0
) -> Receiver:
    receiver = waiting(cls, ranks, quarantine_s)
    receiver.advanced(ADMISSION)
    assert receiver.state is S.TRANSFERRING
    return receiver


def granted(cls: type[Receiver] = Receiver, ranks: int = 1, quarantine_s: float = 0.0) -> Receiver:
    receiver = published(cls, ranks, quarantine_s)
    for rank in range(ranks):
        receiver.claim_received(claim(rank))
    return receiver


def draining(cls: type[Receiver] = Receiver, ranks: int = 1, quarantine_s: float = 0.0) -> Receiver:
    receiver = granted(cls, ranks, quarantine_s)
    receiver.failed_locally(GONE)
    receiver.failed()
    assert receiver.state is S.DRAINING
    return receiver


def messages(effects: Sequence[Effect] | None, kind: type) -> list[SendMessage]:
    return [e for e in effects or () if isinstance(e, SendMessage) and isinstance(e.message, kind)]


# --- the way to the lease ---------------------------------------------------------------


def test_it_asks_for_topology_then_for_admission() -> None:
    receiver = bootstrapping()
    assert receiver.vote() == NOT_READY
    receiver.topology_mapped([peer(0), peer(1)])
    assert receiver.vote() == READY
    receiver.advanced(None)
    assert receiver.vote() == NOT_READY
    receiver.wants_admission = True
    assert receiver.vote() == READY


def test_the_lease_is_open_before_any_peer_hears_of_it() -> None:
    receiver = waiting(ranks=2)
    effects = receiver.advanced(ADMISSION) or ()
    assert effects[0] == GrantLease(LEASE, {})
    assert [m.to.rank for m in messages(effects, Handshake)] == [0, 1]
    assert receiver.vote() == PENDING


# --- grants -----------------------------------------------------------------------------


def test_a_claim_is_granted_and_its_echo_again() -> None:
    receiver = published()
    for _ in range(2):
        (answer,) = messages(receiver.claim_received(claim()), Grant)
        assert answer.message.nonce == nonce()


def test_nothing_is_granted_outside_the_current_lease_and_state() -> None:
    """Rule 1: current lease, Transferring, no local failure, that incarnation."""
    other_lease = claim(lease=LeaseId(DECODE, 2))
    other_life = ClaimFrom(peer(0, Incarnation(b"q" * 16)), claim().message)
    failed = published()
    failed.failed_locally(GONE)
    cases = [
        (bootstrapping(), claim()),
        (waiting(), claim()),
        (published(), other_lease),
        (published(), other_life),
        (published(), claim(rank=3)),
        (failed, claim()),
        (draining(), claim()),
    ]
    for receiver, request in cases:
        effects = receiver.claim_received(request)
        assert messages(effects, Refuse)
        assert not messages(effects, Grant)
        assert receiver.ignored == 0


def check_one_grant_per_lease_and_rank(receiver: Receiver) -> None:
    receiver.claim_received(claim())
    assert messages(receiver.claim_received(claim(life=1)), Refuse)
    receiver.status_received(done())
    assert messages(receiver.claim_received(claim(life=1)), Refuse), "Done frees no place"


def test_one_nonce_per_lease_and_rank_ever() -> None:
    """Rule 1. Protocol model Q2, "one live claim": violated after 14 steps."""
    check_one_grant_per_lease_and_rank(published())


def test_mutant_one_live_claim_is_found() -> None:
    class OneLiveClaim(Receiver):
        def may_grant(self, payload: ClaimFrom) -> bool:
            target = self.targets[payload.peer.rank]
            if target.over:
                target.nonce = None
            return super().may_grant(payload)

    with pytest.raises(AssertionError):
        check_one_grant_per_lease_and_rank(published(OneLiveClaim))


# --- completion -------------------------------------------------------------------------


def test_done_of_every_required_rank_with_valid_metadata_is_the_completion() -> None:
    receiver = granted(ranks=2)
    (answer,) = messages(receiver.status_received(done(1, output_token_id=43)), StatusAck)
    assert answer.message.kind is StatusKind.DONE
    assert receiver.vote() == PENDING
    receiver.status_received(done(0))
    assert receiver.vote() == LOCALLY_DONE
    assert receiver.completed() == (ReleaseLease(LEASE),)
    assert receiver.state is S.DONE
    assert receiver.record is not None
    assert receiver.record.output_token_id == 42, "the lowest required rank's record counts"


def test_a_rank_that_calls_itself_a_dummy_completes_nothing() -> None:
    """A handshake goes to real targets only: a DUMMY says that the topologies differ, and must
    not end the wait for a rank that may be writing."""
    receiver = granted(ranks=2)
    receiver.status_received(done(0))
    receiver.status_received(status(1, StatusKind.DUMMY))
    assert receiver.vote() == FAILED
    assert receiver.failure is not None
    assert receiver.failure.code == "prefill_failed"


def test_a_done_that_nobody_granted_completes_nothing() -> None:
    receiver = published()
    assert messages(receiver.status_received(done()), StatusAck)
    assert receiver.vote() == PENDING
    other = granted()
    other.status_received(done(life=1))
    assert other.vote() == PENDING


def test_a_completion_beats_a_deadline_of_the_same_tick() -> None:
    receiver = granted()
    receiver.status_received(done())
    assert receiver.deadline_expired(failure("deadline_exceeded", "late")) is None
    assert receiver.vote() == LOCALLY_DONE


BAD = {
    "without a metadata record": status(0, StatusKind.DONE, nonce()),
    "unreadable": status(0, StatusKind.DONE, nonce(), metadata=bytes(64)),
    "another request": done(attempt=8),
    "prefill computed 63": done(num_tokens=63),
    "ids differ": done(ids_hash=98),
}


def check_bad_metadata_fails_the_request(receiver: Receiver, bad: StatusFrom, word: str) -> None:
    assert messages(receiver.status_received(bad), StatusAck)
    assert receiver.vote() == FAILED
    assert receiver.failure is not None
    assert receiver.failure.code == "bad_metadata"
    assert word in receiver.failure.detail
    receiver.failed()
    assert receiver.vote() == QUIESCED, "Done ends the claim whatever its metadata is worth"


@pytest.mark.parametrize("word", BAD)
def test_d12_d13_d19_bad_metadata_fails_this_request_only(word: str) -> None:
    """D12: "all zero" is not "absent". D13: another request's record is not ours. D19: the
    record's token count and hash must be those of the local prompt."""
    check_bad_metadata_fails_the_request(granted(), BAD[word], word)


@pytest.mark.parametrize("word", BAD)
def test_d12_d13_d19_mutant_unchecked_metadata_is_found(word: str) -> None:
    class Trusting(Receiver):
        def record_done(self, payload: StatusFrom) -> Sequence[Effect]:
            target = self.targets[payload.peer.rank]
            target.over = True
            target.record = MetadataRecord(
                room=5,
                attempt=7,
                nonce=nonce(),
                output_token_id=0,
                logprob=None,
                num_tokens=64,
                ids_hash=99,
                spec_token_ids=(),
            )
            return self.acknowledge(payload)

    with pytest.raises(AssertionError):
        check_bad_metadata_fails_the_request(granted(Trusting), BAD[word], word)


# --- draining ---------------------------------------------------------------------------


def test_failing_revokes_first_and_cancels_every_rank_with_its_nonce() -> None:
    receiver = published(ranks=2)
    receiver.claim_received(claim(1))
    receiver.failed_locally(GONE)
    effects = receiver.failed() or ()
    assert effects[0] == RevokeLease(LEASE)
    sent = {m.to.rank: m.message.nonces for m in messages(effects, Cancel)}
    assert sent == {0: (), 1: (nonce(1),)}


def check_early_failure_frees_nothing(receiver: Receiver) -> None:
    reason = failure("prefill_failed", "the engine failed")
    receiver.status_received(status(0, StatusKind.FAILED, nonce(), reason=reason))
    assert receiver.failure == reason
    assert receiver.vote() == FAILED
    receiver.failed()
    assert receiver.vote() == NOT_QUIESCED
    receiver.cancel_acked(ack(of=nonce()))
    assert receiver.vote() == QUIESCED
    assert receiver.quiesced() == (ReleaseLease(LEASE),)


def test_d3_an_early_failed_is_news_and_frees_nothing() -> None:
    """D3: the seed freed the blocks when one of several prefill ranks failed."""
    check_early_failure_frees_nothing(granted())


def test_d3_mutant_failed_counts_as_acknowledgement_is_found() -> None:
    """Protocol model Q1, `failedisack`: violated after 20,793 states."""

    class FailedIsAck(Receiver):
        def record_news(self, payload: StatusFrom) -> Sequence[Effect]:
            self.targets[payload.peer.rank].over = True
            return super().record_news(payload)

    with pytest.raises(AssertionError):
        check_early_failure_frees_nothing(granted(FailedIsAck))


@pytest.mark.parametrize("how", ["ack", "done", "fenced", "revoked"])
def test_each_way_in_which_a_claim_ends(how: str) -> None:
    """Rule 3: acknowledged, reported Done, dead and fenced; or the target itself refuses."""
    receiver = draining()
    assert receiver.vote() == NOT_QUIESCED
    if how == "ack":
        receiver.cancel_acked(ack(of=nonce()))
    elif how == "done":
        receiver.status_received(done())
    elif how == "fenced":
        receiver.writer_fenced(Incarnation(b"q" * 16))
        assert receiver.vote() == NOT_QUIESCED
        receiver.writer_fenced(PREFILL)
    else:
        assert receiver.lease_revoked(LeaseId(DECODE, 2)) is None
        receiver.lease_revoked(LEASE)
    assert receiver.vote() == QUIESCED


def test_an_acknowledgement_of_another_nonce_ends_nothing() -> None:
    receiver = draining()
    receiver.cancel_acked(ack(of=nonce(life=1)))
    receiver.cancel_acked(ack(of=None))
    assert receiver.vote() == NOT_QUIESCED
    foreign = CancelAckFrom(peer(0), CancelAck(KEY, LeaseId(DECODE, 2), nonce()))
    assert receiver.cancel_acked(foreign) is None


def test_a_rank_that_never_got_a_grant_is_not_waited_for() -> None:
    receiver = published(ranks=2)
    receiver.claim_received(claim(0))
    receiver.failed_locally(GONE)
    receiver.failed()
    receiver.cancel_acked(ack(0, nonce(0)))
    assert receiver.vote() == QUIESCED


def test_quarantine_is_waited_out_where_it_is_declared() -> None:
    """Rule 6: time frees blocks only on transports declared QUARANTINE, and comes on top."""
    receiver = draining(quarantine_s=2.0)
    receiver.cancel_acked(ack(of=nonce()))
    assert receiver.vote() == NOT_QUIESCED
    receiver.quarantine_s = 0.0
    assert receiver.vote() == QUIESCED


def test_draining_too_long_fences_the_writers_that_are_left() -> None:
    receiver = draining(ranks=2)
    receiver.cancel_acked(ack(1, nonce(1)))
    assert receiver.drain_expired() == (FencePeer(peer(0)),)
    assert (receiver.state, receiver.vote()) == (S.DRAINING, NOT_QUIESCED)


def test_nothing_published_needs_no_drain_but_a_word_to_prefill() -> None:
    """Its half may wait for this one, and whoever told both may be gone."""
    mapped = bootstrapping()
    mapped.topology_mapped([peer(0)])
    for receiver in (mapped, waiting()):
        receiver.deadline_expired(failure("deadline_exceeded", "late"))
        assert receiver.vote() == FAILED
        effects = receiver.failed()
        assert [(m.to, m.message.nonces) for m in messages(effects, Cancel)] == [(peer(0), ())]
        assert len(effects or ()) == 1, "there is no lease to revoke"
        assert receiver.state is S.FAILED
        assert receiver.unanswered() == list(effects or ())
        receiver.cancel_acked(ack(0))
        assert not receiver.is_unanswered


def test_who_ends_before_its_route_is_known_has_nobody_to_tell() -> None:
    receiver = bootstrapping()
    receiver.failed_locally(GONE)
    assert receiver.failed() == ()
    assert not receiver.is_unanswered


# --- resending --------------------------------------------------------------------------


def test_handshakes_are_resent_until_answered_and_queued_is_no_answer() -> None:
    """Rule 4: Queued does not stop it; parked entries may be evicted."""
    receiver = published(ranks=2)
    receiver.status_received(status(0, StatusKind.QUEUED))
    assert [m.to.rank for m in messages(receiver.unanswered(), Handshake)] == [0, 1]
    receiver.claim_received(claim(0))
    assert [m.to.rank for m in messages(receiver.unanswered(), Handshake)] == [1]


def test_cancels_are_resent_until_each_rank_answered() -> None:
    receiver = published(ranks=2)
    receiver.claim_received(claim(0))
    receiver.failed_locally(GONE)
    receiver.failed()
    assert [m.to.rank for m in messages(receiver.unanswered(), Cancel)] == [0, 1]
    receiver.cancel_acked(ack(1))
    assert [m.to.rank for m in messages(receiver.unanswered(), Cancel)] == [0]
    receiver.cancel_acked(ack(0, nonce(0)))
    assert receiver.unanswered() == []


def test_late_messages_are_answered_and_change_nothing() -> None:
    receiver = granted()
    receiver.status_received(done())
    receiver.completed()
    assert messages(receiver.status_received(done()), StatusAck)
    assert messages(receiver.claim_received(claim()), Refuse)
    assert receiver.failed_locally(GONE) is None
    assert (receiver.state, receiver.ignored) == (S.DONE, 1)
