from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_wire import HEAD, MAGIC, VERSION, Kind, pack


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    other.setblocking(False)
    yield one, other
    one.close()
    other.close()


frames = st.lists(
    st.sampled_from([Kind.END, Kind.REFUSED]).flatmap(
        lambda kind: st.tuples(st.just(kind), st.binary(max_size=300))
    ),
    max_size=6,
)


@given(frames, st.data())
def test_frames_come_whole_however_they_are_cut(
    wanted: list[tuple[Kind, bytes]], data: object
) -> None:
    assert isinstance(data, st.DataObject)
    one, other = socket.socketpair()
    with one, other:
        other.setblocking(False)
        reader = FrameReader(frozenset(Kind))
        stream = b"".join(pack(kind, body) for kind, body in wanted)
        found = []
        while stream:
            count = data.draw(st.integers(1, len(stream)))
            one.sendall(stream[:count])
            stream = stream[count:]
            while True:
                try:
                    frame = reader.receive(other)
                except BlockingIOError:
                    break
                if frame is not None:
                    found.append(frame)
        assert found == wanted
        assert reader.is_between_frames


def test_it_reads_nothing_past_a_frame(ends: tuple[socket.socket, socket.socket]) -> None:
    """KV bytes stay in the kernel until it is known where they belong."""
    one, other = ends
    one.sendall(pack(Kind.BYE) + b"kv")
    reader = FrameReader({Kind.BYE})
    assert reader.receive(other) == (Kind.BYE, b"")
    assert other.recv(10) == b"kv"


def test_a_head_that_came_along_with_other_bytes(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    one.sendall(b"kv" + pack(Kind.REFUSED, b"why"))
    reader, kv = FrameReader({Kind.REFUSED}), bytearray(2)
    count = other.recvmsg_into([kv, reader.room_for_head()])[0]
    reader.took(count - 2)
    assert reader.receive(other) == (Kind.REFUSED, b"why")


def test_the_end_of_the_stream_says_whether_a_frame_was_cut(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    one.sendall(pack(Kind.REFUSED, b"why")[:-1])
    one.shutdown(socket.SHUT_WR)
    reader = FrameReader({Kind.REFUSED})
    assert reader.receive(other) is None
    with pytest.raises(EOFError, match="in the middle"):
        reader.receive(other)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        pack(Kind.WELCOME, b""),
        HEAD.pack(MAGIC, VERSION, Kind.REFUSED, 0, 1 << 31),
    ],
)
def test_nonsense_is_refused_after_its_head(
    ends: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    """Another protocol, a frame out of turn, and a body of two gigabytes."""
    one, other = ends
    one.sendall(data)
    with pytest.raises(TransportError):
        FrameReader({Kind.REFUSED}).receive(other)
