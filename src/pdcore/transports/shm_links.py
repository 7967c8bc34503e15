"""The open connections of a shm transport, and who is at their other ends.

One epoll descriptor covers all of it and is what ``fileno`` returns: the bell that our
own threads ring, every connection, and a pidfd per process we ever spoke with. All of
this runs in the owner's thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

import attrs

from pdcore.errors import TransportError
from pdcore.transports.process_proof import ProcessKey
from pdcore.transports.shm_attach import AttachedMemory
from pdcore.transports.shm_mover import Job
from pdcore.transports.shm_pages import PeerMemory
from pdcore.transports.shm_wire import MAX_FRAME_BYTES, Kind, pack, unpack
from pdcore.types import Incarnation, LeaseId

#: Frames a peer has not read; a sender that would exceed it is refused.
MAX_OUTBOX: Final = 4096
#: Frames taken from one peer per poll, so that none starves the rest.
_FRAMES_PER_POLL: Final = 256
#: Incarnations remembered per process, and revoked leases per link; oldest go first.
_MAX_REMEMBERED: Final = 4096


@attrs.define(eq=False)
class Link:
    """One connection. ``memory`` and ``sizes`` (by region id) are the peer's regions when
    we are the sender, empty when we are the receiver; ``refused`` says of those that we
    cannot write why."""

    sock: socket.socket
    incarnation: Incarnation
    process: ProcessKey
    memory: dict[int, PeerMemory | AttachedMemory] = attrs.field(factory=dict, repr=False)
    sizes: dict[int, int] = attrs.field(factory=dict, repr=False)
    refused: dict[int, str] = attrs.field(factory=dict, repr=False)
    outbox: deque[bytes] = attrs.field(factory=deque, repr=False)
    jobs: dict[int, Job] = attrs.field(factory=dict, repr=False)
    revoked: OrderedDict[LeaseId, None] = attrs.field(factory=OrderedDict, repr=False)
    open: bool = True

    def note_revoked(self, lease: LeaseId) -> None:
        self.revoked[lease] = None
        if len(self.revoked) > _MAX_REMEMBERED:
            self.revoked.popitem(last=False)


@attrs.define(eq=False)
class _Watch:
    pidfd: int
    incarnations: OrderedDict[Incarnation, None] = attrs.field(factory=OrderedDict)


@attrs.frozen(eq=False)
class FrameCame:
    link: Link
    kind: Kind
    body: bytes


@attrs.frozen(eq=False)
class LinkEnded:
    """The connection is over; the process behind it may be alive."""

    link: Link
    detail: str


@attrs.frozen(eq=False)
class ProcessDied:
    incarnation: Incarnation


@attrs.frozen(eq=False)
class BellRang:
    pass


Signal = FrameCame | LinkEnded | ProcessDied | BellRang


class LinkSet:
    """Owns every descriptor it is given."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._links: dict[int, Link] = {}
        self._watches: dict[ProcessKey, _Watch] = {}

    def ring(self) -> None:
        """From any thread."""
        os.eventfd_write(self._bell, 1)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def links(self) -> list[Link]:
        return list(self._links.values())

    def add(self, link: Link, pidfd: int) -> None:
        link.sock.setblocking(False)
        self._links[link.sock.fileno()] = link
        self._epoll.register(link.sock.fileno(), select.EPOLLIN)
        watch = self._watches.get(link.process)
        if watch is None:
            watch = self._watches[link.process] = _Watch(pidfd)
            self._epoll.register(pidfd, select.EPOLLIN)
        else:
            os.close(pidfd)
        watch.incarnations[link.incarnation] = None
        if len(watch.incarnations) > _MAX_REMEMBERED:
            watch.incarnations.popitem(last=False)

    def send(self, link: Link, frame: bytes) -> None:
        """Now, or as soon as the peer reads; quietly lost when the link is over."""
        if not link.open:
            return
        if link.outbox or not _send(link, frame):
            link.outbox.append(frame)
            self._epoll.modify(link.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def drop(self, link: Link) -> None:
        """Close a connection; its process stays under watch. Idempotent."""
        if link.open:
            link.open = False
            del self._links[link.sock.fileno()]
            self._epoll.unregister(link.sock.fileno())
            link.sock.close()
            link.outbox.clear()

    def forget(self, process: ProcessKey, incarnation: Incarnation) -> None:
        """Stop watching for the death of an incarnation that ended in order."""
        watch = self._watches.get(process)
        if watch is None:
            return
        watch.incarnations.pop(incarnation, None)
        if not watch.incarnations:
            del self._watches[process]
            self._epoll.unregister(watch.pidfd)
            os.close(watch.pidfd)

    def poll(self) -> Iterator[Signal]:
        """What is ready now. What a process sent before it died comes before its death."""
        ready = self._epoll.poll(0)
        dead: list[ProcessKey] = []
        for fd, mask in ready:
            if fd == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                yield BellRang()
            elif fd in self._links:
                yield from self._serve(self._links[fd], mask)
            else:
                dead += [key for key, watch in self._watches.items() if watch.pidfd == fd]
        for key in dead:
            yield from self._bury(key)

    def close(self, farewell: bytes | None, *, keep_bell: bool = False) -> None:
        """Say ``farewell`` to everybody who listens, and close all descriptors."""
        for link in self.links():
            if farewell is not None and not link.outbox:
                _send(link, farewell)
            self.drop(link)
        self.abandon(keep_bell=keep_bell)

    def abandon(self, *, keep_bell: bool = False) -> None:
        """Close the descriptors without a word. After a fork the epoll object is shared
        with the parent: nothing may be unregistered from it."""
        for link in self.links():
            link.open = False
            link.sock.close()
        self._links.clear()
        for watch in self._watches.values():
            os.close(watch.pidfd)
        self._watches.clear()
        self._epoll.close()
        if not keep_bell:
            os.close(self._bell)

    def _serve(self, link: Link, mask: int) -> Iterator[Signal]:
        if mask & select.EPOLLOUT:
            while link.outbox and _send(link, link.outbox[0]):
                link.outbox.popleft()
            if not link.outbox:
                self._epoll.modify(link.sock.fileno(), select.EPOLLIN)
        if mask & ~select.EPOLLOUT:
            yield from self._receive(link, _FRAMES_PER_POLL)

    def _receive(self, link: Link, limit: int) -> Iterator[Signal]:
        for _ in range(limit):
            if not link.open:
                return
            try:
                frame = link.sock.recv(MAX_FRAME_BYTES + 1)
                kind, body = unpack(frame) if frame else (None, b"")
            except BlockingIOError:
                return
            except (OSError, TransportError) as error:
                kind, body = None, str(error).encode()
            if kind is None:
                self.drop(link)
                yield LinkEnded(link, body.decode(errors="replace") or "the peer hung up")
                return
            yield FrameCame(link, kind, body)

    def _bury(self, key: ProcessKey) -> Iterator[Signal]:
        for link in [link for link in self.links() if link.process == key]:
            # The end of a dead process's connection is certain to come.
            yield from self._receive(link, 1 << 20)
            if link.open:
                self.drop(link)
                yield LinkEnded(link, "its process is dead")
        watch = self._watches.pop(key, None)
        if watch is not None:
            self._epoll.unregister(watch.pidfd)
            os.close(watch.pidfd)
            for incarnation in watch.incarnations:
                yield ProcessDied(incarnation)


def _send(link: Link, frame: bytes) -> bool:
    """False when the peer's queue is full. A broken connection swallows frames; its end
    is read soon."""
    try:
        link.sock.send(frame, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


BYE: Final = pack(Kind.BYE)
DISCONNECT: Final = pack(Kind.DISCONNECT)
