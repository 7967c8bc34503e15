from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch", reason="torchdist needs the extra `torch`")

from pdcore.kv.plan import WriteBatch
from pdcore.testing.transport_harness import make_lease
from pdcore.transports.base import HandleStatus
from pdcore.transports.check import plan_copies
from pdcore.transports.torchdist_channel import Channel, End, LinkOver
from pdcore.transports.torchdist_courier import Job, Limits, Line, Stop, start
from pdcore.transports.torchdist_group import GlooBackend
from pdcore.transports.torchdist_sender import open_channel
from pdcore.transports.torchdist_wire import (
    Kind,
    decode_address,
)
from pdcore.types import Incarnation
from tests.unit.transports.torchdist_rig import (
    HOST,
    LIMITS,
    SOON_S,
    THEM,
    HandReceiver,
    bell,
    channels,
    warm_up,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")
SIZE = 1 << 18
US = Incarnation(b"m" * 16)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.fixture
def line() -> Iterator[tuple[Line, Channel, int]]:
    """Our end of a control connection, the peer's, and the bell."""
    with channels() as (mine, theirs), bell() as wake:
        yield Line(mine, wake, SOON_S), theirs, wake


def test_a_reply_comes_through_the_bell(line: tuple[Line, Channel, int]) -> None:
    """New jobs ring while an answer is awaited."""
    mine, theirs, wake = line
    os.eventfd_write(wake, 1)
    theirs.send(Kind.READY, timeout_s=SOON_S)
    assert mine.reply(Kind.READY, Kind.REJECTED) == (Kind.READY, b"")


def test_a_stalled_peer_is_given_up_and_not_called_dead() -> None:
    """gloo can hang: deadlines of our own above it (nixl #2047)."""
    with channels() as (mine, _), bell() as wake:
        line = Line(mine, wake, 0.02)
        with pytest.raises(LinkOver, match=r"no progress for 0\.02 s") as over:
            line.reply(Kind.READY)
        assert over.value.end is End.LOST


def test_a_frame_out_of_turn_ends_the_session(line: tuple[Line, Channel, int]) -> None:
    mine, theirs, _ = line
    theirs.send(Kind.PLACED, timeout_s=SOON_S)
    with pytest.raises(LinkOver, match="answered PLACED"):
        mine.reply(Kind.READY)
    theirs.send(Kind.PLACED, timeout_s=SOON_S)
    with pytest.raises(LinkOver, match="PLACED unasked"):
        mine.idle()


def test_a_hurry_ends_the_wait(line: tuple[Line, Channel, int]) -> None:
    mine, _, wake = line
    mine.is_hurried = True
    os.eventfd_write(wake, 1)
    with pytest.raises(LinkOver, match="closed before"):
        mine.reply(Kind.READY)
    mine.is_in_doubt = True
    assert mine.resolve(time.monotonic() + SOON_S) is None
    assert mine.is_in_doubt


@pytest.mark.parametrize("kind", [Kind.PLACED, Kind.REJECTED])
def test_an_answer_ends_the_doubt(line: tuple[Line, Channel, int], kind: Kind) -> None:
    """G2: quiesced when the receiver says what became of the chunk."""
    mine, theirs, _ = line
    mine.is_in_doubt = True
    theirs.send(kind, timeout_s=SOON_S)
    assert mine.resolve(time.monotonic() + SOON_S) is None
    assert not mine.is_in_doubt


@pytest.mark.parametrize(
    ("goodbye", "end"),
    [(Kind.DISCONNECT, End.DISCONNECTED), (Kind.BYE, End.CLOSED), (None, End.DIED)],
)
def test_an_end_of_the_peer_ends_the_doubt(
    line: tuple[Line, Channel, int], goodbye: Kind | None, end: End
) -> None:
    mine, theirs, _ = line
    mine.is_in_doubt = True
    if goodbye is not None:
        theirs.farewell(goodbye)
    theirs.close()
    over = mine.resolve(time.monotonic() + SOON_S)
    assert over is not None
    assert over.end is end
    assert not mine.is_in_doubt


def test_the_doubt_is_waited_for_until_then(line: tuple[Line, Channel, int]) -> None:
    mine, _, wake = line
    mine.is_in_doubt = True
    assert mine.resolve(time.monotonic() + 0.01) is None
    assert mine.is_in_doubt
    os.eventfd_write(wake, 1)
    mine.rest(time.monotonic() + SOON_S)
    mine.rest(time.monotonic())


def test_nonsense_leaves_the_doubt(line: tuple[Line, Channel, int]) -> None:
    """Only an answer or an end proves that a chunk cannot land any more."""
    mine, theirs, _ = line
    mine.is_in_doubt = True
    theirs._sock.send(b"HTTP/1.1 200 OK\r\n\r\n")
    over = mine.resolve(time.monotonic() + SOON_S)
    assert over is not None
    assert over.end is End.LOST
    assert mine.is_in_doubt


@pytest.mark.parametrize(
    "bad", [{"chunk_bytes": 100}, {"stall_timeout_s": 0}, {"connect_timeout_s": -1}]
)
def test_limits_are_checked(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Limits(**bad)


class Rig:
    """A courier in a thread of its own, and its receiver, which the test plays."""

    def __init__(self, backend: GlooBackend) -> None:
        self.receiver = HandReceiver(backend, SIZE)
        found = self.receiver.descriptor
        address = decode_address(found.blob)
        channel, self._sizes = open_channel(US, found, address, SOON_S)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.line = Line(channel, self._wake, SOON_S)
        self._backend = backend
        self._pool = ThreadPoolExecutor(1)
        self.source = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)

    def job(self, num_bytes: int, notify: bytes | None = None) -> Job:
        lease = make_lease(THEM, 1, {1: [(0, SIZE)]})
        pieces = np.array([[0, 0, num_bytes, 1, 0, 0]], np.int64)
        plan = plan_copies([WriteBatch(5, 1, pieces)], {5: SIZE}, self._sizes, lease)
        return Job(1, lease.lease, plan, {5: self.source}, notify)

    def carry(self, job: Job) -> Future[Stop]:
        """Started: both halves of the group are built when this returns."""
        started = self._pool.submit(start, self.line, self._backend, LIMITS)
        self.receiver.join_group()
        return self._pool.submit(lambda: started.result().carry(job))

    def close(self) -> None:
        self.line.channel.close()
        self._pool.shutdown()
        os.close(self._wake)
        self.receiver.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    backend = GlooBackend(HOST)
    backend.build_timeout_s = SOON_S
    made = Rig(backend)
    yield made
    made.close()
    backend.close()


def test_a_job_is_carried_chunk_by_chunk(rig: Rig) -> None:
    """G1: the notification is announced with the last chunk; DONE comes with its place."""
    ended = rig.carry(rig.job(150_000, b"wake up"))
    got, notified = b"", []
    for _ in range(3):
        head, data = rig.receiver.take()
        got += data
        notified.append((head.is_last, head.notify))
        assert not ended.done()
        rig.receiver.say(Kind.PLACED)
    assert ended.result(SOON_S) == (HandleStatus.DONE, "")
    assert got == rig.source[:150_000].tobytes()
    assert notified == [(False, None), (False, None), (True, b"wake up")]


def test_a_stop_is_seen_between_two_chunks(rig: Rig) -> None:
    """No cancel within a chunk: the one that is on its way is finished, the next is never
    announced, and the job ends when it is known to be over."""
    job = rig.job(SIZE)
    ended = rig.carry(job)
    rig.receiver.take()
    job.stop = HandleStatus.CANCELLED, "cancelled"
    assert not ended.done()
    rig.receiver.say(Kind.PLACED)
    assert ended.result(SOON_S) == (HandleStatus.CANCELLED, "cancelled")


def test_what_was_stopped_before_it_began_is_never_announced(rig: Rig) -> None:
    job = rig.job(SIZE)
    job.stop = HandleStatus.FAILED, "disconnected"
    assert rig.carry(job).result(SOON_S) == (HandleStatus.FAILED, "disconnected")


def test_a_refusal_ends_the_job(rig: Rig) -> None:
    ended = rig.carry(rig.job(SIZE))
    assert rig.receiver.hear()[0] is Kind.CHUNK
    rig.receiver.say(Kind.REJECTED, b"not granted")
    assert ended.result(SOON_S) == (HandleStatus.FAILED, "not granted")


def test_a_refusal_of_bytes_that_came_ends_it_too(rig: Rig) -> None:
    """The lease was revoked while they were on their way."""
    ended = rig.carry(rig.job(SIZE))
    rig.receiver.take()
    rig.receiver.say(Kind.REJECTED, b"revoked")
    assert ended.result(SOON_S) == (HandleStatus.FAILED, "revoked")
    assert not rig.line.is_in_doubt


def test_a_chunk_that_was_sent_is_in_doubt_until_it_is_answered(rig: Rig) -> None:
    ended = rig.carry(rig.job(1000))
    rig.receiver.take()
    assert rig.line.is_in_doubt
    rig.receiver.say(Kind.PLACED)
    assert ended.result(SOON_S)[0] is HandleStatus.DONE
    assert not rig.line.is_in_doubt


def test_a_peer_that_dies_with_a_receive_posted_is_dead(rig: Rig) -> None:
    """Its group breaks in the same moment; the control connection says why."""
    ended = rig.carry(rig.job(SIZE))
    rig.receiver.die_ready()
    with pytest.raises(LinkOver) as over:
        ended.result(SOON_S)
    assert over.value.end is End.DIED
    assert not rig.line.is_in_doubt
