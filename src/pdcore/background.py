"""Slow calls off the tick: a few threads, one queue back into the worker loop.

A worker loop never waits for HTTP (D28). It hands a call to :class:`Background`; the answer
comes back as a core event through :meth:`poll`, and ``fileno`` becomes readable, so that the
loop's poller wakes.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from pdcore.fsm.events import Event

log = logging.getLogger(__name__)


class BackgroundCalls(Protocol):
    """What the loop needs; simulations answer inline instead of from a thread."""

    def run(self, call: Callable[[], Event]) -> None: ...

    def wake(self) -> None: ...

    def poll(self) -> list[Event]: ...

    def fileno(self) -> int | None: ...

    def close(self) -> None: ...


class Background:
    """``run`` from the loop's thread, ``wake`` from any."""

    def __init__(self, num_threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pdcore-background")
        self._events: deque[Event] = deque()
        # A socketpair works wherever Python does; eventfd would be Linux only.
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def run(self, call: Callable[[], Event]) -> None:
        """Call it in a thread. It must turn its own errors into an event."""
        if not self._is_closed:
            self._pool.submit(self._work, call)

    def wake(self) -> None:
        """Make the loop look at its inputs. A full pipe is a wake-up already pending."""
        try:
            self._writer.send(b"x")
        except (BlockingIOError, OSError):
            return

    def poll(self) -> list[Event]:
        """Events of finished calls, oldest first; never blocks."""
        try:
            while len(self._reader.recv(4096)) == 4096:
                pass
        except (BlockingIOError, OSError):
            pass
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Idempotent. Calls that are still running end by their own time-outs."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._reader.close()
        self._writer.close()

    def _work(self, call: Callable[[], Event]) -> None:
        try:
            self._events.append(call())
        except OSError as error:
            log.warning("a background call failed in process %d: %s", os.getpid(), error)
        self.wake()
