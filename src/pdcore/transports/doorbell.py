"""What wakes a loop that sleeps on descriptors."""

from __future__ import annotations

import contextlib
import socket


class Doorbell:
    """A readable descriptor that works on every platform."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def ring(self) -> None:
        # A full buffer means that it rings already.
        with contextlib.suppress(BlockingIOError):
            self._write.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    def fileno(self) -> int:
        return self._read.fileno()

    def close(self) -> None:
        self._read.close()
        self._write.close()
