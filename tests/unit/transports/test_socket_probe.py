"""A process of another host is dead by proof only: what its address answers (D3)."""

from __future__ import annotations

import errno
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pdcore.errors import TransportError
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import Watched, pump
from pdcore.transports import socket_probe
from pdcore.transports.socket import SocketTransport
from pdcore.transports.socket_address import TCP, Address, Origin, listen_tcp
from pdcore.transports.socket_book import Book, LinkEnd
from pdcore.transports.socket_greeting import Identity
from pdcore.transports.socket_poller import Poller
from pdcore.transports.socket_probe import MAX_PROBES, Probes
from pdcore.transports.socket_wire import Kind, pack, pack_challenge
from pdcore.types import Incarnation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket is Linux")
US, PEER = Incarnation(b"u" * 16), Incarnation(b"p" * 16)


class Scene:
    """Probes with a loop of their own, and a peer whose address does what a test says."""

    def __init__(self) -> None:
        self.poller = Poller()
        self.dead: list[tuple[Incarnation, str]] = []
        self.probes = Probes(
            Identity(US, b""), self.poller, lambda life, why: self.dead.append((life, why))
        )
        self.listener, self.address = listen_tcp("127.0.0.1")

    def run(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not until():
            assert time.monotonic() < deadline, "nothing was found out"
            for fd, _, _ in self.poller.wait(0.01):
                assert self.probes.serve(fd)
            self.probes.expire(time.monotonic())

    def answer(self, frame: bytes) -> None:
        """The next caller hears this after its HELLO."""
        assert select.select([self.listener], [], [], 5)[0]
        sock, _ = self.listener.accept()
        with sock:
            self.run(lambda: bool(select.select([sock], [], [], 0)[0]))
            assert sock.recv(4096)[4:6] == bytes([1, Kind.HELLO])
            sock.sendall(frame)

    def close(self) -> None:
        self.probes.close()
        self.poller.close()
        self.listener.close()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(socket_probe, "FIRST_PAUSE_S", 0.01)
    found = Scene()
    yield found
    found.close()


def test_who_listens_no_more_is_dead(scene: Scene) -> None:
    scene.listener.close()
    scene.probes.start(PEER, scene.address)
    scene.run(lambda: bool(scene.dead))
    assert scene.dead == [(PEER, f"nobody listens at {scene.address} any more")]
    assert len(scene.probes) == 0


def test_another_life_at_its_address_proves_that_it_is_over(scene: Scene) -> None:
    scene.probes.start(PEER, scene.address)
    scene.answer(pack(Kind.STALE))
    scene.run(lambda: bool(scene.dead))
    assert "another process life" in scene.dead[0][1]


def test_who_answers_lives(scene: Scene) -> None:
    """It lost a connection, no more."""
    scene.probes.start(PEER, scene.address)
    scene.answer(pack(Kind.CHALLENGE, pack_challenge(b"n" * 32, has_secret=True)))
    scene.run(lambda: len(scene.probes) == 0)
    assert scene.dead == []


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_no_answer_is_no_proof(scene: Scene, said: bytes) -> None:
    """Whoever hangs up or talks nonsense is asked again, and again."""
    scene.probes.start(PEER, scene.address)
    for _ in range(3):
        scene.answer(said)
        scene.run(lambda: bool(select.select([scene.listener], [], [], 0)[0]))
    assert scene.dead == []
    assert len(scene.probes) == 1


def test_silence_is_no_proof(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process accepts, by its kernel, and says nothing."""
    monkeypatch.setattr(socket_probe, "ANSWER_S", 0.01)
    scene.probes.start(PEER, scene.address)
    for _ in range(3):
        scene.run(lambda: bool(select.select([scene.listener], [], [], 0)[0]))
        scene.listener.accept()[0].close()
    assert scene.dead == []


@pytest.mark.parametrize("failed", [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT])
def test_an_unreachable_host_is_no_proof(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    """A cable was pulled: the process behind it may live. Asked until it is given up."""
    asked: list[object] = []

    class Cut(socket.socket):
        def connect_ex(self, at: object, /) -> int:
            asked.append(at)
            return failed

    monkeypatch.setattr(socket_probe.socket, "socket", Cut)
    scene.probes.start(PEER, scene.address)
    scene.run(lambda: len(asked) >= 4)
    assert len(scene.probes) == 1
    scene.probes.expire(time.monotonic() + socket_probe.GIVE_UP_S + 1)
    assert len(scene.probes) == 0
    assert scene.dead == []


def test_questions_are_bounded_and_asked_once_for_each_life(scene: Scene) -> None:
    for i in range(MAX_PROBES + 3):
        life = Incarnation(i.to_bytes(16, "little"))
        # Port 0 is nobody's; not an address that could be asked.
        scene.probes.start(life, Address(TCP, "not numeric"))
        scene.probes.start(life, Address(TCP, "not numeric"))
    assert len(scene.probes) == MAX_PROBES
    scene.probes.stop(Incarnation(bytes(16)))
    scene.probes.stop(Incarnation(bytes(16)))
    assert len(scene.probes) == MAX_PROBES - 1


# --- the transport, told that the other process is on another host ----------------------------


@pytest.fixture
def far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the network says anything about the peer."""
    monkeypatch.setattr(Origin, "sees_process_of", lambda self, other: False)
    monkeypatch.setattr(Origin, "shares_network_with", lambda self, other: False)
    monkeypatch.setattr(socket_probe, "FIRST_PAUSE_S", 0.02)


@pytest.mark.usefixtures("far_apart")
@pytest.mark.parametrize("part", ["sender", "receiver"])
def test_the_death_of_a_process_on_another_host_is_seen(part: str) -> None:
    harness = RegistryHarness("socket", families=["tcp"])
    mine = Watched(harness.create())
    peer = harness.peer()
    try:
        mine.transport.allocate(4096)
        peer.allocate(4096)
        if part == "sender":
            peer.connect(mine.transport.descriptor())
        else:
            mine.transport.connect(peer.descriptor())
        peer.kill()
        pump(mine, until=lambda: bool(mine.record.deaths))
        (death,) = mine.record.deaths
        assert (death.incarnation, death.fenced) == (peer.incarnation, True)
        assert "nobody listens" in death.detail
    finally:
        mine.transport.close()
        peer.close()


def a_cut_connection_is_no_death() -> None:
    """Transfers end with the connection, unquiesced; the same process life goes on with a
    new session, before which its receiver has dropped the old one."""
    size = 32 << 20
    with Pair(RegistryHarness("socket", families=["tcp"]), size) as pair:
        sender, receiver = pair.sender.transport, pair.receiver.transport
        assert isinstance(sender, SocketTransport)
        assert isinstance(receiver, SocketTransport)
        gate = threading.Event()
        receiver._loop._call(lambda: gate.wait(30) and None)
        try:
            lease = pair.lease()
            handle = pair.submit(lease, pair.batch((0, 0, size)))
            link = sender._sender._sessions[pair.session.session_id]
            book = sender._loop._book
            # As a reset from something on the way, which the receiver has not seen.
            sender._loop._call(lambda: book.end(link, "reset", LinkEnd.ERROR))
            record = pair.sender.record
            pump(pair.sender, until=lambda: handle in record.ended)
            assert handle not in record.quiesced
            assert not record.deaths
        finally:
            gate.set()
        pair.session = sender.connect(receiver.descriptor())
        pump(pair.sender, pair.receiver, until=lambda: handle in record.quiesced)
        finish(pair, pair.submit(lease, pair.batch((0, 0, 4096))))
        pump(pair.sender, until=lambda: len(book.probes) == 0)
        assert not record.deaths
        assert not pair.receiver.record.deaths


@pytest.mark.usefixtures("far_apart")
def test_a_cut_connection_is_no_death_and_a_new_one_settles_the_old() -> None:
    """D3, G2: silence and a broken connection free nothing."""
    a_cut_connection_is_no_death()


@pytest.mark.usefixtures("far_apart")
def test_the_check_finds_who_takes_a_broken_connection_for_a_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D3: the seed freed what a writer that it no longer heard might still write."""
    monkeypatch.setattr(Book, "ask_after", lambda self, link: self.bury(link.incarnation, "gone"))
    with pytest.raises((AssertionError, TransportError)):
        a_cut_connection_is_no_death()


@pytest.mark.usefixtures("far_apart")
def test_who_was_found_dead_is_not_let_in_any_more() -> None:
    """Should the proof be wrong, the fence still holds: nothing of that life lands."""
    with Pair(RegistryHarness("socket", families=["tcp"])) as pair:
        receiver, sender = pair.receiver.transport, pair.sender.transport
        assert isinstance(receiver, SocketTransport)
        book = receiver._loop._book
        receiver._loop._call(lambda: book.bury(sender.incarnation, "a firewall refused"))
        pump(pair.sender, pair.receiver, until=lambda: bool(pair.receiver.record.deaths))
        with pytest.raises(TransportError, match="found dead"):
            sender.connect(receiver.descriptor())
