"""Hostile, careless and slow peers: each costs its own connection, and nobody else's."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np
import pytest

from pdcore.errors import TransportError
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import is_zero, pump, settle
from pdcore.transports import socket_service, socket_table
from pdcore.transports.descriptor import decode
from pdcore.transports.process_proof import ProcessKey
from pdcore.transports.socket import SocketTransport
from pdcore.transports.socket_address import Home, decode_home, dial, encode_home, this_origin
from pdcore.transports.socket_greeting import Identity, greet
from pdcore.transports.socket_wire import (
    HEAD,
    MAGIC,
    VERSION,
    End,
    Hello,
    Kind,
    pack,
    pack_end,
    pack_hello,
    pack_write,
)
from pdcore.types import Incarnation, LeaseId

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket is Linux")
STRANGER = Incarnation(b"s" * 16)
HOME = encode_home(STRANGER, Home(this_origin())) if sys.platform == "linux" else b""


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Pair(RegistryHarness("socket", families=[request.param])) as found:
        yield found


def receiver(pair: Pair) -> SocketTransport:
    assert isinstance(pair.receiver.transport, SocketTransport)
    return pair.receiver.transport


def call(pair: Pair) -> socket.socket:
    """A raw connection to the receiver."""
    mine = decode(receiver(pair).descriptor(), "socket")
    (address,) = decode_home(mine.incarnation, mine.blob).addresses
    return dial(address, time.monotonic() + 5)


def welcomed(pair: Pair) -> socket.socket:
    """A connection of somebody who passed the opening and is hostile afterwards."""
    sock = call(pair)
    me = Identity(STRANGER, HOME)
    greet(sock, me, receiver(pair).incarnation, (1, 1), time.monotonic() + 5)
    sock.settimeout(5)
    return sock


def hung_up(sock: socket.socket) -> bytes:
    """What came before the end; the end must come."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            found += data
    return found


def still_serves(pair: Pair) -> None:
    finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 4096)), notify=b"good"))
    pump(pair.receiver, until=lambda: pair.receiver.record.payloads == [b"good"])


def hello(pair: Pair, **changed: object) -> bytes:
    target = changed.get("target", receiver(pair).incarnation)
    assert isinstance(target, bytes)
    said = Hello(STRANGER, Incarnation(target), 1, 1, b"n" * 32, HOME)
    return pack(Kind.HELLO, pack_hello(said))


BEFORE: list[tuple[Callable[[Pair], bytes], bytes]] = [
    (lambda pair: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"another protocol"),
    (lambda pair: HEAD.pack(MAGIC, VERSION, Kind.HELLO, 0, 1 << 31), b"at most"),
    (lambda pair: HEAD.pack(MAGIC, VERSION + 1, Kind.HELLO, 0, 4), b"version"),
    (lambda pair: pack(Kind.WRITE, b""), b"unexpected WRITE"),
    (lambda pair: pack(Kind.HELLO, b"short"), b"truncated HELLO"),
    (lambda pair: hello(pair, target=b"o" * 16), pack(Kind.STALE)),
    (lambda pair: hello(pair) + pack(Kind.PROOF, b"p" * 32), b"authentication failed"),
    (lambda pair: hello(pair) + pack(Kind.BYE), b"unexpected BYE"),
]


@pytest.mark.parametrize(("said", "why"), BEFORE)
def test_a_bad_opening_is_refused_with_its_reason(
    pair: Pair, said: Callable[[Pair], bytes], why: bytes
) -> None:
    with call(pair) as sock:
        sock.settimeout(5)
        sock.sendall(said(pair))
        assert why in hung_up(sock)
    assert receiver(pair).counts.openings_failed == 1
    still_serves(pair)


AFTER: list[Callable[[], bytes]] = [
    lambda: b"\0" * 64,
    lambda: pack(Kind.HELLO, b""),
    lambda: pack(Kind.ACK, b"x" * 20),
    lambda: HEAD.pack(MAGIC, VERSION, Kind.WRITE, 0, 1 << 20),
    lambda: pack(Kind.WRITE, b"short"),
    lambda: pack(Kind.END, b"short"),
    lambda: pack_write(1, LeaseId(STRANGER, 1), 1, np.array([[0, 1 << 40]], np.int64)),
    lambda: pack_write(1, LeaseId(STRANGER, 1), 1, np.array([[-8, 16]], np.int64)),
]


@pytest.mark.parametrize("said", AFTER)
def test_nonsense_ends_that_connection_only(pair: Pair, said: Callable[[], bytes]) -> None:
    """Counted; the good session beside it goes on."""
    with welcomed(pair) as sock:
        sock.sendall(said())
        hung_up(sock)
    assert receiver(pair).counts.peers_dropped == 1
    still_serves(pair)


@pytest.mark.parametrize("pid", [0, (1 << 22) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
def test_a_caller_that_is_no_process_is_refused(pair: Pair, pid: int) -> None:
    """D58: what is no pid ended the thread that serves everybody, without any secret."""
    origin = attrs.evolve(this_origin(), process=ProcessKey(pid, 1))
    me = Identity(STRANGER, encode_home(STRANGER, Home(origin)))
    with call(pair) as sock, pytest.raises(TransportError):
        greet(sock, me, receiver(pair).incarnation, (1, 1), time.monotonic() + 5)
    still_serves(pair)


def test_random_bytes_after_the_opening(pair: Pair) -> None:
    """A hundred connections of noise, some of it behind a right head: no byte lands, the
    thread lives, nothing is left."""
    rng = random.Random(3)
    for turn in range(100):
        with welcomed(pair) as sock:
            data = rng.randbytes(rng.randrange(1, 200))
            if turn % 2:
                kind = rng.choice([Kind.WRITE, Kind.END])
                data = pack(kind, data)
            with contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            hung_up(sock)
    assert is_zero(pair.target.buffer)
    settle(pair.receiver, quiet_s=0.0)
    still_serves(pair)


def test_a_write_that_is_cut_off_ends_that_connection_only(pair: Pair) -> None:
    lease = pair.lease((0, 4096))
    with welcomed(pair) as sock:
        frame = pack_write(9, lease.lease, pair.target.region_id, np.array([[0, 4096]], np.int64))
        sock.sendall(frame + b"x" * 100)
        sock.shutdown(socket.SHUT_WR)
        hung_up(sock)
    assert is_zero(pair.target.buffer[100:])
    still_serves(pair)


def test_a_stranger_with_a_guessed_lease_writes_nothing(pair: Pair) -> None:
    """A lease that was never granted, under our own incarnation or another's."""
    pair.lease((0, 64))
    for counter, incarnation in ((77, receiver(pair).incarnation), (1, STRANGER)):
        with welcomed(pair) as sock:
            lease = LeaseId(incarnation, counter)
            rows = np.array([[0, 8]], np.int64)
            sock.sendall(pack_write(1, lease, pair.target.region_id, rows) + b"evil" * 2)
            sock.sendall(pack_end(End(1, lease, True, b"evil")))
            sock.shutdown(socket.SHUT_WR)
            assert b"is not granted" in hung_up(sock)
    assert is_zero(pair.target.buffer)
    settle(pair.receiver, quiet_s=0.0)
    assert not pair.receiver.record.notes
    still_serves(pair)


def test_who_says_nothing_is_dropped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_service, "HELLO_TIMEOUT_S", 0.05)
    with call(pair) as sock:
        sock.settimeout(10)
        assert hung_up(sock) == b""
    assert receiver(pair).counts.openings_failed == 1
    still_serves(pair)


def test_who_speaks_ever_so_slowly_is_dropped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no introduction: 64 such callers kept everybody else out for
    as long as they liked."""
    monkeypatch.setattr(socket_service, "HELLO_TIMEOUT_S", 0.2)
    with call(pair) as sock:
        hung_up_at = select.poll()
        hung_up_at.register(sock, select.POLLIN)
        for i in range(200):
            with contextlib.suppress(OSError):
                sock.send(hello(pair)[i : i + 1])
            if hung_up_at.poll(50):
                break
        else:
            pytest.fail("ten seconds for one HELLO")
    assert receiver(pair).counts.openings_failed == 1
    still_serves(pair)


def test_callers_who_say_nothing_keep_nobody_out(pair: Pair) -> None:
    """D58: more of them than are waited for at once."""
    with contextlib.ExitStack() as held:
        for _ in range(socket_table.MAX_CALLERS + 10):
            held.enter_context(call(pair))
        pair.sender.transport.connect(receiver(pair).descriptor())
    assert receiver(pair).counts.callers_turned_away == 0
    still_serves(pair)


def test_too_many_callers_are_turned_away(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_table, "MAX_CALLERS", 3)
    with contextlib.ExitStack() as held:
        for _ in range(3):
            waiting = held.enter_context(call(pair))
            waiting.sendall(hello(pair))
            waiting.settimeout(5)
            assert waiting.recv(1)
        with call(pair) as sock:
            sock.settimeout(10)
            assert hung_up(sock) == b""
        assert receiver(pair).counts.callers_turned_away == 1
    still_serves(pair)


def test_answers_that_nobody_reads_are_bounded() -> None:
    """A sender that asks and never listens is not read from any more; others are. Over
    AF_UNIX, where the kernel's own buffers are small."""
    ends = pack_end(End(1, LeaseId(STRANGER, 1), True, None)) * 1000
    with Pair(RegistryHarness("socket", families=["unix"])) as pair, welcomed(pair) as sock:
        sock.setblocking(False)
        sent = 0
        quiet_until = time.monotonic() + 0.3
        while time.monotonic() < quiet_until and sent < 200 << 20:
            try:
                sent += sock.send(ends[sent % len(ends) :])
                quiet_until = time.monotonic() + 0.3
            except BlockingIOError:
                settle(pair.receiver, quiet_s=0.01)
        assert sent < 200 << 20, "it reads for ever"
        still_serves(pair)


def test_another_user_is_refused_over_af_unix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says who calls."""
    with Pair(RegistryHarness("socket", families=["unix"])) as pair:
        strange = os.getpid(), os.geteuid() + 1
        monkeypatch.setattr(socket_service, "credentials", lambda sock: strange)
        with pytest.raises(TransportError, match="may not write to memory of uid"):
            pair.sender.transport.connect(receiver(pair).descriptor())
        monkeypatch.setattr(socket_service, "credentials", lambda sock: (1, os.geteuid()))
        with pytest.raises(TransportError, match="the caller is process 1, not"):
            pair.sender.transport.connect(receiver(pair).descriptor())
