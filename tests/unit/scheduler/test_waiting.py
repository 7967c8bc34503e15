"""D23: "what is this room waiting for?" has an answer, also for the client of a 504."""

from __future__ import annotations

import pytest

from pdcore.fsm.receiver import RECEIVER
from pdcore.fsm.sender import SENDER
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.scheduler.waiting import overdue
from pdcore.types import Incarnation, PeerRef, Role


def peer(rank: int) -> PeerRef:
    return PeerRef("10.0.0.1:8001", rank, Incarnation(b"i" * 16), "tcp://10.0.0.1:1")


def test_a_decode_that_waits_for_kv_names_the_ranks_that_owe_it() -> None:
    info = RECEIVER.info[ReceiverState.TRANSFERRING]
    why = overdue(Role.DECODE, "Transferring", info, 12.345, [peer(1), peer(0)], "10.0.0.1:8001")
    assert (why.code, why.http_status) == ("deadline_exceeded", 504)
    assert why.detail == (
        "decode was in Transferring and waited for every required prefill rank (CLAIM, STATUS "
        "Done), 12.3 s after it accepted the request; prefill is 10.0.0.1:8001 rank 0, "
        "10.0.0.1:8001 rank 1"
    )


def test_a_prefill_that_heard_of_nobody_names_the_instance_it_was_told_of() -> None:
    info = SENDER.info[SenderState.BOOTSTRAPPING]
    detail = overdue(Role.PREFILL, "Bootstrapping", info, 3.0, [], "10.0.0.2:8100").detail
    assert detail.endswith(
        "decode (HANDSHAKE), 3.0 s after it accepted the request; decode is 10.0.0.2:8100"
    )


@pytest.mark.parametrize("state", list(ReceiverState))
def test_every_state_of_a_receiver_has_an_answer(state: ReceiverState) -> None:
    """Done is not over here: the request generates."""
    detail = overdue(Role.DECODE, state.value, RECEIVER.info[state], 1.0, [], "").detail
    assert f"decode was in {state.value} and waited for" in detail
    assert "waited for ," not in detail
