"""What a decode rank answers, and what a published handshake pins."""

from __future__ import annotations

import pytest

from pdcore.config import CoreLimits
from pdcore.control.codec import unpack_block_ids
from pdcore.control.messages import (
    Cancel,
    CancelAck,
    Claim,
    Grant,
    Handshake,
    Heartbeat,
    HeartbeatAck,
    PeerMessage,
    Refuse,
    Stale,
    Status,
    StatusAck,
    StatusKind,
)
from pdcore.errors import failure
from pdcore.fsm.effects import Effect, FencePeer, GrantLease, ReleaseLease, RevokeLease
from pdcore.fsm.events import LeaseRevoked, MessageReceived, PeerLost
from pdcore.fsm.states import ReceiverState
from pdcore.kv.slots import MetadataSlots
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.decode_rooms import ACKNOWLEDGED_S, MAX_AGE_S
from pdcore.types import GenerateRequest, Incarnation, LeaseId, Nonce, PeerRef, RoomKey
from tests.unit.scheduler.kit import (
    DECODE,
    PREFILL,
    handshake_of,
    make_decode,
    make_request,
    results,
    sent,
    start,
    tell,
    tick,
)

GONE = failure("cancelled", "the client is gone")
FORMER = Incarnation(b"X" * 16)
REBORN = PREFILL._replace(incarnation=Incarnation(b"R" * 16))
NONCE = Nonce(PREFILL.incarnation, 1)


def ask(
    core: DecodeCore, message: PeerMessage, sender: PeerRef = PREFILL, now: float = 0.0
) -> list[Effect]:
    tell(core, sender, message, now)
    return tick(core, now)


def transferring(core: DecodeCore, *, granted: bool = True) -> tuple[GenerateRequest, DecodeRecord]:
    request = make_request()
    lease = handshake_of(start(core, request)).lease
    if granted:
        assert sent(ask(core, Claim(request.key, lease, NONCE)), Grant) != []
    return request, core.rooms.records[request.key]


def test_admission_publishes_exactly_the_prompt_s_blocks() -> None:
    """The lease opens what the handshake names; the block of the first output is ours."""
    core, request = make_decode(), make_request(9)
    effects = start(core, request)
    handshake = handshake_of(effects)
    (grant,) = [e for e in effects if isinstance(e, GrantLease)]
    table = core.blocks.get_block_ids(core.rooms.records[request.key].seq.seq_id)["full"]
    published = unpack_block_ids(handshake.blocks["full"])
    assert published == table[:3]
    stride = core.setup.placement.block_strides[0]
    opened = {b for low, high in grant.ranges[1].tolist() for b in range(low, high)}
    assert opened == {b * stride + i for b in published for i in range(stride)}
    assert handshake.remaining_s == 60.0


def test_a_promise_that_was_lost_is_no_failure() -> None:
    """The vote said there is room and there is none: it waits on."""
    core = make_decode(CoreLimits(num_metadata_slots=1))
    _, record = transferring(core, granted=False)
    waiting = make_request()
    start(core, waiting)
    other = core.rooms.records[waiting.key]
    assert core.rooms.admit(other, 0.0) is None
    assert other.seq.seq_id not in core.blocks
    assert record.slot is not None


def test_a_lease_pins_blocks_and_slot_until_its_writers_are_quiet() -> None:
    core = make_decode()
    request, record = transferring(core)
    core.abort(request.key, GONE, 1.0)
    effects = tick(core, 1.0)
    assert RevokeLease(record.receiver.lease) in effects
    assert sent(effects, Cancel) == [Cancel(request.key, record.receiver.lease, (NONCE,))]
    assert core.blocks.ledger()["full"].quarantined == 3
    assert core.rooms.slots.num_quarantined == 1
    effects = ask(core, CancelAck(request.key, record.receiver.lease, NONCE), now=2.0)
    assert ReleaseLease(record.receiver.lease) in effects
    assert core.blocks.ledger()["full"].free == 63
    assert core.rooms.slots.available == core.rooms.slots.capacity
    assert record.slot is None
    assert core.rooms.records == {}


def test_a_second_nonce_is_never_granted() -> None:
    """Rule 1: one nonce per lease and prefill rank, ever."""
    core = make_decode()
    request, record = transferring(core)
    lease = record.receiver.lease
    again = ask(core, Claim(request.key, lease, NONCE))
    assert sent(again, Grant) == [Grant(request.key, NONCE)]
    other = Nonce(PREFILL.incarnation, 2)
    (refuse,) = sent(ask(core, Claim(request.key, lease, other)), Refuse)
    assert isinstance(refuse, Refuse)
    assert refuse.nonce == other
    assert record.timeline["granted"] == 0.0


def test_claims_and_outcomes_of_unknown_rooms_are_answered_and_leave_nothing() -> None:
    """Section 2: a claim is refused, an outcome acknowledged so that it stops."""
    core = make_decode()
    key, lease = RoomKey(7, 7), LeaseId(DECODE.incarnation, 1)
    assert len(sent(ask(core, Claim(key, lease, NONCE)), Refuse)) == 1
    for kind in (StatusKind.DONE, StatusKind.FAILED, StatusKind.REJECTED):
        assert sent(ask(core, Status(key, lease, kind)), StatusAck) == [StatusAck(key, lease, kind)]
    assert ask(core, Status(key, lease, StatusKind.QUEUED)) == []
    assert ask(core, CancelAck(key, lease, NONCE)) == []
    assert core.rooms.records == {}


def test_a_failure_of_prefill_reaches_the_client_with_its_reason() -> None:
    core = make_decode()
    request, record = transferring(core, granted=False)
    why = failure("prompt_too_long", "at most 64")
    status = Status(request.key, record.receiver.lease, StatusKind.REJECTED, failure=why)
    (result,) = results(ask(core, status))
    assert result.failure == why


def test_stage_times_of_prefill_enter_the_timeline_of_their_own_delivery() -> None:
    core = make_decode()
    request, record = transferring(core)
    lease = record.receiver.lease
    for own, seconds in (
        (LeaseId(DECODE.incarnation, 999), 9.0),
        (lease, 1.5),
    ):
        status = Status(request.key, own, StatusKind.DONE, nonce=NONCE, timings={"queue": seconds})
        ask(core, status)
    assert record.timeline["prefill_queue"] == 1.5


# --- incarnations -----------------------------------------------------------------------


def addressed(core: DecodeCore, to: Incarnation, message: PeerMessage) -> list[Effect]:
    core.handle_event(MessageReceived(PREFILL, to, message), 0.0)
    return tick(core)


def test_what_was_meant_for_a_former_life_is_stale_and_changes_nothing() -> None:
    core = make_decode()
    request, record = transferring(core, granted=False)
    lease = record.receiver.lease
    for message in (
        Claim(request.key, lease, NONCE),
        Status(request.key, lease, StatusKind.FAILED),
    ):
        assert sent(addressed(core, FORMER, message), Stale) == [Stale(request.key, FORMER)]
    assert sent(addressed(core, FORMER, Heartbeat(4)), HeartbeatAck) == [HeartbeatAck(4)]
    for silent in (CancelAck(request.key, lease, NONCE), Stale(request.key, FORMER)):
        assert addressed(core, FORMER, silent) == []
    assert record.receiver.state is ReceiverState.TRANSFERRING
    assert core.inbox.num_ignored == 5


def test_a_stale_answer_fails_the_room_and_asks_for_a_fence() -> None:
    """Proof of death, not of quiescence: the blocks stay out."""
    core = make_decode()
    request, _ = transferring(core)
    effects = ask(core, Stale(request.key, PREFILL.incarnation), REBORN, 1.0)
    (result,) = results(effects)
    assert result.failure is not None
    assert (result.failure.code, result.failure.http_status) == ("peer_lost", 503)
    (fence,) = [e for e in effects if isinstance(e, FencePeer)]
    assert fence.peer.incarnation == PREFILL.incarnation
    assert core.blocks.ledger()["full"].quarantined == 3
    core.handle_event(PeerLost(PREFILL.incarnation, True, "fenced"), 2.0)
    tick(core, 2.0)
    assert core.blocks.ledger()["full"].free == 63


@pytest.mark.parametrize(
    ("said", "code"),
    [("nothing", "stale_route"), ("queued", "peer_lost"), ("claim", "peer_lost")],
)
def test_a_route_that_was_old_is_told_from_a_prefill_that_was_lost(said: str, code: str) -> None:
    """Architecture, section 2 (new requests work after a restart): the life that decode's route
    named never said a word about this request, so nothing of it is lost; its successor may
    have the prefill half already."""
    core = make_decode()
    request, record = transferring(core, granted=said == "claim")
    if said == "queued":
        ask(core, Status(request.key, record.receiver.lease, StatusKind.QUEUED))
    effects = ask(core, Stale(request.key, PREFILL.incarnation), REBORN, 1.0)
    (result,) = results(effects)
    assert result.failure is not None
    assert (result.failure.code, result.failure.http_status) == (code, 503)


def test_a_transport_that_enforces_the_lease_frees_at_once() -> None:
    core = make_decode()
    request, record = transferring(core)
    core.abort(request.key, GONE, 1.0)
    tick(core, 1.0)
    core.handle_event(LeaseRevoked(LeaseId(FORMER, 1)), 1.0)
    tick(core, 1.0)
    assert core.blocks.ledger()["full"].quarantined == 3
    core.handle_event(LeaseRevoked(record.receiver.lease), 1.0)
    tick(core, 1.0)
    assert core.blocks.ledger()["full"].free == 63


# --- a half that never comes ---------------------------------------------------


def queued(core: DecodeCore, record: DecodeRecord, now: float) -> None:
    key, lease = record.key, record.receiver.lease
    ask(core, Status(key, lease, StatusKind.QUEUED), now=now)


def test_a_half_that_was_lost_at_prefill_ends_the_other() -> None:
    """Both halves are sent at once. One that a prefill rank still waits for after ten seconds went
    to a process that is gone; the router was told that it had been taken. It was waited for until
    the request's own deadline, half an hour by default (D23)."""
    core = make_decode(CoreLimits(prefill_arrival_s=10.0))
    _, record = transferring(core, granted=False)
    for now in range(1, 11):
        queued(core, record, float(now))
        core.handle_timeout(float(now))
        tick(core, float(now))
        assert record.receiver.failure is None, "counted from the first word, not the last"
    core.handle_timeout(11.0)
    tick(core, 11.0)
    why = record.receiver.failure
    assert why is not None
    assert (why.code, why.detail) == (
        "stale_route",
        f"{PREFILL.instance} rank 0 has waited 10 s for its half of this request, or for the "
        "other decode ranks of it",
    )
    core.rooms.forget(record.key)
    assert not core.rooms.timers.is_armed("arrival", record.key)


def test_a_prefill_rank_that_fell_silent_is_not_one_that_lacks_its_half() -> None:
    """It may be in the middle of a long step, with the request unread in its mailbox, or cut off:
    only the deadline decides. When it says again that it waits, it is believed."""
    core = make_decode(CoreLimits(prefill_arrival_s=10.0))
    _, record = transferring(core, granted=False)
    queued(core, record, 1.0)
    core.handle_timeout(11.0)
    assert record.receiver.failure is None
    assert core.rooms.timers.is_armed("arrival", record.key), "it is asked about again"
    limits = core.setup.limits
    assert record.lost_half(20.0, limits) is None
    queued(core, record, 20.0)
    assert record.lost_half(20.0, limits) is not None


STRANGE_LIFE = Incarnation(b"z" * 16)


@pytest.mark.parametrize(
    "stranger",
    [PREFILL._replace(rank=1), PeerRef("other:1", 0, STRANGE_LIFE, "tcp://other:1")],
)
def test_who_is_no_target_has_no_say_in_it(stranger: PeerRef) -> None:
    core = make_decode(CoreLimits(prefill_arrival_s=2.0))
    request, record = transferring(core, granted=False)
    message = Status(request.key, record.receiver.lease, StatusKind.QUEUED)
    for now in range(1, 5):
        ask(core, message, stranger, float(now))
        core.handle_timeout(float(now))
        tick(core, float(now))
    assert record.receiver.failure is None


def test_a_claim_that_is_put_off_shows_that_the_half_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An ordinary drain keeps much of the pool out: the claim is resent until it is over."""
    core = make_decode(CoreLimits(prefill_arrival_s=10.0))
    request, record = transferring(core, granted=False)
    monkeypatch.setattr(core.rooms, "kept_out", lambda incarnation: [record])
    queued(core, record, 1.0)
    for now in range(2, 30):
        ask(core, Claim(request.key, record.receiver.lease, NONCE), now=float(now))
        core.handle_timeout(float(now))
        tick(core, float(now))
    assert record.receiver.failure is None


def test_a_half_that_came_late_is_not_given_up() -> None:
    """Its claim shows that it is there; how long it computes is its own business."""
    core = make_decode(CoreLimits(prefill_arrival_s=10.0))
    request, record = transferring(core, granted=False)
    queued(core, record, 1.0)
    assert sent(ask(core, Claim(request.key, record.receiver.lease, NONCE), now=9.0), Grant) != []
    for now in (11.0, 12.0, 20.0):
        core.handle_timeout(now)
        tick(core, now)
    assert record.receiver.failure is None


# --- quarantine --------------------------------------------------------------


def draining(core: DecodeCore) -> tuple[GenerateRequest, DecodeRecord]:
    request, record = transferring(core)
    core.abort(request.key, GONE, 0.0)
    tick(core)
    return request, record


def let_pass(core: DecodeCore, now: float) -> None:
    core.handle_timeout(now)
    tick(core, now)


def test_a_stopped_process_does_not_age_its_quarantine() -> None:
    """Rule 6: at most a second per look, however late the look comes. The period starts when
    no writer can post any more, because it covers what was posted before."""
    core = make_decode(quarantine_s=3.0)
    request, record = draining(core)
    for now in (1.0, 2.0, 3.0, 4.0):
        let_pass(core, now)
    assert record.receiver.quarantine_s == 3.0, "its writer is not over"
    ask(core, CancelAck(request.key, record.receiver.lease, NONCE), now=4.5)
    assert record.receiver.state is ReceiverState.DRAINING, "acknowledged, but in quarantine"
    let_pass(core, 5.0)
    let_pass(core, 500.0)
    assert record.receiver.quarantine_s == ACKNOWLEDGED_S - MAX_AGE_S
    let_pass(core, 500.9)
    assert core.blocks.ledger()["full"].quarantined == 3
    let_pass(core, 502.0)
    assert core.blocks.ledger()["full"].free == 63


def test_a_dead_writer_starts_the_quarantine_once() -> None:
    """Rule 2: the period is the rule where nobody fences, all of it for who said nothing; a
    repeated proof does not start it again."""
    core = make_decode(quarantine_s=3.0)
    request, record = draining(core)
    for now in range(10, 13):
        ask(core, Stale(request.key, PREFILL.incarnation), REBORN, float(now))
        let_pass(core, float(now))
    assert record.receiver.quarantine_s > 0
    for now in (13.0, 14.0):
        ask(core, Stale(request.key, PREFILL.incarnation), REBORN, now)
        let_pass(core, now)
    assert record.receiver.state is ReceiverState.FAILED
    assert core.blocks.ledger()["full"].free == 63


@pytest.mark.parametrize("num_proofs", [1, 2, 3])
def test_proofs_of_a_death_are_no_word_of_the_dead(num_proofs: int) -> None:
    """Decision 25: nor are several in one look, from the transport and from the successor."""
    core = make_decode(quarantine_s=60.0)
    request, record = draining(core)
    core.handle_event(PeerLost(PREFILL.incarnation, False, "killed"), 5.0)
    for _ in range(num_proofs - 1):
        ask(core, Stale(request.key, PREFILL.incarnation), REBORN, 5.1)
    for now in range(6, 60):
        let_pass(core, float(now))
    assert record.receiver.state is ReceiverState.DRAINING
    assert core.blocks.ledger()["full"].quarantined == 3


def test_without_a_quarantine_period_an_unfenced_death_keeps_the_blocks() -> None:
    """Rule 2: only a fence ends it; it comes from the transport."""
    core = make_decode(CoreLimits(drain_timeout_s=10.0))
    request, _ = draining(core)
    ask(core, Stale(request.key, PREFILL.incarnation), REBORN, 5.0)
    core.handle_event(PeerLost(PREFILL.incarnation, False, "killed"), 6.0)
    for now in (10.0, 20.0, 500.0):
        let_pass(core, now)
        assert core.blocks.ledger()["full"].quarantined == 3
    core.handle_event(PeerLost(PREFILL.incarnation, True, "last write landed"), 501.0)
    tick(core, 501.0)
    assert core.blocks.ledger()["full"].free == 63


@pytest.mark.parametrize(
    "stranger",
    [
        REBORN._replace(instance="other"),
        REBORN._replace(rank=1),
        PREFILL,
        REBORN._replace(instance=""),
    ],
)
def test_only_the_successor_at_the_same_place_proves_a_restart(stranger: PeerRef) -> None:
    """STALE is believed of nobody else, or a stranger could fail the rooms of a peer."""
    core = make_decode()
    request, record = transferring(core)
    assert ask(core, Stale(request.key, PREFILL.incarnation), stranger) == []
    assert record.receiver.failure is None
    assert core.inbox.num_ignored == 1


def test_heartbeats_go_to_the_peers_of_rooms_that_are_not_over() -> None:
    """D48: asked once per interval; nobody is asked when nothing depends on it."""
    core = make_decode(CoreLimits(heartbeat_interval_s=1.0))
    request, record = transferring(core)
    core.handle_timeout(1.0)
    assert len(sent(tick(core, 1.0), Heartbeat)) == 1
    core.abort(request.key, GONE, 1.5)
    tick(core, 1.5)
    ask(core, CancelAck(request.key, record.receiver.lease, NONCE), now=1.6)
    core.handle_timeout(2.0)
    assert sent(tick(core, 2.0), Heartbeat) == []
    assert core.poll_deadline() is None


def test_a_message_of_the_wrong_direction_is_counted() -> None:
    core = make_decode()
    assert ask(core, Grant(RoomKey(1, 1), NONCE)) == []
    handshake = Handshake(RoomKey(1, 1), LeaseId(FORMER, 1), b"", {}, 0, 1, 0, 1, 0.0, 0.0)
    assert ask(core, handshake) == []
    assert core.inbox.num_ignored == 2


def test_slots_are_those_of_the_limits() -> None:
    core = make_decode(CoreLimits(num_metadata_slots=5))
    assert isinstance(core.rooms.slots, MetadataSlots)
    assert core.rooms.slots.capacity == 5
