"""The one thread of a socket transport: it serves every connection, a turn each.

The owner's loop may be inside a model step for as long as it likes: KV still comes in, goes
out, and callers are answered. A turn moves about a chunk and never blocks, so a peer that is
slow, or stopped, holds up nobody else (D23). The thread touches no lifecycle: what happened
waits in an inbox until the owner polls.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import attrs

from pdcore.errors import TransportError
from pdcore.transports.base import HandleStatus
from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_address import (
    MAX_PORT,
    TCP,
    UNIX,
    Home,
    Origin,
    encode_home,
    listen_tcp,
    listen_unix,
)
from pdcore.transports.socket_bell import Inbox
from pdcore.transports.socket_book import Book
from pdcore.transports.socket_greeting import Identity, Published
from pdcore.transports.socket_incoming import Incoming
from pdcore.transports.socket_links import Link, Told
from pdcore.transports.socket_outgoing import MAX_REVOKED, Ended, Job, Outgoing
from pdcore.transports.socket_poller import Barrier, Poller
from pdcore.transports.socket_porch import Porch
from pdcore.transports.socket_service import Service
from pdcore.transports.socket_wire import Kind, pack
from pdcore.types import LeaseId

#: How often what waits for too long is looked for, while anything could.
_LOOK_S: Final = 0.25
#: A sleep that took longer was none.
_STOPPED_S: Final = 1.0


class Loop:
    """Methods are the owner's; ``_run`` and what it calls are the thread's."""

    def __init__(
        self,
        me: Identity,
        here: Origin,
        regions: RegionTable,
        published: Callable[[], Published],
        inbox: Inbox[Told],
        stall_timeout_s: float,
    ) -> None:
        self._poller = Poller()
        self._inbox = inbox
        self._book = Book(me, here, self._poller, inbox)
        self._service = Service(me, here, regions, published, self._book)
        self.counts = self._service.counts
        self._stall_timeout_s = stall_timeout_s
        self._porch: Porch | None = None
        self._thread: threading.Thread | None = None
        #: Set by the thread once it is to end: when, at the latest.
        self._until: float | None = None

    def listen(self, listeners: list[socket.socket]) -> None:
        """Take callers in at these; owns them unless it raises TransportError."""

        def begin() -> None:
            self._porch = Porch(listeners)
            for fd in self._porch.filenos():
                self._poller.want(fd, read=True, write=False)

        self._call(begin)

    def adopt(self, link: Link, pidfd: int, oldest: int) -> None:
        """A session was opened; the peer has dropped ours below ``oldest``."""

        def begin() -> None:
            self._book.links.add(link)
            self._book.watch(link, pidfd)
            self._book.supersede(link.incarnation, oldest, Outgoing)
            self._book.debts.settle(link.incarnation, oldest)
            self._book.probes.stop(link.incarnation)
            if self._book.is_over(link.incarnation):
                self._book.end(link, "it was found dead before")

        self._call(begin)

    def submit(self, link: Link, job: Job) -> None:
        def begin() -> None:
            if not isinstance(link.half, Outgoing):
                return
            link.half.add(job)
            if not link.is_open:  # it ended a moment ago
                self._book.give_up(link, "the connection is over", fenced=False)
                return
            if link.half.num_waiting == 1:
                link.moved_s = time.monotonic()
            self._service.send(link)
            self._book.links.refresh(link)

        if not self._call(begin):
            why = "this transport's thread has ended"
            self._inbox.put(Ended(job, HandleStatus.FAILED, why))

    def disconnect(self, link: Link) -> None:
        """End a session after what is being sent at this moment."""
        self._call(
            lambda: self._leave(link, Kind.DISCONNECT, (HandleStatus.FAILED, "disconnected"))
        )

    def settle(self, lease: LeaseId, *, tell_senders: bool = False) -> None:
        """Returns when no byte is on its way into that lease any more; it must not be granted
        any more. Waits for one step at most, and only if that lease has it. ``tell_senders``:
        who places bytes by himself is asked to stop, and again by each new session, until this
        is called without."""
        recalled = self._service.recalled

        def tell() -> None:
            for link in self._book.links:
                if isinstance(link.half, Incoming) and not link.is_mute:
                    link.half.recall(lease, has_backlog=bool(link.out))
                    self._service.send(link)
                    self._book.links.refresh(link)

        if tell_senders:
            recalled[lease] = None
            if len(recalled) > MAX_REVOKED:  # as many as a sender remembers
                del recalled[next(iter(recalled))]
            if self._thread is not None:
                self._call(tell)
        else:
            recalled.pop(lease, None)
        if self._service.placing.lease == lease and self._thread is not None:
            barrier = Barrier(self._thread)
            self._call(barrier.reach)
            barrier.wait()

    def resume(self) -> None:
        """The inbox has room again."""

        def begin() -> None:
            for link in self._book.links:
                self._book.links.refresh(link)

        self._call(begin)

    def close(self, timeout_s: float) -> bool:
        """Say goodbye to everybody and end; False when the thread did not in time. What was
        not finished by then has ended without its quiesced mark."""
        if self._thread is None:
            self._shut()
            return True
        until = time.monotonic() + timeout_s * 0.8
        self._call(lambda: self._begin_to_close(until))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """In a forked child, where the thread is not: close the descriptors."""
        if self._porch is not None:
            self._porch.close()
        self._book.abandon()
        self._poller.abandon()

    # --- the thread ---------------------------------------------------------------------

    def _call(self, do: Callable[[], None]) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="pdcore-socket", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise TransportError(f"this process is at its limits: {error}") from error
            self._thread = thread
        return self._poller.call(do)

    def _run(self) -> None:
        pause_s: float | None = None
        try:
            while self._until is None or (len(self._book.links) and time.monotonic() < self._until):
                slept_s = time.monotonic()
                ready = self._poller.wait(pause_s)
                now = time.monotonic()
                if pause_s is not None and now - slept_s > _STOPPED_S:
                    # Not the peers were silent: this process was stopped meanwhile.
                    for link in self._book.links:
                        link.moved_s += now - slept_s
                for fd, readable, writable in ready:
                    self._ready(fd, readable, writable)
                    self._poller.run_calls()
                waits = self._service.expire(now, self._stall_timeout_s)
                self._book.probes.expire(now)
                is_over = self._until is not None
                pause_s = _LOOK_S if waits or self._book.probes or is_over else None
        finally:
            # Also after a bug: everybody learns that it is over.
            self._shut()

    def _ready(self, fd: int, readable: bool, writable: bool) -> None:
        link = self._book.links.find(fd)
        if link is not None:
            self._service.serve(link, readable=readable, writable=writable)
        elif self._porch is not None and fd in self._porch.filenos():
            sock = self._porch.accept(fd)
            if sock is not None:
                self._service.admit(sock)
        elif not self._book.probes.serve(fd):
            self._book.died(fd)

    def _leave(self, link: Link, word: Kind, stop: tuple[HandleStatus, str]) -> None:
        if isinstance(link.half, Outgoing) and link.is_open:
            link.is_open = False
            link.half.say_farewell(word, stop)
            self._service.send(link)
            self._book.links.refresh(link)

    def _begin_to_close(self, until: float) -> None:
        self._until = until
        if self._porch is not None:
            for fd in self._porch.filenos():
                self._poller.forget(fd)
            self._porch.close()
        for link in self._book.links:
            if isinstance(link.half, Outgoing):
                link.is_open = True
                self._leave(link, Kind.BYE, (HandleStatus.CANCELLED, "closed"))
            else:
                if isinstance(link.half, Incoming):
                    with contextlib.suppress(OSError):
                        link.half.replies.append(pack(Kind.BYE))
                        self._service.send(link)
                self._book.end(link, "closed")

    def _shut(self) -> None:
        if self._porch is not None:
            self._porch.close()
        self._book.close()
        self._poller.close()


@attrs.define
class Bind:
    """Where a transport listens, once it speaks with anybody."""

    here: Origin
    families: tuple[str, ...]
    host: str
    advertise: str | None
    port: int
    is_listening: bool = False

    def __attrs_post_init__(self) -> None:
        unknown = set(self.families) - {UNIX, TCP}
        if unknown or not self.families:
            raise TransportError(
                f"families must be one or both of {UNIX!r} and {TCP!r}, got {self.families!r}"
            )
        if not 0 <= self.port <= MAX_PORT:
            raise TransportError(f"port must be 0 (a free one) to {MAX_PORT}, got {self.port}")

    def begin(self, me: Identity, loop: Loop) -> None:
        """Listen, and say so in what we tell of ourselves. Idempotent. Raises TransportError."""
        if self.is_listening:
            return
        found = []
        try:
            if UNIX in self.families:
                found.append(listen_unix())
            if TCP in self.families:
                found.append(listen_tcp(self.host, self.advertise, self.port))
            loop.listen([listener for listener, _ in found])
        except TransportError:
            for listener, _ in found:
                listener.close()
            raise
        home = Home(self.here, tuple(address for _, address in found))
        me.home = encode_home(me.incarnation, home)
        self.is_listening = True
