from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.process_proof import ProcessKey
from pdcore.transports.shm_wire import (
    KEY_PAGES,
    MAX_PAYLOAD_BYTES,
    Address,
    AttachedRegion,
    Hello,
    Kind,
    Offer,
    SharedRegion,
    SpaceKey,
    credentials,
    decode_address,
    dial,
    pack,
    pack_hello,
    pack_notify,
    receive_offer,
    send_offer,
    unpack,
    unpack_hello,
    unpack_lease,
)
from pdcore.types import Incarnation, LeaseId

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SOCK_SEQPACKET is Linux")
ONE_SHARED, ONE_ATTACHED = b"\1\0\0\0" + bytes(4), bytes(4) + b"\1\0\0\0"
US, THEM = Incarnation(b"u" * 16), Incarnation(b"t" * 16)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield pair
    for sock in pair:
        sock.close()


def soon() -> float:
    return time.monotonic() + 5


@given(st.sampled_from(Kind), st.binary(max_size=100))
def test_frames(kind: Kind, body: bytes) -> None:
    assert unpack(pack(kind, body)) == (kind, body)


@given(st.binary(max_size=80))
def test_random_frames_are_refused(frame: bytes) -> None:
    for read in (unpack, unpack_hello, decode_address):
        with pytest.raises(TransportError):
            read(frame)


def test_hello_lease_and_address() -> None:
    hello = Hello(US, THEM, 12345)
    assert unpack_hello(pack_hello(hello)) == hello
    lease = LeaseId(US, 7)
    frame = pack_notify(lease, b"p" * MAX_PAYLOAD_BYTES)
    assert unpack_lease(unpack(frame)[1]) == (lease, b"p" * MAX_PAYLOAD_BYTES)
    address = Address(b"b" * 16, ProcessKey(3, 4), b"\0name")
    assert decode_address(address.encode()) == address
    with pytest.raises(TransportError):
        decode_address(Address(b"b" * 16, ProcessKey(3, 4), b"/tmp/a-path").encode())
    with pytest.raises(TransportError):
        unpack_lease(b"short")


def test_descriptors_are_handed_over(ends: tuple[socket.socket, socket.socket]) -> None:
    """More regions than one message can carry; each arrives once and is the same file."""
    fds = [os.memfd_create(f"r{i}") for i in range(3)]
    shared = [(SharedRegion(i, 10 + i, 0, i % 2 == 0), fds[i % 3]) for i in range(450)]
    send_offer(ends[0], Offer(shared))
    offer = receive_offer(ends[1], soon())
    assert (offer.attached, offer.key) == ((), None)
    got = offer.shared
    assert [region for region, _ in got] == [region for region, _ in shared]
    for (region, mine), (_, theirs) in zip(got, shared, strict=True):
        assert os.path.samestat(os.fstat(mine), os.fstat(theirs)), region
        assert not os.get_inheritable(mine)
        os.close(mine)
    for fd in fds:
        os.close(fd)


def test_registered_regions_are_told(ends: tuple[socket.socket, socket.socket]) -> None:
    """More than one frame holds, beside a segment; the addresses mean nothing here."""
    attached = tuple(AttachedRegion(i, 1 + i, i << 40, i << 30) for i in range(4500))
    key = SpaceKey(b"8 bytes.", tuple(range(10, 10 + KEY_PAGES)))
    fd = os.memfd_create("r")
    send_offer(ends[0], Offer([(SharedRegion(9999, 10, 0, True), fd)], attached, key))
    os.close(fd)
    got = receive_offer(ends[1], soon())
    ((region, mine),) = got.shared
    os.close(mine)
    assert (region.region_id, got.attached, got.key) == (9999, attached, key)
    assert "8 bytes" not in repr(got.key)


@pytest.mark.parametrize(
    "frames",
    [
        [pack(Kind.REFUSED, b"because")],
        [pack(Kind.HELLO)],
        [pack(Kind.WELCOME, b"\1\0\0")],
        [pack(Kind.WELCOME, b"\1\0\0\0")],
        [pack(Kind.WELCOME, ONE_SHARED), pack(Kind.REGIONS, b"r" * 17)],
        [pack(Kind.WELCOME, ONE_SHARED), pack(Kind.NOTIFY)],
        [pack(Kind.WELCOME, ONE_ATTACHED), pack(Kind.REGIONS, b"r" * 17)],
        [pack(Kind.WELCOME, ONE_ATTACHED), pack(Kind.ATTACHED, b"a" * 72)],
        [pack(Kind.WELCOME, ONE_ATTACHED), pack(Kind.ATTACHED, b"a" * 101)],
        [pack(Kind.WELCOME, ONE_ATTACHED), pack(Kind.ATTACHED, bytes(100))],
        [pack(Kind.WELCOME, ONE_ATTACHED), pack(Kind.ATTACHED, bytes(72) + b"\xff" * 28)],
        [b"rubbish"],
    ],
)
def test_bad_answers_are_refused(
    ends: tuple[socket.socket, socket.socket], frames: list[bytes]
) -> None:
    spare = os.memfd_create("spare")
    for frame in frames:
        socket.send_fds(ends[0], [frame], [spare] if b"r" * 17 not in frame else [])
    os.close(spare)
    with pytest.raises(TransportError):
        receive_offer(ends[1], soon())


def test_silence_and_hanging_up(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(PeerGone, match="in time"):
        receive_offer(ends[1], time.monotonic() + 0.01)
    ends[0].close()
    with pytest.raises(PeerGone, match="closed"):
        receive_offer(ends[1], soon())


def test_running_out_of_descriptors(ends: tuple[socket.socket, socket.socket]) -> None:
    """fd exhaustion is refused, and what did arrive is closed again."""
    import resource

    spare = os.memfd_create("spare")
    send_offer(ends[0], Offer([(SharedRegion(i, 1, 0, True), spare) for i in range(100)]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 20, hard))
    try:
        with pytest.raises(TransportError, match="descriptors"):
            receive_offer(ends[1], soon())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(spare)


def test_dialling() -> None:
    """A listener that never accepts cannot hang us: its backlog fills, then PeerGone."""
    name = b"\0pdcore-test-%s" % os.urandom(8).hex().encode()
    with pytest.raises(PeerGone, match="nobody listens"):
        dial(name, 0.05)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(name)
        listener.listen(0)
        sock = stack.enter_context(dial(name, 0.05))
        assert credentials(sock) == (os.getpid(), os.geteuid())
        started = time.monotonic()
        with pytest.raises(PeerGone, match="does not accept"):
            dial(name, 0.05)
        assert time.monotonic() - started < 2
