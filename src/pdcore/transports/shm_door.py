"""Where peers come in: a listening socket and the thread that answers it.

Answering must not wait for the owner's loop, which may be inside a model step, and two
transports of one process must be able to connect to each other. So a thread of its own
checks who is calling, hands the segments over, and leaves the connection for the owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import attrs

from pdcore.errors import TransportError
from pdcore.transports.process_proof import ProcessKey, boot_id, open_pidfd, this_process
from pdcore.transports.shm_wire import (
    MAX_FRAME_BYTES,
    Address,
    Kind,
    Offer,
    credentials,
    pack,
    send_offer,
    unpack_hello,
)
from pdcore.types import Incarnation

#: A caller that connects and says nothing is dropped after this long.
HELLO_TIMEOUT_S: Final = 2.0
MAX_CALLERS: Final = 64
#: How long the thread rests when it can neither take a caller nor hang up on one.
NO_DESCRIPTOR_PAUSE_S: Final = 0.05
#: Connections the owner has not picked up yet; a stuck owner gets no more.
MAX_ARRIVALS: Final = 1024


@attrs.frozen(eq=False)
class Arrival:
    """An answered caller; ``pidfd`` proves its death later."""

    sock: socket.socket
    incarnation: Incarnation
    process: ProcessKey
    pidfd: int


class Door:
    """``share`` hands a callback the current regions while their descriptors are sure
    to stay open; ``ring`` tells the owner that somebody arrived."""

    def __init__(
        self,
        incarnation: Incarnation,
        share: Callable[[Callable[[Offer], None]], None],
        ring: Callable[[], None],
    ) -> None:
        self._incarnation = incarnation
        self._share = share
        self._ring = ring
        self._arrivals: deque[Arrival] = deque()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        #: None: somebody else took the descriptor in the moment it was free.
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        name = b"\0pdcore-%d-%s" % (os.geteuid(), secrets.token_hex(16).encode())
        self._listener.bind(name)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.address = Address(boot_id(), this_process(), name)
        self._thread = threading.Thread(target=self._run, name="pdcore-shm-door", daemon=True)
        self._thread.start()

    def arrivals(self) -> list[Arrival]:
        found = []
        while self._arrivals:
            found.append(self._arrivals.popleft())
        return found

    def close(self, timeout_s: float) -> bool:
        """Answer nobody any more; False when the thread did not end in time. Whoever was
        answered is still among the arrivals."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended:
            self._close()
        return ended

    def abandon(self) -> None:
        """In a forked child, where the thread is not: close the descriptors."""
        self._close()
        for arrival in self.arrivals():
            arrival.sock.close()
            os.close(arrival.pidfd)

    def _close(self) -> None:
        self._listener.close()
        os.close(self._stop)
        if self._spare is not None:
            os.close(self._spare)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        callers: dict[int, tuple[socket.socket, float]] = {}
        while True:
            ready = poller.poll(int(HELLO_TIMEOUT_S * 1000) if callers else None)
            for fd, _ in ready:
                if fd == self._stop:
                    for sock, _ in callers.values():
                        sock.close()
                    return
                if fd == self._listener.fileno():
                    self._accept(poller, callers)
                elif fd in callers:
                    poller.unregister(fd)
                    self._answer(callers.pop(fd)[0])
            now = time.monotonic()
            for fd in [fd for fd, (_, deadline) in callers.items() if deadline < now]:
                poller.unregister(fd)
                callers.pop(fd)[0].close()

    def _accept(self, poller: select.poll, callers: dict[int, tuple[socket.socket, float]]) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        sock.setblocking(False)
        if len(callers) >= MAX_CALLERS or len(self._arrivals) >= MAX_ARRIVALS:
            sock.close()
            return
        callers[sock.fileno()] = sock, time.monotonic() + HELLO_TIMEOUT_S
        poller.register(sock, select.POLLIN)

    def _turn_away(self) -> None:
        """No descriptor is left: spend the spare one on hanging up, or the caller would
        stay in the backlog and keep this thread spinning. Without a spare one all that is
        left is to look again a little later."""
        if self._spare is None:
            self._spare = _open_spare()
            if self._spare is None:
                stop = select.poll()
                stop.register(self._stop, select.POLLIN)
                stop.poll(int(NO_DESCRIPTOR_PAUSE_S * 1000))
                return
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = _open_spare()

    def _answer(self, sock: socket.socket) -> None:
        try:
            arrival = self._greet(sock)
        except TransportError as error:
            with contextlib.suppress(OSError):
                sock.send(pack(Kind.REFUSED, str(error).encode()), socket.MSG_NOSIGNAL)
            sock.close()
            return
        try:
            self._share(lambda offer: send_offer(sock, offer))
        except OSError:
            sock.close()
            os.close(arrival.pidfd)
            return
        self._arrivals.append(arrival)
        self._ring()

    def _greet(self, sock: socket.socket) -> Arrival:
        """Raises TransportError unless the caller is one of us and means this very life."""
        try:
            # First of all: closing with something unread would lose the reason we give.
            frame = sock.recv(MAX_FRAME_BYTES)
        except OSError as error:
            raise TransportError(f"no HELLO: {error.strerror}") from error
        pid, uid = credentials(sock)
        if uid != os.geteuid():
            raise TransportError(f"uid {uid} may not map memory of uid {os.geteuid()}")
        hello = unpack_hello(frame)
        if hello.target != self._incarnation:
            raise TransportError(
                f"stale descriptor: this is incarnation {self._incarnation.hex()}, "
                f"not {hello.target.hex()}"
            )
        process = ProcessKey(pid, hello.start_ticks)
        return Arrival(sock, hello.incarnation, process, open_pidfd(process))


def _open_spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
