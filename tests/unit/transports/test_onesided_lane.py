"""One session's thread: what it ends, how, and when that is called quiesced."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import attrs
import numpy as np
import pytest

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.base import Completion, HandleStatus
from pdcore.transports.engines import WriteFailed
from pdcore.transports.onesided_chunks import Chunk
from pdcore.transports.onesided_lane import Clock, Job, Lane, Surroundings
from pdcore.transports.socket_links import Link
from pdcore.transports.socket_outgoing import MAX_JOBS, Outgoing
from pdcore.transports.socket_reader import FrameReader
from pdcore.types import Incarnation, LeaseId
from tests.unit.transports.attach_engine import LIMITS, AttachEngine

DONE, FAILED, CANCELLED = HandleStatus.DONE, HandleStatus.FAILED, HandleStatus.CANCELLED
LEASE = LeaseId(Incarnation(b"p" * 16), 1)
SOON_S = 20.0
NEVER_S = 600.0


class Bench:
    """A lane to this very process, and what it said."""

    def __init__(self, *, stall_s: float = NEVER_S, lands_late_s: float = 0.0) -> None:
        self.engine = AttachEngine(attrs.evolve(LIMITS, lands_late_s=lands_late_s))
        self.faults = self.engine.faults
        self.said: queue.Queue[Completion] = queue.Queue()
        self.notes: list[bytes] = []
        self.hung_up = threading.Event()
        self.clock = Clock(stall_s, "clock")
        self.source = np.arange(256, dtype=np.uint8)
        self.target = np.zeros(256, np.uint8)
        sock, self._far = socket.socketpair()
        self.link = Link(sock, Outgoing(), FrameReader(()))
        around = Surroundings(
            "lane",
            self.engine,
            self.clock,
            self.said.put,
            lambda link, lease, payload: self.notes.append(payload),
            lambda link: self.hung_up.set(),
        )
        self.make = lambda address: Lane(around, self.link, address)
        self.lane = self.make(self.engine.address())

    def job(self, handle: int, *rows: tuple[int, int], notify: bytes | None = None) -> Job:
        """One call for each row (offset, bytes)."""

        def chunks() -> Iterator[Chunk]:
            for at, size in rows:
                ours, theirs = self.source.ctypes.data + at, self.target.ctypes.data + at
                columns = [np.array([value], np.int64) for value in (ours, theirs, size)]
                yield Chunk(*columns)

        return Job(handle, LEASE, chunks(), notify)

    def submit(self, handle: int, *rows: tuple[int, int], notify: bytes | None = None) -> Job:
        job = self.job(handle, *rows, notify=notify)
        self.lane.submit(job)
        return job

    def next(self) -> Completion:
        return self.said.get(timeout=SOON_S)

    def close(self) -> None:
        self.faults.release.set()
        self.lane.stop(CANCELLED, "closed")
        self.lane.hurry()
        assert self.lane.join(SOON_S)
        self.clock.close()
        self.link.sock.close()
        self._far.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def said(handle: int, status: HandleStatus, *, quiesced: bool = True) -> Callable[[object], bool]:
    return lambda one: (
        isinstance(one, Completion)
        and (one.handle, one.status, one.quiesced) == (handle, status, quiesced)
    )


def expect(bench: Bench, handle: int, status: HandleStatus, *, quiesced: bool = True) -> str:
    found = bench.next()
    assert said(handle, status, quiesced=quiesced)(found), found
    return found.detail


def test_jobs_end_in_order_and_are_notified_when_their_bytes_are_there(bench: Bench) -> None:
    """G1."""
    for handle in range(1, 9):
        bench.submit(handle, (handle * 8, 8), notify=b"%d" % handle)
    for handle in range(1, 9):
        expect(bench, handle, DONE)
    assert bench.notes == [b"%d" % handle for handle in range(1, 9)]
    assert bench.target.tolist() == [*[0] * 8, *range(8, 72), *[0] * 184]


def test_a_job_of_nothing_ends_without_a_call(bench: Bench) -> None:
    bench.submit(1, notify=b"empty")
    expect(bench, 1, DONE)
    assert bench.faults.calls == []
    assert bench.notes == [b"empty"]


def test_a_failed_call_fails_its_job_and_no_other(bench: Bench) -> None:
    bench.faults.fail_next = 1
    bench.submit(1, (0, 8), (8, 8), notify=b"never")
    bench.submit(2, (16, 8), notify=b"second")
    assert expect(bench, 1, FAILED) == "the vendor says -1"
    expect(bench, 2, DONE)
    assert bench.notes == [b"second"]
    assert bench.target[:16].tolist() == [0] * 16


def test_a_part_is_never_notified(bench: Bench) -> None:
    """D29's kin: half a transfer is none, whatever of it has arrived."""
    bench.faults.partial = True
    bench.submit(1, (0, 8), notify=b"part")
    expect(bench, 1, FAILED)
    assert bench.notes == []


def test_cancelled_between_two_calls(bench: Bench) -> None:
    bench.faults.hang = True
    job = bench.submit(1, (0, 8), (8, 8), notify=b"never")
    assert bench.faults.entered.wait(SOON_S)
    job.stop = CANCELLED, "cancelled"
    bench.faults.release.set()
    expect(bench, 1, CANCELLED)
    assert bench.faults.calls == [(1, 8)]
    assert bench.notes == []


def test_a_peer_whose_engine_is_gone_ends_the_session(bench: Bench) -> None:
    bench.faults.fail_next = 1
    bench.faults.failure = lambda: WriteFailed("no such peer", is_peer_gone=True)
    bench.faults.hang = True
    bench.submit(1, (0, 8))
    bench.submit(2, (8, 8))
    bench.faults.release.set()
    assert expect(bench, 1, FAILED) == "no such peer"
    expect(bench, 2, FAILED)
    assert bench.hung_up.wait(SOON_S)
    with pytest.raises(PeerGone, match="no such peer"):
        bench.submit(3, (0, 8))


def test_a_call_that_does_not_return_fails_in_time_and_is_quiesced_when_it_does() -> None:
    """Public reports nixl #2047, mooncake's 30 s: the vendor's patience is not ours; and its
    call is the only thing that knows when nothing lands any more (G2)."""
    bench = Bench(stall_s=0.05)
    try:
        bench.faults.hang = True
        bench.submit(1, (0, 8), notify=b"never")
        bench.submit(2, (8, 8))
        detail = expect(bench, 1, FAILED, quiesced=False)
        assert "did not return for 0.05 s" in detail
        expect(bench, 2, FAILED)
        with pytest.raises(PeerGone, match="did not return"):
            bench.submit(3, (0, 8))
        assert bench.said.empty()
        assert not bench.lane.join(0.0)
        bench.faults.release.set()
        expect(bench, 1, FAILED)
        assert bench.hung_up.wait(SOON_S)
        assert bench.notes == []
    finally:
        bench.close()


def test_an_engine_that_cannot_open_its_peer() -> None:
    bench = Bench()
    try:
        bench.lane.stop(CANCELLED, "closed")
        assert bench.lane.join(SOON_S)
        bench.lane = bench.make(b"nonsense")
        assert bench.lane.join(SOON_S)
        with pytest.raises(PeerGone, match="malformed address"):
            bench.submit(1, (0, 8))
    finally:
        bench.close()


@pytest.mark.parametrize("how", ["time", "death", "closing"])
def test_late_bytes_are_waited_for(how: str) -> None:
    """Mooncake, memfabric: a call that failed says nothing about bytes on their way. Quiesced
    when they must have landed, or when there is no memory that they could land in."""
    bench = Bench(lands_late_s=0.05 if how == "time" else NEVER_S)
    try:
        bench.faults.late = True
        bench.submit(1, (0, 8))
        expect(bench, 1, FAILED, quiesced=False)
        with pytest.raises(PeerGone):
            bench.submit(2, (8, 8))
        assert not bench.hung_up.is_set()
        if how == "death":
            bench.lane.peer_is_gone("dead")
        elif how == "closing":
            bench.lane.hurry()
            assert bench.lane.join(SOON_S)
            assert bench.lane.is_in_doubt
            assert bench.said.empty()
            return
        expect(bench, 1, FAILED)
        assert bench.lane.join(SOON_S)
        assert not bench.lane.is_in_doubt
    finally:
        bench.close()


def test_whoever_waits_for_late_bytes_without_a_reason_is_told() -> None:
    """An engine that declares lands_late_s 0 has nothing to wait for."""
    bench = Bench(lands_late_s=0.0)
    try:
        bench.faults.late = True
        bench.submit(1, (0, 8))
        expect(bench, 1, FAILED)
    finally:
        bench.close()


def test_stopping_ends_what_waits_and_what_runs(bench: Bench) -> None:
    bench.faults.hang = True
    bench.submit(1, (0, 8), (8, 8))
    bench.submit(2, (16, 8))
    assert bench.faults.entered.wait(SOON_S)
    bench.lane.stop(FAILED, "disconnected")
    assert bench.said.empty()
    bench.faults.release.set()
    assert expect(bench, 1, FAILED) == "disconnected"
    expect(bench, 2, FAILED)
    assert bench.lane.join(SOON_S)
    assert bench.hung_up.is_set()
    assert bench.engine.peers == {}


def test_a_lost_side_channel_ends_transfers(bench: Bench) -> None:
    bench.faults.hang = True
    bench.submit(1, (0, 8), (8, 8))
    assert bench.faults.entered.wait(SOON_S)
    bench.link.is_open = False
    bench.faults.release.set()
    assert "gone, or cannot be reached" in expect(bench, 1, FAILED)
    with pytest.raises(PeerGone, match="its peer is gone"):
        bench.submit(2, (0, 8))


def test_a_revoked_lease_is_written_no_more(bench: Bench) -> None:
    """The receiver asks; that it has been heard is the quiesced mark."""
    bench.faults.hang = True
    bench.submit(1, (0, 8), (8, 8), notify=b"never")
    assert bench.faults.entered.wait(SOON_S)
    half = bench.link.half
    assert isinstance(half, Outgoing)
    half.note_revoked(LEASE)
    bench.faults.release.set()
    assert "revoked" in expect(bench, 1, FAILED)
    bench.submit(2, (0, 8))
    expect(bench, 2, FAILED)
    assert bench.faults.calls == [(1, 8)]
    assert bench.notes == []


def test_a_queue_is_bounded(bench: Bench) -> None:
    bench.faults.hang = True
    for handle in range(MAX_JOBS):
        bench.submit(handle + 1, (0, 1))
    with pytest.raises(TransportError, match="4096 transfers wait"):
        bench.submit(MAX_JOBS + 1, (0, 1))


def test_clock_calls_only_what_is_late() -> None:
    clock = Clock(0.05, "clock")
    late = threading.Event()
    clock.begin("kept", late.set)
    assert late.wait(SOON_S)
    late.clear()
    clock.begin("one", late.set)
    clock.begin("two", lambda: None)
    clock.end("one")
    clock.close()
    assert not late.is_set()
    clock.begin("after", late.set)
    clock.close()
    assert not late.is_set()


def test_clock_does_not_count_the_time_in_which_this_process_was_stopped() -> None:
    """Its peers were not silent then: nobody asked them."""
    looks = iter([0.0, 0.0, 1000.0])  # begun, fallen asleep, awake after a stop
    asked = threading.Event()
    time_is = [1000.0]

    def now() -> float:
        found = next(looks, None)
        if found is None:
            found = time_is[0]
            asked.set()
        return found

    clock = Clock(0.05, "clock", now)
    late = threading.Event()
    try:
        clock.begin("call", late.set)
        assert asked.wait(SOON_S)
        assert not late.is_set()
        time_is[0] += 0.1
        assert late.wait(SOON_S)
    finally:
        clock.close()
