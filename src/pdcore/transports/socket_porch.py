"""Taking callers in, also when no descriptor is left."""

from __future__ import annotations

import contextlib
import errno
import os
import socket


class Porch:
    """The listening sockets of one transport. It keeps one descriptor in reserve: a caller
    that could not be taken would stay in the backlog and keep the thread spinning, so the
    reserve is spent on hanging up."""

    def __init__(self, listeners: list[socket.socket]) -> None:
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._reserve: int | None = _open_reserve()

    def filenos(self) -> list[int]:
        return list(self._listeners)

    def accept(self, fd: int) -> socket.socket | None:
        """The next caller, non-blocking, or None when there is none or it was turned away."""
        try:
            sock, _ = self._listeners[fd].accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(fd)
            return None
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _turn_away(self, fd: int) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
        with contextlib.suppress(OSError):
            self._listeners[fd].accept()[0].close()
        self._reserve = _open_reserve()


def _open_reserve() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
