"""Public reports, group F: events that come twice, late, or about nothing any more.

vLLM and NIXL. A completion of a request that was freed ended an engine; here every event in
every state is a row of a table or is counted.
"""

from __future__ import annotations

import random

import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import (
    CancelAck,
    Finished,
    Grant,
    Refuse,
    Stale,
    Status,
    StatusAck,
    StatusKind,
)
from pdcore.errors import failure
from pdcore.fsm.events import (
    HandleEnded,
    LeaseRevoked,
    MessageReceived,
    PeerLost,
    StepCompleted,
    TopologyFetched,
    VotesReduced,
)
from pdcore.testing.world import Rank, World, make_world
from pdcore.types import Nonce, PeerRef
from tests.scenarios.reports.fleet import (
    FIVE,
    PROMPT,
    check_failed_without_text,
    check_nothing_leaked,
    check_right,
    is_posted,
    let_bytes_move,
)


def record_events(world: World) -> list[tuple[str, object]]:
    """Everything that either core is told, in order."""
    told: list[tuple[str, object]] = []
    for name, rank in world.ranks.items():
        handle = rank.worker.core.handle_event

        def recording(event, now, name=name, handle=handle):
            told.append((name, event))
            handle(event, now)

        object.__setattr__(rank.worker.core, "handle_event", recording)
    return told


def num_results(rank: Rank) -> int:
    return sum(isinstance(message, Finished) for message in rank.said)


@pytest.mark.parametrize("order", ["same", "reversed", "shuffled", "twice"])
@pytest.mark.parametrize("moment", ["finished", "forgotten"])
def test_everything_that_ever_happened_happens_again(order: str, moment: str) -> None:
    """vllm #43226, vllm #47499: after requests that ended well, were aborted or timed out,
    every event of their lives comes again: handles, messages, votes, steps. Nothing raises,
    no second result, no block moves, and the loops serve the next request."""
    world = make_world(limits=CoreLimits(linger_s=1.0), seed=5)
    told = record_events(world)
    keys = [world.submit([9 + i] * (4 + 3 * i), sampling=FIVE) for i in range(6)]
    for _ in range(3):
        world.step()
    world.abort(keys[1])
    world.abort(keys[2], at="prefill")
    world.run(lambda: all(rank.result(k) for rank in world.ranks.values() for k in keys))
    if moment == "forgotten":
        world.settle()
        world.clock.advance(300.0)
        world.step()
    again = list(told)
    if order == "reversed":
        again.reverse()
    elif order == "shuffled":
        random.Random(7).shuffle(again)
    elif order == "twice":
        again = [event for event in again for _ in range(2)]
    assert len(again) > 40
    for name, event in again:
        world.ranks[name].worker.core.handle_event(event, world.clock.monotonic())
        world.step()
    world.settle()
    check_nothing_leaked(world)
    for rank in world.ranks.values():
        assert num_results(rank) == len(keys)
    assert len(world.run_request(PROMPT, FIVE)) == 5


def test_the_mutant_that_trusts_a_completion_is_caught() -> None:
    """The reported rule: a completion names a request that exists."""
    world = make_world(limits=CoreLimits(linger_s=1.0))
    told = record_events(world)
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    world.settle()
    world.clock.advance(300.0)
    world.step()
    rooms = world.prefill.worker.core.rooms
    handle = world.prefill.worker.core.handle_event

    def trusting(event, now):
        if isinstance(event, MessageReceived):
            assert event.message.key in rooms.records, "no such request"
        handle(event, now)

    object.__setattr__(world.prefill.worker.core, "handle_event", trusting)
    late = [
        event
        for name, event in told
        if name == "prefill"
        and isinstance(event, MessageReceived)
        and isinstance(event.message, Grant | StatusAck)
    ]
    assert late
    with pytest.raises(AssertionError, match="no such request"):
        world.prefill.worker.core.handle_event(late[-1], world.clock.monotonic())


def completions_of(world: World, key: object, prefill: PeerRef) -> list[object]:
    """Everything that could be taken for an end of this room's transfer at decode."""
    record = world.decode.worker.core.rooms.records.get(key)
    lease = record.receiver.lease if record is not None else None
    assert lease is not None
    nonce = Nonce(prefill.incarnation, 1)
    why = failure("internal", "x")
    messages = [
        Status(key, lease, StatusKind.DONE, nonce, None, b"not a record"),
        Status(key, lease, StatusKind.DONE),
        Status(key, lease, StatusKind.FAILED, nonce, why),
        CancelAck(key, lease, nonce),
        Stale(key, prefill.incarnation),
        Grant(key, nonce),
        Refuse(key, nonce, "x"),
        StatusAck(key, lease, StatusKind.DONE),
    ]
    return [
        *(MessageReceived(prefill, b"", message) for message in messages),
        HandleEnded(12345, True, None),
        HandleEnded(12345, False, why),
        LeaseRevoked(lease),
        PeerLost(b"nobody was ever it", True, "x"),
        StepCompleted(999, None, why),
        VotesReduced(999, (1, 2, 3)),
        TopologyFetched("elsewhere:1", None, why),
    ]


def test_a_handshake_that_failed_leaves_nothing_to_stumble_over() -> None:
    """vllm #43523, vllm #41863: the handshake fails, so nothing was set up; then everything
    that belongs to a completion is touched, at both sides."""
    world = make_world()
    setup = world.decode.worker.core.setup
    object.__setattr__(setup, "me", setup.me._replace(instance="intruder"))
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: key in world.decode.worker.core.rooms.records)
    events = completions_of(world, key, world.prefill.worker.core.setup.me)
    world.run(lambda: world.decode.result(key) is not None)
    assert check_failed_without_text(world.decode, key) == "handshake_rejected"
    for event in events:
        for rank in world.ranks.values():
            rank.worker.core.handle_event(event, world.clock.monotonic())
            world.step()
    world.abort(key, at="prefill")
    world.settle()
    assert check_failed_without_text(world.decode, key) == "handshake_rejected"
    object.__setattr__(setup, "me", setup.me._replace(instance="decode"))
    after = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(after) is not None)
    check_right(world.decode, after, world.model, PROMPT, 5)
    check_nothing_leaked(world)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_is_left_of_a_failed_transfer_is_waited_for(failing: int) -> None:
    """nixl #2067: a transfer of several parts fails at one of them while others are alive.
    The error is told at once; the memory of both sides is used again only after the last
    part is quiet."""
    limits = CoreLimits(prefill_chunk_tokens=8)
    world = make_world(num_blocks=16, prefill_blocks=16, stepped=True, limits=limits)
    prefill = world.prefill.worker.core
    faults = world.fabric.faults(prefill.setup.me.incarnation)
    key = world.submit([7] * 32, sampling=FIVE)
    # All four parts are posted: the request is computed and nothing has moved.
    world.run(lambda: is_posted(world) and prefill.rooms.records[key].seq.num_output_tokens == 1)
    faults.late_landing = True
    for _ in range(failing):
        world.fabric.step()
    faults.fail_after_chunks = 0
    while faults.fail_after_chunks is not None:
        world.fabric.step()
    assert world.fabric.pending(), "the other parts are alive"
    world.run(lambda: world.decode.result(key) is not None)
    check_failed_without_text(world.decode, key)
    while world.fabric.pending():
        for rank in world.ranks.values():
            ledger = rank.worker.core.blocks.audit()["full"]
            assert ledger.total - ledger.free >= 8, "used again under a live write"
        world.fabric.step()
        world.step()
    world.run(lambda: (let_bytes_move(world) or True) and not prefill.live_keys())
    world.settle()
    check_nothing_leaked(world)
