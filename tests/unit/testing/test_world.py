"""The world itself: it replays, it lies about nothing, and its ranks can be killed."""

from __future__ import annotations

import pytest

from pdcore.config import CoreLimits
from pdcore.control.memory import FaultPlan
from pdcore.control.messages import Finished
from pdcore.engine.simulated import simulated_tokens
from pdcore.testing.world import World, make_world
from pdcore.types import RoomKey, SamplingParams

PROMPT = list(range(10, 30))
FIVE = SamplingParams(max_tokens=5)


def history(seed: int) -> list[str]:
    faults = FaultPlan(drop=0.3, duplicate=0.3, reorder=0.5, max_delay_s=0.02)
    world = make_world(faults=faults, seed=seed)
    keys = [world.submit([i] * 9, sampling=FIVE) for i in range(5, 9)]
    world.abort(keys[2])
    world.run(lambda: all(world.decode.result(k) for k in keys))
    world.settle()
    said = [f"{name}: {m}" for name, rank in world.ranks.items() for m in rank.said]
    return [*said, repr(world.clock.monotonic()), repr(world.network.counters)]


def test_a_run_replays_from_its_seed() -> None:
    """Habit 14: every message, every moment, every fault."""
    assert history(7) == history(7)
    assert history(7) != history(8)


def test_a_condition_that_never_comes_true_shows_every_core() -> None:
    world = make_world()
    with pytest.raises(AssertionError, match="decode: DecodeSnapshot") as error:
        world.run(lambda: False, max_steps=5)
    assert "prefill: PrefillSnapshot" in str(error.value)


def test_run_request_raises_for_a_request_that_failed() -> None:
    world = make_world()
    with pytest.raises(AssertionError, match="prompt_too_long"):
        world.run_request([5] * 600)


def test_idle_time_is_jumped_over() -> None:
    """A wait of 59 s takes a few hundred steps, not one per millisecond."""
    world = make_world(limits=CoreLimits(prefill_arrival_s=100.0))
    key = world.submit(PROMPT, to=("decode",), sampling=FIVE, timeout_s=59.0)
    start = world.clock.monotonic()
    steps = 0

    def is_over() -> bool:
        nonlocal steps
        steps += 1
        return world.decode.result(key) is not None

    world.run(is_over)
    assert 59.0 <= world.clock.monotonic() - start < 60.0
    assert steps < 2500


def test_a_manual_world_delivers_nothing_by_itself() -> None:
    world = make_world(manual=True)
    key = world.submit(PROMPT, sampling=FIVE)
    for _ in range(20):
        world.step()
    assert world.prefill.worker.counters.frames_received == 0
    assert world.decode.result(key) is None
    for _ in range(200):
        for flight in world.network.pending():
            world.network.deliver(flight.sequence)
        world.step()
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 5)


def test_a_stepped_world_moves_no_byte_by_itself() -> None:
    world = make_world(stepped=True)
    key = world.submit(PROMPT, sampling=FIVE)
    for _ in range(50):
        world.step()
    assert [a.kind for a in world.fabric.pending()] == ["move"]
    assert world.decode.result(key) is None


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_restarted_rank_is_another_life_in_the_same_place(name: str) -> None:
    world = make_world()
    world.run_request(PROMPT, FIVE)
    former = world.restart(name)
    now = world.ranks[name]
    before, after = former.worker.core.setup.me, now.worker.core.setup.me
    assert before.incarnation != after.incarnation
    assert before._replace(incarnation=after.incarnation) == after
    assert now.worker.core.rooms.records == {}
    assert now.said == []
    assert former.said != []
    assert now.options == former.options
    assert list(world.ranks) == ["prefill", "decode"]


def results_of(world: World, key: RoomKey) -> list[Finished]:
    return [
        m
        for rank in world.ranks.values()
        for m in rank.said
        if isinstance(m, Finished) and m.key == key
    ]


@pytest.mark.parametrize("restarts", [1, 3])
def test_restart_after_restart_still_serves(restarts: int) -> None:
    world = make_world(num_blocks=24)
    for i in range(restarts):
        world.restart(("prefill", "decode")[i % 2])
        world.step()
        key = world.submit(PROMPT, sampling=FIVE)
        world.run(lambda key=key: len(results_of(world, key)) == 2)
        assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 5)
    world.settle()
