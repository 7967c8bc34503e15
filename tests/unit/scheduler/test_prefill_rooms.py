"""What a prefill rank answers: early, foreign, stale, hostile messages."""

from __future__ import annotations

import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import (
    Cancel,
    CancelAck,
    Claim,
    Grant,
    Heartbeat,
    HeartbeatAck,
    PeerMessage,
    Refuse,
    Stale,
    Status,
    StatusAck,
    StatusKind,
)
from pdcore.errors import CodecError, failure
from pdcore.fsm.effects import Effect, ForgetPeer, PostTransfer, SendMessage
from pdcore.fsm.events import MessageReceived, StepCompleted
from pdcore.fsm.states import SenderState
from pdcore.scheduler.parked import MAX_PARKED_LEGS
from pdcore.scheduler.prefill import PrefillCore
from pdcore.scheduler.prefill_rooms import MAX_DESTINATIONS
from pdcore.types import (
    GenerateRequest,
    Incarnation,
    LeaseId,
    Nonce,
    PeerRef,
    RoomKey,
    StepOutput,
)
from tests.unit.scheduler.kit import (
    DECODE,
    PREFILL,
    handshake_for,
    make_decode,
    make_prefill,
    make_request,
    results,
    sent,
    tell,
    tick,
)

FORMER = Incarnation(b"X" * 16)
REBORN = DECODE._replace(incarnation=Incarnation(b"E" * 16))


def ask(core: PrefillCore, message: PeerMessage, sender: PeerRef = DECODE) -> list[Effect]:
    tell(core, sender, message)
    return tick(core)


def statuses(effects: list[Effect]) -> list[tuple[StatusKind, str | None]]:
    found = [s for s in sent(effects, Status) if isinstance(s, Status)]
    return [(s.kind, None if s.failure is None else s.failure.code) for s in found]


# --- handshakes -------------------------------------------------------------------------


def test_a_handshake_before_its_request_is_parked_and_used() -> None:
    """R44."""
    core, request = make_prefill(), make_request()
    handshake = handshake_for(request)
    assert statuses(ask(core, handshake)) == [(StatusKind.QUEUED, None)]
    ask(core, handshake)
    assert len(core.inbox.parked) == 1
    core.submit(request, 0.0)
    assert len(sent(tick(core), Claim)) == 1
    assert len(core.inbox.parked) == 0


def test_d11_an_early_handshake_of_a_refused_request_is_told_so() -> None:
    """D11: decode does not wait for a prompt that prefill refuses."""
    core = make_prefill(CoreLimits(max_prefill_tokens=4))
    request = make_request(8)
    ask(core, handshake_for(request))
    core.submit(request, 0.0)
    assert statuses(core.poll_effects()) == [(StatusKind.REJECTED, "prompt_too_long")]
    assert statuses(ask(core, handshake_for(request))) == [
        (StatusKind.REJECTED, "prompt_too_long")
    ], "and so is every later one"


def test_d6_one_room_does_not_collect_handshakes_without_bound() -> None:
    """D6: a stranger may name any rank it likes."""
    core, request = make_prefill(), make_request()
    handshake = handshake_for(request)
    for rank in range(3 * MAX_PARKED_LEGS):
        ask(core, handshake, DECODE._replace(rank=rank))
    parked = core.inbox.parked.get(request.key, 0.0)
    assert parked is not None
    assert len(parked) == MAX_PARKED_LEGS


@pytest.mark.parametrize(
    ("changes", "sender", "code"),
    [
        ({}, DECODE._replace(instance="intruder"), "handshake_rejected"),
        ({"num_tokens": 7}, DECODE, "incompatible"),
        ({"ids_hash": 1}, DECODE, "incompatible"),
        ({"endpoint": b"garbage"}, DECODE, "incompatible"),
        ({"endpoint": b""}, DECODE, "incompatible"),
    ],
)
def test_d14_d19_a_handshake_that_cannot_be_served_is_rejected(
    changes: dict[str, object], sender: PeerRef, code: str
) -> None:
    """D14, D19. An intruder changes nothing; a decode that does not fit fails this request."""
    core, request = make_prefill(), make_request()
    core.submit(request, 0.0)
    tick(core)
    effects = ask(core, handshake_for(request, **changes), sender)
    assert statuses(effects)[0] == (StatusKind.REJECTED, code)
    if code == "handshake_rejected":
        assert results(effects) == []
        assert len(sent(ask(core, handshake_for(request)), Claim)) == 1
    else:
        (result,) = results(effects)
        assert result.failure is not None
        assert (result.failure.code, result.failure.http_status) == ("incompatible", 502)


def test_a_dummy_is_answered_and_pins_nothing() -> None:
    core, request = make_prefill(), make_request()
    core.submit(request, 0.0)
    tick(core)
    assert statuses(ask(core, handshake_for(request, is_dummy=True))) == [(StatusKind.DUMMY, None)]
    assert core.rooms.records[request.key].sender.legs == {}


def test_two_decode_ranks_are_two_legs_and_two_claims() -> None:
    """R58: the room waits for all of them."""
    core, request = make_prefill(), make_request()
    core.submit(request, 0.0)
    tick(core)
    handshake = handshake_for(request, num_required=2)
    assert sent(ask(core, handshake), Claim) == []
    second = REBORN._replace(rank=1)
    claims = [c for c in sent(ask(core, handshake, second), Claim) if isinstance(c, Claim)]
    assert len({c.nonce for c in claims}) == 2


def test_destinations_are_decoded_once_per_life_and_bounded() -> None:
    core = make_prefill()
    endpoint = make_decode().setup.endpoint()
    first = core.rooms.destination(DECODE, endpoint)
    assert core.rooms.destination(DECODE, endpoint) is first
    for i in range(MAX_DESTINATIONS + 5):
        life = DECODE._replace(incarnation=Incarnation(i.to_bytes(16, "big")))
        core.rooms.destination(life, endpoint)
    assert len(core.rooms._destinations) == MAX_DESTINATIONS
    with pytest.raises(CodecError):
        core.rooms.destination(DECODE, b"garbage")


# --- cancels ----------------------------------------------------------------------------


def test_a_cancel_of_an_unknown_room_is_acknowledged_for_our_own_nonces_only() -> None:
    """Rule 2: no entity holds it, so nothing writes; another life's nonce is STALE."""
    core, key, lease = make_prefill(), RoomKey(1, 1), LeaseId(DECODE.incarnation, 1)
    own, foreign = Nonce(PREFILL.incarnation, 5), Nonce(FORMER, 6)
    effects = ask(core, Cancel(key, lease, (own, foreign)))
    assert sent(effects, CancelAck) == [CancelAck(key, lease, own)]
    assert sent(effects, Stale) == [Stale(key, FORMER)]


def test_a_cancel_without_a_nonce_is_answered_so_that_it_stops() -> None:
    core, key, lease = make_prefill(), RoomKey(1, 1), LeaseId(DECODE.incarnation, 1)
    assert sent(ask(core, Cancel(key, lease, ())), CancelAck) == [CancelAck(key, lease, None)]


def test_a_cancel_takes_the_parked_handshake_along() -> None:
    """A cancel may overtake; what it cancels must not be used when the request comes."""
    core, request = make_prefill(), make_request()
    handshake = handshake_for(request)
    ask(core, handshake)
    ask(core, Cancel(request.key, handshake.lease, ()))
    core.submit(request, 0.0)
    assert sent(tick(core), Claim) == []


def test_a_cancel_ends_a_room_that_has_no_handshake_yet() -> None:
    """Decode gave up before it came to the request, and the router that had told both is gone."""
    core, request = make_prefill(), make_request()
    core.submit(request, 0.0)
    tick(core)
    lease = LeaseId(DECODE.incarnation, 1)
    effects = ask(core, Cancel(request.key, lease, ()))
    assert sent(effects, CancelAck) == [CancelAck(request.key, lease, None)]
    (result,) = results(effects)
    assert result.failure is not None
    assert result.failure.code == "cancelled"
    assert request.key not in core.rooms.records


def test_a_stranger_s_cancel_ends_no_room_that_names_its_decode_instance() -> None:
    core, request = make_prefill(), make_request(decode="another")
    core.submit(request, 0.0)
    lease = LeaseId(DECODE.incarnation, 1)
    assert results(ask(core, Cancel(request.key, lease, ()))) == []
    assert core.rooms.records[request.key].sender.state is SenderState.BOOTSTRAPPING


def test_a_cancel_that_overtakes_its_request_ends_it_when_it_comes() -> None:
    """Remembered like an early handshake: bounded, for a while, and only if the room is not
    known to be over."""
    core, request = make_prefill(), make_request()
    cancel = Cancel(request.key, LeaseId(DECODE.incarnation, 1), ())
    assert len(sent(ask(core, cancel), CancelAck)) == 1
    core.submit(request, 0.0)
    (result,) = results(tick(core))
    assert result.failure is not None
    assert result.failure.code == "cancelled"
    ask(core, cancel)
    assert len(core.inbox.parked) == 0, "its tombstone says that it is over"


# --- grants -----------------------------------------------------------------------------


def bound(core: PrefillCore, request: GenerateRequest) -> Claim:
    core.submit(request, 0.0)
    (claim,) = sent(ask(core, handshake_for(request)), Claim)
    assert isinstance(claim, Claim)
    return claim


def test_a_grant_for_another_life_or_another_nonce_changes_nothing() -> None:
    core, request = make_prefill(), make_request()
    claim = bound(core, request)
    ask(core, Grant(request.key, Nonce(FORMER, claim.nonce.counter)))
    ask(core, Grant(request.key, Nonce(PREFILL.incarnation, claim.nonce.counter + 1)))
    ask(core, Grant(RoomKey(9, 9), claim.nonce))
    (leg,) = core.rooms.records[request.key].sender.legs.values()
    assert not leg.granted
    assert core.inbox.num_ignored == 2
    ask(core, Grant(request.key, claim.nonce))
    assert leg.granted


def test_a_refused_claim_fails_the_room() -> None:
    core, request = make_prefill(), make_request()
    claim = bound(core, request)
    (result,) = results(ask(core, Refuse(request.key, claim.nonce, "over")))
    assert result.failure is not None
    assert result.failure.code == "cancelled"


def check_hostile_blocks_fail_only_their_room(core: PrefillCore) -> None:
    """D58: a lease that does not fit the tokens is found when the transfer is planned."""
    request = make_request(8)
    core.submit(request, 0.0)
    handshake = handshake_for(request)
    ask(core, msgspec.structs.replace(handshake, blocks={"full": b"\xff" * 4}))
    record = core.rooms.records[request.key]
    (leg,) = record.sender.legs.values()
    ask(core, Grant(request.key, leg.nonce))
    batch = core.schedule(0.0)
    assert batch is not None
    core.handle_event(StepCompleted(batch.batch_id, StepOutput([[5]])), 1.0)
    effects = tick(core, 1.0)
    assert not any(isinstance(e, PostTransfer) for e in effects), "nothing was posted"
    (result,) = results(effects)
    assert result.failure is not None
    assert result.failure.code == "transfer_failed"
    assert record.sender.state is SenderState.FAILED
    assert core.rooms._handles == {}
    assert core.blocks.ledger()["full"].free == 63


def test_d58_block_ids_that_cannot_be_planned_fail_their_room() -> None:
    check_hostile_blocks_fail_only_their_room(make_prefill())


def test_only_who_did_not_answer_loses_the_connection() -> None:
    """Two decode ranks are told of a failure, and one of them acknowledges it."""
    core, request = make_prefill(CoreLimits(linger_s=30.0)), make_request(remaining_s=20.0)
    silent = DECODE._replace(rank=1, incarnation=REBORN.incarnation, address="tcp://decode:2")
    core.submit(request, 0.0)
    handshake = handshake_for(request, num_required=2)
    for peer in (DECODE, silent):
        tell(core, peer, handshake)
    tick(core)
    core.abort(request.key, failure("cancelled", "the client is gone"), 1.0)
    tick(core, 1.0)
    acknowledged = StatusAck(request.key, handshake.lease, StatusKind.FAILED)
    tell(core, DECODE, acknowledged, 1.1)
    tick(core, 1.1)
    core.handle_timeout(31.0)
    forgotten = [e.peer for e in tick(core, 31.0) if isinstance(e, ForgetPeer)]
    assert forgotten == [silent]
    assert core.rooms.records == {}


# --- incarnations -----------------------------------------------------------------------


def addressed(core: PrefillCore, to: Incarnation, message: PeerMessage) -> list[Effect]:
    core.handle_event(MessageReceived(DECODE, to, message), 0.0)
    return tick(core)


def test_what_was_meant_for_a_former_life_is_stale_and_changes_nothing() -> None:
    """Section 2: STALE proves our restart. Answers are never answered, or two peers would
    answer each other for ever."""
    core, request = make_prefill(), make_request()
    core.submit(request, 0.0)
    tick(core)
    handshake = handshake_for(request)
    assert sent(addressed(core, FORMER, handshake), Stale) == [Stale(request.key, FORMER)]
    cancel = Cancel(request.key, handshake.lease, ())
    assert sent(addressed(core, FORMER, cancel), Stale) == [Stale(request.key, FORMER)]
    assert sent(addressed(core, FORMER, Heartbeat(7)), HeartbeatAck) == [HeartbeatAck(7)]
    for silent in (Grant(request.key, Nonce(FORMER, 1)), Stale(request.key, FORMER)):
        assert addressed(core, FORMER, silent) == []
    assert core.rooms.records[request.key].sender.state is SenderState.BOOTSTRAPPING
    assert core.inbox.num_ignored == 5


def test_an_unknown_addressee_is_us() -> None:
    """The first handshake may not know our incarnation yet."""
    core, request = make_prefill(), make_request()
    core.submit(request, 0.0)
    assert len(sent(addressed(core, Incarnation(b""), handshake_for(request)), Claim)) == 1


def test_a_heartbeat_is_answered() -> None:
    core = make_prefill()
    (effect,) = ask(core, Heartbeat(3))
    assert effect == SendMessage(DECODE, HeartbeatAck(3))


def test_a_stale_answer_fails_the_rooms_of_that_life_only() -> None:
    core = make_prefill()
    request = make_request()
    bound(core, request)
    assert ask(core, Stale(request.key, FORMER), REBORN) == []
    (result,) = results(ask(core, Stale(request.key, DECODE.incarnation), REBORN))
    assert result.failure is not None
    assert result.failure.code == "peer_lost"


def test_a_message_of_the_wrong_direction_is_counted() -> None:
    core = make_prefill()
    key, lease = RoomKey(1, 1), LeaseId(DECODE.incarnation, 1)
    assert ask(core, Claim(key, lease, Nonce(PREFILL.incarnation, 1))) == []
    assert ask(core, Status(key, lease, StatusKind.FAILED, failure=failure("internal", "x"))) == []
    assert core.inbox.num_ignored == 2
