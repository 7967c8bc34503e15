"""Who may touch a block, on the product's own cores, workers and loopback bytes.

Each check is a function of a world; beside it a mutant re-creates the seed's rule in one
line, and the same check must fail on it.
"""

from __future__ import annotations

import attrs
import pytest

from pdcore.config import CoreLimits
from pdcore.engine.simulated import simulated_tokens
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.scheduler.decode_rooms import ACKNOWLEDGED_S
from pdcore.testing.world import World, make_world
from pdcore.transports.base import Revocation
from pdcore.types import RoomKey, SamplingParams

PROMPT_A = list(range(10, 30))
PROMPT_B = list(range(500, 520))
FIVE = SamplingParams(max_tokens=5)
#: Room for one request at a time on decode: B can only run in blocks that A had.
SMALL = {"num_blocks": 10, "prefill_blocks": 64, "stepped": True, "seed": 3}


def posted(world: World) -> bool:
    return any(action.kind == "move" for action in world.fabric.pending())


def decode_state(world: World, key: RoomKey) -> ReceiverState | None:
    record = world.decode.worker.core.rooms.records.get(key)
    return None if record is None else record.receiver.state


def sender_state(world: World, key: RoomKey) -> SenderState | None:
    record = world.prefill.worker.core.rooms.records.get(key)
    return None if record is None else record.sender.state


def ledger(world: World, role: str = "decode"):
    return world.ranks[role].worker.core.blocks.audit()["full"]


def start_late_write(world: World) -> RoomKey:
    """Room A is aborted at decode while its write is posted and will land later."""
    prefill = world.prefill.worker.core.setup.me.incarnation
    key = world.submit(PROMPT_A, sampling=FIVE)
    world.run(lambda: posted(world))
    world.fabric.faults(prefill).late_landing = True
    world.abort(key)
    world.run(lambda: world.decode.result(key) is not None)
    return key


def check_late_write_hurts_nobody(world: World) -> None:
    """A's client has its answer at once; B waits for A's blocks until A's writer is quiet."""
    a = start_late_write(world)
    result = world.decode.result(a)
    assert result is not None
    assert result.finish_reason == "abort"
    world.run(lambda: any(action.kind == "land" for action in world.fabric.pending()))
    b = world.submit(PROMPT_B, sampling=FIVE)
    for _ in range(200):
        # B's own transfer goes through whenever it is posted, A's late bytes wait.
        actions = world.fabric.pending()
        moves = [i for i, action in enumerate(actions) if action.kind != "land"]
        if moves:
            world.fabric.step(moves[0])
        if not world.step():
            world.jump()
        if decode_state(world, b) is ReceiverState.DONE:
            break
    while world.fabric.step() is not None:
        pass
    world.run(lambda: world.decode.result(b) is not None or world.fabric.step() is not None)
    world.run(lambda: _progress(world) and world.decode.result(b) is not None)
    done = world.decode.result(b)
    assert done is not None
    assert done.failure is None, done.failure
    assert world.decode.tokens(b) == simulated_tokens(world.model, PROMPT_B, 5)


def _progress(world: World) -> bool:
    while world.fabric.step() is not None:
        pass
    return True


def test_d3_a_late_write_lands_only_in_quarantined_blocks() -> None:
    """D3, SGLang I24527, PR24580, 27372, 35049, 35360: decode aborts during a transfer, the write
    lands afterwards."""
    check_late_write_hurts_nobody(make_world(**SMALL))


def test_d3_mutant_that_frees_on_abort_is_caught() -> None:
    """The seed's rule: blocks go back when the client gives up."""
    world = make_world(**SMALL)
    rooms = world.decode.worker.core.rooms
    rooms.quarantine = rooms.release
    with pytest.raises(AssertionError):
        check_late_write_hurts_nobody(world)


def check_source_pinned(world: World) -> None:
    key = start_late_write(world)
    world.run(lambda: sender_state(world, key) is SenderState.DRAINING)
    assert world.prefill.result(key) is not None, "the outcome is reported before the drain"
    assert ledger(world, "prefill").free < ledger(world, "prefill").total
    world.run(lambda: _progress(world) and not world.prefill.worker.core.live_keys())
    assert ledger(world, "prefill").free == ledger(world, "prefill").total


def test_d4_source_blocks_stay_pinned_until_the_handle_is_quiet() -> None:
    """D4, TensorRT-LLM #12542: prefill frees nothing while a write may still read it."""
    check_source_pinned(make_world(**SMALL))


def test_d4_mutant_that_frees_on_failure_is_caught() -> None:
    world = make_world(**SMALL)
    blocks = world.prefill.worker.core.blocks
    blocks.quarantine = blocks.release
    with pytest.raises(AssertionError):
        check_source_pinned(world)


def test_blocks_are_quarantined_and_counted_until_acknowledged() -> None:
    """Invariant 3: free + held + leased + quarantined always sums; nothing leaks."""
    world = make_world(**SMALL)
    key = start_late_write(world)
    held = ledger(world)
    assert held.quarantined == 6
    assert held.total == held.free + held.quarantined
    assert decode_state(world, key) is ReceiverState.DRAINING
    assert world.decode.worker.core.rooms.slots.num_quarantined == 1
    world.run(lambda: _progress(world) and not world.decode.worker.core.live_keys())
    assert ledger(world).free == ledger(world).total
    assert world.decode.worker.core.rooms.slots.available == 64


def test_receiver_enforced_transport_gives_blocks_back_at_once() -> None:
    """RECEIVER_ENFORCED: revoke is immediate, no acknowledgement is waited for."""
    world = make_world(**{**SMALL, "revocation": Revocation.RECEIVER_ENFORCED})
    key = world.submit(PROMPT_A, sampling=FIVE)
    world.run(lambda: posted(world))
    world.network.partition(
        world.prefill.worker.ports.channel._channel.address,
        world.decode.worker.ports.channel._channel.address,
    )
    world.abort(key)
    world.run(lambda: world.decode.result(key) is not None)
    world.run(lambda: not world.decode.worker.core.live_keys())
    assert ledger(world).free == ledger(world).total


def test_quarantine_transport_waits_its_period_too() -> None:
    """QUARANTINE: an acknowledgement is not enough, blocks also wait until our own buffers are
    empty, and only time seen by ticks counts (rule 6)."""
    world = make_world(**{**SMALL, "revocation": Revocation.QUARANTINE})
    setup = world.decode.worker.core.setup
    assert setup.quarantine_s > 0
    key = world.submit(PROMPT_A, sampling=FIVE)
    world.run(lambda: posted(world))
    world.abort(key)
    world.run(lambda: world.decode.result(key) is not None)
    start = world.clock.monotonic()
    world.run(lambda: _progress(world) and not world.decode.worker.core.live_keys())
    waited_s = world.clock.monotonic() - start
    assert ACKNOWLEDGED_S <= waited_s < ACKNOWLEDGED_S + 3.0 < setup.quarantine_s
    assert ledger(world).free == ledger(world).total


def test_d39_a_dead_prefill_fails_its_rooms_and_gives_the_blocks_back() -> None:
    """A fenced death counts as acknowledged (rule 3); rooms of the peer fail at once."""
    world = make_world(**SMALL)
    key = world.submit(PROMPT_A, sampling=FIVE)
    world.run(lambda: posted(world))
    world.fabric.die(world.prefill.worker.core.setup.me.incarnation)
    del world.ranks["prefill"]
    world.run(lambda: world.decode.result(key) is not None)
    result = world.decode.result(key)
    assert result is not None
    assert result.failure is not None
    assert result.failure.code == "peer_lost"
    assert ledger(world).free == ledger(world).total


def test_death_without_fence_keeps_the_blocks_until_the_last_byte() -> None:
    """Rule 2: death proves no quiescence; a write may outlive its process."""
    world = make_world(**SMALL)
    key = world.submit(PROMPT_A, sampling=FIVE)
    world.run(lambda: posted(world))
    world.fabric.die(world.prefill.worker.core.setup.me.incarnation, late=True)
    del world.ranks["prefill"]
    world.run(lambda: world.decode.result(key) is not None)
    assert ledger(world).quarantined == 6
    world.run(lambda: _progress(world) and not world.decode.worker.core.live_keys())
    assert ledger(world).free == ledger(world).total


def test_abort_storm_leaves_nothing() -> None:
    """SGLang PR17483, PR9817: after aborts at every moment, slots and blocks are whole."""
    world = make_world(num_blocks=24, seed=5, limits=CoreLimits(num_metadata_slots=3))
    keys = []
    for i in range(60):
        keys.append(world.submit([i + 5] * (1 + i % 11), sampling=FIVE))
        for _ in range(i % 4):
            world.step()
        if i % 3:
            world.abort(keys[i // 2], at="prefill" if i % 2 else "decode")
    world.run(lambda: all(world.decode.result(k) and world.prefill.result(k) for k in keys))
    world.settle()
    for role in ("prefill", "decode"):
        assert ledger(world, role).free == ledger(world, role).total
    slots = world.decode.worker.core.rooms.slots
    slots.audit()
    assert slots.available == slots.capacity == 3


def test_exactly_one_terminal_result_per_request() -> None:
    """Invariant 1 under abort, deadline and completion in the same loop iteration."""
    world = make_world(seed=9)
    key = world.submit(PROMPT_A, sampling=FIVE, timeout_s=0.4)
    world.abort(key)
    world.abort(key, at="prefill")
    world.clock.advance(1.0)
    world.run(lambda: world.decode.result(key) is not None)
    world.settle()
    for role in ("prefill", "decode"):
        results = [m for m in world.ranks[role].said if attrs.has(type(m)) or _is_result(m, key)]
        assert len(results) == 1


def _is_result(message: object, key: RoomKey) -> bool:
    return type(message).__name__ == "Finished" and message.key == key
