"""Public reports about too little of something: blocks, descriptors, connections, patience."""

from __future__ import annotations

import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import Finished
from pdcore.engine.simulated import simulated_tokens
from pdcore.testing.world import World, make_world
from pdcore.types import RoomKey
from tests.scenarios.reports.kit import (
    FIVE,
    PROMPT,
    check_serves,
    check_whole,
    code,
    finish,
    move_bytes,
)

#: Each side has room for one of two requests at a time.
ONE_EACH = {"num_blocks": 8, "prefill_blocks": 6}
TWO = ([5] * 16, [6] * 16)


def opposite_orders(world: World) -> list[RoomKey]:
    """Prefill hears of A first, decode of B first."""
    keys = [RoomKey(1, 1), RoomKey(2, 2)]
    for name, order in (("prefill", (0, 1)), ("decode", (1, 0))):
        for i in order:
            world.submit(TWO[i], key=keys[i], to=(name,), sampling=FIVE)
        world.ranks[name].worker.step(0.0)
    return keys


def check_opposite_orders(world: World) -> None:
    keys = opposite_orders(world)
    start = world.clock.monotonic()
    for key, prompt in zip(keys, TWO, strict=True):
        assert finish(world, key) is None
        assert world.decode.tokens(key) == simulated_tokens(world.model, prompt, 5)
    assert world.clock.monotonic() - start < world.timeout_s / 4


def test_two_requests_in_opposite_orders_do_not_hold_each_other_up() -> None:
    """SGLang I31473: prefill held the blocks of A, decode those of B, and each waited for the
    other's. Prefill takes blocks only for what decode has already made room for."""
    world = make_world(limits=CoreLimits(num_reserved_decode_tokens=0), **ONE_EACH)
    check_opposite_orders(world)
    check_whole(world)


def test_a_prefill_that_takes_blocks_on_arrival_is_caught() -> None:
    """SGLang I31473: the order in which requests reach prefill then decides who has blocks."""
    world = make_world(limits=CoreLimits(num_reserved_decode_tokens=0), **ONE_EACH)
    core = world.prefill.worker.core
    submit = core.submit

    def greedy(request, now: float) -> None:
        submit(request, now)
        seq = core.rooms.records[request.key].seq
        core.blocks.allocate_slots(seq.seq_id, seq.num_prompt_tokens, 0)

    vars(core)["submit"] = greedy
    with pytest.raises(AssertionError):
        check_opposite_orders(world)


@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")])
def test_many_requests_through_one_place_each_all_end(order: tuple[str, str]) -> None:
    """SGLang I31473: with every prompt in another order on each side."""
    limits = CoreLimits(num_reserved_decode_tokens=0, num_metadata_slots=1, max_running=1)
    world = make_world(limits=limits, **ONE_EACH)
    keys = [RoomKey(i, i) for i in range(1, 13)]
    for turn, name in enumerate(order):
        for key in keys[:: 1 if turn else -1]:
            world.submit([key.room + 4] * 12, key=key, to=(name,), sampling=FIVE)
    for key in keys:
        assert finish(world, key) is None
        assert world.decode.tokens(key) == simulated_tokens(world.model, [key.room + 4] * 12, 5)
    check_whole(world)


def test_a_thousand_aborts_at_once_leave_both_loops_alive() -> None:
    """SGLang PR29984: in a burst of aborts two threads used one socket, the listener died and
    the rank was dead until somebody restarted it. One loop owns the socket and everything
    else of a rank; here a thousand aborts arrive in the middle of everything."""
    limits = CoreLimits(max_queued_requests=1024, parked_handshake_cap=2048)
    world = make_world(stepped=True, num_blocks=256, limits=limits)
    keys = [world.submit([3 + i % 900] * (1 + i % 9), sampling=FIVE) for i in range(1000)]
    for _ in range(30):
        world.step()
        world.fabric.step()
        world.clock.advance(0.01)
    for i, key in enumerate(keys):
        world.abort(key, at="decode")
        if i % 2:
            world.abort(key, at="prefill")
    ended: dict[str, set[RoomKey]] = {"prefill": set(), "decode": set()}

    def is_over() -> bool:
        move_bytes(world)
        for name, rank in world.ranks.items():
            ended[name] |= {m.key for m in rank.said if isinstance(m, Finished)}
            rank.said.clear()
        return len(ended["decode"]) == len(keys)

    world.run(is_over)
    for key in keys:
        if key not in ended["prefill"]:
            world.abort(key, at="prefill")
    world.run(lambda: is_over() and len(ended["prefill"]) == len(keys))
    check_whole(world)
    check_serves(world)


def test_a_pool_that_an_abort_emptied_is_used_at_once() -> None:
    """SGLang PR17483: a slot that an abort left behind was never free again: after a few of
    them nobody was admitted. Two slots here, twenty aborts, one request."""
    world = make_world(limits=CoreLimits(num_metadata_slots=2), stepped=True)
    for i in range(20):
        key = world.submit(PROMPT, sampling=FIVE)
        for _ in range(i % 7):
            world.step()
            world.clock.advance(0.05)
        world.abort(key)
        world.abort(key, at="prefill")
        assert finish(world, key) in ("cancelled", "prefill_failed")
        assert code(world, key) is not None
    check_whole(world)
    check_serves(world)
