"""Frames: what is packed comes back, and nothing else is taken for one (D58)."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.transports import socket_wire as wire
from pdcore.transports.check import MAX_REGION_BYTES
from pdcore.transports.socket_wire import Answer, End, Hello, Kind
from pdcore.types import Incarnation, LeaseId

INCARNATION = Incarnation(b"i" * 16)
LEASE = LeaseId(INCARNATION, 7)
ids = st.binary(min_size=16, max_size=16).map(Incarnation)
leases = st.builds(LeaseId, ids, st.integers(-(2**63), 2**63 - 1))
handles = st.integers(0, 2**64 - 1)


def body_of(frame: bytes, kind: Kind) -> bytes:
    found, size = wire.unpack_head(frame[: wire.HEAD.size])
    assert (found, size) == (kind, len(frame) - wire.HEAD.size)
    return frame[wire.HEAD.size :]


@given(ids, ids, handles, handles, st.binary(min_size=32, max_size=32), st.binary(max_size=60))
def test_hello(
    mine: Incarnation, target: Incarnation, number: int, oldest: int, nonce: bytes, home: bytes
) -> None:
    hello = Hello(mine, target, number, oldest, nonce, home)
    assert wire.unpack_hello(wire.pack_hello(hello)) == hello


@given(st.booleans(), st.binary(min_size=32, max_size=32))
def test_challenge(has_secret: bool, nonce: bytes) -> None:
    packed = wire.pack_challenge(nonce, has_secret=has_secret)
    assert wire.unpack_challenge(packed) == (has_secret, nonce)


@given(
    st.dictionaries(st.integers(0, 2**32 - 1), st.integers(1, MAX_REGION_BYTES), max_size=20),
    st.binary(max_size=20),
)
def test_welcome(regions: dict[int, int], extra: bytes) -> None:
    mac = b"m" * wire.MAC_BYTES
    found = wire.unpack_welcome(mac + wire.pack_regions(regions) + extra)
    assert (found.regions, found.mac, found.extra) == (regions, mac, extra)


@given(leases)
def test_revoke(lease: LeaseId) -> None:
    frame = wire.pack_revoke(lease)
    assert wire.unpack_head(frame[: wire.HEAD.size]) == (Kind.REVOKE, 24)
    assert wire.unpack_revoke(frame[wire.HEAD.size :]) == lease


pieces = st.lists(
    st.tuples(st.integers(0, MAX_REGION_BYTES), st.integers(1, 1000)), min_size=1, max_size=40
)


@given(handles, leases, st.integers(0, 2**32 - 1), pieces)
def test_write(handle: int, lease: LeaseId, region: int, rows: list[tuple[int, int]]) -> None:
    table = np.array(rows, np.int64)
    frame = wire.pack_write(handle, lease, region, table)
    found = wire.unpack_write(body_of(frame, Kind.WRITE))
    assert (found.handle, found.lease, found.region) == (handle, lease, region)
    assert found.pieces.tolist() == table.tolist()
    assert found.num_bytes == sum(size for _, size in rows)


@given(handles, leases, st.booleans(), st.none() | st.binary(max_size=100))
def test_end(handle: int, lease: LeaseId, complete: bool, notify: bytes | None) -> None:
    end = End(handle, lease, complete, notify)
    assert wire.unpack_end(body_of(wire.pack_end(end), Kind.END)) == end


@given(handles, st.booleans(), st.text(max_size=400))
def test_answer(handle: int, placed: bool, reason: str) -> None:
    """A long reason is cut, never refused."""
    frame = wire.pack_answer(Kind.ACK, Answer(handle, placed, reason))
    found = wire.unpack_answer(body_of(frame, Kind.ACK))
    assert (found.handle, found.placed) == (handle, placed)
    assert reason.startswith(found.reason.rstrip("\N{REPLACEMENT CHARACTER}"))


UNPACK = (
    wire.unpack_hello,
    wire.unpack_challenge,
    wire.unpack_welcome,
    wire.unpack_revoke,
    wire.unpack_write,
    wire.unpack_end,
    wire.unpack_answer,
)


@given(st.binary(max_size=200), st.sampled_from(UNPACK))
def test_garbage_is_refused_or_read_but_never_crashes(data: bytes, unpack: object) -> None:
    """D58: whatever a peer sends, the answer is a value or TransportError."""
    assert callable(unpack)
    with contextlib.suppress(TransportError):
        unpack(data)


@given(st.binary(min_size=wire.HEAD.size, max_size=wire.HEAD.size))
def test_a_random_head_is_refused(data: bytes) -> None:
    if data[:4] != wire.MAGIC:
        with pytest.raises(TransportError, match="another protocol"):
            wire.unpack_head(data)


@pytest.mark.parametrize("kind", list(Kind))
def test_no_kind_may_be_longer_than_its_bound(kind: Kind) -> None:
    """Memory is bounded before the first byte of a body is read."""
    limit = wire.MAX_BODY[kind]
    assert limit <= 1 << 18
    assert wire.unpack_head(wire.HEAD.pack(wire.MAGIC, wire.VERSION, kind, 0, limit)) == (
        kind,
        limit,
    )
    with pytest.raises(TransportError, match=f"at most {limit}"):
        wire.unpack_head(wire.HEAD.pack(wire.MAGIC, wire.VERSION, kind, 0, limit + 1))


def test_other_versions_and_kinds_are_named() -> None:
    with pytest.raises(TransportError, match="version"):
        wire.unpack_head(wire.HEAD.pack(wire.MAGIC, wire.VERSION + 1, Kind.BYE, 0, 0))
    with pytest.raises(TransportError, match="unknown frame kind 99"):
        wire.unpack_head(wire.HEAD.pack(wire.MAGIC, wire.VERSION, 99, 0, 0))


def write_of(rows: list[tuple[int, int]], count: int | None = None) -> bytes:
    frame = wire.pack_write(1, LEASE, 1, np.array(rows, np.int64).reshape(-1, 2))
    body = bytearray(frame[wire.HEAD.size :])
    if count is not None:
        body[36:40] = count.to_bytes(4, "little")
    return bytes(body)


@pytest.mark.parametrize(
    "body",
    [
        write_of([]),
        write_of([(0, 1)], count=2),
        write_of([(0, 1), (1, 1)], count=1),
        write_of([(-1, 1)]),
        write_of([(0, 0)]),
        write_of([(0, -5)]),
        write_of([(MAX_REGION_BYTES + 1, 1)]),
        write_of([(0, wire.MAX_WRITE_BYTES + 1)]),
        write_of([(0, wire.MAX_WRITE_BYTES), (0, 1)]),
        write_of([(0, 2**63 - 1), (0, 2**63 - 1), (0, 2)]),
    ],
)
def test_absurd_tables_are_refused(body: bytes) -> None:
    """Negative, empty, truncated, or so large that a sum would wrap around."""
    with pytest.raises(TransportError):
        wire.unpack_write(body)


def test_malformed_regions_and_payloads_are_refused() -> None:
    twice = bytes(32) + (2).to_bytes(4, "little") + 2 * wire._REGION.pack(1, 8)
    empty = bytes(32) + (1).to_bytes(4, "little") + wire._REGION.pack(1, 0)
    for body in (twice, empty, bytes(32) + (9).to_bytes(4, "little")):
        with pytest.raises(TransportError):
            wire.unpack_welcome(body)
    silent = wire._END.pack(1, *LEASE, True, False) + b"payload"
    with pytest.raises(TransportError, match="does not announce"):
        wire.unpack_end(silent)
