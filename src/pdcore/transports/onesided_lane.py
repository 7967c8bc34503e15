"""One session of a transport over a vendor's engine: a queue, and the thread that works it
off in calls that block as long as the vendor likes.

One thread a session: a peer that is slow or stopped holds up no other (D23). The thread
alone ends what it carries, with one exception: when a call takes longer than the session may
stall, a clock (:class:`Clock`) fails everything at once and closes the session. The one
transfer whose call is still running is quiesced when the call has come back, and not before
``lands_late_s`` more when the vendor cannot say that nothing of it lands; so no vendor's
time-out, cancel or silence is ever taken for a fence.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import attrs

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.base import Completion, HandleStatus
from pdcore.transports.engines import Engine, WriteFailed
from pdcore.transports.onesided_chunks import Chunk
from pdcore.transports.socket_links import Link
from pdcore.transports.socket_outgoing import MAX_JOBS, Outgoing
from pdcore.types import LeaseId

#: A sleep that took longer than it should by this was none: this process was stopped.
_STOPPED_S: Final = 1.0

Stop = tuple[HandleStatus, str]


@attrs.define(eq=False)
class Job:
    """One handle. ``stop`` is set by the owner's thread and read by the lane's."""

    handle: int
    lease: LeaseId
    chunks: Iterator[Chunk] = attrs.field(repr=False)
    notify: bytes | None = attrs.field(default=None, repr=False)
    local_regions: tuple[int, ...] = ()
    stop: Stop | None = None
    #: Said to the owner already, as not quiesced.
    is_told: bool = False


class Clock:
    """Calls ``late`` of whoever began something and did not end it within ``limit_s``. One
    thread, and only once something was begun."""

    def __init__(
        self, limit_s: float, name: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s = limit_s
        self._name = name
        self._now = now
        self._changed = threading.Condition()
        #: Oldest first: all have the same limit.
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._is_idle = True
        self._is_closed = False

    def begin(self, key: object, late: Callable[[], None]) -> None:
        with self._changed:
            self._due[key] = self._now() + self.limit_s, late
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif self._is_idle:
                self._changed.notify()

    def end(self, key: object) -> None:
        with self._changed:
            self._due.pop(key, None)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                self._sleep()
                now = self._now()
                late = [key for key, (due_s, _) in self._due.items() if due_s <= now]
                calls = [self._due.pop(key)[1] for key in late]
            for call in calls:
                call()

    def _sleep(self) -> None:
        """Until the oldest is due, or the first begins, or the end. Not woken for those in
        between: they are due later."""
        self._is_idle = not self._due
        began_s = self._now()
        wait_s = min(due_s for due_s, _ in self._due.values()) - began_s if self._due else None
        if wait_s is None or wait_s > 0:
            self._changed.wait(wait_s)
        self._is_idle = False
        slept_s = self._now() - began_s
        if wait_s is not None and slept_s > wait_s + _STOPPED_S:
            # Not the peers were silent: this process was stopped meanwhile.
            self._due = {key: (due + slept_s, late) for key, (due, late) in self._due.items()}


@attrs.frozen(eq=False)
class Surroundings:
    """What the lanes of a transport work with. ``tell``, ``notify`` and ``hang_up`` may be
    called from any thread; ``hang_up`` is, when nothing of a lane is in any call any more."""

    name: str
    engine: Engine
    clock: Clock
    tell: Callable[[Completion], None]
    notify: Callable[[Link, LeaseId, bytes], None]
    hang_up: Callable[[Link], None]


class Lane:
    """``link`` is the session's side channel. Methods are the owner's; ``_run`` and what it
    calls are the thread's, and ``_expire`` is the clock's."""

    def __init__(self, around: Surroundings, link: Link, address: bytes) -> None:
        """``address`` of the peer's engine. Raises RuntimeError when the process can have no
        more threads."""
        self.link = link
        self._around = around
        #: Set once the peer's engine was met, or could not be.
        self.met = threading.Event()
        #: Why it takes no more jobs.
        self.why: str | None = None
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._is_leaving = self._is_last = False
        #: Nobody waits until late bytes must have landed.
        self._is_hurried = False
        self._is_peer_gone = False
        #: Bytes of a call that came back may still land; for others, once the thread has ended.
        self.is_in_doubt = False
        self._thread = threading.Thread(
            target=self._run, args=(address,), name=f"pdcore-{around.name}", daemon=True
        )
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Raises PeerGone when the session is over, TransportError when too much waits."""
        with self._changed:
            if self.why is not None or not self.link.is_open:
                raise PeerGone(
                    f"the session is over ({self.why or 'its peer is gone'}): connect again"
                )
            half = self.link.half
            unread = half.num_waiting if isinstance(half, Outgoing) else 0
            if len(self._queue) + unread >= MAX_JOBS:
                raise TransportError(
                    f"{MAX_JOBS} transfers wait for the peer: it is stopped, or overloaded"
                )
            self._queue.append(job)
            self._changed.notify_all()

    def stop(self, status: HandleStatus, why: str, *, is_last: bool = False) -> None:
        """End every handle so, between two calls, and the thread; does not wait. ``is_last``:
        the whole transport says goodbye, so the thread does not."""
        with self._changed:
            self._is_last = self._is_last or is_last
            for job in self._queue:
                if job.stop is None:
                    job.stop = status, why
            self.why = self.why or why
            self._is_leaving = True
            self._changed.notify_all()

    def peer_is_gone(self, why: str) -> None:
        """Whatever was on its way to it harms nobody."""
        self._is_peer_gone = True
        self.stop(HandleStatus.FAILED, why)

    def hurry(self) -> None:
        """Do not wait until late bytes must have landed."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """True when nothing more comes of it."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    # --- the thread ---------------------------------------------------------------------

    def _run(self, address: bytes) -> None:
        peer: int | None = None
        why = "its thread failed"
        try:
            self._around.clock.begin(self, self._expire)
            peer = self._around.engine.open(address)
            self._around.clock.end(self)
            self.met.set()
            while (job := self._next()) is not None:
                self._carry(peer, job)
            why = "closed"
        except TransportError as error:
            why = str(error)
        finally:
            self._around.clock.end(self)
            self._finish(why)
            if peer is not None:
                with contextlib.suppress(TransportError):
                    self._around.engine.shut(peer)
            if not self._is_last:
                self._around.hang_up(self.link)

    def _next(self) -> Job | None:
        """Wait for a job; None when there will be none. It stays in the queue."""
        with self._changed:
            while not self._queue:
                if self._is_leaving or self.why is not None:
                    return None
                self._changed.wait()
            return self._queue[0]

    def _carry(self, peer: int, job: Job) -> None:
        """Raises TransportError when the session cannot go on."""
        try:
            while (stop := self._stop_of(job)) is None:
                chunk = next(job.chunks, None)
                if chunk is None:
                    stop = HandleStatus.DONE, ""
                    break
                self._write(peer, chunk, job)
        except WriteFailed as error:
            self.is_in_doubt &= error.may_land
            if error.may_land or error.is_peer_gone:
                raise
            stop = job.stop or (HandleStatus.FAILED, str(error))
        self._end(job, stop)

    def _write(self, peer: int, chunk: Chunk, job: Job) -> None:
        def is_stopping() -> bool:
            return self._stop_of(job) is not None

        engine, clock = self._around.engine, self._around.clock
        self.is_in_doubt = engine.limits.lands_late_s > 0
        clock.begin(self, self._expire)
        try:
            engine.write(peer, chunk.local, chunk.remote, chunk.lengths, is_stopping)
        finally:
            clock.end(self)
        self.is_in_doubt = False

    def _stop_of(self, job: Job) -> Stop | None:
        half = self.link.half
        if job.stop is None and not self.link.is_open:
            job.stop = HandleStatus.FAILED, "the peer is gone, or cannot be reached"
        elif job.stop is None and isinstance(half, Outgoing) and job.lease in half.revoked:
            job.stop = HandleStatus.FAILED, "the receiver revoked the lease"
        return job.stop

    def _end(self, job: Job, stop: Stop) -> None:
        with self._changed:
            self._queue.popleft()
            if job.is_told:
                # The clock was faster: what it said stands.
                stop = job.stop or stop
            elif stop[0] is HandleStatus.DONE and job.notify is not None:
                self._around.notify(self.link, job.lease, job.notify)
            self._around.tell(Completion(job.handle, stop[0], True, stop[1]))

    def _expire(self) -> None:
        """A call takes too long. Its thread comes back when the vendor lets it."""
        limit_s = self._around.clock.limit_s
        why = f"the engine did not return for {limit_s:g} s: the peer is stopped, or cut off"
        with self._changed:
            self.why = self.why or why
            jobs = list(self._queue)
            for job in jobs:
                job.stop = job.stop or (HandleStatus.FAILED, why)
            self._tell_failed(jobs, is_first_quiesced=False)

    def _finish(self, why: str) -> None:
        """The thread carries no more: end what is left."""
        with self._changed:
            self.why = self.why or why
            self.met.set()
            self._tell_failed(list(self._queue), is_first_quiesced=not self.is_in_doubt)
            if not self.is_in_doubt:
                return
            late_s = self._around.engine.limits.lands_late_s
            is_cut_short = self._changed.wait_for(
                lambda: self._is_hurried or self._is_peer_gone, late_s
            )
            if self._is_peer_gone or not is_cut_short:
                self.is_in_doubt = False
                self._tell_failed(list(self._queue), is_first_quiesced=True)

    def _tell_failed(self, jobs: list[Job], *, is_first_quiesced: bool) -> None:
        """The first may be in a call, or land late; the others never began. The first stays
        in the queue until it is quiesced."""
        for i, job in enumerate(jobs):
            is_quiesced = is_first_quiesced or i > 0
            if job.is_told and not is_quiesced:
                continue
            job.is_told = True
            if is_quiesced:
                self._queue.remove(job)
            status, detail = job.stop or (HandleStatus.FAILED, self.why or "")
            self._around.tell(Completion(job.handle, status, is_quiesced, detail))
