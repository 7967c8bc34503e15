"""What the end of a connection means for its transfers and its peer (G2)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import attrs
import pytest

from pdcore.transports.base import HandleStatus, PeerDied
from pdcore.transports.process_proof import open_pidfd, this_process
from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_address import Home, Origin, this_origin
from pdcore.transports.socket_bell import Inbox
from pdcore.transports.socket_book import Book, LinkEnd
from pdcore.transports.socket_greeting import Greeting, Identity
from pdcore.transports.socket_incoming import Incoming, IncomingCounts, Placing
from pdcore.transports.socket_links import Link, Told
from pdcore.transports.socket_outgoing import Ended, Job, Outgoing
from pdcore.transports.socket_poller import Poller
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_vector import Vector
from pdcore.types import Incarnation, LeaseId

PEER = Incarnation(b"p" * 16)
ME = Identity(Incarnation(b"m" * 16), b"")
HERE = this_origin()
ELSEWHERE = attrs.evolve(HERE, network=HERE.network + 1)


class Scene:
    def __init__(self) -> None:
        self.poller = Poller()
        self.inbox: Inbox[Told] = Inbox()
        self.book = Book(ME, HERE, self.poller, self.inbox)
        self.far: list[socket.socket] = []
        self.handles = 0

    def link(self, half: Outgoing | Incoming | Greeting, origin: Origin, number: int) -> Link:
        near, far = socket.socketpair()
        self.far.append(far)
        link = Link(near, half, FrameReader(()), PEER, Home(origin), number)
        self.book.links.add(link)
        return link

    def sender(self, origin: Origin = HERE, number: int = 1, begun: int = 1) -> Link:
        """A session with ``begun`` transfers under way and one that waits."""
        half = Outgoing()
        for i in range(begun + 1):
            self.handles += 1
            job = Job(self.handles, LeaseId(PEER, 1), iter([Vector([memoryview(b"kv")])]))
            half.add(job)
            if i < begun:
                half.next_frame()
                half.next_frame()
        return self.link(half, origin, number)

    def receiver(self, number: int = 1) -> Link:
        half = Incoming(RegionTable(), Placing(), IncomingCounts())
        return self.link(half, HERE, number)

    def told(self) -> list[tuple[int, bool] | str]:
        """(handle, quiesced) of transfers, the reason of deaths."""
        found: list[tuple[int, bool] | str] = []
        for one in self.inbox.drain():
            if isinstance(one, Ended):
                found.append((one.job.handle, one.quiesced))
            elif isinstance(one, PeerDied):
                assert one.fenced
                assert one.incarnation == PEER
                found.append(one.detail)
        return found

    def close(self) -> None:
        self.book.close()
        self.poller.close()
        self.inbox.close()
        for sock in self.far:
            sock.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    found = Scene()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("origin", "end", "quiesced"),
    [
        (HERE, LinkEnd.STREAM, True),
        (HERE, LinkEnd.ERROR, True),
        (HERE, LinkEnd.OURS, False),
        (ELSEWHERE, LinkEnd.STREAM, True),
        (ELSEWHERE, LinkEnd.ERROR, False),
        (ELSEWHERE, LinkEnd.OURS, False),
    ],
)
def test_what_an_end_proves(scene: Scene, origin: Origin, end: LinkEnd, quiesced: bool) -> None:
    """Only who knows that the receiver reads nothing more calls a transfer quiesced; one
    that never began is, in any case."""
    link = scene.sender(origin)
    scene.book.end(link, "broken", end)
    assert scene.told() == [(1, quiesced), (2, True)]
    scene.book.end(link, "again")
    assert scene.told() == []
    assert not link.is_open
    assert link.sock.fileno() == -1
    assert len(scene.book.links) == 0


def test_a_newer_session_settles_what_older_ones_owe(scene: Scene) -> None:
    """The receiver drops older sessions before it welcomes a newer one."""
    scene.book.end(scene.sender(ELSEWHERE, number=3), "cut", LinkEnd.ERROR)
    scene.book.end(scene.sender(ELSEWHERE, number=8), "cut", LinkEnd.ERROR)
    assert scene.told() == [(1, False), (2, True), (3, False), (4, True)]
    scene.book.debts.settle(PEER, 3)
    assert scene.told() == []
    scene.book.debts.settle(PEER, 8)
    assert scene.told() == [(1, True)]
    scene.book.debts.settle(PEER, 9)
    assert scene.told() == [(3, True)]
    scene.book.debts.settle(PEER, 10)
    assert scene.told() == []


def test_a_stalled_session_is_settled_by_the_end_of_its_stream(scene: Scene) -> None:
    link = scene.sender(ELSEWHERE)
    scene.book.give_up(link, "stalled", fenced=False)
    assert scene.told() == [(1, False), (2, True)]
    assert not link.is_open
    scene.book.end(link, "", LinkEnd.STREAM)
    assert scene.told() == [(1, True)]


def test_a_newer_session_settles_those_that_stalled_and_linger(scene: Scene) -> None:
    """G2: on a way that lets nothing through the end of a stream never comes; what was owed,
    and the descriptor, stayed for ten minutes and more."""
    stalled, open_, theirs = scene.sender(number=2), scene.sender(number=7), scene.receiver(3)
    scene.book.give_up(stalled, "stalled", fenced=False)
    assert scene.told() == [(1, False), (2, True)]
    scene.book.supersede(Incarnation(b"x" * 16), 9, Outgoing)
    assert scene.told() == []
    scene.book.supersede(PEER, 7, Outgoing)
    assert scene.told() == [(1, True)]
    assert stalled.sock.fileno() == -1
    assert open_.sock.fileno() >= 0
    assert theirs.sock.fileno() >= 0


def test_a_life_that_says_bye_is_over_with_its_last_connection(scene: Scene) -> None:
    """And what it owes is settled, and it is not watched any more."""
    scene.book.end(scene.sender(ELSEWHERE, number=1), "cut", LinkEnd.ERROR)
    one, other = scene.receiver(2), scene.sender(ELSEWHERE, number=3)
    scene.book.watch(one, open_pidfd(this_process()))
    scene.told()
    scene.book.said_bye(one)
    assert scene.told() == []
    scene.book.end(other, "reset", LinkEnd.ERROR)
    assert scene.told() == [
        (3, False),
        (4, True),
        (1, True),
        (3, True),
        "it closed its transport",
    ]


def test_a_lost_connection_is_no_death(scene: Scene) -> None:
    """Silence, and a broken connection, prove nothing about a process (D3)."""
    scene.book.end(scene.receiver(), "reset", LinkEnd.ERROR)
    assert scene.told() == []


def test_a_dead_process_ends_all_its_connections(scene: Scene) -> None:
    link, other = scene.receiver(1), scene.sender(ELSEWHERE, 2)
    read, write = os.pipe()  # readable at once: as a pidfd of a dead process
    os.close(write)
    scene.book.watch(link, read)
    assert scene.book.died(read)
    assert scene.told() == [(1, True), (2, True), "its process is dead"]
    assert link.sock.fileno() == other.sock.fileno() == -1
    assert not scene.book.died(read)
    scene.book.watch(link, -1)


def test_a_process_that_lives_is_not_dead_by_rumour(scene: Scene) -> None:
    """Of several descriptors that were ready at once, one is closed while another is served,
    and a pidfd takes its number: what was said of that number is not about the process."""
    link = scene.receiver()
    pidfd = open_pidfd(this_process())
    scene.book.watch(link, pidfd)
    assert scene.book.died(pidfd)
    assert scene.told() == []
    assert link.sock.fileno() >= 0
    assert scene.book.died(pidfd), "it is watched no more"


def test_older_sessions_of_a_caller_are_dropped(scene: Scene) -> None:
    old, new, ours = scene.receiver(1), scene.receiver(5), scene.sender(number=2)
    scene.book.supersede(PEER, 5, Incoming)
    assert old.sock.fileno() == -1
    assert new.sock.fileno() >= 0
    assert ours.sock.fileno() >= 0
    scene.book.supersede(Incarnation(b"x" * 16), 99, Incoming)
    assert new.sock.fileno() >= 0


def test_a_status_that_was_asked_for_stays(scene: Scene) -> None:
    """A cancelled transfer whose connection breaks is CANCELLED."""
    link = scene.sender(begun=0)
    assert isinstance(link.half, Outgoing)
    job = Job(9, LeaseId(PEER, 1), iter(()), stop=(HandleStatus.CANCELLED, "cancelled"))
    link.half.add(job)
    scene.book.end(link, "broken", LinkEnd.STREAM)
    last = scene.inbox.drain()[-1]
    assert isinstance(last, Ended)
    assert (last.job, last.status) == (job, HandleStatus.CANCELLED)
