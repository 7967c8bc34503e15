"""Public reports, group A: who still owns a block after something went wrong.

vLLM, vllm-ascend, Dynamo. The symptom is always the same: blocks that nobody gives back,
until the instance hangs. Every test ends with whole ledgers on both sides.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import Abort, Claim, Grant, Status, StatusKind, Submit
from pdcore.engine.simulated import simulated_tokens
from pdcore.fsm.effects import GrantLease, PostTransfer, ReleaseLease, SendMessage
from pdcore.fsm.events import HandleEnded, MessageReceived, StepCompleted
from pdcore.scheduler.prefill import PrefillCore
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.testing.transport_checks_data import zero_bytes
from pdcore.testing.transport_harness import LoopbackHarness
from pdcore.testing.world import World, make_world
from pdcore.types import Incarnation, PeerRef, Role, RoomKey, SamplingParams, StepOutput
from tests.scenarios.reports.fleet import (
    FIVE,
    PROMPT,
    check_failed_without_text,
    check_nothing_leaked,
    is_posted,
    let_bytes_move,
)
from tests.unit.scheduler.kit import (
    DECODE,
    handshake_of,
    make_decode,
    make_prefill,
    make_request,
    sent,
    start,
    tell,
    tick,
)
from tests.unit.server.kit import TEXT, Call, run, settle
from tests.unit.server.kit import World as ServerWorld

SMALL = {"num_blocks": 10, "prefill_blocks": 64, "stepped": True, "seed": 3}


def in_transfer(**changes: object) -> tuple[World, RoomKey]:
    world = make_world(**{**SMALL, **changes})
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: is_posted(world))
    return world, key


def check_both_sides_give_up(world: World, key: RoomKey) -> None:
    prefill = world.prefill.worker.core.setup.me
    lease = world.decode.worker.core.rooms.records[key].receiver.lease
    world.fabric.faults(prefill.incarnation).stopped = True
    world.abort(key)
    world.abort(key, at="prefill")
    world.settle()
    check_nothing_leaked(world)
    # What comes after the end is answered, so that it stops, and changes nothing.
    late = Status(key, lease, StatusKind.DONE)
    core = world.decode.worker.core
    core.handle_event(MessageReceived(prefill, b"", late), world.clock.monotonic())
    world.step()
    assert check_failed_without_text(world.decode, key) == "cancelled"
    check_nothing_leaked(world)


def test_both_sides_abort_and_no_completion_ever_comes() -> None:
    """vllm #46283, vllm #46289: an end does not depend on a completion that nobody sends."""
    check_both_sides_give_up(*in_transfer())


def test_the_mutant_that_waits_for_the_completion_is_caught() -> None:
    """Blocks that only a completion frees: an abort at decode is forgotten by prefill."""
    world, key = in_transfer()
    world.decode.worker.core.rooms.release = lambda record: None
    with pytest.raises(AssertionError):
        check_both_sides_give_up(world, key)


@pytest.mark.parametrize("moment", ["queued", "computed"])
def test_decode_refuses_what_prefill_already_has(moment: str) -> None:
    """vllm #41269: decode answers 4xx before it admitted anything. The router's cancel frees
    prefill at once, not after its own time-out, whatever prefill has computed by then."""
    world = make_world()
    refused = [5, 10_000_000]
    key = world.submit(PROMPT, to=("prefill",), sampling=FIVE)
    if moment == "computed":
        for _ in range(20):
            world.step()
    world.submit(refused, key=key, to=("decode",), sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    assert check_failed_without_text(world.decode, key) == "invalid_request"
    start_s = world.clock.monotonic()
    world.abort(key, at="prefill")  # what the router sends to the other leg
    world.run(lambda: not world.prefill.worker.core.blocks.ledger()["full"].held)
    world.run(lambda: world.prefill.result(key) is not None)
    assert world.clock.monotonic() - start_s < 0.1
    check_nothing_leaked(world)


def test_cancelled_in_transfer_again_and_again() -> None:
    """dynamo #7489: each of many requests is ended in the middle of its transfer; afterwards
    the pools are whole and a new request is served."""
    world = make_world(num_blocks=24, prefill_blocks=64, stepped=True, seed=4)
    for number in range(12):
        prompt = [100 + number] * (5 + number)
        key = world.submit(prompt, sampling=FIVE)
        world.run(lambda: is_posted(world))
        world.fabric.step()
        for side in ("decode", "prefill")[:: 1 if number % 2 else -1]:
            world.abort(key, at=side)
        world.run(lambda key=key: all(r.result(key) for r in world.ranks.values()))
        check_failed_without_text(world.decode, key)
    world.settle()
    check_nothing_leaked(world)
    probe = world.submit(PROMPT, sampling=FIVE)

    def is_served() -> bool:
        let_bytes_move(world)
        return world.decode.result(probe) is not None

    world.run(is_served)
    assert world.decode.tokens(probe) == simulated_tokens(world.model, PROMPT, 5)


def check_the_next_waits_for_one_chunk(world: World) -> None:
    chunk = world.prefill.worker.core.setup.limits.prefill_chunk_tokens
    long = world.submit(list(range(3, 403)), sampling=FIVE)
    world.run(lambda: world.prefill.worker.counters.batch_tokens >= 2 * chunk)
    world.abort(long, at="prefill")
    world.abort(long)
    done = world.prefill.worker.counters.batch_tokens
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 5)
    computed = world.prefill.worker.counters.batch_tokens - done
    assert computed <= chunk + len(PROMPT), f"{computed} tokens before the next had its turn"
    world.settle()
    check_nothing_leaked(world)


def test_a_client_that_leaves_frees_the_engine_within_one_chunk() -> None:
    """dynamo #13691, dynamo #14507: the prefill of a request whose client is gone goes on for
    at most the chunk that is running; the next in the queue does not wait for the rest, and is
    not refused because the cancelled one's blocks are on their way back."""
    check_the_next_waits_for_one_chunk(make_world(limits=CoreLimits(prefill_chunk_tokens=16)))


def test_a_transfer_of_nothing_completes() -> None:
    """vllm-ascend #10098: where every byte is there already, the transfer still completes
    and its notification comes; nothing waits for a delayed free that never ends."""
    zero_bytes(LoopbackHarness())


def start_legs(core: PrefillCore, num_legs: int) -> list[PostTransfer]:
    """A request that is computed, with a write posted to each of so many decode ranks."""
    request = make_request(12)
    core.submit(request, 0.0)
    tick(core)
    handshake = handshake_of(start(make_decode(), request))
    handshake = msgspec.structs.replace(handshake, num_required=num_legs)
    claims: list[tuple[PeerRef, Claim]] = []
    for rank in range(num_legs):
        peer = DECODE._replace(rank=rank, incarnation=Incarnation(bytes([rank + 1]) * 16))
        tell(core, peer, handshake)
        claims += [
            (effect.to, effect.message)
            for effect in tick(core)
            if isinstance(effect, SendMessage) and isinstance(effect.message, Claim)
        ]
    for peer, claim in claims:
        tell(core, peer, Grant(claim.key, claim.nonce))
    tick(core)
    batch = core.schedule(0.0)
    assert batch is not None
    core.handle_event(StepCompleted(batch.batch_id, StepOutput([[5]])), 0.0)
    posts = [effect for effect in tick(core) if isinstance(effect, PostTransfer)]
    assert len(posts) == num_legs
    return posts


@pytest.mark.parametrize("num_legs", [1, 2, 4])
def test_prefill_keeps_its_blocks_until_every_leg_has_them(num_legs: int) -> None:
    """vllm-ascend #3332, vllm-ascend #3882: with k decode ranks to be written, blocks are
    free after the k-th write is quiet and not before, whoever counts."""
    core = make_prefill()
    posts = start_legs(core, num_legs)
    for post in posts:
        assert core.blocks.audit()["full"].free < core.blocks.audit()["full"].total
        core.handle_event(HandleEnded(post.handle, True), 1.0)
        tick(core, 1.0)
    ledger = core.blocks.audit()["full"]
    assert ledger.free == ledger.total


def test_a_rank_that_needs_nothing_holds_nothing() -> None:
    """vllm-ascend #3332: with no rank to be written, nothing is kept for it: a decode rank
    that is a dummy target is answered, and prefill has no leg, no claim and no block."""
    core, request = make_prefill(), make_request(12)
    core.submit(request, 0.0)
    tick(core)
    handshake = handshake_of(start(make_decode(), request))
    tell(core, DECODE, msgspec.structs.replace(handshake, is_dummy=True))
    effects = tick(core)
    (answer,) = sent(effects, Status)
    assert isinstance(answer, Status)
    assert answer.kind is StatusKind.DUMMY
    assert sent(effects, Claim) == []
    ledger = core.blocks.audit()["full"]
    assert ledger.free == ledger.total


def test_a_lease_is_released_once_and_by_its_own_end() -> None:
    """vllm-ascend #3882: every lease that is granted is released exactly once."""
    world = make_world(seed=8)
    granted: list[object] = []
    released: list[object] = []
    execute = world.decode.worker.executor.execute

    def watching(effects, now):
        for effect in effects:
            if isinstance(effect, GrantLease):
                granted.append(effect.lease)
            elif isinstance(effect, ReleaseLease):
                released.append(effect.lease)
        return execute(effects, now)

    world.decode.worker.executor.execute = watching
    keys = [
        world.submit([n] * 9, sampling=SamplingParams(max_tokens=1 + n % 3)) for n in range(5, 17)
    ]
    for key in keys[::3]:
        world.abort(key)
    world.run(lambda: all(world.decode.result(key) for key in keys))
    world.settle()
    assert sorted(granted) == sorted(released)
    assert len(set(granted)) == len(granted)
    check_nothing_leaked(world)


# --- a client that leaves ------------------------------------------------------------------------


#: The turn of the event loop at which the worker says that the request is finished.
FINISHED_AT = 25


async def leave_at(role: Role, turn: int, how: str) -> bool:
    """The client is gone after so many turns of the event loop; False when the handler had
    its answer by then. Whatever the worker was sent, it is told to end."""
    world = ServerWorld()
    leg = LegOptions(role, "127.0.0.1:8100")
    app = create_instance_app(InstanceOptions(leg), TEXT, world.dispatcher, clock=world.clock)
    body = {
        "prompt": "hi",
        "bootstrap_room": 5,
        "attempt": 7,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 18800,
    }
    one = Call(app, "POST", "/v1/completions", body)
    for step in range(turn):
        await asyncio.sleep(0)
        if step == 20:
            world.tokens(RoomKey(5, 7), [65])
        if step == FINISHED_AT:
            world.finish(RoomKey(5, 7), "stop")
    if one.task.done():
        return False
    if how == "cancel":
        one.task.cancel()
    else:
        one.leave()
    await settle()
    await asyncio.gather(one.task, return_exceptions=True)
    was_sent, was_ended = bool(world.link.of(Submit)), bool(world.link.of(Abort))
    is_finished_there = turn > FINISHED_AT
    assert was_sent == was_ended or is_finished_there, (turn, how)
    assert world.dispatcher.num_pending == 0
    return True


@pytest.mark.parametrize("how", ["leave", "cancel"])
def test_a_client_leaves_decode_at_every_turn_of_the_loop(how: str) -> None:
    """vllm #50425: also before the engine has seen the request, while it is read, encoded,
    dispatched, waited for; at every point at which the handler awaits anything."""

    async def play() -> int:
        turn = 0
        while await leave_at(Role.DECODE, turn, how):
            turn += 1
        return turn

    assert run(play()) > FINISHED_AT
