"""Public reports, group E: who a peer is, whether it lives, and whom its failure concerns.

smg, NIXL, vLLM, vllm-ascend. Fleets of several instances: one dies, is replaced or cannot be
reached; everybody else must not notice.
"""

from __future__ import annotations

import random

import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import WorkerHealth
from pdcore.fsm.routed import Leg
from pdcore.router.core import RouterCore, RouterLimits
from pdcore.router.events import Answer, Dispatch, LegAnswered, StreamBegan, StreamEnded
from pdcore.router.fleet import Fleet as RouterFleet
from pdcore.router.fleet import Report
from pdcore.router.policies import ClientFields, parse_targets
from pdcore.testing.world import Rank, World, make_world
from pdcore.types import PeerRef
from tests.scenarios.reports.fleet import (
    FIVE,
    PROMPT,
    Fleet,
    check_failed_without_text,
    check_nothing_leaked,
    check_right,
    is_posted,
    let_bytes_move,
    make_fleet,
)


def check_pair(fleet: Fleet, prefill: str, decode: str) -> None:
    key = fleet.submit(prefill, decode)
    fleet.finish(decode, key)
    check_right(fleet.world.ranks[decode], key, fleet.world.model, PROMPT, 5)


def problems(rank: Rank) -> list[str]:
    return [m for m in rank.said if isinstance(m, WorkerHealth)][-1].problems


def test_a_decode_that_is_killed_and_replaced_again_and_again() -> None:
    """smg #2382: decodes die in mid request and come back on the same address. The prefill
    that served them goes on serving the others at once, and the new life too; what was lost
    has an error and no empty 200."""
    fleet = make_fleet(1, 2)
    world = fleet.world
    for round_number in range(6):
        lost = [fleet.submit("prefill-0", "decode-0", [9 + i] * 12) for i in range(3)]
        kept = fleet.submit("prefill-0", "decode-1")
        for _ in range(round_number):
            world.step()
        former = fleet.restart("decode-0")
        assert fleet.finish("decode-1", kept).failure is None
        prefill = world.ranks["prefill-0"]
        world.run(lambda lost=lost, prefill=prefill: all(prefill.result(k) for k in lost))
        for key in lost:
            result = former.result(key)
            assert result is None or result.failure is not None or len(former.tokens(key)) == 5
        check_pair(fleet, "prefill-0", "decode-0")
        check_pair(fleet, "prefill-0", "decode-1")
    world.settle()
    check_nothing_leaked(world)
    assert problems(world.ranks["prefill-0"]) == []


def stuck_fleet() -> Fleet:
    """decode-0 never acknowledges again what prefill-0 did for it."""
    limits = CoreLimits(drain_timeout_s=5.0, quarantine_share=0.2, heartbeat_interval_s=1.0)
    return make_fleet(2, 2, limits=limits, num_blocks=40, stepped=True)


def test_readiness_says_that_a_peer_does_not_acknowledge() -> None:
    """smg #2382: pods were Ready while every request failed. A writer that does not
    acknowledge keeps its blocks out, and its peer's health says so until it does."""
    fleet = stuck_fleet()
    world = fleet.world
    key = fleet.submit("prefill-0", "decode-0", [7] * 60)
    world.run(lambda: is_posted(world))
    fleet.cut("prefill-0", "decode-0")
    decode = world.ranks["decode-0"]
    decode.port.abort(key, "the client is gone")
    world.run(lambda: decode.worker.core.snapshot().stuck == 1)
    until_s = world.clock.monotonic() + 2.0
    world.run(lambda: world.clock.monotonic() > until_s)
    assert any("does not acknowledge" in text for text in problems(decode))
    assert problems(world.ranks["decode-1"]) == []
    world.network.heal()

    def is_well() -> bool:
        let_bytes_move(world)
        return not any(rank.worker.core.live_keys() for rank in world.ranks.values())

    world.run(is_well)
    until_s = world.clock.monotonic() + 2.0
    world.run(lambda: world.clock.monotonic() > until_s)
    assert problems(decode) == []
    check_nothing_leaked(world)


def check_restart_is_noticed(world: World, late: bool) -> float:
    """Prefill is replaced on the same address in the middle of a request; how long until
    decode's client knows."""
    key = world.submit(PROMPT, sampling=FIVE, timeout_s=600.0)
    world.run(lambda: is_posted(world))
    start_s = world.clock.monotonic()
    world.restart("prefill", late=late)
    world.run(lambda: world.decode.result(key) is not None)
    took_s = world.clock.monotonic() - start_s
    assert check_failed_without_text(world.decode, key) == "peer_lost"
    return took_s


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_replaced_prefill_is_noticed_within_heartbeats(is_seen: bool) -> None:
    """nixl #795: another life at the same address. Whether the transport sees the death or
    only a heartbeat is answered by somebody else, it takes a few intervals and not the
    request's ten minutes; then the new life serves."""
    limits = CoreLimits(heartbeat_interval_s=1.0, heartbeat_misses=3)
    world = make_world(stepped=True, limits=limits)
    if not is_seen:
        executor = world.decode.worker.executor
        poll = executor.transport.poll
        executor.transport.poll = lambda: [e for e in poll() if type(e).__name__ != "PeerDied"]
    assert check_restart_is_noticed(world, late=False) <= 4.0
    key = world.submit(PROMPT, sampling=FIVE)

    def is_over() -> bool:
        let_bytes_move(world)
        return world.decode.result(key) is not None

    world.run(is_over)
    check_right(world.decode, key, world.model, PROMPT, 5)


def test_one_broken_pair_is_that_pairs_failure() -> None:
    """vllm #55471: the path between one prefill and one decode is broken. Its requests end
    at their time with what they waited for; the three other pairs are as well as ever, and
    so is this one when the path is."""
    fleet = make_fleet(2, 2)
    world = fleet.world
    fleet.cut("prefill-0", "decode-0")
    key = fleet.submit("prefill-0", "decode-0", timeout_s=20.0)
    for pair in (("prefill-0", "decode-1"), ("prefill-1", "decode-0"), ("prefill-1", "decode-1")):
        check_pair(fleet, *pair)
    result = fleet.finish("decode-0", key)
    assert check_failed_without_text(world.ranks["decode-0"], key) in {
        "deadline_exceeded",
        "peer_lost",
        "unavailable",
    }
    assert result.failure is not None
    again = fleet.finish("decode-0", fleet.submit("prefill-0", "decode-0", timeout_s=20.0))
    assert again.failure is not None
    assert (again.failure.code, again.failure.http_status) == ("unavailable", 503)
    assert again.timeline["finished"] < 1.0, "a path that is known to be broken is not waited for"
    for pair in (("prefill-0", "decode-1"), ("prefill-1", "decode-0")):
        check_pair(fleet, *pair)
    world.network.heal()
    until_s = world.clock.monotonic() + 3.0
    world.run(lambda: world.clock.monotonic() > until_s)
    world.clock.advance(60.0)  # longer than any cool-down
    check_pair(fleet, "prefill-0", "decode-0")
    world.settle()
    check_nothing_leaked(world)


@pytest.mark.parametrize("room", range(1, 9))
def test_the_router_takes_another_pair(room: int) -> None:
    """vllm #55471: the decode of a broken pair refuses new work from that prefill at once;
    the router sends the request to another pair, and its client sees nothing of it."""
    fleet = RouterFleet(*parse_targets(["p0:1", "p1:1"], ["d0:1", "d1:1"]))
    for _, member in fleet.members():
        fleet.report(member, Report(True, "Up", dp_size=1))
    core = RouterCore(fleet, RouterLimits(), random.Random(room))
    ticket = core.submit(ClientFields(room=room), 0.0, 0.0)
    (first,) = [e for e in core.poll_effects() if isinstance(e, Dispatch)]
    core.handle_event(LegAnswered(ticket, first.attempt, Leg.PREFILL, 202), 0.0)
    refusal = LegAnswered(ticket, first.attempt, Leg.DECODE, 503, "unavailable")
    core.handle_event(refusal, 0.1)
    effects = core.poll_effects()
    (second,) = [e for e in effects if isinstance(e, Dispatch)]
    assert not [e for e in effects if isinstance(e, Answer)]
    broken = (first.prefill.instance, first.decode.instance)
    assert (second.prefill.instance, second.decode.instance) != broken
    assert second.attempt != first.attempt
    core.handle_event(StreamBegan(ticket, second.attempt), 0.2)
    core.handle_event(StreamEnded(ticket, second.attempt), 0.3)
    assert [m.num_live for _, m in fleet.members()] == [0, 0, 0, 0]


def test_who_is_not_meant_is_told_both_names() -> None:
    """vllm #27083: an address that means two hosts pairs the wrong two. The refusal says
    whom the request names and who came."""
    fleet = make_fleet(1, 2)
    world = fleet.world
    decode = world.ranks["decode-0"]
    setup = decode.worker.core.setup
    object.__setattr__(setup, "me", PeerRef("127.0.0.1:8100", *setup.me[1:]))
    key = fleet.submit("prefill-0", "decode-0")
    result = fleet.finish("decode-0", key)
    assert check_failed_without_text(decode, key) == "handshake_rejected"
    assert result.failure is not None
    assert "decode-0" in result.failure.detail
    assert "127.0.0.1:8100" in result.failure.detail


@pytest.mark.parametrize("step", range(8))
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_peers_death_never_ends_the_loop_beside_it(name: str, step: int) -> None:
    """vllm-ascend #7514: one side dies at any step of a request. The loop of the other side
    fails what needed it, and serves the next."""
    fleet = make_fleet(2, 2, limits=CoreLimits(topology_ttl_s=5.0))
    world = fleet.world
    key = fleet.submit("prefill-0", "decode-0", timeout_s=30.0)
    for _ in range(step):
        world.step()
    fleet.kill(name, late=step % 2 == 1)
    other = "decode-0" if name == "prefill-0" else "prefill-0"
    rank = world.ranks[other]
    world.run(lambda: rank.result(key) is not None)
    check_pair(fleet, *(("prefill-1", "decode-0") if other == "decode-0" else (other, "decode-1")))
    world.settle()
    check_nothing_leaked(world)
