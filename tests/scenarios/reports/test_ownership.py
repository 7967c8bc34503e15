"""Public reports about who may touch, free or lose what: writers, blocks, slots."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import (
    Finished,
    PeerMessage,
    Status,
    StatusKind,
)
from pdcore.engine.simulated import simulated_tokens
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.kv.cache import KVBlocks
from pdcore.testing.world import World, make_world
from pdcore.types import PeerRef, RoomKey, StepOutput
from tests.scenarios.reports.kit import (
    FIVE,
    PROMPT,
    check_serves,
    check_whole,
    finish,
    move_bytes,
    tamper,
    until_posted,
    wait,
)
from tests.unit.scheduler.kit import (
    DECODE,
    tell,
)

# --- aborts at every moment ---------------------------------------------------------------

#: A prompt of five chunks, each a forward pass and a write of its own.
FIVE_CHUNKS = CoreLimits(prefill_chunk_tokens=4)


def posted_tokens(world: World, key: RoomKey) -> int:
    record = world.prefill.worker.core.rooms.records.get(key)
    if record is None:
        return len(PROMPT)
    return max((leg.posted_tokens for leg in record.sender.legs.values()), default=0)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("num_tokens", [0, 4, 8, 12, 16, 20])
@pytest.mark.parametrize("has_landed", [False, True])
def test_an_abort_at_any_chunk_boundary_ends_cleanly(
    side: str, num_tokens: int, has_landed: bool
) -> None:
    """SGLang PR28086, I38981: in the middle of a chunked prefill, with the bytes of the chunks
    before landed or under way, whoever gives up: no loop ends, nothing stays behind."""
    world = make_world(limits=FIVE_CHUNKS, stepped=True, num_blocks=40)
    key = world.submit(PROMPT, sampling=FIVE)

    def is_there() -> bool:
        if has_landed:
            move_bytes(world)
        receiver = world.decode.worker.core.rooms.records[key].receiver
        is_told = receiver.state is not ReceiverState.BOOTSTRAPPING and bool(receiver.targets)
        return is_told and posted_tokens(world, key) >= num_tokens

    world.run(is_there)
    world.abort(key, at=side)
    for role in ("prefill", "decode"):
        assert finish(world, key, role) in ("cancelled", "prefill_failed", None)
    check_whole(world)
    check_serves(world)


def queue_and_state(world: World, key: RoomKey) -> tuple[str, str]:
    """The queue at decode, and the state of the receiver."""
    core = world.decode.worker.core
    record = core.rooms.records.get(key)
    if record is None:
        return ("none", "none")
    state = record.receiver.state
    queues = {
        "pending": any(key in keys for keys in core.prealloc.pending.values()),
        "preallocation": key in core.prealloc.waiting,
        "running": record.seq.seq_id in core.running.records,
    }
    found = [name for name, is_in in queues.items() if is_in]
    assert len(found) <= 1, f"{key} is in {found}"
    return (found[0] if found else "none", state.value)


#: Where a request may be at decode in which state; ``transfer`` has no list of its own.
LEGAL = {
    ("pending", ReceiverState.BOOTSTRAPPING.value),
    ("preallocation", ReceiverState.WAITING_FOR_INPUT.value),
    ("none", ReceiverState.TRANSFERRING.value),
    ("none", ReceiverState.DRAINING.value),
    ("none", ReceiverState.FAILED.value),
    ("running", ReceiverState.DONE.value),
}


def check_pairs_are_legal(world: World, keys: list[RoomKey]) -> set[tuple[str, str]]:
    """Between two iterations, of every request; a failure is acted on in its own tick."""
    found = set()
    for key in keys:
        queue, state = queue_and_state(world, key)
        if state != "none":
            found.add((queue, state))
    illegal = found - LEGAL
    assert not illegal, illegal
    prefill = world.prefill.worker.core
    for key in prefill.waiting:
        state = prefill.rooms.records[key].sender.state
        assert state in (SenderState.WAITING_FOR_INPUT, SenderState.TRANSFERRING)
    return found


def abort_wave(world: World, num_requests: int, seed: int) -> set[tuple[str, str]]:
    """Requests and aborts at random moments, looked at after every iteration."""
    rng = random.Random(seed)
    # Writes outlive their cancel, so that drains take as long as the fabric likes.
    me = world.prefill.worker.core.setup.me.incarnation
    world.fabric.faults(me).late_landing = True
    keys: list[RoomKey] = []
    seen: set[tuple[str, str]] = set()
    for _ in range(num_requests):
        keys.append(world.submit([rng.randrange(3, 900)] * rng.randrange(1, 14), sampling=FIVE))
        for _ in range(rng.randrange(4)):
            world.step()
            if rng.random() < 0.5 and world.fabric.pending():
                world.fabric.step(rng.randrange(8))
            seen |= check_pairs_are_legal(world, keys)
        if rng.random() < 0.6:
            moving = [k for k in keys if queue_and_state(world, k)[1] == "Transferring"]
            victim = rng.choice(moving if moving and rng.random() < 0.5 else keys[-6:])
            world.abort(victim, at=rng.choice(["prefill", "decode"]))

    def is_over() -> bool:
        world.fabric.step(rng.randrange(8))
        seen.update(check_pairs_are_legal(world, keys))
        return all(rank.result(key) for rank in world.ranks.values() for key in keys)

    world.run(is_over)
    for rank in world.ranks.values():
        results = [m.key for m in rank.said if isinstance(m, Finished)]
        assert sorted(results) == sorted(keys), "one result each, and exactly one"
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_ever_in_a_queue_that_its_state_has_no_place_in(seed: int) -> None:
    """SGLang I25063, PR20686, PR31075: the pair (queue, state) is one of six, at every moment
    of an abort wave; an unexpected one crashed the scheduler, or made it spin.
    SGLang PR29834, PR31965: a request is in one queue at a time, so an abort finds it once.
    SGLang PR9817: also when it has its KV and waits for its first step."""
    limits = CoreLimits(num_metadata_slots=4, prefill_chunk_tokens=8, max_queued_requests=80)
    world = make_world(num_blocks=24, stepped=True, limits=limits)
    seen = abort_wave(world, 60, seed)
    assert seen >= LEGAL - {("none", "Failed"), ("pending", "Bootstrapping")}, seen
    check_whole(world)
    check_serves(world)


def test_a_request_left_in_its_queue_is_caught() -> None:
    """The mutant: an aborted request stays in the preallocation queue."""
    limits = CoreLimits(num_metadata_slots=2, max_queued_requests=80)
    world = make_world(num_blocks=24, stepped=True, limits=limits)
    world.decode.worker.core.prealloc.leave = lambda key: None
    with pytest.raises(AssertionError):
        abort_wave(world, 60, 0)


# --- released once, whatever ends the request ---------------------------------------------


def count_releases(blocks: KVBlocks) -> list[int]:
    """Sequences whose blocks went back, in order."""
    released: list[int] = []
    free, release = blocks.free, blocks.release

    def counted(act: Callable[[int], None]) -> Callable[[int], None]:
        def call(seq_id: int) -> None:
            before = blocks.ledger()["full"].free
            act(seq_id)
            if blocks.ledger()["full"].free > before:
                released.append(seq_id)

        return call

    vars(blocks).update(free=counted(free), release=counted(release))
    return released


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_that_the_engine_refuses_gives_its_blocks_back_once(
    side: str, is_aborted: bool
) -> None:
    """SGLang PR18822, PR30937: the engine raises for one request (an invalid grammar), and the
    client gives up in the same moment: one release, not two, and not none."""
    world = make_world()
    rank = world.ranks[side]
    released = count_releases(rank.worker.core.blocks)
    run = rank.worker.runner.execute_model
    keys: list[RoomKey] = []

    def refuse(batch: object) -> StepOutput:
        vars(rank.worker.runner).pop("execute_model")
        if is_aborted:
            world.abort(keys[0], at=side)
        raise ValueError("this grammar cannot be compiled")

    assert run is not None
    vars(rank.worker.runner)["execute_model"] = refuse
    keys.append(world.submit(PROMPT, sampling=FIVE))
    assert finish(world, keys[0]) is not None
    check_whole(world)
    assert len(released) == len(set(released)) == 1
    check_serves(world)


def test_nothing_is_left_of_what_ends_before_or_after_its_transfer() -> None:
    """SGLang PR21652, PR15439: side tables (of offloads, of prefetches) kept what an abort or a
    bootstrap time-out left behind. Here a request has one record, its blocks and a slot."""
    world = make_world(stepped=True, limits=CoreLimits(linger_s=1.0, tombstone_ttl_s=2.0))
    late = world.submit(PROMPT, to=("decode",), sampling=FIVE, timeout_s=2.0)
    alone = world.submit(PROMPT, to=("prefill",), sampling=FIVE, timeout_s=2.0)
    aborted = until_posted(world)
    world.abort(aborted)
    assert finish(world, late) == "deadline_exceeded"
    assert finish(world, alone, "prefill") == "deadline_exceeded"
    assert finish(world, aborted) == "cancelled"
    check_whole(world)
    wait(world, 35.0)
    for rank in world.ranks.values():
        core = rank.worker.core
        assert core.rooms.records == {}
        assert core.rooms._live == {}
        assert core.blocks.ledger()["full"].held == 0
    assert world.decode.worker.core.prealloc.pending == {}
    assert len(world.prefill.worker.core.inbox.parked) <= 1


# --- metadata -----------------------------------------------------------------------------


def swapped(world: World) -> Callable[[PeerMessage], PeerMessage]:
    """Of two requests, the second's metadata goes out with the first's Done."""
    kept: dict[RoomKey, bytes | None] = {}

    def change(message: PeerMessage) -> PeerMessage:
        if not isinstance(message, Status) or message.kind is not StatusKind.DONE:
            return message
        kept.setdefault(message.key, message.metadata)
        others = [data for key, data in kept.items() if key != message.key]
        if not others:
            return message
        return msgspec.structs.replace(message, metadata=others[0])

    return change


def test_metadata_of_another_request_fails_the_one_it_was_taken_for() -> None:
    """SGLang PR17430: two requests met in one slot, and one was given the other's first token.
    A record names its room, attempt and nonce; a mismatch ends that request, and no other.
    SGLang PR24226: what is reused (a slot, an offload buffer) says whose it is."""
    world = make_world()
    let_go = tamper(world, "prefill", swapped(world))
    good = world.submit(PROMPT, sampling=FIVE)
    assert finish(world, good) is None
    bad = world.submit(PROMPT[::-1], sampling=FIVE)
    assert finish(world, bad) == "bad_metadata"
    assert world.decode.tokens(bad) == []
    assert world.decode.tokens(good) == simulated_tokens(world.model, PROMPT, 5)
    let_go()
    check_serves(world)
    check_whole(world)


def test_a_stranger_cannot_complete_a_request_with_a_record_of_its_own() -> None:
    """SGLang PR17430: also not under the right room and attempt: the nonce is another's."""
    world = make_world(stepped=True)
    key = until_posted(world)
    receiver = world.decode.worker.core.rooms.records[key].receiver
    stranger = PeerRef("stranger", 0, DECODE.incarnation, "tcp://stranger:1")
    status = Status(key, receiver.lease, StatusKind.DONE, receiver.targets[0].nonce, None, b"x", {})
    tell(world.decode.worker.core, stranger, status, world.clock.monotonic())
    assert receiver.state is ReceiverState.TRANSFERRING
    assert finish(world, key) is None
