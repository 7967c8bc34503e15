"""Slow calls off the tick: a few threads, one queue back into the worker loop.

A worker loop never waits for HTTP (D28). It hands a call to :class:`Background`; the answer
comes back as a core event through :meth:`poll`, and ``fileno`` becomes readable, so that the
loop's poller wakes.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from pdcore.fsm.events import Event

log = logging.getLogger(__name__)

#: Calls at once. One bootstrap server that accepts and never answers holds a thread for its
#: whole time-out; the others must not wait behind it. There is one call per address at a
#: time, and an idle thread is used before a new one starts, so most of them never exist.
MAX_THREADS: Final = 32

#: Calculations at once. They fill cores, one each, and neither wait for a call that hangs nor
#: take its threads: hundreds of long prompts may arrive together.
MAX_COMPUTING: Final = 4

#: ``failed(error)``: the event that answers for a call that raised.
FailedCall = Callable[[BaseException], Event]


class BackgroundCalls(Protocol):
    """What the loop needs; simulations answer inline instead of from a thread."""

    def run(self, call: Callable[[], Event], failed: FailedCall) -> None: ...

    def compute(self, call: Callable[[], Event], failed: FailedCall) -> None: ...

    def wake(self) -> None: ...

    def poll(self) -> list[Event]: ...

    def fileno(self) -> int | None: ...

    def close(self) -> None: ...


class Background:
    """``run`` and ``compute`` from the loop's thread, ``wake`` from any."""

    def __init__(self, num_threads: int = MAX_THREADS, num_computing: int = MAX_COMPUTING) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pdcore-background")
        self._computing = ThreadPoolExecutor(num_computing, thread_name_prefix="pdcore-computing")
        self._events: deque[Event] = deque()
        # A socketpair works wherever Python does; eventfd would be Linux only.
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def run(self, call: Callable[[], Event], failed: FailedCall) -> None:
        """Call it in a thread. Every call is answered by one event, whatever it raises:
        somebody waits for the answer, and a lost one would be waited for for ever."""
        self._submit(self._pool, call, failed)

    def compute(self, call: Callable[[], Event], failed: FailedCall) -> None:
        """As :meth:`run`, for what works instead of waiting: first come, first served."""
        self._submit(self._computing, call, failed)

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
        self._computing.shutdown(wait=False, cancel_futures=True)
        self._reader.close()
        self._writer.close()

    def _submit(
        self, pool: ThreadPoolExecutor, call: Callable[[], Event], failed: FailedCall
    ) -> None:
        if not self._is_closed:
            future = pool.submit(call)
            future.add_done_callback(lambda done: self._finish(done, failed))

    def _finish(self, done: Future[Event], failed: FailedCall) -> None:
        """In the thread of the call, or in ``close`` for one that never started."""
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.warning("a background call raised", exc_info=error)
        self._events.append(done.result() if error is None else failed(error))
        self.wake()
