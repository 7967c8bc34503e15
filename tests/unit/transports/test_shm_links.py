from __future__ import annotations

import gc
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdcore.transports.process_proof import ProcessKey, open_pidfd, start_ticks, this_process
from pdcore.transports.shm_links import (
    BYE,
    BellRang,
    FrameCame,
    Link,
    LinkEnded,
    LinkSet,
    ProcessDied,
    Signal,
)
from pdcore.transports.shm_wire import Kind, pack
from pdcore.types import Incarnation, LeaseId

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux")
THEM = Incarnation(b"t" * 16)


@pytest.fixture
def links() -> Iterator[LinkSet]:
    made = LinkSet()
    yield made
    made.close(None)


def add(links: LinkSet, key: ProcessKey | None = None) -> tuple[Link, socket.socket]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = key or this_process()
    link = Link(mine, THEM, process)
    links.add(link, open_pidfd(process))
    return link, theirs


def wait(links: LinkSet) -> list[Signal]:
    assert select.select([links.fileno()], [], [], 10)[0]
    return list(links.poll())


def test_the_bell(links: LinkSet) -> None:
    assert list(links.poll()) == []
    links.ring()
    links.ring()
    assert [type(signal) for signal in wait(links)] == [BellRang]
    assert not select.select([links.fileno()], [], [], 0)[0]


def test_frames_then_the_end(links: LinkSet) -> None:
    link, theirs = add(links)
    theirs.send(pack(Kind.NOTIFY, b"one"))
    theirs.send(BYE)
    theirs.close()
    signals = wait(links)
    assert [type(s) for s in signals] == [FrameCame, FrameCame, LinkEnded]
    assert [(s.kind, s.body) for s in signals if isinstance(s, FrameCame)] == [
        (Kind.NOTIFY, b"one"),
        (Kind.BYE, b""),
    ]
    assert not link.open
    assert links.links() == []
    links.drop(link)
    links.send(link, b"nobody hears this")


def test_nonsense_ends_the_link(links: LinkSet) -> None:
    link, theirs = add(links)
    theirs.send(b"nonsense")
    (signal,) = wait(links)
    assert isinstance(signal, LinkEnded)
    assert "nonsense" in signal.detail or "another protocol" in signal.detail
    assert theirs.recv(1) == b""
    theirs.close()
    assert not link.open


def test_a_peer_that_does_not_read_gets_its_frames_later_in_order(links: LinkSet) -> None:
    link, theirs = add(links)
    frames = [pack(Kind.NOTIFY, b"%d" % i) for i in range(2000)]
    for frame in frames:
        links.send(link, frame)
    assert link.outbox
    theirs.settimeout(10)
    got = []
    for _ in frames:
        got.append(theirs.recv(100))
        if link.outbox:
            list(links.poll())
    assert got == frames
    assert not link.outbox
    theirs.close()


def test_a_death_comes_after_what_was_sent_before_it(links: LinkSet) -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    _, theirs = add(links, ProcessKey(child.pid, start_ticks(child.pid)))
    theirs.send(pack(Kind.NOTIFY, b"last words"))
    child.kill()
    child.wait(10)
    assert child.stdin is not None
    child.stdin.close()
    signals = wait(links)
    assert isinstance(signals[0], FrameCame)
    assert isinstance(signals[-1], ProcessDied)
    assert list(links.poll()) == []
    theirs.close()


def test_one_pidfd_per_process_however_many_links(links: LinkSet) -> None:
    gc.collect()  # what other tests left must not go away in between
    before = len(os.listdir("/proc/self/fd"))
    made = [add(links) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 11
    for link, theirs in made:
        links.drop(link)
        theirs.close()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    links.forget(this_process(), THEM)
    links.forget(this_process(), THEM)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_remembered_is_bounded() -> None:
    link = Link(socket.socket(), THEM, this_process())
    for i in range(5000):
        link.note_revoked(LeaseId(THEM, i))
    assert len(link.revoked) == 4096
    assert LeaseId(THEM, 4999) in link.revoked
    link.sock.close()
