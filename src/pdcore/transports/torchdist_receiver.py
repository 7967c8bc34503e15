"""The receiving end of torchdist pairs: where peers come in, and a thread for each.

torch.distributed is two-sided: nothing comes in for which no receive is posted. A receive
is posted into staging memory, and only for a chunk whose every row lies in a lease that is
granted; the bytes are put in place by this code, under the lock that a revoke takes. So the
receiver enforces leases, whatever a peer sends.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import threading
import time
from typing import Final

from pdcore.errors import TransportError
from pdcore.transports.base import Notification
from pdcore.transports.check import CopyPlan
from pdcore.transports.regions import RegionTable
from pdcore.transports.torchdist_channel import AFTERMATH_S, Channel, End, LinkOver
from pdcore.transports.torchdist_chunks import plan_chunk, scatter
from pdcore.transports.torchdist_courier import Limits
from pdcore.transports.torchdist_group import (
    Backend,
    GroupFailed,
    PairGroup,
    Staging,
)
from pdcore.transports.torchdist_hub import Hub
from pdcore.transports.torchdist_wire import (
    MAX_REASON_BYTES,
    Address,
    ChunkHead,
    Kind,
    Meeting,
    Welcome,
    decode_chunk,
    decode_hello,
    encode_key,
)
from pdcore.transports.torchdist_witness import Witness, stamp
from pdcore.types import Incarnation

#: A caller that connects and says nothing is dropped after this long.
HELLO_TIMEOUT_S: Final = 2.0
#: Threads at once, callers who have said nothing yet included.
MAX_LINKS: Final = 1024
#: How long closing waits for a sender that was promised a receive, or a group.
CLOSE_GRACE_S: Final = 1.0
#: How long the door rests when this process has no descriptor left for a caller.
NO_DESCRIPTOR_PAUSE_S: Final = 0.05


class Desk:
    """What every incoming link needs to know; shared by the threads. ``port`` 0: a free one."""

    def __init__(
        self,
        incarnation: Incarnation,
        regions: RegionTable,
        hub: Hub,
        backend: Backend,
        host: str,
        port: int,
        limits: Limits,
    ) -> None:
        self.incarnation = incarnation
        self.regions = regions
        self.hub = hub
        self.backend = backend
        self.host = host
        self.port = port
        self.limits = limits
        self.token = secrets.token_bytes(16)
        #: By sender and session; guarded by the hub's lock.
        self.links: dict[tuple[Incarnation, int], Incoming] = {}

    def drop(self, incarnation: Incarnation, number: int) -> None:
        """The sender gave that session up: from now on nothing of it is placed."""
        with self.hub.lock:
            link = self.links.get((incarnation, number))
            if link is not None:
                link.stop(is_dropped=True)


class Incoming:
    """One caller, from its HELLO on. Takes the socket over, and closes it where this raises
    OSError or RuntimeError: no descriptor, or no thread, is left for it."""

    def __init__(self, sock: socket.socket, desk: Desk) -> None:
        self._desk = desk
        self._ringing = threading.Lock()
        self._is_closing = False
        self._is_dropped = False
        self._incarnation: Incarnation | None = None
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="pdcore-torchdist-in", daemon=True)
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(sock.close)
            self._channel = Channel(sock)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            unless_made.callback(os.close, self._wake)
            self._thread.start()
            unless_made.pop_all()

    def stop(self, *, is_dropped: bool = False) -> None:
        """Say goodbye for our whole incarnation, or for this session alone, and end the
        thread; does not wait."""
        with self._ringing:
            self._is_dropped |= is_dropped
            self._is_closing |= not is_dropped
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def join(self, timeout_s: float) -> bool:
        """True when its thread is gone."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """In a forked child, where the thread is not: close what is a copy."""
        if self._wake >= 0:
            self._channel.close()
            os.close(self._wake)
            self._wake = -1

    def _run(self) -> None:
        end, detail = End.DISCONNECTED, "its thread failed"
        try:
            self._greet()
            self._serve()
        except LinkOver as over:
            end, detail = over.end, over.detail
        except GroupFailed as error:
            end, detail = self._aftermath(error)
        except (TransportError, RuntimeError, OSError) as error:
            detail = str(error)
        finally:
            self._finish(end, detail)

    def _aftermath(self, error: GroupFailed) -> tuple[End, str]:
        """A group breaks, usually, by the peer's death: give the connection a moment to
        prove it."""
        deadline = time.monotonic() + AFTERMATH_S
        try:
            while not self._is_closing and time.monotonic() < deadline:
                self._channel.receive(self._wake, deadline)
        except LinkOver as over:
            return over.end, over.detail
        return End.DISCONNECTED, str(error)

    def _finish(self, end: End, detail: str) -> None:
        if self._incarnation is not None:
            self._channel.farewell(Kind.BYE if self._is_closing else Kind.DISCONNECT, detail)
        with self._ringing:
            self._channel.close()
            os.close(self._wake)
            self._wake = -1
        if self._incarnation is not None:
            with self._desk.hub.lock:
                if self._desk.links.get((self._incarnation, self._number)) is self:
                    del self._desk.links[self._incarnation, self._number]
            self._desk.hub.ended(self._incarnation, end, detail)

    def _greet(self) -> None:
        """Raises LinkOver unless the caller was given our descriptor and means this very
        life of ours."""
        desk = self._desk
        frame = self._channel.receive(self._wake, time.monotonic() + HELLO_TIMEOUT_S)
        try:
            if frame is None or frame[0] is not Kind.HELLO:
                raise TransportError("expected HELLO")
            hello = decode_hello(frame[1])
            if hello.target != desk.incarnation or not hmac.compare_digest(hello.token, desk.token):
                raise TransportError(f"stale descriptor: this is {desk.incarnation.hex()}")
            desk.drop(hello.incarnation, hello.drops)
            if not desk.hub.opened(hello.incarnation):
                raise TransportError("this incarnation of yours was reported as over")
        except TransportError as error:
            self._channel.farewell(Kind.REFUSED, str(error))
            raise LinkOver(End.DISCONNECTED, str(error)) from None
        self._incarnation, self._number = hello.incarnation, hello.number
        self._channel.witness = Witness(hello.stamp)
        with desk.hub.lock:
            if hello.number:
                desk.links[hello.incarnation, hello.number] = self
            regions = desk.regions.targets()
        self._send(Kind.WELCOME, Welcome(stamp(), regions).encode())

    def _serve(self) -> None:
        """Chunk by chunk, until the connection is over. Raises LinkOver, GroupFailed."""
        desk = self._desk
        desk.backend.enter_thread()
        group = self._build()
        staging = Staging(desk.limits.chunk_bytes, desk.backend.device)
        while True:
            _, body = self._expect(Kind.CHUNK)
            head = decode_chunk(body)
            try:
                plan = self._check(head)
                if head.num_bytes:
                    self._take(group, staging, head.num_bytes)
                self._place(head, plan, staging)
            except _Refusal as refusal:
                self._send(Kind.REJECTED, str(refusal).encode()[:MAX_REASON_BYTES])
            else:
                self._send(Kind.PLACED)

    def _build(self) -> PairGroup:
        desk = self._desk
        self._expect(Kind.JOIN)
        meeting = Meeting(desk.limits.chunk_bytes, secrets.token_bytes(16))
        self._send(Kind.GROUP, meeting.encode())

        def tell(key: str, value: bytes) -> None:
            self._send(Kind.KEY, encode_key(key, value))

        def hear() -> bytes:
            # The sender may be at it already, and would wait for us.
            return self._expect(Kind.KEY, closing_grace_s=CLOSE_GRACE_S)[1]

        return PairGroup(desk.backend, 1, meeting.key, tell, hear)

    def _check(self, head: ChunkHead) -> CopyPlan:
        """Raises _Refusal unless every row may be written now."""
        desk = self._desk
        with desk.hub.lock:
            lease = desk.regions.granted(head.lease)
            if lease is None:
                raise _Refusal(f"{head.lease} is not granted")
            try:
                return plan_chunk(head, desk.regions.targets(), lease, desk.limits.chunk_bytes)
            except TransportError as error:
                raise _Refusal(str(error)) from None

    def _take(self, group: PairGroup, staging: Staging, num_bytes: int) -> None:
        """The bytes of a chunk into staging memory. Raises LinkOver, GroupFailed."""
        work = group.post(staging, num_bytes)
        self._send(Kind.READY)
        # Not in the group: a stopped sender would leave us there, and a closing one too.
        self._expect(Kind.SENT, closing_grace_s=CLOSE_GRACE_S)
        group.finish(work, staging, num_bytes, self._desk.limits.stall_timeout_s)

    def _place(self, head: ChunkHead, plan: CopyPlan, staging: Staging) -> None:
        """Raises _Refusal when the lease has ended since it was checked."""
        desk = self._desk
        with desk.hub.lock:
            if self._is_dropped or desk.regions.granted(head.lease) is None:
                raise _Refusal(f"{head.lease} was revoked, or its sender gave the session up")
            scatter(plan, staging.host, desk.regions.arrays)
            if head.is_last and head.notify is not None and self._incarnation is not None:
                desk.hub.put(Notification(self._incarnation, head.notify))

    def _expect(self, *wanted: Kind, closing_grace_s: float = 0.0) -> tuple[Kind, bytes]:
        """Raises LinkOver when the peer, or we, say goodbye."""
        deadline = None
        while True:
            if self._is_dropped:
                raise LinkOver(End.DISCONNECTED, "its sender gave the session up")
            if self._is_closing:
                deadline = deadline or time.monotonic() + closing_grace_s
                if time.monotonic() >= deadline:
                    raise LinkOver(End.DISCONNECTED, "closed")
            frame = self._channel.receive(self._wake, deadline)
            if frame is None or (frame[0] is Kind.KEY and Kind.KEY not in wanted):
                continue  # one more than the group needed
            if frame[0] not in wanted:
                raise LinkOver(
                    End.LOST, f"the peer sent {frame[0].name}, expected {wanted[0].name}"
                )
            return frame

    def _send(self, kind: Kind, body: bytes = b"") -> None:
        self._channel.send(kind, body, timeout_s=self._desk.limits.stall_timeout_s)


class _Refusal(Exception):
    """The peer may not write this chunk (any more)."""


class Door:
    """A listening socket and the thread that takes callers from it."""

    def __init__(self, desk: Desk) -> None:
        """Raises TransportError when it cannot listen at the desk's host, or no descriptor
        or thread is left for it."""
        self._desk = desk
        #: Its thread's alone, until that has ended.
        self._links: list[Incoming] = []
        family = socket.AF_INET6 if ":" in desk.host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (desk.host, desk.port), family=family, backlog=128
            )
        except OSError as error:
            raise TransportError(
                f"cannot listen at {desk.host} port {desk.port}: {error.strerror}"
            ) from error
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = Address(desk.backend.name, desk.host, port, desk.token)
        self._thread = threading.Thread(target=self._run, name="pdcore-torchdist-door", daemon=True)
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self._listener.close)
            try:
                self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                unless_made.callback(os.close, self._stop)
                self._thread.start()
            except (OSError, RuntimeError) as error:
                raise TransportError(f"this process is at its limits: {error}") from error
            unless_made.pop_all()

    def close(self, deadline: float) -> list[str]:
        """Say goodbye to all, and wait until ``deadline``; what is left."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return ["the thread that answers connections"]
        self._listener.close()
        os.close(self._stop)
        for link in self._links:
            link.stop()
        ended = [link.join(deadline - time.monotonic()) for link in self._links]
        return ["a thread that receives"] * ended.count(False)

    def abandon(self) -> None:
        """In a forked child: close the descriptors that are copies of the parent's."""
        self._listener.close()
        os.close(self._stop)
        for link in self._links:
            link.abandon()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while True:
            if any(fd == self._stop for fd, _ in poller.poll()):
                return
            try:
                self._admit(self._listener.accept()[0])
            except BlockingIOError:
                continue
            except (OSError, RuntimeError):
                # Nothing is left for a caller, or it has gone: look again a little later.
                pause = select.poll()
                pause.register(self._stop, select.POLLIN)
                pause.poll(int(NO_DESCRIPTOR_PAUSE_S * 1000))

    def _admit(self, sock: socket.socket) -> None:
        """Raises OSError, RuntimeError: see Incoming."""
        self._links = [link for link in self._links if not link.join(0.0)]
        if len(self._links) >= MAX_LINKS:
            sock.close()
            return
        self._links.append(Incoming(sock, self._desk))
