from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_greeting import Greeting, Identity
from pdcore.transports.socket_incoming import Incoming, IncomingCounts, Placing
from pdcore.transports.socket_links import MAX_REPLIES, Link
from pdcore.transports.socket_outgoing import Job, Outgoing
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_vector import Vector
from pdcore.types import Incarnation, LeaseId

US = Incarnation(b"u" * 16)


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    one, other = socket.socketpair()
    yield one
    one.close()
    other.close()


def link_of(sock: socket.socket, half: Outgoing | Incoming | Greeting) -> Link:
    return Link(sock, half, FrameReader(()))


def test_a_sender_wants_to_send_while_it_has_transfers(sock: socket.socket) -> None:
    half = Outgoing()
    link = link_of(sock, half)
    assert not link.wants_to_send
    half.add(Job(1, LeaseId(US, 1), iter(())))
    assert link.wants_to_send
    assert link.may_read
    link.is_mute = True
    assert not link.wants_to_send


def test_a_receiver_wants_to_send_its_answers_and_stops_reading_for_them(
    sock: socket.socket,
) -> None:
    """Bounded: who never reads its answers is not read from any more."""
    half = Incoming(RegionTable(), Placing(), IncomingCounts())
    link = link_of(sock, half)
    assert not link.wants_to_send
    half.replies.append(b"ack")
    assert link.wants_to_send
    assert link.may_read
    link.out.extend(Vector([memoryview(b"ack")]) for _ in range(MAX_REPLIES - 1))
    assert not link.may_read


def test_a_caller_wants_to_hear_its_answer(sock: socket.socket) -> None:
    link = link_of(sock, Greeting(Identity(US, b"")))
    assert not link.wants_to_send
    link.out.append(Vector([memoryview(b"challenge")]))
    assert link.wants_to_send


def test_only_transfers_that_wait_are_stalled(sock: socket.socket) -> None:
    """A connection without work may be silent for ever: it is not dead for that."""
    half = Outgoing()
    link = link_of(sock, half)
    later = link.moved_s + 31
    assert not link.is_stalled(later, 30)
    half.add(Job(1, LeaseId(US, 1), iter(())))
    assert link.is_stalled(later, 30)
    assert not link.is_stalled(later - 2, 30)


def test_an_idle_connection_needs_no_clock(sock: socket.socket) -> None:
    """D46: a transport without work sleeps until something happens."""
    half = Outgoing()
    link = link_of(sock, half)
    assert not link.has_deadline
    half.add(Job(1, LeaseId(US, 1), iter(())))
    assert link.has_deadline
    receiver = link_of(sock, Incoming(RegionTable(), Placing(), IncomingCounts()))
    assert not receiver.has_deadline
    receiver.is_mute = True
    assert receiver.has_deadline
    assert link_of(sock, Greeting(Identity(US, b""))).has_deadline
