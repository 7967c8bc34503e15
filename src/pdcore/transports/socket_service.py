"""Turns: what one connection may do when its descriptor is ready, and no more than that.

A turn moves about a chunk and never blocks. Whatever a peer does wrong ends its connection,
counted, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

import attrs

from pdcore.errors import TransportError
from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_address import Origin, credentials, decode_home, tune
from pdcore.transports.socket_book import Book, LinkEnd
from pdcore.transports.socket_greeting import Greeting, Identity, Published, pack_refusal
from pdcore.transports.socket_incoming import Incoming, IncomingCounts, Placing
from pdcore.transports.socket_links import Link, NoteCame
from pdcore.transports.socket_outgoing import Outgoing
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_vector import Vector
from pdcore.transports.socket_wire import (
    FROM_SENDER,
    Kind,
    pack_revoke,
    unpack_answer,
    unpack_revoke,
)
from pdcore.transports.socket_witness import open_proof
from pdcore.types import LeaseId

#: A caller that has not been welcomed is dropped after this long.
HELLO_TIMEOUT_S: Final = 2.0
#: A connection over which everything was said: how long the peer's end is waited for.
LINGER_S: Final = 600.0
_FRAMES_PER_TURN: Final = 64
_BYTES_PER_TURN: Final = 1 << 20
#: Frames are sent one call each, unless they are smaller than this together.
_BYTES_TOGETHER: Final = 1 << 16
_DONTWAIT: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT


@attrs.define
class SocketCounts(IncomingCounts):
    """``openings_failed``: openings that failed, a wrong secret among the reasons;
    ``peers_dropped``: connections ended because a peer sent nonsense; ``links_stalled``:
    sessions given up because nothing moved; ``callers_turned_away``: too many at once."""

    openings_failed: int = 0
    callers_turned_away: int = 0
    peers_dropped: int = 0
    links_stalled: int = 0


class Service:
    """Used by the transport's thread only; but ``recalled`` is changed by the owner's, and read
    here as a whole, at once: leases that senders are asked to stop, the oldest first."""

    def __init__(
        self,
        me: Identity,
        here: Origin,
        regions: RegionTable,
        published: Callable[[], Published],
        book: Book,
    ) -> None:
        self.counts = SocketCounts()
        self.placing = Placing()
        self.recalled: dict[LeaseId, None] = {}
        self._me = me
        self._here = here
        self._regions = regions
        self._published = published
        self._book = book

    def admit(self, sock: socket.socket) -> None:
        """A caller has connected."""
        links = self._book.links
        if not links.has_room() and (silent := links.longest_silent()) is not None:
            self._lose(silent, "it says nothing, and others wait", LinkEnd.OURS)
        if not links.has_room():
            self.counts.callers_turned_away += 1
            sock.close()
            return
        with contextlib.suppress(OSError):
            tune(sock)
        links.add(Link(sock, Greeting(self._me), FrameReader((Kind.HELLO,))))

    def serve(self, link: Link, *, readable: bool, writable: bool) -> None:
        """One turn."""
        try:
            if writable and link.wants_to_send:
                self.send(link)
            if readable:
                self._receive(link)
        except BlockingIOError:
            pass
        except EOFError as error:
            self._lose(link, f"the peer hung up {error}".rstrip(), LinkEnd.STREAM)
        except TransportError as error:
            self._drop(link, error)
        except OSError as error:
            self._lose(link, f"the connection broke: {error.strerror}", LinkEnd.ERROR)
        self._book.links.refresh(link)

    def send(self, link: Link) -> None:
        """Send what may go out now; quietly, because a broken connection is noticed by who
        reads what the peer said before."""
        budget = _BYTES_PER_TURN
        while budget > 0 and (link.out or self._load(link)):
            vector = link.out[0]
            try:
                sent = link.sock.sendmsg(vector.window(), (), _DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._book.mute(link)
                return
            vector.advance(sent)
            budget -= sent
            link.moved()
            if not vector.left:
                link.out.popleft()
        if isinstance(link.half, Outgoing) and link.half.is_over and not link.out:
            self._book.mute(link)

    def expire(self, now: float, stall_s: float) -> bool:
        """End what has waited for too long; False when nothing waits."""
        waits = False
        for link in self._book.links:
            waits = waits or link.has_deadline
            age_s = now - link.moved_s
            if isinstance(link.half, Greeting):
                if age_s > HELLO_TIMEOUT_S:
                    self.counts.openings_failed += 1
                    self._book.end(link, "it did not introduce itself")
            elif link.is_stalled(now, stall_s):
                self.counts.links_stalled += 1
                why = f"nothing moved for {stall_s:g} s: the peer is stopped, or cut off"
                self._book.give_up(link, why, fenced=False)
                self._book.mute(link)
                self._book.ask_after(link)
                self._book.links.refresh(link)
            elif link.is_mute and age_s > LINGER_S:
                self._book.end(link, "the peer does not close the connection")
        return waits

    # --- inside -------------------------------------------------------------------------

    def _load(self, link: Link) -> bool:
        """Put what comes next into ``link.out``; False when there is nothing."""
        half = link.half
        if isinstance(half, Incoming):
            link.out.extend(Vector([memoryview(reply)]) for reply in half.replies)
            half.replies.clear()
            if half.is_behind:
                half.is_behind = False
                asked = b"".join(map(pack_revoke, list(self.recalled)))
                link.out.extend([Vector([memoryview(asked)])] if asked else [])
        elif isinstance(half, Outgoing):
            views: list[memoryview] = []
            size = 0
            # Small frames share a call: a short write and its END arrive together.
            while half.has_more and size < _BYTES_TOGETHER:
                frame, ended = half.next_frame()
                if ended is not None:
                    self._book.tell(ended)
                if frame is not None:
                    size += frame.left
                    views += frame.window()
            if views:
                link.out.append(Vector(views))
        return bool(link.out)

    def _receive(self, link: Link) -> None:
        """Raises what ``serve`` handles."""
        until = self.counts.bytes_placed + _BYTES_PER_TURN
        for _ in range(_FRAMES_PER_TURN):
            if isinstance(link.half, Incoming) and link.half.is_placing:
                # As much as the kernel had; others have their turn before the next call.
                is_placed = link.half.advance(link.sock, link.reader)
                if link.half.replies:
                    self.send(link)
                if not is_placed or self.counts.bytes_placed >= until:
                    return
            frame = link.reader.receive(link.sock)
            link.moved()
            if frame is not None:
                self._frame(link, *frame)
            if link.sock.fileno() < 0 or not link.may_read:
                return

    def _frame(self, link: Link, kind: Kind, body: bytes) -> None:
        """Raises TransportError."""
        half = link.half
        if isinstance(half, Greeting):
            self._greet(link, half, kind, body)
        elif kind is Kind.BYE:
            self._book.said_bye(link)
        elif isinstance(half, Outgoing) and kind is Kind.REVOKE:
            half.note_revoked(unpack_revoke(body))
        elif isinstance(half, Outgoing):
            ended = half.answered(kind, unpack_answer(body))
            if ended is not None:
                self._book.tell(ended)
        elif kind is Kind.WRITE:
            half.begin(body)
        elif kind is Kind.END:
            placed = half.finish(body)
            if placed.notify is not None:
                self._book.tell(NoteCame(link.incarnation, placed.lease, placed.notify))
            half.replies.append(placed.reply)
            self.send(link)
        else:
            self._book.end(link, "the peer disconnected", LinkEnd.WORD)

    def _greet(self, link: Link, greeting: Greeting, kind: Kind, body: bytes) -> None:
        """HELLO or PROOF. Raises TransportError for who is not welcome."""
        if kind is Kind.HELLO:
            self._say(link, greeting.challenge(body))
            link.reader.allowed = (Kind.PROOF,)
            return
        welcome = greeting.welcome(body, self._published())
        hello = greeting.hello
        assert hello is not None, "PROOF comes after HELLO"
        if self._book.is_over(hello.incarnation):
            raise TransportError("this process life was found dead, and nothing of it is let in")
        home = decode_home(hello.incarnation, hello.home)
        self._check_user(link, home.origin)
        pidfd = open_proof(self._here, home.origin)
        # First of all: who is told that it is welcome may take older sessions for dead.
        self._book.supersede(hello.incarnation, hello.oldest, Incoming)
        self._book.probes.stop(hello.incarnation)
        link.incarnation, link.home, link.number = hello.incarnation, home, hello.number
        link.half = Incoming(self._regions, self.placing, self.counts)
        # What a session before this one, which broke, was asked.
        link.half.is_behind = bool(self.recalled)
        link.reader.allowed = FROM_SENDER
        self._book.watch(link, pidfd)
        self._say(link, welcome)

    def _check_user(self, link: Link, origin: Origin) -> None:
        """Over AF_UNIX the kernel says who calls: nobody but our own user."""
        if link.sock.family != socket.AF_UNIX:
            return
        pid, uid = credentials(link.sock)
        if uid != os.geteuid():
            raise TransportError(f"uid {uid} may not write to memory of uid {os.geteuid()}")
        if self._here.sees_process_of(origin) and pid != origin.process.pid:
            raise TransportError(f"the caller is process {pid}, not {origin.process.pid}")

    def _say(self, link: Link, frame: bytes) -> None:
        link.out.append(Vector([memoryview(frame)]))
        self.send(link)

    def _lose(self, link: Link, why: str, end: LinkEnd) -> None:
        """The peer, or the way to it, ended the connection."""
        self.counts.openings_failed += isinstance(link.half, Greeting)
        self._book.end(link, why, end)

    def _drop(self, link: Link, error: TransportError) -> None:
        """It sent nonsense, or was refused."""
        if isinstance(link.half, Greeting):
            self.counts.openings_failed += 1
            with contextlib.suppress(OSError):
                link.sock.send(pack_refusal(error), _DONTWAIT)
        else:
            self.counts.peers_dropped += 1
        self._book.end(link, f"the peer sent nonsense: {error}")
