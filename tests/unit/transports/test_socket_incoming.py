"""Bytes into leased memory and nowhere else (G3, G4, D58)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.transports.base import Region, RemoteLease
from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_incoming import Incoming, IncomingCounts, Placing
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_wire import (
    FROM_SENDER,
    HEAD,
    MAX_WRITE_BYTES,
    End,
    Kind,
    pack_end,
    pack_write,
    unpack_answer,
    unpack_head,
)
from pdcore.types import Incarnation, LeaseId

US = Incarnation(b"u" * 16)
SIZE = 4096


class Scene:
    """A receiver with one region, and the socket its sender writes to."""

    def __init__(self) -> None:
        self.regions = RegionTable()
        self.region: Region = self.regions.add(memoryview(bytearray(SIZE)), target=True)
        self.placing, self.counts = Placing(), IncomingCounts()
        self.half = Incoming(self.regions, self.placing, self.counts)
        self.reader = FrameReader(FROM_SENDER)
        self.far, self.near = socket.socketpair()
        self.near.setblocking(False)

    def grant(self, counter: int, *ranges: tuple[int, int]) -> LeaseId:
        lease = LeaseId(US, counter)
        rows = np.array(ranges, np.int64).reshape(-1, 2)
        self.regions.grant(RemoteLease(lease, {self.region.region_id: rows}))
        return lease

    def begin(
        self, lease: LeaseId, *pieces: tuple[int, int], handle: int = 1, region: int | None = None
    ) -> None:
        table = np.array(pieces, np.int64).reshape(-1, 2)
        where = self.region.region_id if region is None else region
        self.half.begin(pack_write(handle, lease, where, table)[HEAD.size :])

    def feed(self, data: bytes) -> None:
        self.far.sendall(data)
        while self.half.is_placing:
            try:
                self.half.advance(self.near, self.reader)
            except BlockingIOError:
                return

    def finish(self, lease: LeaseId, handle: int = 1, notify: bytes | None = b"n") -> bool:
        """Was it all placed? Whoever is notified was."""
        frame = pack_end(End(handle, lease, True, notify))
        placed = self.half.finish(frame[HEAD.size :])
        assert unpack_head(placed.reply[: HEAD.size])[0] is Kind.ACK
        answer = unpack_answer(placed.reply[HEAD.size :])
        assert (placed.notify is not None) == (answer.placed and notify is not None)
        return answer.placed

    def image(self) -> bytes:
        return bytes(self.region.buffer)

    def close(self) -> None:
        self.far.close()
        self.near.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    found = Scene()
    yield found
    found.close()


def test_bytes_go_where_the_frame_says(scene: Scene) -> None:
    lease = scene.grant(1, (0, 100), (100, 200), (300, 400))
    scene.begin(lease, (90, 20), (390, 10), (0, 5))
    scene.feed(b"a" * 20 + b"b" * 10 + b"c" * 3)
    assert scene.half.is_placing
    scene.feed(b"c" * 2)
    assert not scene.half.is_placing
    wanted = bytearray(SIZE)
    wanted[90:110], wanted[390:400], wanted[0:5] = b"a" * 20, b"b" * 10, b"c" * 5
    assert scene.image() == wanted
    assert scene.finish(lease)
    assert (scene.counts.bytes_placed, scene.counts.bytes_dropped) == (35, 0)
    assert scene.placing.lease is None


def test_the_head_that_follows_comes_along(scene: Scene) -> None:
    lease = scene.grant(1, (0, 100))
    scene.begin(lease, (0, 4))
    scene.feed(b"data" + pack_end(End(1, lease, True, None)))
    frame = scene.reader.receive(scene.near)
    assert frame is not None
    assert frame[0] is Kind.END
    assert scene.image()[:5] == b"data\0"


OUTSIDE = [
    [(0, 65)],
    [(60, 8)],
    [(64, 1)],
    [(127, 2)],
    [(0, 64), (200, 1)],
    [(SIZE - 1, 1)],
    [(SIZE, 1)],
    [(1 << 50, 8)],
]


@pytest.mark.parametrize("pieces", OUTSIDE)
def test_outside_the_lease_nothing_is_placed(scene: Scene, pieces: list[tuple[int, int]]) -> None:
    """G3: the whole frame is dropped before its first byte, the good pieces with it, and so
    is what follows of that transfer; the sender hears of it at once."""
    lease = scene.grant(1, (0, 64), (128, 192))
    scene.begin(lease, *pieces)
    (reject,) = scene.half.replies
    assert unpack_head(reject[: HEAD.size])[0] is Kind.REJECT
    scene.feed(b"x" * sum(size for _, size in pieces))
    scene.begin(lease, (0, 8))
    scene.feed(b"y" * 8)
    assert scene.image() == bytes(SIZE)
    assert not scene.finish(lease)
    assert len(scene.half.replies) == 1
    assert scene.counts.writes_refused == 1
    # Another transfer under the same lease is judged for itself.
    scene.begin(lease, (0, 8), handle=2)
    scene.feed(b"z" * 8)
    assert scene.finish(lease, handle=2)


def end_grant(scene: Scene, lease: LeaseId, how: str) -> None:
    if how == "revoke":
        scene.regions.revoke(lease)
    else:
        scene.regions.release(lease)


@pytest.mark.parametrize("how", ["revoke", "release"])
def test_a_lease_that_ends_in_mid_write_gets_no_further_byte(scene: Scene, how: str) -> None:
    """RECEIVER_ENFORCED: looked up before each call, not once a frame."""
    lease = scene.grant(1, (0, 100))
    scene.begin(lease, (0, 100))
    scene.feed(b"a" * 40)
    end_grant(scene, lease, how)
    scene.feed(b"b" * 60)
    assert not scene.half.is_placing, "the rest must be read all the same"
    assert scene.image() == b"a" * 40 + bytes(SIZE - 40)
    assert not scene.finish(lease)
    assert scene.counts.bytes_dropped == 60


def test_a_lease_nobody_granted_or_of_another_region(scene: Scene) -> None:
    lease = scene.grant(1, (0, 100))
    stranger = LeaseId(US, 99)
    scene.begin(stranger, (0, 4))
    scene.feed(b"abcd")
    assert not scene.finish(stranger)
    scene.begin(lease, (0, 4), handle=2, region=77)
    scene.feed(b"abcd")
    assert not scene.finish(lease, handle=2)
    empty = LeaseId(US, 3)
    scene.regions.grant(RemoteLease(empty, {scene.region.region_id: np.empty((0, 2), np.int64)}))
    scene.begin(empty, (0, 4), handle=3)
    scene.feed(b"abcd")
    assert not scene.finish(empty, handle=3)
    assert scene.image() == bytes(SIZE)


def test_nothing_to_write_needs_a_lease_too(scene: Scene) -> None:
    assert scene.finish(scene.grant(1, (0, 1)))
    assert not scene.finish(LeaseId(US, 9))


def test_the_end_of_the_stream_in_mid_write(scene: Scene) -> None:
    lease = scene.grant(1, (0, 100))
    scene.begin(lease, (0, 100))
    scene.feed(b"a" * 40)
    scene.far.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError, match="in the middle of a write"):
        scene.half.advance(scene.near, scene.reader)
    scene.regions.revoke(lease)
    with pytest.raises(EOFError):
        scene.half.advance(scene.near, scene.reader)
    assert scene.placing.lease is None


def test_a_malformed_frame_is_the_callers_business(scene: Scene) -> None:
    with pytest.raises(TransportError):
        scene.half.begin(b"short")
    with pytest.raises(TransportError):
        scene.half.finish(b"short")
    assert not scene.half.is_placing


rows = st.lists(
    st.tuples(st.integers(-10, 2 * SIZE), st.integers(-10, 300)), min_size=1, max_size=5
)


@given(rows)
def test_no_table_writes_outside_the_lease(pieces: list[tuple[int, int]]) -> None:
    """G3, D58, as a property: whatever the table says, only leased bytes change."""
    scene = Scene()
    try:
        lease = scene.grant(1, (100, 300), (1000, 1500))
        table = np.array(pieces, np.int64)
        try:
            scene.begin(lease, *pieces)
        except TransportError:
            return
        assert table[:, 1].sum() <= MAX_WRITE_BYTES
        scene.feed(b"x" * int(table[:, 1].sum()))
        image = np.frombuffer(scene.image(), np.uint8)
        outside = np.ones(SIZE, bool)
        outside[100:300] = outside[1000:1500] = False
        assert not image[outside].any()
    finally:
        scene.close()


# --- mutants: the rule of a transport that trusts its peer ---------------------------------


class TrustsTheFrame(Incoming):
    """The seed's data plane took whatever address the peer named."""

    def _why_not(self, write: object) -> str | None:
        return None


class LooksOnceAFrame(Incoming):
    """A lease that is looked at when the frame begins, and not again."""

    def advance(self, sock: socket.socket, reader: FrameReader) -> bool:
        left = self._place(sock, reader)
        if not left:
            self._write = None
        return not left


CHECKS: list[tuple[type[Incoming], Callable[[Scene], None]]] = [
    (TrustsTheFrame, lambda scene: test_outside_the_lease_nothing_is_placed(scene, [(64, 1)])),
    (
        LooksOnceAFrame,
        lambda scene: test_a_lease_that_ends_in_mid_write_gets_no_further_byte(scene, "revoke"),
    ),
]


@pytest.mark.parametrize(("mutant", "check"), CHECKS)
def test_the_checks_find_who_trusts(
    scene: Scene, mutant: type[Incoming], check: Callable[[Scene], None]
) -> None:
    """D58, D3: a check that passes these proves nothing."""
    scene.half = mutant(scene.regions, scene.placing, scene.counts)
    with pytest.raises((AssertionError, ValueError)):
        check(scene)
