"""Is a process of another host dead? Asked at its own address, after its connection broke.

A connection breaks for many reasons, and what is known of a process on this host (pidfd) is
not known of another one. But every transport listens for as long as it lives, at an address
of its own. Whoever is asked there answers:

- CHALLENGE: the life that is meant is there. It lost its connection, no more;
- STALE: another life has that address now, so the former one is over;
- its kernel refuses: nobody listens there, so the transport was closed or its process died;
- nothing: nobody knows. Asked again, ever more seldom, for an hour: a host that lost its
  power answers when it is up again.

Should a refusal come from something on the way, safety does not depend on it: who was
called dead is not let in any more (socket_book).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable
from typing import Final

import attrs

from pdcore.errors import TransportError
from pdcore.transports.socket_address import Address, target_of
from pdcore.transports.socket_auth import fresh_nonce
from pdcore.transports.socket_greeting import Identity
from pdcore.transports.socket_poller import Poller
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_wire import Hello, Kind, pack, pack_hello
from pdcore.types import Incarnation

#: How long one question waits for its answer.
ANSWER_S: Final = 2.0
#: Pause after the first question, which doubles with each one, and where it ends.
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 60.0
GIVE_UP_S: Final = 3600.0
#: Lives asked after at once; of more than that nothing is found out.
MAX_PROBES: Final = 256


@attrs.define(eq=False)
class _Probe:
    """``sock`` while a question waits for its answer, else None until ``due_s``."""

    incarnation: Incarnation
    address: Address
    until_s: float
    pause_s: float
    due_s: float = 0.0
    sock: socket.socket | None = None
    reader: FrameReader | None = None
    has_asked: bool = False


class Probes:
    """Used by the transport's thread only. ``found_dead`` is told the life and how."""

    def __init__(
        self, me: Identity, poller: Poller, found_dead: Callable[[Incarnation, str], None]
    ) -> None:
        self._me = me
        self._poller = poller
        self._found_dead = found_dead
        self._probes: dict[Incarnation, _Probe] = {}

    def __len__(self) -> int:
        return len(self._probes)

    def start(self, incarnation: Incarnation, address: Address) -> None:
        """Find out, from now on. Nothing changes for one that is asked after already."""
        if incarnation not in self._probes and len(self._probes) < MAX_PROBES:
            until_s = time.monotonic() + GIVE_UP_S
            probe = _Probe(incarnation, address, until_s, FIRST_PAUSE_S)
            self._probes[incarnation] = probe
            self._ask(probe)

    def stop(self, incarnation: Incarnation) -> None:
        """Known by other means. Idempotent."""
        probe = self._probes.pop(incarnation, None)
        if probe is not None:
            self._hang_up(probe)

    def serve(self, fd: int) -> bool:
        """``fd`` is ready; False when it is none of ours."""
        for probe in self._probes.values():
            if probe.sock is not None and probe.sock.fileno() == fd:
                self._hear(probe, probe.sock)
                return True
        return False

    def expire(self, now: float) -> None:
        """Ask again, and stop waiting."""
        for probe in list(self._probes.values()):
            if now > probe.until_s:
                self.stop(probe.incarnation)
            elif now > probe.due_s:
                if probe.sock is None:
                    self._ask(probe)
                else:
                    self._rest(probe)

    def close(self) -> None:
        for incarnation in list(self._probes):
            self.stop(incarnation)

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors."""
        for probe in self._probes.values():
            if probe.sock is not None:
                probe.sock.close()

    def _ask(self, probe: _Probe) -> None:
        try:
            family, at = target_of(probe.address)
            probe.sock = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, TransportError):
            self._rest(probe)
            return
        probe.sock.setblocking(False)
        probe.due_s = time.monotonic() + ANSWER_S
        probe.reader = FrameReader((Kind.CHALLENGE, Kind.REFUSED, Kind.STALE))
        failed = probe.sock.connect_ex(at)
        if failed in (0, errno.EINPROGRESS):
            self._poller.want(probe.sock.fileno(), read=False, write=True)
        else:
            self._conclude(probe, failed)

    def _hear(self, probe: _Probe, sock: socket.socket) -> None:
        """The connection is there, or failed; or the answer came."""
        failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed or probe.reader is None:
            self._conclude(probe, failed)
            return
        try:
            if not probe.has_asked:
                said = Hello(self._me.incarnation, probe.incarnation, 0, 0, fresh_nonce())
                sock.send(pack(Kind.HELLO, pack_hello(said)), socket.MSG_NOSIGNAL)
                probe.has_asked = True
                self._poller.want(sock.fileno(), read=True, write=False)
                return
            frame = probe.reader.receive(sock)
        except BlockingIOError:
            return
        except (OSError, EOFError, TransportError):
            # Whoever that is: no answer.
            self._rest(probe)
            return
        if frame is not None:
            self._answered(probe, frame[0])

    def _answered(self, probe: _Probe, kind: Kind) -> None:
        self.stop(probe.incarnation)
        if kind is Kind.STALE:
            self._found_dead(probe.incarnation, f"another process life is at {probe.address}")

    def _conclude(self, probe: _Probe, failed: int) -> None:
        if failed == errno.ECONNREFUSED:
            self.stop(probe.incarnation)
            self._found_dead(probe.incarnation, f"nobody listens at {probe.address} any more")
        else:
            self._rest(probe)

    def _rest(self, probe: _Probe) -> None:
        """No answer: ask again after a pause."""
        self._hang_up(probe)
        probe.due_s = time.monotonic() + probe.pause_s
        probe.pause_s = min(2 * probe.pause_s, MAX_PAUSE_S)

    def _hang_up(self, probe: _Probe) -> None:
        if probe.sock is not None:
            self._poller.forget(probe.sock.fileno())
            with contextlib.suppress(OSError):
                probe.sock.close()
            probe.sock = probe.reader = None
            probe.has_asked = False
