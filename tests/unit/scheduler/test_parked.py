"""What comes before its request: who displaces whom, and what is kept of it."""

from __future__ import annotations

from pdcore.control.messages import Cancel, Claim, Handshake
from pdcore.fsm.effects import Effect, ReduceVotes
from pdcore.fsm.events import MessageReceived, VotesReduced
from pdcore.fsm.legs import FAILED, NOT_READY
from pdcore.scheduler.prefill import PrefillCore
from pdcore.types import Incarnation, LeaseId, Nonce, PeerRef, RoomKey
from tests.unit.scheduler.kit import (
    DECODE,
    PREFILL,
    handshake_for,
    make_prefill,
    make_request,
    results,
    sent,
    tell,
    tick,
)

FORMER = Incarnation(b"X" * 16)


def ask(core: PrefillCore, message: Cancel | Handshake) -> list[Effect]:
    tell(core, DECODE, message)
    return tick(core)


def test_a_cancel_of_a_former_receiver_does_not_end_its_successor_s_request() -> None:
    """The same attempt, dispatched to decode again: its handshake has come already."""
    core, request = make_prefill(), make_request()
    ask(core, handshake_for(request))
    ask(core, Cancel(request.key, LeaseId(FORMER, 9), ()))
    core.submit(request, 0.0)
    assert len(sent(tick(core), Claim)) == 1


def test_a_stranger_s_message_does_not_displace_a_parked_cancel() -> None:
    core, request = make_prefill(), make_request()
    ask(core, Cancel(request.key, LeaseId(DECODE.incarnation, 1), ()))
    stranger = PeerRef("stranger", DECODE.rank, Incarnation(b"S" * 16), "tcp://stranger:1")
    for message in (handshake_for(request), Cancel(request.key, LeaseId(FORMER, 1), ())):
        core.handle_event(MessageReceived(stranger, PREFILL.incarnation, message), 0.0)
    core.submit(request, 0.0)
    (result,) = results(tick(core))
    assert result.failure is not None
    assert result.failure.code == "cancelled"


def test_a_parked_cancel_keeps_no_nonces() -> None:
    """Habit 8: they were answered when it came, and would be a stranger's memory."""
    core, key, lease = make_prefill(), RoomKey(1, 1), LeaseId(DECODE.incarnation, 1)
    ask(core, Cancel(key, lease, tuple(Nonce(PREFILL.incarnation, i) for i in range(1000))))
    (parked,) = core.inbox.parked.get(key, 0.0) or ()
    assert parked.message == Cancel(key, lease, ())


def test_a_cancel_that_one_rank_has_parked_ends_the_request_on_all() -> None:
    """Decision 26: it is that rank's own failure, and the vote takes it to the others in one
    tick: no rank decides by what only it has heard."""
    cores, request = [make_prefill(group_size=2) for _ in range(2)], make_request()
    tell(cores[0], DECODE, Cancel(request.key, LeaseId(DECODE.incarnation, 1), ()))
    votes: list[ReduceVotes] = []
    for core in cores:
        core.poll_effects()
        core.submit(request, 0.0)
        core.tick(0.0)
        votes.extend(e for e in core.poll_effects() if isinstance(e, ReduceVotes))
    one, other = votes
    assert (one.votes, other.votes) == ((FAILED,), (NOT_READY,))
    assert one.ids_hash == other.ids_hash
    for core in cores:
        reduced = VotesReduced(one.sequence, (FAILED,), failures=one.failures)
        core.handle_event(reduced, 0.0)
        (result,) = results(core.poll_effects())
        assert result.failure is not None
        assert result.failure.code == "cancelled"
        assert request.key not in core.rooms.records
