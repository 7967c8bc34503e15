"""The preallocation queue: waiting for a route, then for blocks and a slot."""

from __future__ import annotations

import itertools

import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import Claim, Handshake, RouteRank
from pdcore.errors import failure
from pdcore.fsm.effects import Effect, FetchTopology, SendMessage
from pdcore.fsm.events import TopologyFetched
from pdcore.scheduler.decode import DecodeCore
from pdcore.types import GenerateRequest, Nonce, RoomKey
from tests.unit.scheduler.kit import (
    PREFILL,
    handshake_of,
    make_decode,
    make_request,
    make_route,
    results,
    start,
    tell,
    tick,
)

AT = "bootstrap:1"
LIMITS = CoreLimits(topology_ttl_s=30.0, topology_retry_s=1.0)


def submit(core: DecodeCore, now: float = 0.0, **changes: object) -> GenerateRequest:
    request = make_request(**changes)
    core.submit(request, now)
    return request


def fetched(core: DecodeCore, now: float = 0.0, bootstrap: str = AT) -> list[Effect]:
    core.handle_event(TopologyFetched(bootstrap, make_route(core.setup)), now)
    return tick(core, now)


def missing(core: DecodeCore, now: float, code: str = "unreachable") -> list[Effect]:
    core.handle_event(TopologyFetched(AT, None, failure(code, "no answer")), now)
    return tick(core, now)


def fetches(effects: list[Effect]) -> list[str]:
    return [e.bootstrap for e in effects if isinstance(e, FetchTopology)]


def codes(effects: list[Effect]) -> dict[RoomKey, str | None]:
    return {r.key: None if r.failure is None else r.failure.code for r in results(effects)}


def test_one_fetch_per_address_for_all_who_wait() -> None:
    """D28: single flight."""
    core = make_decode(LIMITS)
    for _ in range(3):
        submit(core)
    submit(core, bootstrap="bootstrap:2")
    assert fetches(tick(core)) == [AT, "bootstrap:2"]
    assert core.snapshot().pending == 4
    fetched(core)
    assert (core.snapshot().pending, core.snapshot().transfer) == (1, 3)
    assert AT not in core.prealloc.pending


def test_d20_a_late_route_is_asked_again_at_intervals_until_the_budget_is_over() -> None:
    """D20: 503 after topology_ttl_s, counted per request in time, not in tries."""
    core = make_decode(LIMITS)
    first = submit(core, 0.0)
    tick(core)
    assert codes(missing(core, 0.1, "unavailable")) == {}
    second = submit(core, 20.0)
    ends: dict[RoomKey, float] = {}
    asked: list[float] = []
    for tenth in range(2, 600):
        now = tenth / 10
        core.handle_timeout(now)
        effects = tick(core, now)
        if fetches(effects):
            asked.append(now)
            effects += missing(core, now, "unavailable")
        for key, code in codes(effects).items():
            assert code == "unavailable", "the reason of the last fetch"
            ends[key] = now
    assert 30.0 <= ends[first.key] < 32.0
    assert 50.0 <= ends[second.key] < 52.0
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert min(gaps) > 0.99
    assert core.prealloc.pending == {}
    assert not core.rooms.timers.is_armed("topology", AT)


def test_a_request_that_ended_meanwhile_waits_for_nothing() -> None:
    core = make_decode(LIMITS)
    request = submit(core)
    tick(core)
    assert core.abort(request.key, failure("cancelled", "gone"), 1.0)
    assert codes(tick(core, 1.0)) == {request.key: "cancelled"}
    fetched(core, 2.0)
    assert core.prealloc.pending == {}
    assert core.snapshot().transfer == 0


@pytest.mark.parametrize(
    ("request_changes", "route_changes", "code"),
    [
        ({"prefill": "somebody"}, {}, "incompatible"),
        ({"prefill": ""}, {}, None),
        ({"prefill_dp_rank": 1}, {}, "incompatible"),
        ({}, {"ranks": {}}, "unavailable"),
        ({}, {"fingerprint": "other"}, "incompatible"),
    ],
)
def test_a_route_that_does_not_serve_the_request_fails_it_at_once(
    request_changes: dict[str, object], route_changes: dict[str, object], code: str | None
) -> None:
    """Section 2: both legs name the chosen instances."""
    core = make_decode(LIMITS)
    request = submit(core, **request_changes)
    tick(core)
    core.handle_event(TopologyFetched(AT, make_route(core.setup, **route_changes)), 0.0)
    effects = tick(core)
    assert codes(effects) == ({} if code is None else {request.key: code})
    assert fetches(effects) == []


def check_an_unnamed_dp_rank_is_found_in_the_route(unnamed: int | None) -> None:
    """Three dp ranks, each with an incarnation of its own; six rooms that came before their
    route was known, and six after."""
    core = make_decode(LIMITS, num_blocks=256)
    ranks = {f"{dp},0,0": RouteRank("prefill", 1 + dp, bytes([dp] * 16).hex()) for dp in range(3)}
    rooms = [*range(3, 15)]
    for room in rooms[:6]:
        submit(core, key=RoomKey(room, 1), prefill_dp_rank=unnamed)
    effects = tick(core)
    route = make_route(core.setup, dp_size=3, ranks=ranks)
    core.handle_event(TopologyFetched(AT, route), 0.0)
    effects += tick(core)
    for room in rooms[6:]:
        submit(core, key=RoomKey(room, 1), prefill_dp_rank=unnamed)
    effects += tick(core)
    sent = [e for e in effects if isinstance(e, SendMessage) and isinstance(e.message, Handshake)]
    found = {e.message.key.room: (e.to.rank, e.to.incarnation) for e in sent}
    assert found == {room: (room % 3, bytes([room % 3] * 16)) for room in rooms}


def test_r60_an_unnamed_dp_rank_is_the_rooms_once_the_route_is_known() -> None:
    """R60, D21: the mutant is what a decode instance said before: the first."""
    check_an_unnamed_dp_rank_is_found_in_the_route(None)
    with pytest.raises(AssertionError):
        check_an_unnamed_dp_rank_is_found_in_the_route(0)


def test_a_refusal_is_answered_from_memory_until_it_is_old() -> None:
    """D14: negative cache."""
    core = make_decode(LIMITS)
    submit(core)
    tick(core)
    core.handle_event(TopologyFetched(AT, make_route(core.setup, fingerprint="other")), 0.0)
    tick(core)
    again = submit(core, 29.0)
    effects = tick(core, 29.0)
    assert codes(effects) == {again.key: "incompatible"}
    assert fetches(effects) == []
    submit(core, 31.0)
    assert fetches(tick(core, 31.0)) == [AT]


def test_d41_a_forbidden_address_is_refused_at_once() -> None:
    core = make_decode(LIMITS)
    request = submit(core)
    tick(core)
    assert codes(missing(core, 0.0, "invalid_request")) == {request.key: "invalid_request"}


def test_an_old_route_serves_while_it_is_asked_again() -> None:
    core = make_decode(LIMITS)
    submit(core)
    tick(core)
    fetched(core)
    submit(core, 40.0)
    effects = tick(core, 40.0)
    assert fetches(effects) == [AT]
    assert core.snapshot().transfer == 2


def test_leaving_is_idempotent() -> None:
    core = make_decode(LIMITS)
    core.prealloc.leave(RoomKey(1, 1))
    core.prealloc.leave(RoomKey(1, 1))
    assert len(core.prealloc.line) == 0


def waiting_behind(core: DecodeCore) -> tuple[GenerateRequest, GenerateRequest]:
    """One in transfer that takes all, one that waits."""
    holder, waiter = make_request(31), make_request(8)
    start(core, holder)
    start(core, waiter)
    assert (core.snapshot().transfer, core.snapshot().prealloc) == (1, 1)
    return holder, waiter


def test_an_offer_is_not_repeated_while_nothing_changed() -> None:
    """Cost follows change: a full pool is not compared with the line in every iteration."""
    core = make_decode(CoreLimits(num_reserved_decode_tokens=0), num_blocks=10)
    waiting_behind(core)
    assert not core.wants_tick
    assert not core.prealloc.may_offer(0)
    assert core.prealloc.may_offer(1), "what retracted sequences are owed counts too"


def test_head_room_that_ends_without_freeing_a_block_wakes_the_line() -> None:
    """A holder that goes into quarantine will not grow: its reserve is free for newcomers,
    although the pool has not changed."""
    core = make_decode(CoreLimits(num_reserved_decode_tokens=16), num_blocks=10)
    holder, waiter = make_request(15), make_request(8)
    lease = handshake_of(start(core, holder)).lease
    tell(core, PREFILL, Claim(holder.key, lease, Nonce(PREFILL.incarnation, 1)))
    start(core, waiter)
    # 9 usable - 4 held - 4 reserved = 1, and the waiter needs 3.
    assert core.snapshot().prealloc == 1
    core.abort(holder.key, failure("cancelled", "gone"), 1.0)
    tick(core, 1.0)
    assert core.snapshot().draining == 1
    assert core.snapshot().transfer == 1
    assert not core.wants_tick
