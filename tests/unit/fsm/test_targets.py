"""A receiver's facts: votes follow from them, and reading them changes nothing."""

from __future__ import annotations

import pytest

from pdcore.errors import failure
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
from pdcore.fsm.targets import ReceiverFacts, Target
from pdcore.kv.metadata import MetadataRecord
from pdcore.types import Incarnation, LeaseId, Nonce, PeerRef, RoomKey

DECODE, PREFILL = Incarnation(b"d" * 16), Incarnation(b"p" * 16)
WHY = failure("internal", "a test")


def target(rank: int = 0, **changes: object) -> Target:
    made = Target(PeerRef("prefill:8001", rank, PREFILL, "tcp://p:1"))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def record(token: int = 42) -> MetadataRecord:
    return MetadataRecord(
        room=5,
        attempt=7,
        nonce=Nonce(PREFILL, 1),
        output_token_id=token,
        logprob=None,
        num_tokens=64,
        ids_hash=99,
        spec_token_ids=(),
    )


def facts(state: S, *targets: Target, **changes: object) -> ReceiverFacts:
    receiver = ReceiverFacts(RoomKey(5, 7), LeaseId(DECODE, 1), 64, 99)
    receiver.state = state
    receiver.targets = {t.peer.rank: t for t in targets}
    for name, value in changes.items():
        setattr(receiver, name, value)
    return receiver


def test_votes_answer_the_question_of_the_committed_state() -> None:
    """Architecture, section 9: one question per state, MIN over the group."""
    nonce = Nonce(PREFILL, 1)
    cases = [
        (facts(S.BOOTSTRAPPING), NOT_READY),
        (facts(S.BOOTSTRAPPING, target()), READY),
        (facts(S.BOOTSTRAPPING, target(), failure=WHY), FAILED),
        (facts(S.WAITING_FOR_INPUT, target()), NOT_READY),
        (facts(S.WAITING_FOR_INPUT, target(), wants_admission=True), READY),
        (facts(S.WAITING_FOR_INPUT, target(), wants_admission=True, failure=WHY), FAILED),
        (facts(S.TRANSFERRING, target(nonce=nonce)), PENDING),
        (facts(S.TRANSFERRING, target(record=record())), LOCALLY_DONE),
        (facts(S.TRANSFERRING, target(record=record()), target(1)), PENDING),
        (facts(S.TRANSFERRING, target(record=record()), failure=WHY), FAILED),
        (facts(S.DRAINING, target(nonce=nonce), failure=WHY), NOT_QUIESCED),
        (facts(S.DRAINING, target(nonce=nonce, over=True), failure=WHY), QUIESCED),
        (facts(S.DRAINING, target(), failure=WHY), QUIESCED),
        (facts(S.DRAINING, target(), failure=WHY, quarantine_s=0.5), NOT_QUIESCED),
    ]
    for receiver, vote in cases:
        assert receiver.vote() == vote, receiver


def test_a_receiver_without_targets_is_not_done() -> None:
    """Else its deadline would never expire while its topology is not known."""
    receiver = facts(S.BOOTSTRAPPING)
    assert not receiver.is_locally_done
    assert receiver.may_expire(WHY)


def test_the_record_is_that_of_the_lowest_required_rank() -> None:
    """Rule 5."""
    assert facts(S.TRANSFERRING, target()).record is None
    receiver = facts(S.TRANSFERRING, target(2, record=record(7)), target(1, record=record(8)))
    assert receiver.record == record(8)


@pytest.mark.parametrize("state", S)
def test_a_receiver_reads_well(state: S) -> None:
    """Habit 11: repr is the debugging interface."""
    assert repr(facts(state, target(nonce=Nonce(PREFILL, 3)))) == (
        f"Receiver(5/7 {state.value} [Target(rank=0, nonce=3, over=False)])"
    )
