"""One thread, many connections: nobody waits for anybody else (D23), and a revoke only for
the step that is being done."""

from __future__ import annotations

import socket
import sys
import threading
import time
import zlib
from types import SimpleNamespace

import pytest

from pdcore.errors import TransportError
from pdcore.testing.transport_checks_data import MIB, finish
from pdcore.testing.transport_harness import Pair, RegistryHarness, make_batch, make_lease
from pdcore.testing.transport_watch import Watched, is_zero, pump, same, settle
from pdcore.transports import socket_links, socket_loop, socket_service
from pdcore.transports.base import HandleStatus, Transport
from pdcore.transports.socket import SocketTransport
from pdcore.transports.socket_links import Link
from pdcore.types import Incarnation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket is Linux")


class Held:
    """A transport whose thread stands still until it is let go, as that of a stopped
    process does."""

    def __init__(self, transport: Transport) -> None:
        assert isinstance(transport, SocketTransport)
        self._gate = threading.Event()
        stands = threading.Event()

        def stand() -> None:
            stands.set()
            self._gate.wait(60)

        transport._loop._call(stand)
        assert stands.wait(10)

    def let_go(self) -> None:
        self._gate.set()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


@pytest.fixture(params=["unix", "tcp"])
def harness(request: pytest.FixtureRequest) -> RegistryHarness:
    return RegistryHarness("socket", families=[request.param], stall_timeout_s=30.0)


def slow_peer_holds_up_nobody(harness: RegistryHarness, timeout_s: float) -> None:
    """32 MiB for a receiver that reads nothing; transfers to another one, more of them than
    the kernel takes turns of the first, end all the same."""
    size = 32 * MIB
    with Pair(harness, size) as pair, Held(pair.receiver.transport) as held:
        good = Watched(harness.create())
        try:
            target = good.transport.allocate(4096)
            sender = pair.sender.transport
            session = sender.connect(good.transport.descriptor())
            slow = pair.submit(pair.lease(), pair.batch((0, 0, size)))
            lease = make_lease(good.transport.incarnation, 1, {target.region_id: [(0, 4096)]})
            good.transport.grant(lease)
            batch = make_batch(pair.source, target, (0, 0, 4096))
            ended = pair.sender.record.quiesced
            for _ in range(40):
                quick = sender.submit(session, [batch], lease, b"quick")
                pump(pair.sender, good, until=lambda one=quick: one in ended, timeout_s=timeout_s)
            assert slow not in ended
            held.let_go()
            finish(pair, slow)
        finally:
            held.let_go()
            good.transport.close()


def test_a_slow_peer_holds_up_nobody(harness: RegistryHarness) -> None:
    """D23: the seed had four threads that any four slow transfers occupied."""
    slow_peer_holds_up_nobody(harness, 10.0)


class Waits(socket_service.Service):
    """The seed's rule: a call that does not return before the peer has taken everything."""

    def send(self, link: Link) -> None:
        link.sock.setblocking(True)
        super().send(link)
        link.sock.setblocking(False)


def test_the_check_finds_who_waits(
    harness: RegistryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D23: the check fails on a mutant that waits."""
    monkeypatch.setattr(socket_loop, "Service", Waits)
    monkeypatch.setattr(socket_service, "_DONTWAIT", socket.MSG_NOSIGNAL)
    monkeypatch.setattr(socket_service, "_BYTES_PER_TURN", 1 << 40)
    with pytest.raises(AssertionError):
        slow_peer_holds_up_nobody(harness, 0.5)


def test_a_stopped_peer_is_given_up_and_not_called_dead(harness: RegistryHarness) -> None:
    """Own deadline: transfers fail when nothing moves. They are quiesced only when it is
    known that nothing of them lands any more (G2)."""
    harness.options["stall_timeout_s"] = 0.3
    size = 32 * MIB
    with Pair(harness, size) as pair, Held(pair.receiver.transport) as held:
        lease = pair.lease()
        begun, waiting = (pair.submit(lease, pair.batch((0, 0, size))) for _ in range(2))
        record = pair.sender.record
        pump(pair.sender, until=lambda: len(record.ended) == 2)
        assert set(record.ended.values()) == {HandleStatus.FAILED}
        assert record.quiesced == {waiting}, "bytes of the first one are on their way"
        held.let_go()
        pump(pair.sender, until=lambda: begun in record.quiesced)
        after = zlib.crc32(pair.target.buffer)
        settle(pair.sender, pair.receiver, quiet_s=0.05)
        assert zlib.crc32(pair.target.buffer) == after
        assert not record.deaths
        pair.session = pair.sender.transport.connect(pair.receiver.transport.descriptor())
        finish(pair, pair.submit(lease, pair.batch((0, 0, 4096))))


def test_a_sender_that_was_stopped_itself_does_not_blame_its_peers(
    harness: RegistryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that went on while this process was stopped says nothing about anybody."""
    harness.options["stall_timeout_s"] = 2.0
    size = 32 * MIB
    with Pair(harness, size) as pair, Held(pair.receiver.transport) as held:
        sender = pair.sender.transport
        assert isinstance(sender, SocketTransport)
        handle = pair.submit(pair.lease(), pair.batch((0, 0, size)))
        settle(pair.sender, quiet_s=0.1)
        wait = sender._loop._poller.wait
        skipped = [0.0]

        def stopped(timeout_s: float | None) -> list[tuple[int, bool, bool]]:
            found = wait(timeout_s)
            skipped[0] += 60.0
            return found

        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped[0])
        monkeypatch.setattr(sender._loop._poller, "wait", stopped)
        for module in (socket_loop, socket_links):
            monkeypatch.setattr(module, "time", clock)
        pump(pair.sender, until=lambda: skipped[0] > 180.0)
        assert handle not in pair.sender.record.ended
        monkeypatch.undo()
        held.let_go()


def test_a_session_without_work_is_never_given_up(harness: RegistryHarness) -> None:
    harness.options["stall_timeout_s"] = 0.05
    with Pair(harness) as pair:
        settle(pair.sender, pair.receiver, quiet_s=0.4)
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 4096))))


def test_a_revoke_is_at_once_while_bytes_pour_in(harness: RegistryHarness) -> None:
    """RECEIVER_ENFORCED: from the moment ``revoke`` returns no byte of the lease lands,
    whatever the thread was doing; other leases are written on."""
    size = 16 * MIB
    with Pair(harness, size) as pair:
        half = size // 2
        for _ in range(5):
            revoke_one_of_two(pair, half, size)


def revoke_one_of_two(pair: Pair, half: int, size: int) -> None:
    receiver, ended = pair.receiver.transport, pair.sender.record
    assert isinstance(receiver, SocketTransport)
    first, second = pair.lease((0, half)), pair.lease((half, size))
    before = receiver.counts.bytes_placed
    one = pair.submit(first, pair.batch((0, 0, half)))
    two = pair.submit(second, pair.batch((half, half, half)))
    pump(pair.receiver, until=lambda: receiver.counts.bytes_placed > before)
    assert receiver.revoke(first.lease)
    pair.target.buffer[:half] = bytes(half)
    pump(pair.sender, pair.receiver, until=lambda: ended.quiesced >= {one, two})
    assert is_zero(pair.target.buffer[:half])
    assert ended.ended[two] is HandleStatus.DONE
    assert same(pair.target.buffer[half:], pair.source.buffer[half:])
    for lease in (first, second):
        receiver.release(lease.lease)


def test_the_owner_that_does_not_poll_is_not_flooded(
    harness: RegistryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded memory: when the inbox is full nothing more is read from senders, until the
    owner has polled; and nothing is lost."""
    from pdcore.transports import socket, socket_table

    for module in (socket, socket_table):
        monkeypatch.setattr(module, "MAX_TOLD", 8)
    with Pair(harness) as pair:
        lease = pair.lease()
        handles = [pair.submit(lease, notify=b"%d" % i) for i in range(500)]
        settle(pair.sender, quiet_s=0.1)
        inbox = pair.receiver.transport
        assert isinstance(inbox, SocketTransport)
        assert len(inbox._inbox) < 100
        finish(pair, *handles)
        pump(pair.receiver, until=lambda: len(pair.receiver.record.notes) == 500)
        assert pair.receiver.record.payloads == [b"%d" % i for i in range(500)]


@pytest.fixture
def closed() -> SocketTransport:
    transport = RegistryHarness("socket").create()
    assert isinstance(transport, SocketTransport)
    transport.descriptor()
    transport.close()
    return transport


def test_after_the_end_calls_are_harmless(closed: SocketTransport) -> None:
    closed._loop.resume()
    closed._loop.settle(make_lease(closed.incarnation, 1, {}).lease)
    assert closed._loop.close(1.0)


def test_a_bug_in_the_thread_ends_everything_loudly_and_hangs_nobody(
    harness: RegistryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever raises there: handles end, callers are not left waiting, later submits end."""
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    with Pair(harness, 32 * MIB) as pair:
        with Held(pair.receiver.transport):
            handle = pair.submit(pair.lease(), pair.batch((0, 0, 32 * MIB)))
            sender = pair.sender.transport
            assert isinstance(sender, SocketTransport)
            sender._loop._call(lambda: 1 // 0)
            record = pair.sender.record
            pump(pair.sender, until=lambda: handle in record.ended)
            assert record.ended[handle] is HandleStatus.FAILED
        left = sender.close()
        assert left == [f"handle {handle}: may still land"]
        assert len(reported) == 1


def test_without_a_thread_it_says_so_and_the_next_try_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but TransportError, and no listener is left open (G7)."""
    transport = SocketTransport(Incarnation(b"u" * 16))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransportError, match="at its limits"):
            transport.descriptor()
    transport.descriptor()
    assert transport.close() == []
