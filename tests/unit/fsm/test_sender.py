"""Sender: claim before write, post only what is granted and computed, drain before the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

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
from pdcore.fsm.effects import CancelTransfer, Effect, FencePeer, PostTransfer, SendMessage
from pdcore.fsm.events import HandleEnded
from pdcore.fsm.legs import (
    FAILED,
    LOCALLY_DONE,
    NOT_QUIESCED,
    NOT_READY,
    PENDING,
    QUIESCED,
    READY,
    CancelFrom,
    FirstToken,
    HandshakeFrom,
    KvReady,
    StatusAckFrom,
)
from pdcore.fsm.sender import Sender
from pdcore.fsm.states import SenderState as S
from pdcore.kv.metadata import decode_record
from pdcore.types import Incarnation, LeaseId, Nonce, PeerRef, RoomKey

KEY = RoomKey(5, 7)
DECODE, PREFILL = Incarnation(b"d" * 16), Incarnation(b"p" * 16)
TOKEN = FirstToken(output_token_id=42, logprob=-0.5, num_tokens=64, ids_hash=99)
ENGINE = failure("prefill_failed", "the engine failed")


def peer(rank: int = 0) -> PeerRef:
    return PeerRef("decode:8100", rank, DECODE, f"tcp://decode:{9000 + rank}")


def handshake(rank: int = 0, lease: int = 1, num_required: int = 1) -> HandshakeFrom:
    message = Handshake(
        key=KEY,
        lease=LeaseId(DECODE, lease),
        endpoint=b"endpoint",
        blocks={"full": b"\x01\x00\x00\x00"},
        num_cached_tokens=0,
        num_tokens=64,
        ids_hash=99,
        num_required=num_required,
        expires_at_s=1e9,
        remaining_s=30.0,
    )
    return HandshakeFrom(peer(rank), message)


def cancel(rank: int = 0, lease: int = 1, nonces: tuple[Nonce, ...] = ()) -> CancelFrom:
    return CancelFrom(peer(rank), Cancel(KEY, LeaseId(DECODE, lease), nonces))


def bootstrapping(cls: type[Sender] = Sender) -> Sender:
    return cls(KEY, PREFILL, itertools.count(100))


def waiting(cls: type[Sender] = Sender, ranks: int = 1) -> Sender:
    sender = bootstrapping(cls)
    for rank in range(ranks):
        sender.handshake_received(handshake(rank, num_required=ranks))
    sender.advanced()
    assert sender.state is S.WAITING_FOR_INPUT
    return sender


def transferring(cls: type[Sender] = Sender, ranks: int = 1) -> Sender:
    """Every leg granted, the first 32 of 64 tokens computed and posted."""
    sender = waiting(cls, ranks)
    for leg in list(sender.legs.values()):
        sender.claim_granted(leg.nonce)
    sender.compute_started()
    sender.compute_ended(KvReady(32))
    sender.advanced()
    assert sender.state is S.TRANSFERRING
    return sender


def finish_compute(sender: Sender) -> Sequence[Effect]:
    sender.compute_started()
    return sender.compute_ended(KvReady(64, TOKEN)) or ()


def end_handles(sender: Sender) -> list[Effect]:
    live = sorted(h for leg in sender.legs.values() for h in leg.live)
    return [e for h in live for e in sender.handle_ended(HandleEnded(h, quiesced=True)) or ()]


def messages(effects: Sequence[Effect] | None, kind: type) -> list[SendMessage]:
    return [e for e in effects or () if isinstance(e, SendMessage) and isinstance(e.message, kind)]


def posts(effects: Sequence[Effect] | None) -> list[PostTransfer]:
    return [effect for effect in effects or () if isinstance(effect, PostTransfer)]


# --- bootstrapping ----------------------------------------------------------------------


def test_it_waits_for_every_required_handshake() -> None:
    """R44: as many distinct decode ranks as the message says (R58)."""
    sender = bootstrapping()
    assert sender.vote() == NOT_READY
    (queued,) = messages(sender.handshake_received(handshake(0, num_required=2)), Status)
    assert queued.message.kind is StatusKind.QUEUED
    assert sender.vote() == NOT_READY
    sender.handshake_received(handshake(0, num_required=2))
    assert sender.vote() == NOT_READY, "the same rank twice is one rank"
    sender.handshake_received(handshake(1, num_required=2))
    assert sender.vote() == READY


def test_every_leg_claims_with_its_own_nonce() -> None:
    sender = bootstrapping()
    for rank in (0, 1):
        sender.handshake_received(handshake(rank, num_required=2))
    claims = messages(sender.advanced(), Claim)
    assert [c.to.rank for c in claims] == [0, 1]
    assert len({c.message.nonce for c in claims}) == 2
    assert {c.message.lease for c in claims} == {LeaseId(DECODE, 1)}


@pytest.mark.parametrize("make", [bootstrapping, waiting, transferring])
def test_a_handshake_of_another_lease_is_rejected(make) -> None:
    """Rule 1: a receiver that was forgotten and created again has another block list."""
    sender = make()
    sender.handshake_received(handshake())
    (answer,) = messages(sender.handshake_received(handshake(lease=2)), Status)
    assert answer.message.kind is StatusKind.REJECTED
    assert answer.message.lease == LeaseId(DECODE, 2)
    assert sender.legs[0].lease == LeaseId(DECODE, 1)


def test_a_repeated_handshake_gets_the_claim_or_the_outcome_again() -> None:
    """Rule 4: the answer got lost."""
    sender = waiting()
    (claim,) = messages(sender.handshake_received(handshake()), Claim)
    assert claim.message.nonce == sender.legs[0].nonce
    sender.claim_granted(sender.legs[0].nonce)
    assert sender.handshake_received(handshake()) == ()
    sender.failed_locally(ENGINE)
    (status,) = messages(sender.handshake_received(handshake()), Status)
    assert (status.message.kind, status.message.failure) == (StatusKind.FAILED, ENGINE)


# --- writing ----------------------------------------------------------------------------


def check_no_leg_is_written_before_its_own_grant(sender: Sender) -> None:
    granted, other = sender.legs.values()
    sender.claim_granted(granted.nonce)
    sender.compute_started()
    sender.compute_ended(KvReady(32))
    first = posts(sender.advanced())
    assert [(p.peer, p.start_token, p.num_tokens) for p in first] == [(granted.peer, 0, 32)]
    assert [p.peer for p in posts(finish_compute(sender))] == [granted.peer]
    late = posts(sender.claim_granted(other.nonce))
    assert [(p.peer, p.start_token, p.num_tokens) for p in late] == [(other.peer, 0, 64)]


def test_no_byte_of_a_leg_is_written_before_its_own_grant() -> None:
    """Rule 1 (D3): the right to write is taken, never assumed."""
    check_no_leg_is_written_before_its_own_grant(waiting(ranks=2))


def test_d3_mutant_writing_on_the_handshake_alone_is_found() -> None:
    class WritesAtOnce(Sender):
        def post_ready(self, payload: object) -> Sequence[Effect]:
            for leg in self.legs.values():
                leg.granted = True
            return super().post_ready(payload)

    with pytest.raises(AssertionError):
        check_no_leg_is_written_before_its_own_grant(waiting(WritesAtOnce, ranks=2))


def test_it_starts_when_a_leg_is_granted_and_kv_is_there() -> None:
    sender = waiting()
    sender.compute_started()
    sender.compute_ended(KvReady(32))
    assert sender.vote() == NOT_READY
    sender.claim_granted(sender.legs[0].nonce)
    assert sender.vote() == READY


def test_a_grant_of_a_foreign_nonce_is_ignored() -> None:
    sender = waiting()
    assert sender.claim_granted(Nonce(PREFILL, 1)) is None
    assert sender.ignored == 1
    assert not sender.legs[0].granted


def test_chunks_are_posted_once_and_in_order() -> None:
    sender = transferring()
    (second,) = posts(finish_compute(sender))
    assert (second.start_token, second.num_tokens) == (32, 32)
    assert sender.claim_granted(sender.legs[0].nonce) is None, "granted twice"


def check_done_needs_every_handle_quiesced(sender: Sender) -> None:
    """Rule 9: last chunk known, every chunk of every leg posted, every handle quiesced."""
    finish_compute(sender)
    handles = sorted(sender.legs[0].live)
    assert len(handles) == 2
    assert sender.vote() == PENDING
    sender.handle_ended(HandleEnded(handles[1], quiesced=True))
    sender.handle_ended(HandleEnded(handles[0], quiesced=False))
    assert sender.vote() == PENDING
    sender.handle_ended(HandleEnded(handles[0], quiesced=True))
    assert sender.vote() == LOCALLY_DONE


def test_done_needs_every_handle_quiesced() -> None:
    check_done_needs_every_handle_quiesced(transferring())


def test_mutant_done_with_the_last_chunk_is_found() -> None:
    """Protocol model Q6, `lastdone`: violated after 9 steps."""

    class LastChunkIsDone(Sender):
        def record_end(self, ended: HandleEnded) -> Sequence[Effect]:
            for leg in self.legs.values():
                if ended.handle == max(leg.live, default=0):
                    leg.live.clear()
            return ()

    with pytest.raises(AssertionError):
        check_done_needs_every_handle_quiesced(transferring(LastChunkIsDone))


def test_done_carries_the_metadata_record_to_every_leg() -> None:
    """Rule 5: STATUS Done with the record is the only completion."""
    sender = transferring(ranks=2)
    finish_compute(sender)
    end_handles(sender)
    done = messages(sender.completed(), Status)
    assert sender.state is S.DONE
    assert [d.to.rank for d in done] == [0, 1]
    for sent in done:
        record = decode_record(sent.message.metadata)
        leg = sender.legs[sent.to.rank]
        assert sent.message.kind is StatusKind.DONE
        assert sent.message.nonce == record.nonce == leg.nonce
        assert (record.room, record.attempt) == KEY
        assert (record.output_token_id, record.num_tokens, record.ids_hash) == (42, 64, 99)


def test_a_completion_beats_a_deadline_of_the_same_tick() -> None:
    sender = transferring()
    finish_compute(sender)
    end_handles(sender)
    assert sender.deadline_expired(failure("deadline_exceeded", "late")) is None
    assert (sender.vote(), sender.failure) == (LOCALLY_DONE, None)


# --- failing and draining ---------------------------------------------------------------


def test_a_failure_is_told_at_once_and_only_the_first_counts() -> None:
    sender = transferring(ranks=2)
    told = messages(sender.failed_locally(ENGINE), Status)
    assert [(t.to.rank, t.message.kind) for t in told] == [
        (0, StatusKind.FAILED),
        (1, StatusKind.FAILED),
    ]
    assert sender.vote() == FAILED
    assert sender.state is S.TRANSFERRING, "committed state moves only by a tick"
    assert sender.failed_locally(failure("internal", "another")) is None
    assert sender.failure == ENGINE


def check_nothing_is_posted_after_a_failure(sender: Sender) -> None:
    sender.failed_locally(ENGINE)
    assert not posts(finish_compute(sender))
    sender.failed()
    assert sender.state is S.DRAINING
    assert not posts(finish_compute(sender))


def test_nothing_is_posted_after_a_local_failure() -> None:
    """Rule 9: posting needs Transferring and no local failure."""
    check_nothing_is_posted_after_a_failure(transferring())


def test_mutant_posting_until_the_group_commits_is_found() -> None:
    """Protocol model Q1, `nopoison`: violated after 14 steps."""

    class PostsOn(Sender):
        def post_ready(self, payload: object) -> Sequence[Effect]:
            reason, self.failure = self.failure, None
            effects = super().post_ready(payload)
            self.failure = reason
            return effects

    with pytest.raises(AssertionError):
        check_nothing_is_posted_after_a_failure(transferring(PostsOn))


def check_acknowledged_only_when_quiet(sender: Sender) -> None:
    nonce = sender.legs[0].nonce
    effects = list(sender.cancel_received(cancel(nonces=(nonce,))) or ())
    assert messages(effects, Status)
    effects += sender.failed() or ()
    assert CancelTransfer(min(sender.legs[0].live)) in effects
    assert not messages(effects, CancelAck)
    assert sender.vote() == NOT_QUIESCED
    (ack,) = messages(end_handles(sender), CancelAck)
    assert ack.message.nonce == nonce
    assert sender.vote() == QUIESCED
    assert sender.quiesced() == ()
    assert sender.state is S.FAILED


def test_a_cancel_is_acknowledged_only_when_nothing_can_write() -> None:
    """Rule 2 (D3): the acknowledgement gives the blocks back to decode's pool."""
    check_acknowledged_only_when_quiet(transferring())


def test_d3_mutant_an_early_acknowledgement_is_found() -> None:
    class AcksAtOnce(Sender):
        def record_cancel(self, payload: CancelFrom) -> Sequence[Effect]:
            effects = super().record_cancel(payload)
            leg = self.legs[payload.peer.rank]
            return (
                *effects,
                SendMessage(leg.peer, CancelAck(self.key, leg.lease, leg.nonce)),
            )

    with pytest.raises(AssertionError):
        check_acknowledged_only_when_quiet(transferring(AcksAtOnce))


def test_a_cancel_is_answered_in_every_state() -> None:
    """Rule 3: Done and unknown legs included; every resend is answered again."""
    done = transferring()
    finish_compute(done)
    end_handles(done)
    done.completed()
    for sender in (waiting(), done):
        nonce = sender.legs[0].nonce
        for _ in range(2):
            (ack,) = messages(sender.cancel_received(cancel(nonces=(nonce,))), CancelAck)
            assert ack.message.nonce == nonce
    assert done.state is S.DONE
    (ack,) = messages(bootstrapping().cancel_received(cancel(rank=3)), CancelAck)
    assert ack.message.nonce is None


def test_a_cancel_of_a_former_receiver_life_spares_this_one() -> None:
    """Protocol model Q2: the cancel names its lease, so that it spares a newer one."""
    sender = transferring()
    former = Nonce(PREFILL, 1)
    effects = sender.cancel_received(cancel(lease=9, nonces=(former,)))
    (ack,) = messages(effects, CancelAck)
    assert (ack.message.nonce, ack.message.lease) == (former, LeaseId(DECODE, 9))
    assert sender.failure is None


@pytest.mark.parametrize("make", [bootstrapping, waiting, transferring])
def test_a_cancel_of_a_former_sender_life_is_answered_for_each_nonce(make) -> None:
    """Rule 2: a sender that was forgotten (quiesced) and created again by a late duplicate
    holds another nonce; decode still waits for the one that it granted."""
    former, restarted = Nonce(PREFILL, 1), Nonce(Incarnation(b"q" * 16), 1)
    effects = make().cancel_received(cancel(nonces=(former, restarted)))
    assert former in [m.message.nonce for m in messages(effects, CancelAck)]
    # Another process life's nonce is not ours to acknowledge.
    assert restarted not in [m.message.nonce for m in messages(effects, CancelAck)]


def test_a_running_forward_pass_is_drained_too() -> None:
    """Protocol model Q6, `srcfree`: sources freed while a chunk was still computed."""
    sender = waiting()
    sender.compute_started()
    sender.failed_locally(ENGINE)
    assert sender.failed() == ()
    assert (sender.state, sender.vote()) == (S.DRAINING, NOT_QUIESCED)
    sender.compute_ended(KvReady(64, TOKEN))
    assert sender.vote() == QUIESCED


def test_without_a_destination_nothing_has_to_drain() -> None:
    sender = bootstrapping()
    sender.deadline_expired(failure("deadline_exceeded", "late"))
    assert sender.vote() == FAILED
    sender.failed()
    assert sender.state is S.FAILED


def test_bound_ranks_drain_whatever_they_know_themselves() -> None:
    """Section 9: a rank whose forward pass runs and one that idles take the same row, so that
    a group stays together; alone, the next tick ends it."""
    for is_computing in (False, True):
        sender = waiting()
        if is_computing:
            sender.compute_started()
        sender.deadline_expired(failure("deadline_exceeded", "late"))
        sender.failed()
        assert sender.state is S.DRAINING
        assert sender.vote() == (NOT_QUIESCED if is_computing else QUIESCED)


@pytest.mark.parametrize("make", [waiting, transferring])
def test_a_rank_that_is_pulled_along_tells_its_own_decode_rank(make: Callable[[], Sender]) -> None:
    """Section 9: it has no failure of its own, and its counterpart waits for its word."""
    sender = make()
    assert sender.failure is None
    (told,) = messages(sender.failed(), Status)
    assert told.message.kind is StatusKind.FAILED
    assert told.message.failure is not None
    assert "another rank" in told.message.failure.detail
    assert sender.state is S.DRAINING


@pytest.mark.parametrize("where", ["compute", "handle", "refusal"])
def test_what_goes_wrong_on_the_way_fails_it(where: str) -> None:
    sender = waiting() if where == "refusal" else transferring()
    if where == "compute":
        sender.compute_started()
        effects = sender.compute_ended(KvReady(32, failure=ENGINE))
    elif where == "handle":
        (handle,) = sender.legs[0].live
        effects = sender.handle_ended(HandleEnded(handle, quiesced=True, failure=ENGINE))
    else:
        effects = sender.claim_refused(sender.legs[0].nonce)
    assert [m.message.kind for m in messages(effects, Status)] == [StatusKind.FAILED]
    assert sender.vote() == FAILED


def test_draining_too_long_fences_the_legs_that_are_live() -> None:
    sender = transferring(ranks=2)
    (handle,) = sender.legs[1].live
    sender.failed_locally(ENGINE)
    sender.failed()
    sender.handle_ended(HandleEnded(handle, quiesced=True))
    assert sender.drain_expired() == (FencePeer(peer(0)),)
    assert sender.state is S.DRAINING, "a deadline alone frees nothing"


# --- resending --------------------------------------------------------------------------


def test_what_is_not_answered_is_resent() -> None:
    """Rule 4: claims until granted, outcomes until acknowledged."""
    sender = waiting()
    assert messages(sender.unanswered(), Claim)
    sender.claim_granted(sender.legs[0].nonce)
    assert sender.unanswered() == []
    sender.failed_locally(ENGINE)
    (again,) = messages(sender.unanswered(), Status)
    assert again.message.kind is StatusKind.FAILED
    leg = sender.legs[0]
    told = StatusAck(sender.key, leg.lease, StatusKind.FAILED)
    sender.status_acked(StatusAckFrom(leg.peer, StatusAck(sender.key, leg.lease, StatusKind.DONE)))
    sender.status_acked(StatusAckFrom(leg.peer._replace(incarnation=bytes(16)), told))
    foreign = StatusAck(sender.key, LeaseId(leg.lease.incarnation, 999), StatusKind.FAILED)
    sender.status_acked(StatusAckFrom(leg.peer, foreign))
    assert sender.unanswered(), "only the leg's own rank, about what it was told, counts"
    sender.status_acked(StatusAckFrom(leg.peer, told))
    assert sender.unanswered() == []
