"""The one thread of a shm transport that copies.

It takes turns among sessions, one chunk each, so that a large transfer to one peer does
not hold up another (D23), and looks at a transfer's stop mark before every chunk. It
alone ends transfers that it was given, so each ends exactly once. It touches no socket
and no lifecycle: results wait in a queue until the owner drains it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator

import attrs

from pdcore.errors import TransportError
from pdcore.transports.base import HandleStatus
from pdcore.types import LeaseId


@attrs.define(eq=False)
class Job:
    """One handle. ``stop`` is set by the owner and read by the mover; setting an
    attribute is atomic, and the first one to be seen wins."""

    handle: int
    #: Whom it is for: jobs of one session run first in, first out.
    session: Hashable
    steps: Iterator[int] = attrs.field(repr=False)
    lease: LeaseId
    notify: bytes | None = attrs.field(default=None, repr=False)
    local_regions: tuple[int, ...] = ()
    stop: tuple[HandleStatus, str] | None = None


@attrs.frozen
class Ended:
    """The last word on a job: nothing of it lands any more."""

    job: Job
    status: HandleStatus
    detail: str


def advance(job: Job) -> Ended | None:
    """Copy one chunk, or say how the job ended."""
    if job.stop is not None:
        return Ended(job, *job.stop)
    try:
        moved = next(job.steps, None)
    except TransportError as error:
        return Ended(job, HandleStatus.FAILED, str(error))
    except (ValueError, IndexError, TypeError, MemoryError) as error:
        # Checked before, so this is a bug; the thread must survive it all the same.
        return Ended(job, HandleStatus.FAILED, f"copying failed: {error}")
    return Ended(job, HandleStatus.DONE, "") if moved is None else None


class Mover:
    """``ring`` is called after every job that ended, from the mover's thread."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._queues: dict[Hashable, deque[Job]] = {}
        self._turns: deque[Hashable] = deque()
        self._ended: deque[Ended] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        with self._changed:
            queue = self._queues.get(job.session)
            if queue is None:
                queue = self._queues[job.session] = deque()
                self._turns.append(job.session)
            queue.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pdcore-shm", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drain(self) -> list[Ended]:
        """Everything that ended since the last call, in order."""
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    def close(self, timeout_s: float) -> bool:
        """Stop once every job has ended (mark them first); False when it takes longer."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._take_turn():
            pass

    def _take_turn(self) -> bool:
        """Wait for a job and copy one chunk of it; False when there will be none. Names of
        its own, so that nobody's memory stays mapped while the thread waits for the next."""
        with self._changed:
            while not self._turns:
                if self._closing:
                    return False
                self._changed.wait()
            session = self._turns.popleft()
            job = self._queues[session][0]
        ended = advance(job)
        with self._changed:
            queue = self._queues[session]
            if ended is not None:
                queue.popleft()
                self._ended.append(ended)
            if queue:
                self._turns.append(session)
            else:
                del self._queues[session]
        if ended is not None:
            self._ring()
        return True
