"""The outcome of a tick: which event it means in each committed state, for all ranks alike."""

from __future__ import annotations

import itertools

import pytest

from pdcore.errors import failure
from pdcore.fsm.commit import commit_receiver, commit_sender
from pdcore.fsm.legs import FAILED, LOCALLY_DONE, NOT_QUIESCED, PENDING, QUIESCED, READY
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.sender import Sender
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.fsm.targets import Admission
from pdcore.types import Incarnation, LeaseId, RoomKey

KEY = RoomKey(7, 8)
LIFE = Incarnation(b"p" * 16)


def sender(state: SenderState) -> Sender:
    made = Sender(KEY, LIFE, itertools.count(1))
    made.state = state
    return made


def receiver(state: ReceiverState) -> Receiver:
    made = Receiver(KEY, LeaseId(LIFE, 1), 4, 5)
    made.state = state
    return made


def no_room() -> Admission | None:
    return None


@pytest.mark.parametrize(
    ("before", "outcome", "after"),
    [
        (SenderState.BOOTSTRAPPING, PENDING, SenderState.BOOTSTRAPPING),
        (SenderState.BOOTSTRAPPING, READY, SenderState.WAITING_FOR_INPUT),
        (SenderState.BOOTSTRAPPING, FAILED, SenderState.FAILED),
        (SenderState.WAITING_FOR_INPUT, READY, SenderState.TRANSFERRING),
        (SenderState.TRANSFERRING, PENDING, SenderState.TRANSFERRING),
        (SenderState.TRANSFERRING, FAILED, SenderState.DRAINING),
        (SenderState.DRAINING, NOT_QUIESCED, SenderState.DRAINING),
        (SenderState.DRAINING, QUIESCED, SenderState.FAILED),
        (SenderState.DONE, FAILED, SenderState.DONE),
        (SenderState.FAILED, READY, SenderState.FAILED),
    ],
)
def test_an_outcome_moves_a_sender(before: SenderState, outcome: int, after: SenderState) -> None:
    """D17: the same outcome moves every rank of a group to the same state."""
    made = sender(before)
    commit_sender(made, outcome)
    assert (made.state, made.ignored) == (after, 0)


@pytest.mark.parametrize(
    ("before", "outcome", "after"),
    [
        (ReceiverState.BOOTSTRAPPING, READY, ReceiverState.WAITING_FOR_INPUT),
        (ReceiverState.BOOTSTRAPPING, FAILED, ReceiverState.FAILED),
        (ReceiverState.WAITING_FOR_INPUT, PENDING, ReceiverState.WAITING_FOR_INPUT),
        (ReceiverState.WAITING_FOR_INPUT, FAILED, ReceiverState.FAILED),
        (ReceiverState.TRANSFERRING, LOCALLY_DONE, ReceiverState.DONE),
        (ReceiverState.TRANSFERRING, PENDING, ReceiverState.TRANSFERRING),
        (ReceiverState.TRANSFERRING, FAILED, ReceiverState.DRAINING),
        (ReceiverState.DRAINING, NOT_QUIESCED, ReceiverState.DRAINING),
        (ReceiverState.DRAINING, QUIESCED, ReceiverState.FAILED),
        (ReceiverState.DONE, FAILED, ReceiverState.DONE),
        (ReceiverState.FAILED, READY, ReceiverState.FAILED),
    ],
)
def test_an_outcome_moves_a_receiver(
    before: ReceiverState, outcome: int, after: ReceiverState
) -> None:
    made = receiver(before)
    commit_receiver(made, outcome, no_room)
    assert (made.state, made.ignored) == (after, 0)


def test_a_broken_promise_of_blocks_moves_nothing() -> None:
    """The vote promised admission; a rank that has no blocks after all waits on."""
    made = receiver(ReceiverState.WAITING_FOR_INPUT)
    assert commit_receiver(made, READY, no_room) is None
    assert made.state is ReceiverState.WAITING_FOR_INPUT


def test_a_failure_of_one_rank_drains_before_it_frees() -> None:
    """D17, protocol models Q1: one MIN over lifecycle states frees at once; here the failure
    spreads first, and the release is another question."""
    made = sender(SenderState.TRANSFERRING)
    made.failure = failure("cancelled", "a peer of the group failed")
    commit_sender(made, FAILED)
    assert made.state is SenderState.DRAINING
    commit_sender(made, min(made.vote(), NOT_QUIESCED))
    assert made.state is SenderState.DRAINING
