"""What a declared period costs: who waits for it, how long, and who must not be blamed for it.

Between two hosts the period of NIXL and Mooncake is two minutes (D3). It is for writers that
died without a word; an ordinary request that ends early must not take an instance's readiness,
slots or sessions for that long.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from pdcore.config import CoreLimits
from pdcore.scheduler.decode_rooms import ACKNOWLEDGED_S
from pdcore.testing.world import World, make_world
from pdcore.transports import loopback
from pdcore.transports.base import Revocation
from pdcore.types import RoomKey, SamplingParams

PERIOD_S = 120.0
PROMPT = list(range(10, 70))
FIVE = SamplingParams(max_tokens=5)
#: Prefill computes this prompt in eight steps, so that a client can leave in the middle.
LIMITS = CoreLimits(prefill_chunk_tokens=8)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    def made(limits: CoreLimits = LIMITS) -> World:
        monkeypatch.setattr(loopback, "QUARANTINE_S", PERIOD_S)
        kind = Revocation.QUARANTINE
        return make_world(stepped=True, num_blocks=4000, limits=limits, revocation=kind)

    return made


def begin(world: World) -> RoomKey:
    """A request whose first chunk is being written."""
    key = world.submit(PROMPT, sampling=FIVE, timeout_s=600.0)
    world.run(lambda: any(action.kind == "move" for action in world.fabric.pending()))
    return key


def move(world: World, *, lands: bool = True) -> None:
    """All that is on its way arrives, late writes too or not."""
    while True:
        kinds = [action.kind for action in world.fabric.pending()]
        chosen = [i for i, kind in enumerate(kinds) if lands or kind != "land"]
        if not chosen:
            return
        world.fabric.step(chosen[0])


def pass_time(world: World, seconds: float, *, lands: bool = True) -> list[str]:
    """Everything that health named meanwhile; sooner if nothing is to be done any more."""
    end_s = world.clock.monotonic() + seconds
    problems: list[str] = []

    def is_over() -> bool:
        move(world, lands=lands)
        for rank in world.ranks.values():
            problems.extend(rank.worker.health().problems)
        is_at_rest = all(rank.worker.core.poll_deadline() is None for rank in world.ranks.values())
        return is_at_rest or world.clock.monotonic() >= end_s

    world.run(is_over)
    return problems


def quarantined(world: World) -> int:
    return world.decode.worker.core.blocks.audit()["full"].quarantined


def test_an_acknowledged_end_does_not_wait_for_the_period(make: Callable[..., World]) -> None:
    """A client that leaves in the middle of a transfer: its writer says that it has stopped, and
    seconds later the blocks are back. Nobody is stuck meanwhile (rule 6)."""
    world = make()
    world.abort(begin(world))
    assert pass_time(world, ACKNOWLEDGED_S / 2) == []
    assert quarantined(world) > 0, "what it posted last may be in our own buffers"
    assert pass_time(world, ACKNOWLEDGED_S + 2.0) == []
    assert quarantined(world) == 0
    assert not world.decode.worker.core.live_keys()


def test_nobody_waits_for_a_writer_that_was_never_granted(make: Callable[..., World]) -> None:
    """The handshake went nowhere: there is nothing that could land."""
    world = make()
    ends = [rank.worker.ports.channel._channel.address for rank in world.ranks.values()]
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: any(r.receiver.admission for r in records(world)))
    world.network.partition(*ends)
    world.abort(key)
    world.run(lambda: world.decode.result(key) is not None)
    pass_time(world, 0.2)
    assert quarantined(world) == 0


def records(world: World) -> list[object]:
    return list(world.decode.worker.core.rooms.records.values())


@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_a_writer_that_died_without_a_word_costs_the_whole_period(
    make: Callable[..., World], num_requests: int
) -> None:
    """D3. And no longer, and nobody is called stuck for it: there is nobody to ask. Its
    successor says so once for each room, and each time for all of them."""
    world = make()
    for _ in range(num_requests - 1):
        world.submit(PROMPT, sampling=FIVE, timeout_s=600.0)
    begin(world)
    world.restart("prefill", late=True)
    assert pass_time(world, PERIOD_S - 5.0, lands=False) == []
    assert quarantined(world) > 0
    assert pass_time(world, 10.0) == []
    assert quarantined(world) == 0


def test_a_write_in_doubt_is_waited_for_and_ends_nobody_elses(make: Callable[..., World]) -> None:
    """A write fails, and its engine may go on landing it for the period: prefill keeps the
    session, on which others are served, and neither side is unready (it was: at drain_timeout_s
    the session was fenced, and both sides said that the other does not acknowledge)."""
    world = make()
    life = world.prefill.worker.core.setup.me.incarnation
    world.fabric.faults(life).fail_after_chunks = 1
    first = begin(world)
    assert pass_time(world, LIMITS.drain_timeout_s - 1.0, lands=False) == []
    assert world.decode.result(first) is not None
    second = begin(world)  # in the middle of its transfer when the drain's time is over
    end_s = world.clock.monotonic() + 5.0
    world.run(lambda: world.clock.monotonic() >= end_s)
    assert pass_time(world, 2.0, lands=False) == []
    result = world.decode.result(second)
    assert result is not None
    assert result.failure is None
    assert quarantined(world) > 0
    assert pass_time(world, PERIOD_S) == []
    assert quarantined(world) == 0


def test_requests_that_end_early_do_not_use_up_the_slots(make: Callable[..., World]) -> None:
    """Admission waits for a metadata slot, and each of these kept one for the period."""
    world = make(attrs.evolve(LIMITS, num_metadata_slots=2))
    for _ in range(6):
        key = begin(world)
        world.abort(key)
        pass_time(world, ACKNOWLEDGED_S)
    key = world.submit(PROMPT, sampling=FIVE, timeout_s=10.0)
    pass_time(world, 8.0)
    result = world.decode.result(key)
    assert result is not None
    assert result.failure is None


def test_who_really_does_not_acknowledge_is_still_named(make: Callable[..., World]) -> None:
    """Rule 6: after the drain's time and the period that a call in doubt may take."""
    world = make()
    ends = [rank.worker.ports.channel._channel.address for rank in world.ranks.values()]
    key = begin(world)
    world.network.partition(*ends)
    world.abort(key)
    assert pass_time(world, LIMITS.drain_timeout_s + 2 * PERIOD_S - 2.0) == []
    problems = pass_time(world, 5.0)
    assert any("does not acknowledge" in problem for problem in problems)
    world.network.heal()
    pass_time(world, 10.0)
    assert pass_time(world, 1.0) == []
    assert quarantined(world) == 0
