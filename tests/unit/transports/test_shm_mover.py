from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from pdcore.transports.base import HandleStatus
from pdcore.transports.shm_mover import Job, Mover, advance
from pdcore.types import Incarnation, LeaseId

LEASE = LeaseId(Incarnation(b"l" * 16), 1)
WAIT_S = 10.0


class Rig:
    """A mover with a bell to wait for, and jobs that log their steps."""

    def __init__(self, kind: type[Mover] = Mover) -> None:
        self.rung = threading.Semaphore(0)
        self.mover = kind(self.rung.release)
        self.log: list[tuple[object, int]] = []

    def job(
        self, handle: int, session: object, chunks: int, gate: threading.Event | None = None
    ) -> Job:
        def steps() -> Iterator[int]:
            for i in range(chunks):
                if gate is not None and i == 1:
                    assert gate.wait(WAIT_S)
                self.log.append((session, i))
                yield 1

        return Job(handle, session, steps(), LEASE)

    def wait(self, count: int) -> list[tuple[int, HandleStatus]]:
        for _ in range(count):
            assert self.rung.acquire(timeout=WAIT_S)
        return [(ended.job.handle, ended.status) for ended in self.mover.drain()]


class OneQueue(Mover):
    """The seed's rule: all sessions in one queue, first come, first served (D23)."""

    def submit(self, job: Job) -> None:
        job.session = "all"
        super().submit(job)


def takes_turns(rig: Rig) -> None:
    gate = threading.Event()
    rig.mover.submit(rig.job(1, "a", 50, gate))
    rig.mover.submit(rig.job(2, "a", 1))
    rig.mover.submit(rig.job(3, "b", 2))
    gate.set()
    ended = rig.wait(3)
    assert rig.mover.close(WAIT_S)
    assert ended == [(3, HandleStatus.DONE), (1, HandleStatus.DONE), (2, HandleStatus.DONE)]
    position = {entry: i for i, entry in enumerate(rig.log)}
    assert position["b", 1] < position["a", 49]


def test_sessions_take_turns_and_jobs_of_one_stay_in_order() -> None:
    """D23: a long transfer to one peer does not hold up another; the mutant with one
    queue for all is caught."""
    takes_turns(Rig())
    with pytest.raises(AssertionError):
        takes_turns(Rig(OneQueue))


def test_a_stop_mark_ends_a_job_between_chunks() -> None:
    rig = Rig()
    gate = threading.Event()
    job = rig.job(1, "a", 100, gate)
    waiting = rig.job(2, "a", 100)
    rig.mover.submit(job)
    rig.mover.submit(waiting)
    job.stop = HandleStatus.CANCELLED, "cancelled"
    waiting.stop = HandleStatus.FAILED, "gone"
    gate.set()
    assert rig.wait(2) == [(1, HandleStatus.CANCELLED), (2, HandleStatus.FAILED)]
    assert len(rig.log) <= 2
    assert rig.mover.close(WAIT_S)


def test_a_failing_copy_does_not_kill_the_thread() -> None:
    def broken() -> Iterator[int]:
        raise ValueError("shapes differ")
        yield 0

    rig = Rig()
    rig.mover.submit(Job(1, "a", broken(), LEASE))
    rig.mover.submit(rig.job(2, "a", 1))
    assert rig.wait(2) == [(1, HandleStatus.FAILED), (2, HandleStatus.DONE)]
    assert rig.mover.close(WAIT_S)


def test_close_waits_no_longer_than_it_is_told() -> None:
    rig = Rig()
    gate = threading.Event()
    rig.mover.submit(rig.job(1, "a", 2, gate))
    assert not rig.mover.close(0.01)
    gate.set()
    assert rig.mover.close(WAIT_S)
    assert rig.wait(1) == [(1, HandleStatus.DONE)]


class Session:
    """Of a peer whose memory is mapped as long as this lives."""


def keeps_nobody(kind: type[Mover]) -> None:
    rig = Rig(kind)
    session = Session()
    alive = weakref.ref(session)
    gone = threading.Event()
    weakref.finalize(session, gone.set)
    rig.mover.submit(rig.job(1, session, 2))
    assert rig.wait(1) == [(1, HandleStatus.DONE)]
    rig.log.clear()
    del session
    try:
        assert gone.wait(0.5 if kind is not Mover else WAIT_S), alive()
    finally:
        assert rig.mover.close(WAIT_S)


class Remembering(Mover):
    """The mutant: one function that waits with the names of its last job."""

    def _take_turn(self) -> bool:
        with self._changed:
            while not self._turns:
                if self._closing:
                    return False
                self._changed.wait()
            session = self._turns[0]
        while super()._take_turn():
            if not self._turns:
                break
        with self._changed:
            self._changed.wait_for(lambda: self._turns or self._closing)
        return session is not None


def test_a_waiting_mover_keeps_no_peers_memory_mapped() -> None:
    """D39: found by chaos: the segment of a dead peer stayed mapped until the next transfer
    to another one, since the thread waited with the last job in its hands."""
    keeps_nobody(Mover)
    with pytest.raises(AssertionError):
        keeps_nobody(Remembering)


def test_an_idle_mover_has_no_thread() -> None:
    before = threading.active_count()
    mover = Mover(lambda: None)
    assert threading.active_count() == before
    assert mover.close(0)


def test_advance() -> None:
    rig = Rig()
    job = rig.job(1, "a", 1)
    assert advance(job) is None
    ended = advance(job)
    assert ended is not None
    assert (ended.status, ended.detail) == (HandleStatus.DONE, "")
