"""A sender's facts: votes follow from them, and reading them changes nothing."""

from __future__ import annotations

import itertools

import pytest

from pdcore.control.messages import Handshake
from pdcore.errors import failure
from pdcore.fsm.legs import (
    FAILED,
    LOCALLY_DONE,
    NOT_QUIESCED,
    NOT_READY,
    PENDING,
    QUIESCED,
    READY,
    FirstToken,
    Leg,
    SenderFacts,
)
from pdcore.fsm.states import SenderState as S
from pdcore.types import Incarnation, LeaseId, Nonce, PeerRef, RoomKey

KEY = RoomKey(5, 7)
DECODE, PREFILL = Incarnation(b"d" * 16), Incarnation(b"p" * 16)


def leg(rank: int = 0) -> Leg:
    message = Handshake(KEY, LeaseId(DECODE, 1), b"", {}, 0, 64, 99, 1, 1e9, 30.0)
    return Leg(PeerRef("decode:8100", rank, DECODE, "tcp://d:1"), message, Nonce(PREFILL, rank))


def facts(state: S, **changes: object) -> SenderFacts:
    sender = SenderFacts(KEY, PREFILL, itertools.count())
    sender.state = state
    sender.legs = {0: leg()}
    sender.num_required = 1
    for name, value in changes.items():
        setattr(sender, name, value)
    return sender


TOKEN = FirstToken(42, None, 64, 99)
WHY = failure("internal", "a test")


def test_votes_answer_the_question_of_the_committed_state() -> None:
    """Architecture, section 9: one question per state, MIN over the group."""
    granted, complete, live = leg(), leg(), leg()
    granted.granted = complete.granted = live.granted = True
    complete.posted_tokens = live.posted_tokens = 64
    live.live = {1}
    cases = [
        (facts(S.BOOTSTRAPPING, num_required=2), NOT_READY),
        (facts(S.BOOTSTRAPPING), READY),
        (facts(S.BOOTSTRAPPING, failure=WHY), FAILED),
        (facts(S.WAITING_FOR_INPUT, ready_tokens=32), NOT_READY),
        (facts(S.WAITING_FOR_INPUT, ready_tokens=32, legs={0: granted}), READY),
        (facts(S.WAITING_FOR_INPUT, legs={0: granted}), NOT_READY),
        (facts(S.WAITING_FOR_INPUT, failure=WHY), FAILED),
        (facts(S.TRANSFERRING, legs={0: complete}), PENDING),
        (facts(S.TRANSFERRING, legs={0: live}, first_token=TOKEN), PENDING),
        (facts(S.TRANSFERRING, legs={0: complete}, first_token=TOKEN), LOCALLY_DONE),
        (facts(S.TRANSFERRING, legs={0: complete, 1: leg(1)}, first_token=TOKEN), PENDING),
        (facts(S.TRANSFERRING, legs={0: complete}, first_token=TOKEN, failure=WHY), FAILED),
        (facts(S.DRAINING, legs={0: live}, failure=WHY), NOT_QUIESCED),
        (facts(S.DRAINING, is_computing=True, failure=WHY), NOT_QUIESCED),
        (facts(S.DRAINING, failure=WHY), QUIESCED),
    ]
    for sender, vote in cases:
        assert sender.vote() == vote, sender


def test_within_one_state_the_worse_vote_is_the_smaller() -> None:
    """MIN must let one failed rank pull the rest, and one busy rank hold them."""
    assert FAILED < NOT_READY < READY
    assert FAILED < PENDING < LOCALLY_DONE
    assert NOT_QUIESCED < QUIESCED


@pytest.mark.parametrize("state", S)
def test_a_sender_reads_well(state: S) -> None:
    """Habit 11: repr is the debugging interface."""
    assert repr(facts(state)) == (
        f"Sender(5/7 {state.value} [Leg(rank=0, granted=False, posted=0, live=[])])"
    )
