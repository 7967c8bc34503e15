"""Public reports about peers that die, restart or are replaced."""

from __future__ import annotations

import pytest

from pdcore.control.messages import WorkerHealth
from pdcore.engine.simulated import simulated_tokens
from pdcore.fsm.events import TopologyFetched
from pdcore.testing.world import World, make_world
from pdcore.transports.base import PeerDied
from pdcore.types import SamplingParams
from tests.scenarios.reports.kit import (
    FIVE,
    PROMPT,
    check_serves,
    check_whole,
    code,
    finish,
    until_posted,
    wait,
)


def problems(world: World, role: str) -> list[str]:
    """What the last health report of this rank says."""
    reports = [m for m in world.ranks[role].said if isinstance(m, WorkerHealth)]
    return reports[-1].problems if reports else []


@pytest.mark.parametrize("dies", ["idle", "posted", "received"])
def test_a_dead_prefill_does_not_make_decode_unhealthy(dies: str) -> None:
    """SGLang I12779, 13657: decode's health counted the requests that waited for a prefill
    that was gone, and the supervisor restarted a decode that had nothing wrong. It stays
    healthy, and goes on with what it has."""
    world = make_world(stepped=True)
    key = until_posted(world)
    if dies == "idle":
        assert finish(world, key) is None
    elif dies == "received":
        key = world.submit(PROMPT, sampling=SamplingParams(max_tokens=60))
        world.run(lambda: _moved(world) and len(world.decode.tokens(key)) > 2)
    world.fabric.die(world.prefill.worker.core.setup.me.incarnation)
    world.prefill.worker.ports.channel.close()
    del world.ranks["prefill"]
    for _ in range(4):
        wait(world, 2.0)
        assert problems(world, "decode") == []
    if dies == "received":
        assert finish(world, key) is None
        assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 60)
    elif dies == "posted":
        assert code(world, key) == "peer_lost"
    lost = world.submit(PROMPT, to=("decode",), sampling=FIVE, timeout_s=5.0)
    assert finish(world, lost) is not None
    assert problems(world, "decode") == []


def _moved(world: World) -> bool:
    while world.fabric.step() is not None:
        pass
    return True


@pytest.mark.parametrize("num_lives", [1, 5])
def test_prefill_restarts_on_the_same_address_and_decode_does_not(num_lives: int) -> None:
    """SGLang I6215, I16903, PR6263: endpoints that decode had cached outlived the prefill
    that published them; only a restart of decode helped. Each life of prefill has its own
    incarnation, and the next request goes to the one that lives."""
    world = make_world()
    for _ in range(num_lives):
        check_serves(world)
        world.restart("prefill")
        wait(world, 1.0)
    check_serves(world)
    check_whole(world)


def check_replacement_is_noticed(world: World) -> None:
    """Nobody tells decode of the death: the address answers, from another process."""
    key = until_posted(world)
    former = world.prefill.worker.core.setup.me.incarnation
    # The transport saw nothing either: only what the new process says can prove it.
    transport = world.decode.worker.ports.transport
    poll = transport.poll
    vars(transport)["poll"] = lambda: [e for e in poll() if not isinstance(e, PeerDied)]
    start = world.clock.monotonic()
    world.restart("prefill")
    assert finish(world, key) == "peer_lost"
    assert world.clock.monotonic() - start < 10.0
    assert world.prefill.worker.core.setup.me.incarnation != former


def test_a_process_replaced_behind_its_address_is_noticed() -> None:
    """SGLang PR34289, 36029; nixl I795: behind a stable address the prefill was another one,
    and decode waited for a process that was gone. Every answer carries an incarnation: the
    cached route is dropped and exactly the rooms of the former life fail."""
    world = make_world(stepped=True)
    check_replacement_is_noticed(world)
    check_serves(world)


def test_a_decode_that_compares_addresses_is_caught() -> None:
    """nixl I795: the address answers, so the peer is taken for alive."""
    world = make_world(stepped=True)
    book = world.decode.worker.core.rooms.peers
    vars(book)["answered"] = lambda peer, sequence: None
    vars(world.decode.worker.core.inbox)["lose_peer"] = lambda *rest: None
    with pytest.raises(AssertionError):
        check_replacement_is_noticed(world)


def test_requests_of_a_living_peer_do_not_fail_with_those_of_a_dead_one() -> None:
    """SGLang PR34289: a request that has its KV does not need the prefill that is gone."""
    world = make_world(stepped=True)
    done = world.submit(PROMPT, sampling=SamplingParams(max_tokens=40))
    world.run(lambda: _moved(world) and len(world.decode.tokens(done)) > 2)
    waiting = until_posted(world, PROMPT[::-1])
    world.restart("prefill")
    assert finish(world, waiting) == "peer_lost"
    assert finish(world, done) is None
    assert world.decode.tokens(done) == simulated_tokens(world.model, PROMPT, 40)


def test_a_prefill_that_registers_late_is_waited_for() -> None:
    """SGLang PR19288, I6413: a request before the registration was complete was a 500. The
    route is 503 until every rank is there; decode asks again at intervals and serves."""
    world = make_world()
    executor = world.decode.worker.executor
    good = executor.fetch_route
    asked: list[float] = []

    def late(bootstrap: str) -> TopologyFetched:
        asked.append(world.clock.monotonic())
        return TopologyFetched(bootstrap, None) if len(asked) < 6 else good(bootstrap)

    vars(executor)["fetch_route"] = late
    check_serves(world)
    assert len(asked) == 6
