from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from pdcore.errors import PeerGone, TransportError
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_checks_growth import Footprint
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import Watched, pump
from pdcore.transports import socket_sender, socket_service
from pdcore.transports.base import PeerSession
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.socket import SocketTransport
from pdcore.transports.socket_wire import MAX_PAYLOAD_BYTES
from pdcore.types import Incarnation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket is Linux")
KEY = "a secret of enough bytes"


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Pair(RegistryHarness("socket", families=[request.param])) as found:
        yield found


def sender(pair: Pair) -> SocketTransport:
    assert isinstance(pair.sender.transport, SocketTransport)
    return pair.sender.transport


def test_notifications_and_transfers_that_wait_are_bounded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = pair.lease()
    largest = b"n" * MAX_PAYLOAD_BYTES
    finish(pair, pair.submit(lease, notify=largest))
    pump(pair.receiver, until=lambda: pair.receiver.record.payloads == [largest])
    with pytest.raises(TransportError, match=f"at most {MAX_PAYLOAD_BYTES}"):
        pair.submit(lease, notify=largest + b"n")
    monkeypatch.setattr(socket_sender, "MAX_JOBS", 0)
    with pytest.raises(TransportError, match="stopped, or overloaded"):
        pair.submit(lease)


def connections() -> int:
    """Ends, in this process, of connections to whoever listens in it: what else it has open,
    and other tests may have left, is not counted."""
    listening: set[object] = set()
    names: list[set[object]] = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(one.getsockname())
                    continue
                names.append({one.getsockname()})
                with contextlib.suppress(OSError):  # its other end is gone
                    names[-1].add(one.getpeername())
    return sum(bool(name & listening) for name in names)


def test_a_refused_connect_leaves_nothing(pair: Pair) -> None:
    """No descriptor, no thread: whatever went wrong."""
    good = pair.receiver.transport.descriptor()
    mine = decode(good, "socket")
    extra = EndpointDescriptor("socket", mine.incarnation, {**mine.regions, 99: 64}, mine.blob)
    before = connections()
    assert before > 0
    for _ in range(20):
        with pytest.raises(TransportError, match="stale descriptor"):
            sender(pair).connect(extra.encode())
    # The far end hangs up in its own time.
    pump(pair.receiver, until=lambda: connections() <= before)


def test_sessions_are_counted_and_the_oldest_in_use_is_named(pair: Pair) -> None:
    """What a receiver may drop: sessions that are not in use any more."""
    oldest = sender(pair)._sender._oldest
    first = pair.session.session_id
    target = pair.receiver.transport.incarnation
    assert oldest(target, 99) == first
    second = sender(pair).connect(pair.receiver.transport.descriptor())
    assert oldest(target, 99) == first
    sender(pair).disconnect(pair.session)
    assert oldest(target, 99) == second.session_id
    assert oldest(sender(pair).incarnation, 99) == 99
    pair.session = second
    finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64))))


def test_unknown_sessions_and_handles(pair: Pair) -> None:
    stranger = PeerSession(10**9, pair.session.incarnation)
    with pytest.raises(PeerGone, match="connect again"):
        sender(pair).submit(stranger, [], pair.lease())
    sender(pair).disconnect(stranger)
    sender(pair).cancel(10**9)


def with_secret(key: str | None) -> SocketTransport:
    return SocketTransport(Incarnation(os.urandom(16)), families=["tcp"], secret=key)


@pytest.mark.parametrize(
    ("mine", "theirs"), [(KEY, KEY[::-1]), (KEY, None), (None, KEY), (KEY, KEY)]
)
def test_only_who_knows_the_secret_is_let_in(mine: str | None, theirs: str | None) -> None:
    """Both ends must agree; a wrong secret is counted, and is no PeerGone, which would be
    tried again."""
    one, other = with_secret(mine), with_secret(theirs)
    try:
        other.allocate(64)
        if mine == theirs:
            one.connect(other.descriptor())
            return
        with pytest.raises(TransportError, match="authentication failed") as caught:
            one.connect(other.descriptor())
        assert not isinstance(caught.value, PeerGone)
        assert KEY not in str(caught.value)
        pump(Watched(other), until=lambda: other.counts.openings_failed == 1)
    finally:
        one.close()
        other.close()


def test_the_secret_never_crosses_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything either end says while they open, a transfer included."""
    said: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            said.append(bytes(data))
            super().sendall(data, flags)

        def sendmsg(self, buffers, *rest):  # type: ignore[no-untyped-def, override]
            said.extend(bytes(buffer) for buffer in buffers)
            return super().sendmsg(buffers, *rest)

    monkeypatch.setattr(socket, "socket", Recorded)
    with Pair(RegistryHarness("socket", families=["tcp"], secret=KEY)) as pair:
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64)), notify=b"n"))
    assert any(b"PDSO" in frame for frame in said)
    assert KEY.encode() not in b"".join(said)


@pytest.mark.parametrize(("family", "turns"), [("unix", 1000), ("tcp", 200)])
def test_a_thousand_sessions_leave_nothing(family: str, turns: int) -> None:
    """G7, beside a session that stays: connect, write, disconnect."""
    with Pair(RegistryHarness("socket", families=[family])) as pair:
        sessions_leave_nothing(pair, turns)


def sessions_leave_nothing(pair: Pair, turns: int) -> None:
    lease, descriptor = pair.lease(), pair.receiver.transport.descriptor()
    stays = pair.session
    before = Footprint.now()
    for turn in range(turns):
        pair.session = sender(pair).connect(descriptor)
        handle = pair.submit(lease, pair.batch((0, 0, 64)))
        if turn % 2:
            finish(pair, handle)
        sender(pair).disconnect(pair.session)
    record = pair.sender.record
    pump(pair.sender, pair.receiver, until=lambda: len(record.quiesced) == turns)
    pump(pair.sender, pair.receiver, until=lambda: Footprint.now() == before)
    pair.session = stays
    finish(pair, pair.submit(lease, pair.batch((0, 0, 64))))


def test_who_is_kept_out_of_af_unix_comes_in_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of two users, on one host: the nearest address is not theirs."""
    monkeypatch.setattr(socket_service, "credentials", lambda sock: (1, os.geteuid() + 1))
    with Pair(RegistryHarness("socket")) as pair:
        link = sender(pair)._sender._sessions[pair.session.session_id]
        assert link.sock.family == socket.AF_INET
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64))))
    monkeypatch.undo()
    with Pair(RegistryHarness("socket")) as pair:
        link = sender(pair)._sender._sessions[pair.session.session_id]
        assert link.sock.family == socket.AF_UNIX
