from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from pdcore.errors import PeerGone
from pdcore.transports import torchdist_witness
from pdcore.transports.process_proof import boot_id, start_ticks
from pdcore.transports.torchdist_channel import Channel, End, LinkOver, dial
from pdcore.transports.torchdist_wire import (
    MAGIC,
    MAX_BODY_BYTES,
    VERSION,
    Address,
    Kind,
)
from pdcore.transports.torchdist_witness import Witness
from tests.unit.transports.torchdist_rig import HOST, SOON_S, bell, channels, sockets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")


def hear(channel: Channel) -> tuple[Kind, bytes]:
    frame = channel.receive(None, time.monotonic() + SOON_S)
    assert frame is not None
    return frame


def send_on(channel: Channel, body: bytes, timeout_s: float) -> None:
    """More than any socket buffers. Raises LinkOver."""
    for _ in range(1000):
        channel.send(Kind.REJECTED, body, timeout_s=timeout_s)


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


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_reset_alone_is_no_death() -> None:
    """Something in between may have cut the connection."""
    one, other = sockets()
    channel = Channel(other)
    try:
        reset(one)
        with pytest.raises(LinkOver, match="may be alive") as over:
            hear(channel)
        assert over.value.end is End.LOST
    finally:
        channel.close()


@pytest.mark.parametrize("look", [lambda channel: send_on(channel, b"", SOON_S), hear])
def test_a_reset_stays_one_however_it_is_noticed(look: Callable[[Channel], object]) -> None:
    """The kernel tells of a reset once, to whoever asks first; what is read after that looks
    like an end in order, and was taken for a death: its process was shut out for good."""
    one, other = sockets()
    channel = Channel(other)
    try:
        reset(one)
        ended = select.poll()
        ended.register(other, 0)
        assert ended.poll(SOON_S * 1000)
        for _ in range(3):
            with pytest.raises(LinkOver) as over:
                look(channel)
            assert over.value.end is End.LOST
            look = hear
    finally:
        channel.close()


@pytest.mark.parametrize("is_dead", [True, False])
def test_the_witness_has_the_last_word(is_dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process can be seen, it counts and not how the connection ended."""
    monkeypatch.setattr(torchdist_witness, "DEATH_TIMEOUT_S", 20.0 if is_dead else 0.0)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one, other = sockets()
    channel = Channel(other)
    try:
        channel.witness = Witness(
            torchdist_witness.STAMP.pack(boot_id(), process.pid, start_ticks(process.pid))
        )
        if is_dead:
            process.kill()
            reset(one)
        else:
            one.close()
        with pytest.raises(LinkOver) as over:
            hear(channel)
        assert over.value.end is (End.DIED if is_dead else End.LOST)
    finally:
        channel.close()
        process.kill()
        process.communicate()


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


def test_a_frame_that_never_ends_keeps_nobody_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A megabyte is announced, and there is always one byte more of it to read: that kept
    the owner's thread in ``connect`` for as long as the peer liked."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    with channels() as (one, other):
        other._sock.sendall(struct.pack("<4sBBI", MAGIC, VERSION, Kind.WELCOME, 1 << 20) + b"x")
        reads = 0

        def fill() -> None:
            nonlocal reads
            reads += 1
            assert reads < 1000

        monkeypatch.setattr(one, "_fill", fill)
        assert one.receive(None, 10.0) is None
        assert reads < 10


def test_nobody_there_is_peer_gone() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerGone, match="nobody listens"):
        dial(Address("gloo", HOST, port, b"k" * 16), SOON_S)
