"""Public reports about whose request, room, attempt or rank something is."""

from __future__ import annotations

import attrs
import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import (
    Handshake,
    PeerMessage,
    Route,
    RouteRank,
    Status,
    StatusKind,
    Submit,
)
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import InvalidRequest, failure
from pdcore.fsm.effects import Effect, SendMessage
from pdcore.fsm.events import MessageReceived, TopologyFetched
from pdcore.fsm.routed import Leg
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.router.events import Dispatch, LegLost
from pdcore.router.fleet import Report
from pdcore.scheduler.decode import DecodeCore
from pdcore.server.openai import Endpoint
from pdcore.testing.world import World, make_world
from pdcore.types import LeaseId, PeerRef, Role, RoomKey, SamplingParams
from tests.scenarios.reports.kit import FIVE, PROMPT, check_serves, check_whole, finish, tamper
from tests.unit.router.test_core import Router
from tests.unit.scheduler.kit import make_decode, make_request, make_route, tick
from tests.unit.server.test_prepare import prepare

NUM_STRANGERS = 100_000


def test_a_hundred_thousand_strangers_leave_no_state() -> None:
    """SGLang I39428, PR39623: metadata of unknown rooms was kept for ever. Handshakes go into
    a table with a cap and a time to live, outcomes into nothing at all."""
    world = make_world(limits=CoreLimits(parked_handshake_cap=64))
    core, decode = world.prefill.worker.core, world.decode.worker.core
    sender, me = decode.setup.me, core.setup.me
    first = Handshake(
        key=RoomKey(1, 1),
        lease=LeaseId(sender.incarnation, 1),
        endpoint=decode.setup.endpoint(),
        blocks={"full": b""},
        num_cached_tokens=0,
        num_tokens=4,
        ids_hash=1,
        num_required=1,
        expires_at_s=0.0,
        remaining_s=1.0,
    )
    done = Status(RoomKey(1, 1), first.lease, StatusKind.FAILED, failure=failure("internal", "x"))
    for i in range(1, NUM_STRANGERS + 1):
        handshake = msgspec.structs.replace(first, key=RoomKey(i, i))
        core.handle_event(MessageReceived(sender, b"", handshake), 1000.0)
        status = msgspec.structs.replace(done, key=RoomKey(i, i))
        decode.handle_event(MessageReceived(me, b"", status), 1000.0)
        if i % 1000 == 0:
            core.poll_effects()
            decode.poll_effects()
    assert len(core.inbox.parked) == 64
    assert core.rooms.records == decode.rooms.records == {}
    assert len(core.rooms.tombstones) == len(decode.rooms.tombstones) == 0
    later = world.clock.monotonic() + core.setup.limits.parked_handshake_ttl_s + 1.0
    core.inbox.parked.put(RoomKey(1, 2), (), later)
    assert len(core.inbox.parked) == 1, "what nobody asked for expires"
    check_serves(world)


# --- late metadata ------------------------------------------------------------------------


def until_timed_out(world: World) -> RoomKey:
    """Prefill gave up a request whose decode could not be heard; decode still waits."""
    ends = [rank.worker.ports.channel._channel.address for rank in world.ranks.values()]
    world.network.partition(*ends)
    key = world.submit(PROMPT, to=("decode",), sampling=FIVE, timeout_s=60.0)
    world.submit(PROMPT, key=key, to=("prefill",), sampling=FIVE, timeout_s=5.0)
    world.run(lambda: world.prefill.result(key) is not None)
    assert world.decode.result(key) is None
    return key


def check_late_metadata(world: World) -> None:
    key = until_timed_out(world)
    start = world.clock.monotonic()
    world.network.heal()
    assert finish(world, key) == "deadline_exceeded"
    assert world.clock.monotonic() - start < 6.0, "decode was pinned"
    record = world.prefill.worker.core.rooms.records.get(key)
    assert record is None or record.sender.state is SenderState.FAILED
    assert world.decode.tokens(key) == []


def test_metadata_after_a_time_out_is_answered_failed_at_once() -> None:
    """tokenspeed PR1427, smg PR2463: a room that prefill had given up was resurrected by late
    metadata, and decode waited five minutes for it. It is told Failed with its next message;
    prefill's outcome is remembered, and a repeated one changes nothing."""
    world = make_world()
    check_late_metadata(world)
    check_whole(world)
    check_serves(world)


def test_a_prefill_that_forgets_its_failures_is_caught() -> None:
    """smg PR2463: the tombstone is erased, so the late handshake is parked like an early one."""
    world = make_world(limits=CoreLimits(linger_s=0.0))
    rooms = world.prefill.worker.core.rooms
    report = rooms.report

    def forgetful(record, *rest: object, **more: object) -> None:
        report(record, *rest, **more)
        rooms.tombstones.pop(record.key, 0.0)
        rooms.forget(record.key)

    vars(rooms)["report"] = forgetful
    with pytest.raises(AssertionError):
        check_late_metadata(world)


def test_waiting_in_decodes_queue_is_no_failure_of_prefill() -> None:
    """tokenspeed PR1427: requests that merely queued at a healthy decode were failed by
    prefill. There is one deadline, the request's own, and queueing is not silence."""
    limits = CoreLimits(num_metadata_slots=1, max_running=1, linger_s=1.0)
    world = make_world(limits=limits, num_blocks=40)
    sampling = SamplingParams(max_tokens=100)
    keys = [world.submit([i] * 12, sampling=sampling, timeout_s=600.0) for i in range(5, 9)]
    while len([key for key in keys if world.decode.result(key)]) < len(keys):
        world.step()
        world.clock.advance(0.2)
    assert world.clock.monotonic() > 1000.0 + limits.linger_s * 20
    for key, i in zip(keys, range(5, 9), strict=True):
        assert finish(world, key) is None
        assert world.decode.tokens(key) == simulated_tokens(world.model, [i] * 12, 100)


# --- a room that comes back ---------------------------------------------------------------


def again(world: World, key: RoomKey, replaces: int | None) -> RoomKey:
    """The same room under a new attempt, at both legs."""
    second = RoomKey(key.room, key.attempt + 1)
    for name, rank in world.ranks.items():
        kept: list[Submit] = []
        put = rank.port.put
        vars(rank.port)["put"] = kept.append
        world.submit(PROMPT, key=second, to=(name,), sampling=FIVE)
        vars(rank.port).pop("put")
        put(msgspec.structs.replace(kept[0], replaces=replaces))
    return second


@pytest.mark.parametrize("is_over", [False, True])
def test_a_room_that_comes_back_starts_at_the_beginning(is_over: bool) -> None:
    """SGLang I6857: after a retraction the room was added again, found the Success of its
    former life and hung. A new attempt has a receiver and a sender of its own, which start in
    Bootstrapping, whether the former one is over or still runs."""
    world = make_world()
    first = world.submit(PROMPT, sampling=SamplingParams(max_tokens=200))
    world.run(lambda: len(world.decode.tokens(first)) > 3)
    if is_over:
        world.abort(first)
        assert finish(world, first) == "cancelled"
    second = again(world, first, None if is_over else first.attempt)
    now = world.clock.monotonic()
    for rank in world.ranks.values():
        rank.worker._receive(now)
    receiver = world.decode.worker.core.rooms.records[second].receiver
    sender = world.prefill.worker.core.rooms.records[second].sender
    assert receiver.state is ReceiverState.BOOTSTRAPPING
    assert sender.state is SenderState.BOOTSTRAPPING
    assert receiver.lease.counter > 1
    assert finish(world, second) is None
    assert world.decode.tokens(second) == simulated_tokens(world.model, PROMPT, 5)
    check_whole(world)


def test_a_retracted_request_does_not_meet_its_former_transfer() -> None:
    """SGLang I6857: retraction happens inside decode, into fresh blocks: no receiver, sender or
    message of the transfer takes part, and every token comes."""
    limits = CoreLimits(num_reserved_decode_tokens=0, max_retractions=5)
    world = make_world(num_blocks=19, prefill_blocks=64, limits=limits)
    sent: list[PeerMessage] = []

    def look(message: PeerMessage) -> PeerMessage:
        sent.append(message)
        return message

    tamper(world, "decode", look)
    keys = [world.submit([i] * 12, sampling=SamplingParams(max_tokens=40)) for i in (20, 30)]
    for key in keys:
        assert finish(world, key) is None
    for key, i in zip(keys, (20, 30), strict=True):
        assert world.decode.tokens(key) == simulated_tokens(world.model, [i] * 12, 40)
    leases = {m.key: set[int]() for m in sent if isinstance(m, Handshake)}
    for message in sent:
        if isinstance(message, Handshake):
            leases[message.key].add(message.lease.counter)
    assert all(len(counters) == 1 for counters in leases.values())


# --- which rank ---------------------------------------------------------------------------


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("wanted", [None, 0, 1, 3])
@pytest.mark.parametrize("instances", [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_both_legs_of_every_dispatch_name_one_dp_rank(
    dp_size: int, wanted: int | None, instances: tuple[int, int]
) -> None:
    """SGLang I29725, PR22901, 27546, 19168, 21299: balancing by one rule and routing by
    another sent the two halves to different dp ranks. Here the router decides once per
    dispatch, from the room or the client's word, and both legs get one body."""
    router = Router(*instances, max_in_flight=1000)
    for _, member in router.fleet.members():
        router.fleet.report(member, Report(True, "Up", dp_size=dp_size))
    if wanted is not None and wanted >= dp_size:
        with pytest.raises(InvalidRequest, match="outside"):
            router.submit(dp_rank=wanted)
        return
    used = set()
    for room in range(1, 200):
        _, dispatch = router.submit(room=room, dp_rank=wanted)
        used.add(dispatch.added["disagg_prefill_dp_rank"])
    assert used == (set(range(dp_size)) if wanted is None else {wanted})


def partitions(core: DecodeCore, life: int, dp_size: int, instance: str = "prefill") -> Route:
    """A route with so many dp ranks, each a process of its own."""
    ranks = {
        f"{dp},0,0": RouteRank("prefill", 1 + dp, bytes([life + dp] * 16).hex())
        for dp in range(dp_size)
    }
    return make_route(core.setup, dp_size=dp_size, ranks=ranks, instance=instance)


def rank_at_prefill(dispatch: Dispatch, dp_size: int) -> int | None:
    """Where the prefill leader of so many dp ranks puts this dispatch."""
    fields = {"prompt": "hi", **dispatch.added, "bootstrap_host": "127.0.0.1"}
    return prepare(Endpoint.GENERATE, fields, Role.PREFILL, dp_size).prefill_dp_rank


def rank_asked_by_decode(dispatch: Dispatch, dp_size: int, unnamed: int | None = None) -> int:
    """Whom the decode rank, given what its own leader makes of this dispatch, sends its
    handshake to. ``unnamed``: what a dp rank that is not named is taken for."""
    fields = {"prompt": "hi", **dispatch.added, "bootstrap_host": "127.0.0.1"}
    request = prepare(Endpoint.GENERATE, fields, Role.DECODE)
    if request.prefill_dp_rank is None:
        request = attrs.evolve(request, prefill_dp_rank=unnamed)
    core = make_decode()
    core.submit(request, 0.0)
    tick(core)
    route = partitions(core, 10, dp_size, request.prefill)
    core.handle_event(TopologyFetched(request.bootstrap, route), 0.0)
    sent = [e for e in tick(core) if isinstance(e, SendMessage)]
    (asked,) = {e.to.rank for e in sent if isinstance(e.message, Handshake)}
    return asked


def check_both_legs_have_one_dp_rank(
    dp_size: int, known: int | None, wanted: int | None, unnamed: int | None = None
) -> None:
    """``known``: what the router has heard of prefill's dp_size."""
    router = Router(1, 1)
    for _, member in router.fleet.members():
        member.dp_size = known
    for room in range(1, 10):
        _, dispatch = router.submit(room=room, dp_rank=wanted)
        rank = rank_at_prefill(dispatch, dp_size)
        if wanted is not None or known is None:
            assert rank == (room % dp_size if wanted is None else wanted)
        assert rank_asked_by_decode(dispatch, dp_size, unnamed) == rank, room


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("wanted", [None, 0, 1])
@pytest.mark.parametrize("is_known", [True, False])
def test_decode_asks_the_dp_rank_that_prefill_took(
    dp_size: int, wanted: int | None, is_known: bool
) -> None:
    """D21, R60, SGLang I29725, PR22901, 27546, 19168, 21299: also where the router, which has
    not heard of dp_size yet or is another one, names no dp rank in the body."""
    if wanted is not None and wanted >= dp_size:
        return
    check_both_legs_have_one_dp_rank(dp_size, dp_size if is_known else None, wanted)


def test_a_decode_that_takes_rank_0_for_unnamed_is_noticed() -> None:
    """D21: the mutant; with the router's word it changes nothing."""
    check_both_legs_have_one_dp_rank(3, 3, None, unnamed=0)
    with pytest.raises(AssertionError):
        check_both_legs_have_one_dp_rank(3, None, None, unnamed=0)


def test_another_attempt_keeps_the_dp_rank_that_was_asked_for() -> None:
    """SGLang I40730: also on another instance."""
    router = Router(2, 2)
    ticket, first = router.submit(room=7, dp_rank=3)
    router.event(LegLost(ticket, first.attempt, Leg.PREFILL, sent=False, detail="refused"))
    router.at(10.0)  # should the retry be made after a pause
    second = router.of(Dispatch)[-1]
    assert second.attempt != first.attempt
    assert second.added["disagg_prefill_dp_rank"] == first.added["disagg_prefill_dp_rank"] == 3


def test_what_is_asked_again_goes_to_the_rank_that_was_asked_first() -> None:
    """SGLang I40730: a repeated bootstrap went to another dp rank than the one that was bound.
    A receiver's targets are fixed when it is mapped; whatever is resent goes there, also
    after the route has changed."""
    core = make_decode()
    request = make_request(prefill_dp_rank=2)
    core.submit(request, 0.0)
    tick(core)
    asked: list[PeerRef] = []

    def note(effects: list[Effect]) -> None:
        sent = [effect for effect in effects if isinstance(effect, SendMessage)]
        asked.extend(effect.to for effect in sent if isinstance(effect.message, Handshake))

    core.handle_event(TopologyFetched(request.bootstrap, partitions(core, 10, 4)), 0.0)
    note(tick(core))
    core.handle_event(TopologyFetched(request.bootstrap, partitions(core, 50, 4)), 1.0)
    for second in range(1, 20):
        core.handle_timeout(float(second))
        note(tick(core, float(second)))
    assert len(asked) > 3
    assert {(peer.rank, peer.incarnation) for peer in asked} == {(2, bytes([12] * 16))}
