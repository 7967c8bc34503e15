"""What the transport's thread sleeps on: descriptors, and calls from the owner's thread."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable


class Poller:
    """``call`` may be used from any thread, the rest from the transport's only."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._wanted: dict[int, int] = {}

    def call(self, do: Callable[[], None]) -> bool:
        """Have the transport's thread do it, before its next step; False when it is over."""
        with self._lock:
            if self._wake < 0:
                return False
            self._calls.append(do)
            os.eventfd_write(self._wake, 1)
            return True

    def run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def want(self, fd: int, *, read: bool, write: bool) -> None:
        """Be told when ``fd`` can be read or written; its end is told anyhow."""
        mask = (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0)
        known = self._wanted.get(fd)
        if known is None:
            self._epoll.register(fd, mask)
        elif known != mask:
            self._epoll.modify(fd, mask)
        self._wanted[fd] = mask

    def forget(self, fd: int) -> None:
        """Before ``fd`` is closed."""
        if self._wanted.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def wait(self, timeout_s: float | None) -> list[tuple[int, bool, bool]]:
        """(descriptor, is readable or at its end, is writable), once calls were carried out."""
        ready = self._epoll.poll(-1 if timeout_s is None else timeout_s)
        found = []
        for fd, mask in ready:
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            else:
                found.append((fd, bool(mask & ~select.EPOLLOUT), bool(mask & select.EPOLLOUT)))
        self.run_calls()
        return found

    def close(self) -> None:
        """Idempotent. Calls that nobody came to are forgotten."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """As ``close``, without the lock: in a forked child, whose parent may hold it."""
        if self._wake >= 0:
            self._epoll.close()
            os.close(self._wake)
            self._wake = -1


class Barrier:
    """Waits until a thread that carries out calls has come to ours."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._passed = threading.Event()

    def reach(self) -> None:
        self._passed.set()

    def wait(self) -> None:
        """Bounded by the thread's longest step, or its life."""
        while not self._passed.wait(0.25) and self._thread.is_alive():
            pass
