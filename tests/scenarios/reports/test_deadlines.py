"""Public reports about waiting: for ever, too short, or in a way that holds up the others."""

from __future__ import annotations

import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import Submit
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import failure
from pdcore.fsm.effects import Effect, FencePeer
from pdcore.fsm.events import TopologyFetched
from pdcore.testing.world import World, make_world
from pdcore.types import RoomKey, SamplingParams
from pdcore.worker import Core
from tests.scenarios.reports.kit import (
    FIVE,
    PROMPT,
    check_serves,
    check_whole,
    code,
    finish,
    move_bytes,
    until_posted,
    wait,
)


def stop_the_bytes(world: World, is_stopped: bool) -> None:
    me = world.prefill.worker.core.setup.me.incarnation
    world.fabric.faults(me).stopped = is_stopped


# --- a transfer that does not move --------------------------------------------------------


def check_stalled_transfer_is_bounded(world: World) -> None:
    """Both loops go on while one write stands still; both clients hear at the deadline."""
    key = until_posted(world)
    stop_the_bytes(world, True)
    start = world.clock.monotonic()
    for role in ("decode", "prefill"):
        assert finish(world, key, role) in ("deadline_exceeded", "prefill_failed")
    assert world.clock.monotonic() - start < world.timeout_s + 1.0
    # The loops serve what needs none of these bytes: here a request that is refused.
    refused = world.submit([], sampling=FIVE)
    assert finish(world, refused) == "invalid_request"
    stop_the_bytes(world, False)
    check_whole(world)
    check_serves(world)


def test_a_transfer_that_stands_still_is_given_up() -> None:
    """SGLang PR33920: a tail request waited two hours for a transfer. The wait ends with the
    request's deadline; the worker was never blocked by it."""
    check_stalled_transfer_is_bounded(make_world(stepped=True))


def test_a_transfer_that_never_moves_again_is_fenced() -> None:
    """SGLang PR33920: past the drain time the session is destroyed, and asked for again and
    again; blocks that may still be written stay out and are counted."""
    limits = CoreLimits(drain_timeout_s=5.0)
    world = make_world(stepped=True, limits=limits)
    key = until_posted(world)
    me = world.prefill.worker.core.setup.me.incarnation
    world.fabric.faults(me).late_landing = True
    stop_the_bytes(world, True)
    asked: list[FencePeer] = []
    for rank in world.ranks.values():
        note_fences(rank.worker.core, asked)
    world.run(lambda: world.decode.result(key) is not None)
    assert code(world, key) is not None
    wait(world, 20.0)
    assert len(asked) > 1
    ledger = world.decode.worker.core.blocks.audit()["full"]
    assert ledger.quarantined > 0
    assert ledger.free + ledger.quarantined == ledger.total
    stop_the_bytes(world, False)
    check_whole(world)
    check_serves(world)


def note_fences(core: Core, asked: list[FencePeer]) -> None:
    poll = core.poll_effects

    def noting() -> list[Effect]:
        effects = poll()
        asked.extend(e for e in effects if isinstance(e, FencePeer))
        return effects

    vars(core)["poll_effects"] = noting


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["bootstrap", "handshake", "granted", "posted"])
def test_no_wait_of_a_request_outlives_its_deadline(side: str, moment: str) -> None:
    """SGLang PR31800: requests were stuck in Transferring because only one state had a
    time-out. Here the other side falls silent at each stage: the client has its answer at
    the request's deadline, whatever it waits for."""
    world = make_world(stepped=True, num_blocks=40, limits=CoreLimits(prefill_chunk_tokens=8))
    other = "decode" if side == "prefill" else "prefill"
    if moment == "bootstrap":
        del world.ranks[other]
        key = world.submit(PROMPT, to=(side,), sampling=FIVE, timeout_s=10.0)
    else:
        key = world.submit(PROMPT, sampling=FIVE, timeout_s=10.0)
        world.run(lambda: reached(world, key, moment))
        ends = [rank.worker.ports.channel._channel.address for rank in world.ranks.values()]
        world.network.partition(*ends)
        stop_the_bytes(world, True)
    start = world.clock.monotonic()
    world.run(lambda: world.ranks[side].result(key) is not None)
    assert code(world, key, side) is not None
    assert world.clock.monotonic() - start < 12.0


def reached(world: World, key: RoomKey, moment: str) -> bool:
    record = world.decode.worker.core.rooms.records[key]
    targets = list(record.receiver.targets.values())
    if moment == "handshake":
        return record.receiver.state.value == "Transferring"
    if moment == "granted":
        return any(target.nonce for target in targets)
    return any(action.kind == "move" for action in world.fabric.pending())


# --- completion and time-out in one moment ------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_a_result_that_is_there_at_the_deadline_is_a_result(delay_s: float) -> None:
    """SGLang PR32267: a completion that was queued lost to the time-out that was checked
    first. What has arrived is applied before the deadline of the same iteration."""
    world = make_world(stepped=True, manual=True, seed=4)
    sampling = SamplingParams(max_tokens=1)
    key = world.submit(PROMPT, sampling=sampling, timeout_s=20.0)

    def is_told() -> bool:
        """Deliver everything but hold the last word of prefill back."""
        move_bytes(world)
        done = world.prefill.result(key) is not None
        for flight in world.network.pending():
            if not done:
                world.network.deliver(flight.sequence)
        return done

    world.run(is_told)
    assert world.decode.result(key) is None
    for flight in world.network.pending():
        world.network.deliver(flight.sequence)
    record = world.decode.worker.core.rooms.records[key]
    world.clock.advance(record.deadline_s - world.clock.monotonic() + delay_s)
    world.decode.worker.step(0.0)
    assert code(world, key) is None
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 1)


# --- a prefill that cannot be reached -----------------------------------------------------


def test_an_unreachable_prefill_costs_its_own_requests_only() -> None:
    """SGLang PR20371, 19900, 20832: with one bootstrap address dead, requests that name
    another go on meanwhile, and those of the dead one end with 503 after their budget."""
    world = make_world(limits=CoreLimits(topology_ttl_s=8.0))
    executor = world.decode.worker.executor
    good = executor.fetch_route
    asked: list[float] = []

    def fetch(bootstrap: str) -> TopologyFetched:
        if bootstrap == "bootstrap:1":
            return good(bootstrap)
        asked.append(world.clock.monotonic())
        return TopologyFetched(bootstrap, None, failure("unreachable", "nobody answers"))

    vars(executor)["fetch_route"] = fetch
    lost = submit_to(world, "gone:1")
    start = world.clock.monotonic()
    for _ in range(3):
        check_serves(world)
    assert world.decode.result(lost) is None
    assert finish(world, lost) == "unreachable"
    result = world.decode.result(lost)
    assert result is not None
    assert result.failure is not None
    assert result.failure.http_status == 503
    spent = world.clock.monotonic() - start
    assert 7.5 < spent < 9.5
    assert len(asked) <= spent / world.decode.worker.core.setup.limits.topology_retry_s + 2


def submit_to(world: World, bootstrap: str) -> RoomKey:
    """A request for decode alone that names another bootstrap server."""
    port = world.decode.port
    kept: list[Submit] = []
    put = port.put
    vars(port)["put"] = kept.append
    key = world.submit(PROMPT, to=("decode",), sampling=FIVE)
    vars(port).pop("put")
    put(msgspec.structs.replace(kept[0], bootstrap=bootstrap))
    return key
