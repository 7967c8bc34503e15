"""What the transport's thread has to tell its owner, and the doorbell for it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import Generic, TypeVar

E = TypeVar("E")


class Inbox(Generic[E]):
    """A queue with a descriptor that is readable exactly while something is in it, so that
    whoever sleeps on it neither misses a word nor wakes up for nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[E] = deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __len__(self) -> int:
        return len(self._items)

    def fileno(self) -> int:
        return self._fd

    def put(self, *items: E) -> None:
        """From any thread."""
        with self._lock:
            self._items.extend(items)
            if self._items and self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def drain(self) -> list[E]:
        with self._lock:
            found = list(self._items)
            self._items.clear()
            if self._fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._fd)
        return found

    def peek(self) -> list[E]:
        with self._lock:
            return list(self._items)

    def close(self) -> None:
        """Nobody sleeps on it any more. What is in it stays for :meth:`drain`."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """As ``close``, without the lock: in a forked child, whose parent may hold it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
