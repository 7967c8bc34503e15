"""What a sender keeps mapped of its peers' memory, counted by the kernel."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Iterator

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.check import CopyPlan, PairCopy
from pdcore.transports.copy import ByteArray
from pdcore.transports.shm_pages import (
    GRANULE,
    MIN_LIMIT_BYTES,
    PeerMemory,
    PeerPages,
    copy_paged,
)
from pdcore.transports.shm_segment import Segment, attach_segment, create_segment
from pdcore.types import Incarnation
from tests.unit.transports.residency import resident_shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is Linux")
US = Incarnation(b"u" * 16)
MIB = 1 << 20
POOL = 24 * MIB
LIMIT = 4 * MIB


@pytest.fixture(scope="module")
def pool() -> Iterator[Segment]:
    segment = create_segment(POOL, US)
    yield segment
    os.close(segment.fd)


@pytest.fixture
def owner(pool: Segment) -> Segment:
    np.frombuffer(pool.buffer, np.uint8)[:] = 0
    return pool


@pytest.fixture(scope="module")
def source() -> ByteArray:
    return np.random.default_rng(7).integers(0, 256, POOL, np.uint8)


def attach(owner: Segment, pages: PeerPages) -> PeerMemory:
    fd = os.dup(owner.fd)
    segment = attach_segment(fd, owner.size_bytes, owner.offset, sealed=owner.sealed)
    return PeerMemory(segment, pages)


def rows(start: Int64Array, width: int, *strided: int) -> Int64Array:
    """Rows to the same offset as they come from."""
    out = np.zeros((len(start), 6), np.int64)
    out[:, 0] = out[:, 1] = start
    out[:, 2], out[:, 3] = width, 1
    if strided:
        out[:, 3], out[:, 4], out[:, 5] = strided[0], strided[1], strided[1]
    return out


def steps(memory: PeerMemory, source: ByteArray, pieces: Int64Array) -> Iterator[int]:
    num_bytes = int((pieces[:, 2] * pieces[:, 3]).sum())
    return copy_paged(CopyPlan((PairCopy(1, 1, pieces),), num_bytes), {1: source}, {1: memory})


SHAPES = {
    "one run": rows(np.array([0]), POOL),
    "large blocks": rows(np.random.default_rng(1).permutation(POOL // 737_280) * 737_280, 737_280),
    "small blocks": rows(np.random.default_rng(2).permutation(POOL // 4096) * 4096, 4096),
    "lone rows": rows(np.arange(0, POOL, GRANULE), 512),
    "strided": rows(np.array([0, 1024]), 1024, POOL // 2048, 2048),
    "wide strides": rows(np.array([0]), 1024, POOL // MIB, MIB),
}


class Hoarder(PeerPages):
    """The rule of before: what is mapped stays mapped."""

    def add(self, memory: PeerMemory, granules: Int64Array) -> None:
        self.resident_bytes += len(granules) * GRANULE


def stays_within_its_limit(owner: Segment, source: ByteArray, pages: PeerPages) -> None:
    memory = attach(owner, pages)
    before = resident_shared()
    for pieces in SHAPES.values():
        for number, _ in enumerate(steps(memory, source, pieces)):
            if number % 4 == 0:
                assert resident_shared() - before <= LIMIT
    assert resident_shared() - before <= LIMIT
    assert pages.resident_bytes <= LIMIT


def test_a_pool_larger_than_the_limit_does_not_become_resident(
    owner: Segment, source: ByteArray
) -> None:
    """A prefill worker's resident set does not grow with its decode peers' pools, at no
    moment of any transfer; a sender that never gives back is caught."""
    stays_within_its_limit(owner, source, PeerPages(LIMIT))
    assert np.array_equal(np.frombuffer(owner.buffer, np.uint8), source)
    with pytest.raises(AssertionError):
        stays_within_its_limit(owner, source, Hoarder(LIMIT))


class MappedAt(mmap.mmap):
    """A segment mapped a chosen number of pages behind a granule's start, inside a
    reservation that keeps the place; offsets count from the segment's start."""

    start = 0

    def place(self, owner: Segment, pages: int) -> Segment:
        address = np.frombuffer(self, np.uint8).ctypes.data
        self.start = -address % GRANULE + pages * mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        ]
        wanted = address + self.start
        flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = libc.mmap(wanted, owner.size_bytes, access, flags, owner.fd, owner.offset)
        assert found == wanted
        buffer = memoryview(self)[self.start : self.start + owner.size_bytes]
        return attrs.evolve(owner, buffer=buffer, mapping=self)

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        super().madvise(option, self.start + start, length)


@pytest.mark.parametrize("pages", [0, 1, 5, 15])
def test_the_limit_holds_wherever_the_kernel_maps_a_pool(
    owner: Segment, source: ByteArray, pages: int
) -> None:
    """Fault-around at the start of a mapping is not aligned: it reached into the next
    granule, uncounted, at 15 of 16 addresses."""
    memory = PeerMemory(MappedAt(-1, POOL + 2 * GRANULE).place(owner, pages), PeerPages(LIMIT))
    before = resident_shared()
    for number, _ in enumerate(steps(memory, source, SHAPES["small blocks"])):
        if number % 4 == 0:
            assert resident_shared() - before <= LIMIT
    assert np.array_equal(np.frombuffer(owner.buffer, np.uint8), source)


@pytest.mark.parametrize("limit", [LIMIT, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_arrives_and_no_other_changes(
    owner: Segment, source: ByteArray, shape: str, limit: int | None
) -> None:
    pieces = SHAPES[shape]
    memory = attach(owner, PeerPages(limit))
    found = np.frombuffer(owner.buffer, np.uint8)
    wanted = np.zeros(POOL, np.uint8)
    for start, _, width, count, stride, _ in pieces.tolist():
        for at in range(start, start + count * max(stride, 1), max(stride, 1)):
            wanted[at : at + width] = source[at : at + width]
    moved = list(steps(memory, source, pieces))
    assert np.array_equal(found, wanted)
    assert sum(moved) == (pieces[:, 2] * pieces[:, 3]).sum()
    assert max(moved) <= MIB


def test_attaching_maps_nothing(owner: Segment) -> None:
    """Connecting happens in the worker's loop: it must not take as long as touching a
    pool of any size."""
    before = resident_shared()
    memory = attach(owner, PeerPages())
    assert resident_shared() == before
    assert len(memory.array) == POOL


def test_no_limit_means_until_the_peer_is_gone(owner: Segment, source: ByteArray) -> None:
    memory = attach(owner, PeerPages())
    before = resident_shared()
    for _ in range(2):
        list(steps(memory, source, SHAPES["one run"]))
        assert resident_shared() - before >= POOL
    del memory
    gc.collect()
    assert resident_shared() == before


def test_the_limit_is_for_all_peers_together(owner: Segment, source: ByteArray) -> None:
    pages = PeerPages(LIMIT)
    peers = [attach(owner, pages) for _ in range(4)]
    before = resident_shared()
    for memory in peers:
        list(steps(memory, source, SHAPES["one run"]))
    assert resident_shared() - before <= LIMIT
    # What a gone peer had is the first to make room.
    peers.clear()
    list(steps(attach(owner, pages), source, SHAPES["one run"]))
    assert pages.resident_bytes <= LIMIT


def test_pages_of_a_transfer_in_progress_are_not_taken_from_it(
    owner: Segment, source: ByteArray
) -> None:
    """A copy that finds its pages gone would map them again, one by one, uncounted."""
    pages = PeerPages(4 * LIMIT)
    first, second = attach(owner, pages), attach(owner, pages)
    halfway = steps(first, source, rows(np.array([0]), MIB + MIB // 2))
    assert [next(halfway), next(halfway)] == [0, MIB]
    before = resident_shared()
    list(steps(second, source, SHAPES["one run"]))
    grown = resident_shared() - before
    assert sum(halfway) == MIB // 2
    assert resident_shared() == before + grown, "the first transfer's pages were there"


def test_a_stopped_transfer_lets_go_of_its_pages(owner: Segment, source: ByteArray) -> None:
    memory = attach(owner, PeerPages(LIMIT))
    granules = np.arange(8)
    stopped = steps(memory, source, rows(np.array([0]), MIB))
    next(stopped)
    assert len(memory.give_back(granules)) == 8
    del stopped
    assert not len(memory.give_back(granules))


def test_steps_of_mapping_are_bounded(owner: Segment, source: ByteArray) -> None:
    """Cancel looks at its mark between steps, and mapping holds the interpreter's lock."""
    memory = attach(owner, PeerPages())
    before = resident_shared()
    for _ in steps(memory, source, SHAPES["one run"]):
        now = resident_shared()
        assert now - before <= MIB + GRANULE
        before = now


@settings(deadline=None, max_examples=60)
@given(
    limit=st.sampled_from([None, MIN_LIMIT_BYTES, LIMIT]),
    unit=st.sampled_from([100, 4096, GRANULE, 3 * MIB]),
    count=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_windows_cover_each_byte_once(limit: int | None, unit: int, count: int, seed: int) -> None:
    """The parts are the pieces, in order, each with exactly the granules it touches."""
    owner = create_segment(POOL // 2, US)
    try:
        memory = attach(owner, PeerPages(limit))
    finally:
        os.close(owner.fd)
    rng = np.random.default_rng(seed)
    slots = POOL // 2 // unit
    chosen = rng.choice(slots, min(count, slots), replace=False)
    pieces = rows(chosen * unit, 1)
    pieces[:, 2] = rng.integers(1, unit + 1, len(pieces))
    base = memory.array.ctypes.data
    spans: list[tuple[int, int]] = []
    for part, granules in memory.windows(pieces):
        touched: set[int] = set()
        for local, at, width, count_, _, _ in part.tolist():
            assert (local, count_) == (at, 1)
            spans.append((at, at + width))
            first = (base + at) // GRANULE - base // GRANULE
            touched |= set(range(first, (base + at + width - 1) // GRANULE - base // GRANULE + 1))
        assert granules.tolist() == sorted(touched)
        assert limit is None or len(granules) * GRANULE <= limit
    assert joined(spans) == joined([(at, at + width) for at, width in pieces[:, 1:3].tolist()])


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours in order become one."""
    out: list[tuple[int, int]] = []
    for start, end in spans:
        if out and out[-1][1] == start:
            start = out.pop()[0]
        out.append((start, end))
    return out


def test_a_limit_too_small_to_work_in_is_refused() -> None:
    with pytest.raises(TransportError, match=f"peer_resident_bytes is 5: .* {MIN_LIMIT_BYTES}"):
        PeerPages(5)
