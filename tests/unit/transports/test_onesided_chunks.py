"""Plans become calls: every byte once, within a call's bounds, at addresses that were checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.transports.base import RemoteLease
from pdcore.transports.check import plan_copies
from pdcore.transports.onesided_chunks import (
    MAX_ADDRESS_BYTES,
    Chunk,
    Welcome,
    base_of,
    cut,
    decode_welcome,
)
from pdcore.types import Incarnation, LeaseId

SIZE = 4096
LOCAL, REMOTE = {1: 10_000, 2: 50_000}, {7: 1_000_000}


def chunks_of(
    rows: list[tuple[int, int, int]], max_rows: int, max_bytes: int, region: int = 1
) -> list[Chunk]:
    table: Int64Array = np.array([(*row, 1, 0, 0) for row in rows], np.int64).reshape(-1, 6)
    whole = np.array([[0, SIZE]], np.int64)
    lease = RemoteLease(LeaseId(Incarnation(b"p" * 16), 1), {7: whole})
    batch = WriteBatch(region, 7, table)
    plan = plan_copies([batch], {1: SIZE, 2: SIZE}, {7: SIZE}, lease)
    return list(cut(plan, LOCAL, REMOTE, max_rows, max_bytes))


@st.composite
def disjoint_rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    rows, at = [], 0
    for _ in range(draw(st.integers(0, 12))):
        at += draw(st.integers(0, 9))
        size = draw(st.integers(1, 300))
        rows.append((draw(st.integers(0, SIZE - size)), at, size))
        at += size
    return draw(st.permutations([row for row in rows if row[1] + row[2] <= SIZE]))


@given(disjoint_rows(), st.integers(1, 5), st.integers(1, 700), st.sampled_from([1, 2]))
def test_every_byte_is_in_one_call_that_is_not_too_large(
    rows: list[tuple[int, int, int]], max_rows: int, max_bytes: int, region: int
) -> None:
    found: dict[int, int] = {}
    for chunk in chunks_of(rows, max_rows, max_bytes, region):
        assert 0 < len(chunk.lengths) <= max_rows
        assert chunk.lengths.min() > 0
        assert chunk.lengths.sum() <= max_bytes
        for local, remote, size in zip(
            chunk.local.tolist(), chunk.remote.tolist(), chunk.lengths.tolist(), strict=True
        ):
            for i in range(size):
                assert remote + i not in found
                found[remote + i] = local + i
    wanted = {
        REMOTE[7] + into + i: LOCAL[region] + start + i
        for start, into, size in rows
        for i in range(size)
    }
    assert found == wanted


def test_neighbours_are_one_descriptor() -> None:
    (chunk,) = chunks_of([(0, 0, 16), (16, 16, 16), (64, 64, 8)], 100, 1 << 20)
    assert chunk.lengths.tolist() == [32, 8]


sizes = st.dictionaries(st.integers(0, 2**32 - 1), st.integers(1, 1 << 50), max_size=8)


@given(sizes, st.binary(max_size=40))
def test_welcome(known: dict[int, int], address: bytes) -> None:
    bases = {region: 4096 + i for i, region in enumerate(known)}
    found = decode_welcome(Welcome(bases, address).encode(), known)
    assert (found.bases, found.address) == (bases, address)


@given(st.binary(max_size=200))
def test_a_welcome_of_noise_is_refused(data: bytes) -> None:
    with pytest.raises(TransportError):
        decode_welcome(data, {1: 4096})


@given(st.data())
def test_a_damaged_welcome_is_refused_or_read(data: st.DataObject) -> None:
    """Nothing else can happen, whatever a peer sends: no crash, no address out of range."""
    good = bytearray(Welcome({1: 4096, 2: 8192}, b"address").encode())
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_welcome(bytes(good), {1: 64, 2: 64})
    except TransportError:
        return
    assert all(0 < base <= (1 << 62) - 64 for base in found.bases.values())


def test_what_a_welcome_must_say() -> None:
    """D58: an address that would overflow, or none, is no address."""
    for base in (0, 1 << 63, (1 << 62) - 63):
        with pytest.raises(TransportError, match="region 1 lies nowhere"):
            decode_welcome(Welcome({1: base}, b"").encode(), {1: 64})
    with pytest.raises(TransportError, match="region 2 lies nowhere"):
        decode_welcome(Welcome({1: 64}, b"").encode(), {1: 64, 2: 64})
    with pytest.raises(TransportError, match="another transport"):
        decode_welcome(b"", {})
    with pytest.raises(TransportError, match="another version"):
        decode_welcome(b"PDOS\2" + bytes(4), {})
    long = bytes(MAX_ADDRESS_BYTES + 1)
    with pytest.raises(TransportError, match="at most 65536"):
        Welcome({}, long).encode()
    with pytest.raises(TransportError, match="too long"):
        decode_welcome(Welcome({}, b"").encode() + long, {})


def test_where_a_buffer_begins() -> None:
    array = np.zeros(64, np.uint8)
    assert base_of(array[8:]) == base_of(array) + 8
