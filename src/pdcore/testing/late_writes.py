"""Does a write that comes too late hurt anybody? A slow sender that nobody can call back.

One trial: request A's transfer is posted and part of it has landed when A ends (its client
is gone, or its prefill process is killed). Request B waits at decode for the very blocks
that A had; as soon as the pool gives them, they are filled with a pattern. All the while
A's sender goes on writing, a chunk now and then, until it has no more to write. Then the
pattern is counted: every byte that differs was written by A into memory of B.

With the product's rules (claims, draining, quarantine: architecture section 3) the count is
0. A variant that gives blocks back when the client gives up, as most systems do, corrupts
some: if it does not, the harness proves nothing, so run it beside.

The worlds run the product's own cores and workers (:mod:`pdcore.testing.world`). What holds
the writes back is a :class:`Writes`: the stepped loopback fabric here, a gate for a
transport of your own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Protocol

import attrs
import numpy as np

from pdcore.engine.simulated import SimulatedConfig
from pdcore.fsm.states import ReceiverState
from pdcore.kv.plan import lease_ranges
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.decode_rooms import DecodeRooms
from pdcore.testing.world import World, make_world
from pdcore.transports.copy import ByteArray
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import RoomKey, SamplingParams

#: What B's blocks are filled with; the simulated engine's KV is never all this.
PATTERN: Final = 0xA5
#: Blocks of four tokens: 9, of which A takes 5 or 6 and B, with its first output token, all.
NUM_BLOCKS: Final = 10
A_TOKENS: Final = (17, 20)
B_TOKENS: Final = (35, 35)
#: A's KV is about 3 KiB.
CHUNK_BYTES: Final = 320
#: Chunks that land before A ends, and rounds of the workers between two chunks afterwards.
EARLY_CHUNKS: Final = 6
PAUSES: Final = (3, 6)
#: More than any trial needs; reaching it is a hang.
MAX_STEPS: Final = 20_000


class Writes(Protocol):
    """Bytes on their way that land a chunk at a time, when told."""

    def has_pending(self) -> bool:
        """Could a byte still land now?"""
        ...

    def step(self) -> None:
        """Let one chunk land, or one end of a write be told."""
        ...


class FabricWrites:
    """Of a stepped loopback fabric."""

    def __init__(self, fabric: LoopbackFabric) -> None:
        self._fabric = fabric

    def has_pending(self) -> bool:
        return bool(self._fabric.pending())

    def step(self) -> None:
        self._fabric.step()


@attrs.frozen
class Trial:
    """A world with what holds its writes back, and how A ends in it."""

    world: World
    writes: Writes
    #: Ends A's request; its sender goes on.
    end: Callable[[World, RoomKey], None]
    #: Whatever has to be given back.
    close: Callable[[], None] = lambda: None


MakeTrial = Callable[[int], Trial]
#: What a variant changes in a world before anything happens.
Change = Callable[[World], None]


@attrs.frozen
class LateWriteReport:
    """``corrupted_bytes`` of B's memory in all trials; ``corrupted_trials`` had any.
    ``late_chunks`` landed, or were told of, after A's client had its answer: 0 would mean
    that nothing was tested."""

    name: str
    trials: int
    corrupted_bytes: int
    corrupted_trials: int
    late_chunks: int


def unchanged(world: World) -> None:
    """The product's own rules."""


def decode_rooms(world: World) -> DecodeRooms:
    core = world.decode.worker.core
    if not isinstance(core, DecodeCore):
        raise TypeError(f"the decode rank runs a {type(core).__name__}")
    return core.rooms


def loopback_trial(seed: int) -> Trial:
    """A's client is gone; cancelled writes land all the same, late."""
    world = _small_world(seed)
    me = world.prefill.worker.core.setup.me.incarnation
    world.fabric.faults(me).late_landing = True
    return Trial(world, FabricWrites(world.fabric), World.abort)


def outliving_trial(seed: int) -> Trial:
    """A's prefill process is killed and started again; what it had posted still lands."""
    world = _small_world(seed)

    def kill(world: World, key: RoomKey) -> None:
        world.restart("prefill", late=True)

    return Trial(world, FabricWrites(world.fabric), kill)


def _small_world(seed: int) -> World:
    world = make_world(
        model=small_model(), num_blocks=NUM_BLOCKS, prefill_blocks=64, stepped=True, seed=seed
    )
    world.fabric.chunk_bytes = CHUNK_BYTES
    return world


def small_model() -> SimulatedConfig:
    return SimulatedConfig(block_size=4, max_model_len=64, verify_all=True)


def run_late_writes(
    name: str, make: MakeTrial, trials: int, seed: int, change: Change = unchanged
) -> LateWriteReport:
    """Raises AssertionError when a trial hangs, or with the product's rules leaves blocks
    out of the pool."""
    total, hit, late = 0, 0, 0
    for i in range(trials):
        trial = make(seed + i)
        change(trial.world)
        try:
            corrupted, chunks = run_trial(trial, random.Random(seed + i))
        finally:
            trial.close()
        total += corrupted
        hit += corrupted > 0
        late += chunks
    return LateWriteReport(name, trials, total, hit, late)


def run_trial(trial: Trial, rng: random.Random) -> tuple[int, int]:
    """(corrupted bytes of B, chunks that came after A's answer)."""
    world, writes = trial.world, trial.writes
    a = world.submit(_prompt(rng, A_TOKENS), sampling=SamplingParams(max_tokens=2), timeout_s=1e6)
    world.run(writes.has_pending)
    for _ in range(rng.randrange(EARLY_CHUNKS + 1)):
        writes.step()
    assert writes.has_pending(), "A was over before it could be cut off: use smaller chunks"
    trial.end(world, a)
    world.run(lambda: world.decode.result(a) is not None)
    b = world.submit(_prompt(rng, B_TOKENS), to=("decode",), timeout_s=1e6)
    late = _until_given(trial, b, pause=rng.randint(*PAUSES))
    parts = _memory_of(world, b)
    for part in parts:
        part[:] = PATTERN
    while writes.has_pending():
        writes.step()
        world.step()
        late += 1
    return sum(int(np.count_nonzero(part != PATTERN)) for part in parts), late


def _prompt(rng: random.Random, bounds: tuple[int, int]) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(rng.randint(*bounds))]


def _until_given(trial: Trial, b: RoomKey, pause: int) -> int:
    """Run until the pool gives B its blocks; after every ``pause`` rounds of that A's
    sender writes one more chunk. Returns how many it wrote."""
    world, late = trial.world, 0
    for i in range(MAX_STEPS):
        record = _record(world, b)
        if record is not None and record.receiver.state is ReceiverState.TRANSFERRING:
            return late
        if i % pause == pause - 1 and trial.writes.has_pending():
            trial.writes.step()
            late += 1
        if not world.step():
            world.jump()
    raise AssertionError(f"B did not get its blocks: {world.decode.worker.core.snapshot()}")


def _record(world: World, key: RoomKey) -> DecodeRecord | None:
    return decode_rooms(world).records.get(key)


def _memory_of(world: World, key: RoomKey) -> list[ByteArray]:
    """All of B's blocks as views, the one of its first output token included."""
    rooms, record = decode_rooms(world), _record(world, key)
    assert record is not None
    setup, blocks = rooms.setup, rooms.blocks.get_block_ids(record.seq_id)
    return [
        np.frombuffer(world.decode.memory[region], np.uint8)[start:end]
        for region, rows in lease_ranges(setup.placement, setup.spec, blocks).items()
        for start, end in rows.tolist()
    ]
