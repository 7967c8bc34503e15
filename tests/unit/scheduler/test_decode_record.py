"""What a decode rank knows about one request, beside its lifecycle."""

from __future__ import annotations

import pytest

from pdcore.control.messages import Claim, Status, StatusKind
from pdcore.fsm.states import ReceiverState
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.types import LeaseId, Nonce
from tests.unit.scheduler.kit import (
    DECODE,
    PREFILL,
    handshake_of,
    make_decode,
    make_request,
    start,
    tell,
    tick,
)


def record_of(**changes: object) -> DecodeRecord:
    request = make_request(5, **changes)
    return DecodeRecord(request, LeaseId(DECODE.incarnation, 1), 7, 10.0, 0.0)


def test_a_local_request_has_nothing_to_receive() -> None:
    record = record_of(is_local=True)
    assert record.receiver.state is ReceiverState.DONE
    assert record.is_settled
    assert not record.is_over
    record.is_reported = True
    assert record.is_over


def test_a_new_one_waits_for_everybody_and_nobody() -> None:
    record = record_of()
    assert (record.key, record.seq_id, record.slot) == (record.request.key, 7, None)
    assert (record.peers(), record.awaited(), record.unheard()) == ([], [], [])
    flags = record.is_over, record.is_settled, record.is_draining
    assert flags == (False, False, False)
    assert record.failing(99.0, 1.0) == []


@pytest.mark.parametrize("told", ["nothing", "queued", "claim"])
def test_whom_it_has_heard_of_decides_what_a_loss_means(told: str) -> None:
    """Section 2: who never said a word was perhaps never there, only the route was old."""
    core, request = make_decode(), make_request()
    lease = handshake_of(start(core, request)).lease
    record = core.rooms.records[request.key]
    if told == "queued":
        tell(core, PREFILL, Status(request.key, lease, StatusKind.QUEUED), 0.0)
    elif told == "claim":
        tell(core, PREFILL, Claim(request.key, lease, Nonce(PREFILL.incarnation, 1)), 0.0)
    tick(core, 0.0)
    code = record.loss_of(PREFILL.incarnation, "killed").code
    assert code == ("stale_route" if told == "nothing" else "peer_lost")
    assert record.peers() == [PREFILL]
    assert record.awaited() == ([PREFILL] if told == "claim" else [])
    assert record.unheard() == ([] if told == "claim" else [PREFILL])
    # D25: a fair time to answer, and silence.
    assert record.failing(0.5, 1.0) == []
    assert record.failing(5.0, 1.0) == ([PREFILL] if told == "nothing" else [])
