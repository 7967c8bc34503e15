"""The control connection of a torchdist pair.

torch.distributed moves bytes but says little else: it has no refusal, no cancel, and its
waits know no other end than a time-out. So each pair has a TCP connection of its own
beside the group, which says what comes next, what was placed, and, by its end, that the
other process is gone.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import select
import socket
import struct
import time
from typing import Final

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.torchdist_wire import (
    MAGIC,
    MAX_BODY_BYTES,
    MAX_REASON_BYTES,
    VERSION,
    Address,
    Kind,
)
from pdcore.transports.torchdist_witness import Witness

#: Seconds until an unreachable host is noticed: idle, then probes at intervals.
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 4
#: How long the last word to a peer may take.
FAREWELL_TIMEOUT_S: Final = 0.2
#: After a group broke: how long until the connection shows the peer's end, too.
AFTERMATH_S: Final = 1.0

_HEAD: Final = struct.Struct("<4sBBI")


class End(enum.Enum):
    """How a control connection ended, as far as this side can prove it."""

    #: The other side said that nothing of this pair lands any more.
    DISCONNECTED = "disconnected"
    #: It said so for its whole incarnation.
    CLOSED = "closed"
    #: Its process is gone: nobody else closes the connection without a word.
    DIED = "died"
    #: Unreachable; the process may be alive.
    LOST = "lost"


class LinkOver(TransportError):
    """The control connection is over."""

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(detail)
        self.end = end
        self.detail = detail


class NobodyListens(PeerGone):
    """The kernel there says so: that transport is closed, or its process gone."""


class _Empty(Exception):
    """Nothing to read now."""


class Channel:
    """One control connection, used by one thread at a time; takes the socket over.
    ``witness`` is of the process at its other end, once that has said who it is."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        self._sock = sock
        self._buffered = bytearray()
        #: The kernel tells of a reset once; afterwards it looks like an end in order.
        self._was_reset = False
        self.witness: Witness | None = None

    def send(self, kind: Kind, body: bytes = b"", *, timeout_s: float) -> None:
        """Raises LinkOver when the connection is over or takes nothing for so long."""
        try:
            self._write(kind, body, timeout_s)
        except TimeoutError:
            raise LinkOver(End.LOST, "the peer reads nothing: stopped?") from None
        except OSError as error:
            self._was_reset |= error.errno == errno.ECONNRESET
            raise self._last_word() or self._broken(error) from None

    def farewell(self, kind: Kind, why: str = "") -> None:
        """The last word, if there is anybody to hear it. Without one the peer would take
        the end of the connection for the end of this process."""
        with contextlib.suppress(OSError):
            self._write(kind, why.encode()[:MAX_REASON_BYTES], FAREWELL_TIMEOUT_S)

    def _write(self, kind: Kind, body: bytes, timeout_s: float) -> None:
        """Raises OSError, TimeoutError among them."""
        data = memoryview(_HEAD.pack(MAGIC, VERSION, kind, len(body)) + body)
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        while data:
            try:
                data = data[self._sock.send(data, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError from None
                poller.poll(max(1, int(left * 1000)))

    def receive(self, wake: int | None, deadline: float | None = None) -> tuple[Kind, bytes] | None:
        """The next frame; None when ``wake`` became readable or the deadline passed.

        Raises LinkOver: the peer said goodbye, the connection broke, or this is no frame.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if wake is not None:
            poller.register(wake, select.POLLIN)
        is_late = False
        while True:
            frame = self._take()
            if frame is not None:
                return _heard(*frame)
            if is_late:
                return None
            left = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
            ready = [fd for fd, _ in poller.poll(left)]
            # Also where there is always a little more to read, and never a whole frame.
            is_late = deadline is not None and time.monotonic() >= deadline
            if self._sock.fileno() in ready:
                with contextlib.suppress(_Empty):
                    self._fill()
            elif wake in ready:
                os.eventfd_read(wake)
                return None

    def close(self) -> None:
        """What was sent before still arrives."""
        self._sock.close()
        if self.witness is not None:
            self.witness.close()

    def _last_word(self) -> LinkOver | None:
        """A goodbye that came before the connection broke under us."""
        try:
            while True:
                frame = self._take()
                if frame is None:
                    self._fill()
                else:
                    _heard(*frame)
        except LinkOver as over:
            return over
        except _Empty:
            return None

    def _fill(self) -> None:
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            raise _Empty from None
        except OSError as error:
            raise self._broken(error) from None
        if not data:
            raise self._silent(was_reset=self._was_reset)
        self._buffered += data

    def _broken(self, error: OSError) -> LinkOver:
        # A host that cannot be reached proves nothing.
        self._was_reset |= error.errno == errno.ECONNRESET
        if error.errno in (errno.ECONNRESET, errno.EPIPE):
            return self._silent(was_reset=True)
        return LinkOver(End.LOST, f"the connection broke: {error.strerror}")

    def _silent(self, *, was_reset: bool) -> LinkOver:
        """The end without a goodbye, which whoever closes in order says first."""
        is_dead = (
            not was_reset if self.witness is None else self.witness.is_dead(was_reset=was_reset)
        )
        if is_dead:
            return LinkOver(End.DIED, "its process is gone")
        return LinkOver(End.LOST, "the connection was cut, and its process may be alive")

    def _take(self) -> tuple[Kind, bytes] | None:
        if len(self._buffered) < _HEAD.size:
            return None
        magic, version, number, size = _HEAD.unpack_from(self._buffered)
        if magic != MAGIC or version != VERSION or size > MAX_BODY_BYTES:
            raise LinkOver(End.LOST, "the peer speaks another protocol or version")
        end = _HEAD.size + size
        if len(self._buffered) < end:
            return None
        body = bytes(self._buffered[_HEAD.size : end])
        del self._buffered[:end]
        try:
            return Kind(number), body
        except ValueError:
            raise LinkOver(End.LOST, f"the peer sent an unknown frame {number}") from None


def _heard(kind: Kind, body: bytes) -> tuple[Kind, bytes]:
    """Raises LinkOver for a goodbye."""
    if kind is Kind.DISCONNECT:
        raise LinkOver(End.DISCONNECTED, body.decode(errors="replace"))
    if kind is Kind.BYE:
        raise LinkOver(End.CLOSED, "closed its transport")
    return kind, body


def dial(address: Address, timeout_s: float) -> Channel:
    """Raises NobodyListens, PeerGone when nobody answers, TransportError when it cannot be
    reached."""
    try:
        return Channel(socket.create_connection((address.host, address.port), timeout_s))
    except ConnectionRefusedError:
        raise NobodyListens("nobody listens at the peer's address: its process is gone") from None
    except TimeoutError:
        raise PeerGone("the peer does not accept connections: stopped, or overloaded") from None
    except OSError as error:
        raise TransportError(f"cannot connect to the peer: {error.strerror}") from error
