from __future__ import annotations

import os
import socket
import struct
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.torchdist_wire import (
    MAX_BODY_BYTES,
    Address,
    Channel,
    ChunkHead,
    End,
    Hello,
    Kind,
    LinkOver,
    Meeting,
    decode_address,
    decode_chunk,
    decode_hello,
    decode_meeting,
    decode_regions,
    dial,
    encode_regions,
)
from pdcore.types import Incarnation, LeaseId
from tests.unit.transports.torchdist_rig import HOST, SOON_S, bell, channels, rows, sockets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")
ADDRESS = Address("gloo", HOST, 4711, b"k" * 16)
LEASE = LeaseId(Incarnation(b"i" * 16), 7)


def hear(channel: Channel) -> tuple[Kind, bytes]:
    frame = channel.receive(None, time.monotonic() + SOON_S)
    assert frame is not None
    return frame


def send_on(channel: Channel, body: bytes, timeout_s: float) -> None:
    """More than any socket buffers. Raises LinkOver."""
    for _ in range(1000):
        channel.send(Kind.REJECTED, body, timeout_s=timeout_s)


@pytest.mark.parametrize("host", [HOST, "::1", "10.1.2.3"])
def test_an_address_survives(host: str) -> None:
    address = Address("hccl", host, 65535, b"t" * 16)
    assert decode_address(address.encode()) == address


def test_a_damaged_address_is_never_dialled() -> None:
    """G6: any flipped bit, any part; a damaged host may be somebody else's."""
    good = ADDRESS.encode()
    for i in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[i] ^= 1 << bit
            with pytest.raises(TransportError, match="malformed"):
                decode_address(bytes(bad))
        with pytest.raises(TransportError, match="malformed"):
            decode_address(good[:i])


def test_a_name_is_no_address() -> None:
    """Resolving one may take longer than ``connect`` may."""
    named = Address("gloo", "prefill.example", 80, b"t" * 16)
    with pytest.raises(TransportError, match=r"prefill\.example"):
        decode_address(named.encode())


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    """Whatever a peer sends is an error of the transport or a value, nothing else."""
    for read in (decode_address, decode_hello, decode_regions, decode_meeting, decode_chunk):
        try:
            read(noise)
        except TransportError:
            continue


def test_frames_survive() -> None:
    hello = Hello(Incarnation(b"a" * 16), Incarnation(b"b" * 16), b"c" * 16)
    assert decode_hello(hello.encode()) == hello
    assert decode_regions(encode_regions({3: 1 << 40, 1: 5})) == {3: 1 << 40, 1: 5}
    meeting = Meeting(4711, 1 << 20, b"k" * 16)
    assert decode_meeting(meeting.encode()) == meeting
    for notify in (None, b"", b"wake up"):
        head = ChunkHead(LEASE, 30, rows((1, 2, 10), (3, 4, 20)), True, notify)
        found = decode_chunk(head.encode())
        assert (found.lease, found.num_bytes, found.is_last) == (LEASE, 30, True)
        assert found.notify == notify
        assert np.array_equal(found.table, head.table)


def test_a_meeting_with_absurd_chunks_is_refused() -> None:
    for chunk_bytes in (0, 100, 1 << 31):
        with pytest.raises(TransportError, match="chunks of"):
            decode_meeting(Meeting(1, chunk_bytes, b"k" * 16).encode())


def test_frames_come_whole_and_in_order() -> None:
    one, other = sockets()
    channel = Channel(other)
    try:
        frames = b"".join(
            struct.pack("<4sBBI", b"PDTD", 1, kind, len(body)) + body
            for kind, body in ((Kind.READY, b""), (Kind.REJECTED, b"x" * 70_000))
        )
        for start in range(0, len(frames), 9_999):
            one.sendall(frames[start : start + 9_999])
        assert hear(channel) == (Kind.READY, b"")
        assert hear(channel) == (Kind.REJECTED, b"x" * 70_000)
    finally:
        one.close()
        channel.close()


def test_a_wait_ends_with_the_bell_and_with_the_deadline() -> None:
    with channels() as (one, other), bell() as wake:
        os.eventfd_write(wake, 1)
        assert other.receive(wake) is None
        assert other.receive(wake, time.monotonic()) is None
        one.send(Kind.SENT, timeout_s=SOON_S)
        assert other.receive(wake) == (Kind.SENT, b"")


@pytest.mark.parametrize(
    ("kind", "end"), [(Kind.DISCONNECT, End.DISCONNECTED), (Kind.BYE, End.CLOSED)]
)
def test_a_goodbye_ends_the_connection(kind: Kind, end: End) -> None:
    with channels() as (one, other):
        one.send(Kind.READY, timeout_s=SOON_S)
        one.farewell(kind, "that was it")
        one.close()
        assert hear(other) == (Kind.READY, b"")
        with pytest.raises(LinkOver) as over:
            hear(other)
        assert over.value.end is end


def test_an_end_without_a_word_is_a_death() -> None:
    """Whoever closes in order says so first (death detection)."""
    with channels() as (one, other):
        one.close()
        with pytest.raises(LinkOver, match="process is gone") as over:
            hear(other)
        assert over.value.end is End.DIED


def test_a_reset_is_a_death_too() -> None:
    one, other = sockets()
    channel = Channel(other)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
        with pytest.raises(LinkOver) as over:
            hear(channel)
        assert over.value.end is End.DIED
    finally:
        channel.close()


def test_a_goodbye_counts_although_the_connection_broke_afterwards() -> None:
    """A peer that disconnects with something of ours unread resets the connection: our next
    frame fails, and its last word is still there to be read. It is not dead."""
    with channels() as (one, other):
        one.farewell(Kind.DISCONNECT, "not interested")
        other.send(Kind.WELCOME, timeout_s=SOON_S)
        one.close()
        with pytest.raises(LinkOver) as over:
            send_on(other, b"", SOON_S)
        assert over.value.end is End.DISCONNECTED
        assert "not interested" in over.value.detail


def test_a_peer_that_reads_nothing_is_given_up() -> None:
    with channels() as (one, _), pytest.raises(LinkOver, match="reads nothing") as over:
        send_on(one, b"x" * 100_000, 0.05)
    assert over.value.end is End.LOST


@pytest.mark.parametrize(
    "head",
    [
        (b"HTTP", 1, 2, 0),
        (b"PDTD", 2, 2, 0),
        (b"PDTD", 1, 99, 0),
        (b"PDTD", 1, 2, MAX_BODY_BYTES + 1),
    ],
)
def test_another_protocol_is_no_death(head: tuple[bytes, int, int, int]) -> None:
    """Nonsense ends the connection and proves nothing about its process; nothing is
    allocated on the word of a peer."""
    one, other = sockets()
    channel = Channel(other)
    try:
        one.sendall(struct.pack("<4sBBI", *head))
        with pytest.raises(LinkOver) as over:
            hear(channel)
        assert over.value.end is End.LOST
    finally:
        one.close()
        channel.close()


def test_nobody_there_is_peer_gone() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerGone, match="nobody listens"):
        dial(Address("gloo", HOST, port, b"k" * 16), SOON_S)
