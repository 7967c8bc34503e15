from __future__ import annotations

import select
import socket
import sys
from collections.abc import Iterator

import pytest

from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_bell import Inbox
from pdcore.transports.socket_greeting import Greeting, Identity
from pdcore.transports.socket_incoming import Incoming, IncomingCounts, Placing
from pdcore.transports.socket_links import Link, NoteCame, Told
from pdcore.transports.socket_outgoing import Outgoing
from pdcore.transports.socket_poller import Poller
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_table import MAX_CALLERS, MAX_LINKS, MAX_TOLD, LinkTable
from pdcore.transports.socket_wire import Hello, pack_hello
from pdcore.types import Incarnation, LeaseId

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux")
US = Incarnation(b"u" * 16)


class Scene:
    def __init__(self) -> None:
        self.poller = Poller()
        self.inbox: Inbox[Told] = Inbox()
        self.table = LinkTable(self.poller, self.inbox)
        self.far: list[socket.socket] = []

    def link(self, half: Outgoing | Incoming | Greeting) -> Link:
        near, far = socket.socketpair()
        self.far.append(far)
        link = Link(near, half, FrameReader(()))
        self.table.add(link)
        return link

    def receiver(self) -> Link:
        return self.link(Incoming(RegionTable(), Placing(), IncomingCounts()))


@pytest.fixture
def scene() -> Iterator[Scene]:
    found = Scene()
    yield found
    for link in found.table:
        assert found.table.remove(link)
    found.poller.close()
    found.inbox.close()
    for sock in found.far:
        sock.close()


def test_links_are_found_and_removed_once(scene: Scene) -> None:
    link = scene.receiver()
    fd = link.sock.fileno()
    assert scene.table.find(fd) is link
    assert list(scene.table) == [link]
    assert scene.table.remove(link)
    assert not scene.table.remove(link)
    assert scene.table.find(fd) is None
    assert len(scene.table) == 0
    scene.table.refresh(link)


def test_a_full_inbox_stops_the_reading_of_senders_only(scene: Scene) -> None:
    """Bounded: the owner of a busy worker may not poll for long. What senders of our own
    hear back is bounded by what they asked."""
    receiver, sender = scene.receiver(), scene.link(Outgoing())
    for sock in scene.far:
        sock.send(b"x")
    assert len(scene.poller.wait(0)) == 2
    note = NoteCame(US, LeaseId(US, 1), b"")
    scene.inbox.put(*[note] * MAX_TOLD)
    for link in scene.table:
        scene.table.refresh(link)
    assert scene.poller.wait(0) == [(sender.sock.fileno(), True, False)]
    scene.inbox.drain()
    scene.table.refresh(receiver)
    assert len(scene.poller.wait(0)) == 2
    assert not select.select([scene.inbox.fileno()], [], [], 0)[0]


def test_callers_are_bounded(scene: Scene) -> None:
    for _ in range(MAX_CALLERS):
        assert scene.table.has_room()
        scene.link(Greeting(Identity(US, b"")))
    assert not scene.table.has_room()
    assert MAX_LINKS > MAX_CALLERS


def test_of_silent_callers_the_first_is_found(scene: Scene) -> None:
    assert scene.table.longest_silent() is None
    scene.receiver()
    first = scene.link(Greeting(Identity(US, b"")))
    second = scene.link(Greeting(Identity(US, b"")))
    assert scene.table.longest_silent() is first
    assert isinstance(first.half, Greeting)
    said = pack_hello(Hello(US, US, 1, 1, b"n" * 32))
    first.half.challenge(said)
    assert scene.table.longest_silent() is second
