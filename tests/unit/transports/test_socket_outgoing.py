from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import HandleStatus, RemoteLease
from pdcore.transports.check import plan_copies
from pdcore.transports.copy import copy_steps
from pdcore.transports.socket_outgoing import MAX_REVOKED, Ended, Job, Outgoing, write_frames
from pdcore.transports.socket_vector import Vector
from pdcore.transports.socket_wire import (
    HEAD,
    MAX_PIECES,
    Answer,
    End,
    Kind,
    unpack_end,
    unpack_head,
    unpack_write,
)
from pdcore.types import Incarnation, LeaseId

LEASE = LeaseId(Incarnation(b"r" * 16), 1)
STOP = HandleStatus.CANCELLED, "cancelled"


def job(handle: int, frames: int = 1, notify: bytes | None = None) -> Job:
    bodies = (Vector([memoryview(b"%d-%d" % (handle, i))]) for i in range(frames))
    return Job(handle, LEASE, bodies, notify)


def text(vector: Vector | None) -> bytes:
    assert vector is not None
    return b"".join(bytes(view) for view in vector.window())


def end_of(vector: Vector | None) -> End:
    frame = text(vector)
    assert unpack_head(frame[: HEAD.size])[0] is Kind.END
    return unpack_end(frame[HEAD.size :])


pieces = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(0, 40), st.integers(0, 40)),
    min_size=1,
    max_size=12,
)


@given(pieces, st.integers(1, 200), st.integers(1, 9))
def test_frames_carry_exactly_what_a_copy_would(
    shapes: list[tuple[int, int, int, int]], chunk_bytes: int, rows_at_once: int
) -> None:
    """Strided or not, whatever the chunk: putting each piece of each frame where it says
    gives the same memory as copying the plan."""
    rows, local, remote = [], 0, 0
    for width, count, gap, other_gap in shapes:
        rows.append((local, remote, width, count, width + gap, width + other_gap))
        local, remote = local + count * (width + gap), remote + count * (width + other_gap)
    source = np.arange(local, dtype=np.int64).astype(np.uint8)
    batch = WriteBatch(1, 2, np.array(rows, np.int64))
    lease = RemoteLease(LEASE, {2: np.array([[0, remote]], np.int64)})
    plan = plan_copies([batch], {1: local}, {2: remote}, lease)
    wanted, found = np.zeros(remote, np.uint8), np.zeros(remote, np.uint8)
    list(copy_steps(plan, {1: source}, {2: wanted}))
    total = 0
    for frame in write_frames(5, LEASE, plan, {1: source}, chunk_bytes, rows_at_once):
        head, *views = frame.window()
        kind, size = unpack_head(head[: HEAD.size])
        assert kind is Kind.WRITE
        write = unpack_write(bytes(head[HEAD.size : HEAD.size + size]))
        assert (write.handle, write.lease, write.region) == (5, LEASE, 2)
        assert write.num_bytes <= chunk_bytes
        for (offset, width), view in zip(write.pieces.tolist(), views, strict=True):
            assert len(view) == width
            found[offset : offset + width] = np.frombuffer(view, np.uint8)
        total += write.num_bytes
    assert total == plan.num_bytes
    assert (found == wanted).all()


def test_a_frame_never_holds_more_pieces_than_one_call_takes() -> None:
    count = 3 * MAX_PIECES
    rows = np.zeros((count, 6), np.int64)
    rows[:, 0] = rows[:, 1] = 2 * np.arange(count)
    rows[:, 2:4] = 1
    lease = RemoteLease(LEASE, {2: np.array([[0, 2 * count]], np.int64)})
    plan = plan_copies([WriteBatch(1, 2, rows)], {1: 2 * count}, {2: 2 * count}, lease)
    source = np.zeros(2 * count, np.uint8)
    sizes = [len(frame.window()) - 1 for frame in write_frames(1, LEASE, plan, {1: source})]
    assert sum(sizes) == count
    assert max(sizes) <= MAX_PIECES


def test_millions_of_rows_are_not_expanded_at_once() -> None:
    """D23: between ranks of different TP sizes a long prompt is millions of rows. Expanded
    before the first frame, they took seconds of the one thread that serves everybody, and
    more memory than the KV itself."""
    count = 1 << 20
    rows = np.array([[0, 0, 1, count, 2, 2]], np.int64)
    lease = RemoteLease(LEASE, {2: np.array([[0, 2 * count]], np.int64)})
    plan = plan_copies([WriteBatch(1, 2, rows)], {1: 2 * count}, {2: 2 * count}, lease)
    source = np.zeros(2 * count, np.uint8)
    tracemalloc.start()
    frames = write_frames(1, LEASE, plan, {1: source})
    assert len(next(frames).window()) == MAX_PIECES + 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_transfers_go_out_in_order_and_end_with_their_answers() -> None:
    half = Outgoing()
    one, two = job(1, 2, b"n"), job(2)
    half.add(one)
    half.add(two)
    assert half.num_waiting == 2
    assert [text(half.next_frame()[0]) for _ in range(2)] == [b"1-0", b"1-1"]
    assert end_of(half.next_frame()[0]) == End(1, LEASE, True, b"n")
    # The next one does not wait for the answer.
    assert text(half.next_frame()[0]) == b"2-0"
    assert half.answered(Kind.ACK, Answer(1, True, "")) == Ended(one, HandleStatus.DONE, "")
    assert end_of(half.next_frame()[0]).handle == 2
    assert not half.has_more
    refused = half.answered(Kind.ACK, Answer(2, False, "no lease"))
    assert refused == Ended(two, HandleStatus.FAILED, "no lease")
    assert half.num_waiting == 0


def test_a_stopped_transfer_says_so_and_is_never_notified() -> None:
    """G1, G2: CANCELLED with the answer, which is also the quiesced mark."""
    half = Outgoing()
    one = job(1, 3, b"n")
    half.add(one)
    half.next_frame()
    one.stop = STOP
    assert end_of(half.next_frame()[0]) == End(1, LEASE, False, None)
    assert half.answered(Kind.ACK, Answer(1, False, "")) == Ended(one, *STOP)


def test_what_never_began_ends_without_a_word() -> None:
    half = Outgoing()
    one = job(1)
    one.stop = STOP
    half.add(one)
    assert half.next_frame() == (None, Ended(one, *STOP))


def test_too_late_to_stop() -> None:
    """All was sent and placed: it is DONE, though a cancel came meanwhile."""
    half = Outgoing()
    one = job(1)
    half.add(one)
    half.next_frame()
    half.next_frame()
    one.stop = STOP
    assert half.answered(Kind.ACK, Answer(1, True, "")) == Ended(one, HandleStatus.DONE, "")


def test_a_rejected_transfer_stops_early() -> None:
    half = Outgoing()
    one = job(1, 5)
    half.add(one)
    half.next_frame()
    assert half.answered(Kind.REJECT, Answer(1, False, "revoked")) is None
    assert not end_of(half.next_frame()[0]).complete
    ended = half.answered(Kind.ACK, Answer(1, False, "revoked"))
    assert ended == Ended(one, HandleStatus.FAILED, "revoked")


def test_an_answer_that_was_not_asked_for_is_nonsense() -> None:
    half = Outgoing()
    with pytest.raises(TransportError, match="not to be answered"):
        half.answered(Kind.ACK, Answer(1, True, ""))
    for number in (1, 2):
        half.add(job(number))
        half.next_frame()
        half.next_frame()
    with pytest.raises(TransportError, match="not to be answered"):
        half.answered(Kind.ACK, Answer(2, True, ""))


@pytest.mark.parametrize("fenced", [True, False])
def test_giving_up_says_what_may_still_land(fenced: bool) -> None:
    """G2: quiesced only where the receiver reads nothing more, or nothing was ever sent."""
    half = Outgoing()
    jobs = [job(number, 2) for number in (1, 2, 3)]
    for one in jobs:
        half.add(one)
    for _ in range(4):  # the first is sent, the second begun
        half.next_frame()
    ended = half.give_up("broken", fenced=fenced)
    assert [one.job for one in ended] == jobs
    assert [one.quiesced for one in ended] == [fenced, fenced, True]
    assert {one.status for one in ended} == {HandleStatus.FAILED}
    assert half.answered(Kind.ACK, Answer(1, True, "")) is None, "an answer that comes too late"


def test_farewell_comes_last() -> None:
    half = Outgoing()
    half.add(job(1))
    half.next_frame()
    half.say_farewell(Kind.DISCONNECT, (HandleStatus.FAILED, "disconnected"))
    half.say_farewell(Kind.BYE, STOP)
    half.say_farewell(Kind.DISCONNECT, STOP)
    assert not end_of(half.next_frame()[0]).complete
    assert not half.is_over
    assert unpack_head(text(half.next_frame()[0]))[0] is Kind.BYE
    assert half.is_over
    assert half.next_frame() == (None, None)


def test_revoked_leases_are_remembered_and_bounded() -> None:
    half = Outgoing()
    for counter in range(MAX_REVOKED + 1):
        half.note_revoked(LeaseId(Incarnation(b"r" * 16), counter))
    assert len(half.revoked) == MAX_REVOKED
    assert LeaseId(Incarnation(b"r" * 16), 0) not in half.revoked
