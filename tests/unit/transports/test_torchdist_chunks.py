from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.transports.base import RemoteLease
from pdcore.transports.check import CopyPlan, plan_copies
from pdcore.transports.copy import ByteArray, copy_steps
from pdcore.transports.torchdist_chunks import Chunk, cut, gather, plan_chunk, scatter
from pdcore.transports.torchdist_wire import (
    ChunkHead,
    decode_chunk,
)
from pdcore.types import Incarnation, LeaseId
from tests.unit.transports.torchdist_rig import rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")
SIZE = 4096
SIZES = {1: SIZE, 2: SIZE}


def lease_over(*ranges: tuple[int, int], region: int = 1) -> RemoteLease:
    array = np.array(ranges or [(0, SIZE)], np.int64)
    return RemoteLease(LeaseId(Incarnation(b"l" * 16), 1), {region: array})


BOTH = RemoteLease(
    LeaseId(Incarnation(b"l" * 16), 1), {r: np.array([(0, SIZE)], np.int64) for r in SIZES}
)


def head_of(chunk: Chunk) -> ChunkHead:
    """As it arrives at the receiver."""
    head = ChunkHead(BOTH.lease, chunk.num_bytes, chunk.table, chunk.is_last)
    return decode_chunk(head.encode())


def move(plan: CopyPlan, chunk_bytes: int, max_rows: int) -> tuple[dict[int, ByteArray], int]:
    """All chunks of a plan through one staging buffer; the number of chunks."""
    local = memory(7)
    remote = {region: np.zeros(SIZE, np.uint8) for region in SIZES}
    staging = np.zeros(chunk_bytes, np.uint8)
    chunks = 0
    for chunk in cut(plan, chunk_bytes, max_rows):
        chunks += 1
        staging[:] = 0xEE
        gather(chunk, local, staging)
        scatter(plan_chunk(head_of(chunk), SIZES, BOTH, chunk_bytes), staging, remote)
    return remote, chunks


def memory(seed: int) -> dict[int, ByteArray]:
    rng = np.random.default_rng(seed)
    return {region: rng.integers(0, 256, SIZE, np.uint8) for region in (1, 2)}


@st.composite
def plans(draw: st.DrawFn) -> CopyPlan:
    """Pieces on a grid of the destination, so that they do not overlap; some have rows."""
    batches = []
    for local, remote in draw(st.lists(st.tuples(*[st.sampled_from([1, 2])] * 2), max_size=2)):
        pieces = []
        for slot in draw(st.lists(st.integers(0, 15), unique=True, max_size=8)):
            width, count = draw(st.integers(0, 30)), draw(st.integers(0, 5))
            stride = width + draw(st.integers(0, 12))
            pieces.append((draw(st.integers(0, SIZE - 256)), slot * 256, width, count, stride, 42))
        array = np.array(pieces, np.int64).reshape(-1, 6)
        batches.append(WriteBatch(local, remote, array))
    if len({batch.remote_region for batch in batches}) < len(batches):
        batches = batches[:1]
    return plan_copies(batches, SIZES, SIZES, BOTH)


@given(plans(), st.integers(1, 300), st.integers(1, 5))
def test_any_plan_arrives_in_any_chunks(plan: CopyPlan, chunk_bytes: int, max_rows: int) -> None:
    """Every byte of a plan, and none besides, whatever the chunks; the receiver checks and
    places each by itself."""
    wanted = {region: np.zeros(SIZE, np.uint8) for region in SIZES}
    for _ in copy_steps(plan, memory(7), wanted):
        pass
    found, chunks = move(plan, chunk_bytes, max_rows)
    for region in SIZES:
        assert np.array_equal(found[region], wanted[region])
    assert chunks >= max(1, -(-plan.num_bytes // chunk_bytes))


@given(plans(), st.integers(1, 300), st.integers(1, 5))
def test_chunks_keep_their_limits(plan: CopyPlan, chunk_bytes: int, max_rows: int) -> None:
    chunks = list(cut(plan, chunk_bytes, max_rows))
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert sum(chunk.num_bytes for chunk in chunks) == plan.num_bytes
    for chunk in chunks:
        assert chunk.num_bytes <= chunk_bytes
        assert len(chunk.table) <= max_rows
        assert chunk.num_bytes or len(chunks) == 1, "a chunk of nothing"


def test_a_transfer_of_nothing_is_one_chunk() -> None:
    """vllm-ascend #10098: it is announced and answered like any other."""
    (chunk,) = cut(plan_copies([], SIZES, SIZES, BOTH), 4096)
    assert (chunk.num_bytes, chunk.is_last, len(chunk.table)) == (0, True, 0)
    assert plan_chunk(head_of(chunk), SIZES, lease_over(), 4096).num_bytes == 0


def test_chunks_are_filled() -> None:
    """Not one message a block: 38-60 us each with gloo."""
    pieces = np.array([[256 * i, 128 * i, 128, 1, 0, 0] for i in range(16)], np.int64)
    plan = plan_copies([WriteBatch(1, 1, pieces)], SIZES, SIZES, BOTH)
    assert [chunk.num_bytes for chunk in cut(plan, 1000)] == [1000, 1000, 48]


def strided(region: int, offset: int, width: int, count: int, stride: int) -> Int64Array:
    return np.array([(region, offset, width, count, stride)], np.int64)


@pytest.mark.parametrize(
    ("table", "num_bytes"),
    [
        (rows((1, 100, 64)), 64),
        (rows((1, 0, 64), (1, 96, 64)), 128),
        (rows((2, 0, 64)), 64),
        (rows((9, 0, 64)), 64),
        (rows((1, 0, 64)), 63),
        (rows((1, 0, 64)), 65),
        (rows((1, 0, 64)), 1 << 31),
        (rows((1, 0, 64)), -64),
        (rows((1, -64, 64)), 64),
        (rows((-1, 0, 64)), 64),
        (rows((1, 0, -64)), -64),
        (rows((1, 0, 64), (1, 32, 64)), 128),
        (rows((1, 0, 1 << 62)), 0),
        (strided(1, 0, 1 << 62, 1 << 62, 0), 0),
        (strided(1, 0, 1 << 33, 1 << 33, 1 << 33), 0),
        (strided(1, 0, 16, 4, 64), 64),
        (strided(1, 0, 16, 4, 8), 64),
        (strided(1, (1 << 63) - 1, 16, 4, 16), 64),
    ],
)
def test_a_chunk_outside_its_lease_is_refused(table: Int64Array, num_bytes: int) -> None:
    """D58: the receiver believes nothing that a sender announces; bounds, lease, overlap and
    lengths are checked again, 64-bit overflow included."""
    head = ChunkHead(BOTH.lease, num_bytes, table, True)
    with pytest.raises(TransportError):
        plan_chunk(head, SIZES, lease_over((0, 128)), 4096)


def test_a_chunk_larger_than_the_staging_is_refused() -> None:
    head = ChunkHead(BOTH.lease, 4096, rows((1, 0, 4096)), True)
    assert plan_chunk(head, SIZES, lease_over(), 4096).num_bytes == 4096
    with pytest.raises(TransportError, match="4096 bytes"):
        plan_chunk(head, SIZES, lease_over(), 4095)
