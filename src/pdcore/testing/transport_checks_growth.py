"""Conformance checks that do one thing again and again, and look at what is left (G6, G7).

A thousand turns, or as few as a vendor that takes half a second to start can afford
(``harness.cycles``): what is leaked once each turn shows in the sum, whatever the machine
and its other processes do.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from pdcore.errors import TransportError
from pdcore.testing.transport_checks_data import MIB, finish
from pdcore.testing.transport_harness import Pair, TransportHarness
from pdcore.testing.transport_watch import Watched, pump, settle
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.types import Incarnation

#: Bounded means bounded: no check waits longer for a single call.
CALL_LIMIT_S = 5.0
#: What all turns together would keep if each kept the region it made.
LEAKED_BYTES = 256 * MIB
#: What may stay: a quarter of that, which no allocator and no kernel's accounting reaches.
ALLOWED_BYTES = LEAKED_BYTES // 4
#: Objects of Python that may stay once, and for each turn; a kept session is dozens.
ALLOWED_BLOCKS = 2000
ALLOWED_BLOCKS_A_TURN = 3
#: Turns before anything is measured: caches fill, threads start.
WARM_UP = 3
#: Fewer hostile descriptors than this hit no field twice.
LEAST_HOSTILE = 40


@attrs.frozen
class Footprint:
    """Open descriptors, threads, and names in /dev/shm of this process (0 and none where the
    platform has no such list)."""

    fds: int
    threads: int
    names: tuple[str, ...]

    @classmethod
    def now(cls) -> Footprint:
        fds = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        names = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
        mine = tuple(name for name in names if name.startswith("pdcore-"))
        return cls(fds, threading.active_count(), mine)


@attrs.frozen
class Memory:
    """``resident_bytes`` of this process (0 where it does not say), and objects of Python."""

    resident_bytes: int
    blocks: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        blocks = sys.getallocatedblocks()
        if not os.path.exists("/proc/self/statm"):
            return cls(0, blocks)
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), blocks)


@contextmanager
def steady(turns: int, *watched: Watched) -> Iterator[None]:
    """What runs inside leaves descriptors, threads and segments as they were, in a moment at
    the latest, and no memory that grows with ``turns``. Raises AssertionError."""
    # The memory first: it collects what others left, whose descriptors are not ours to miss.
    memory, before = Memory.now(), Footprint.now()
    yield
    pump(*watched, until=lambda: Footprint.now() == before, what=f"{before} again")
    after = Memory.now()
    grew = after.resident_bytes - memory.resident_bytes
    assert grew < ALLOWED_BYTES, f"{turns} turns left {grew >> 20} MiB of memory behind"
    objects = after.blocks - memory.blocks
    allowed = ALLOWED_BLOCKS + ALLOWED_BLOCKS_A_TURN * turns
    assert objects < allowed, f"{turns} turns left {objects} objects behind"


def refused(transport: Watched, descriptor: bytes, why: str) -> None:
    """``connect`` refuses, and in time. Raises AssertionError."""
    started = time.monotonic()
    try:
        transport.transport.connect(descriptor)
    except TransportError:
        took = time.monotonic() - started
        assert took < CALL_LIMIT_S, f"connect to {why} took {took:.1f} s"
        return
    raise AssertionError(f"connect accepted {why}")


def wrong_incarnation(harness: TransportHarness) -> None:
    """G6: a descriptor of another life at the same address is refused every time, and what was
    refused costs nothing afterwards, on both sides."""
    with Pair(harness) as pair:
        mine = decode(pair.receiver.transport.descriptor(), pair.receiver.transport.name)

        def turn() -> None:
            stranger = Incarnation(os.urandom(16))
            stale = EndpointDescriptor(mine.transport, stranger, mine.regions, mine.blob)
            refused(pair.sender, stale.encode(), "another incarnation")
            pair.receiver.poll()

        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64))))
        for _ in range(WARM_UP):
            turn()
        settle(pair.sender, pair.receiver, quiet_s=harness.quiet_s)
        with steady(harness.cycles, pair.sender, pair.receiver):
            for _ in range(harness.cycles):
                turn()
        assert not pair.receiver.record.deaths, "a caller that was refused is nobody's peer"
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64))))


def hostile_descriptors(harness: TransportHarness) -> None:
    """G6: damaged or random descriptors, most with a right checksum: each refused with
    TransportError, none crashes or leaves anything, and the receiver goes on serving."""
    rng = random.Random(20)
    turns = max(harness.cycles, LEAST_HOSTILE)
    with Pair(harness) as pair:
        good = pair.receiver.transport.descriptor()
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64))))
        for turn in range(WARM_UP):
            refused(pair.sender, good[: turn * 8], "a truncated descriptor")
        settle(pair.sender, pair.receiver, quiet_s=harness.quiet_s)
        with steady(turns, pair.sender, pair.receiver):
            for turn in range(turns):
                data = _damage(rng, turn, good, pair.receiver.transport.name)
                if data is not None:
                    refused(pair.sender, data, f"{data.hex()} (turn {turn})")
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64))))


def _damage(rng: random.Random, turn: int, good: bytes, name: str) -> bytes | None:
    """Noise, a part, a flipped bit, or other regions and a damaged blob with all else right;
    None when the damage happened to change nothing."""
    kind = turn % 4
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return good[: rng.randrange(len(good))]
    if kind == 2:
        damaged = bytearray(good)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return bytes(damaged)
    mine = decode(good, name)
    blob = bytearray(mine.blob or b"\0")
    for _ in range(rng.randrange(1, 4)):
        blob[rng.randrange(len(blob))] = rng.randrange(256)
    if bytes(blob) == mine.blob:
        return None
    regions = {rng.randrange(1 << 32): rng.randrange(1, 1 << 50) for _ in range(3)}
    return EndpointDescriptor(mine.transport, mine.incarnation, regions, bytes(blob)).encode()


def cycles_without_growth(harness: TransportHarness) -> None:
    """G7, public report I31766: connecting, sending and closing again and again grows
    neither descriptors nor threads nor segments nor memory, also beside a peer that stays."""
    size = LEAKED_BYTES // harness.cycles

    def cycle() -> None:
        with Pair(harness, size) as pair:
            session = pair.sender.transport.connect(descriptor)
            finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 4096)), notify=b"n"))
            pair.sender.transport.disconnect(session)
        stays.poll()

    stays = Watched(harness.create())
    try:
        stays.transport.allocate(4096)
        stays.transport.fileno()
        descriptor = stays.transport.descriptor()
        for _ in range(WARM_UP):
            cycle()
        pump(stays, until=lambda: True)
        # Those that came and went are news once; a test that keeps it all would grow itself.
        stays.record.deaths.clear()
        with steady(harness.cycles, stays):
            for _ in range(harness.cycles):
                cycle()
                stays.record.deaths.clear()
    finally:
        stays.transport.close()
