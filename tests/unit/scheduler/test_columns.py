"""What a decode batch keeps between steps."""

from __future__ import annotations

import gc
import random
import weakref

from pdcore.scheduler.columns import HISTORY_STEPS, MAX_PAST, Calendar, Columns, Row, StopIds
from pdcore.scheduler.sequence import Sequence
from pdcore.types import GenerateRequest, RoomKey, SamplingParams


def row(seq_id: int) -> Row:
    request = GenerateRequest(RoomKey(seq_id + 1, 1), "r", (1, 2), SamplingParams(), 0, 0)
    seq = Sequence(seq_id, request)
    seq.complete_prefill()
    seq.append_token(1000 * seq_id)
    return Row(seq, seq_id, frozenset())


def test_stop_ids_are_counted() -> None:
    stops = StopIds()
    stops.add(frozenset({1, 2}))
    stops.add(frozenset({2, 3}))
    stops.discard(frozenset({1, 2}))
    assert stops.ids == {2, 3}
    stops.discard(frozenset({2, 3}))
    assert stops.ids == set()


def test_the_calendar_forgets_what_moved() -> None:
    calendar = Calendar()
    a, b = row(1), row(2)
    a.index = b.index = 0
    calendar.plan_alloc(a, 3)
    calendar.plan_alloc_together({b.order: b}, 3)
    calendar.plan_alloc(a, 5)
    calendar.plan_limit(a, 4)
    calendar.plan_limit(b, 4)
    calendar.plan_limit(b, 9)
    calendar.step = 3
    due = calendar.pop_alloc()
    assert due == {b.order: b}
    assert calendar.pop_alloc() == {}
    calendar.plan_alloc_together(due, 5)
    calendar.forget_alloc(a)
    calendar.forget_alloc(a)
    calendar.step = 5
    assert calendar.pop_alloc() == {b.order: b}
    calendar.plan_alloc(b, 6)
    calendar.forget_alloc(b)
    calendar.step = 6
    assert calendar.pop_alloc() == {}
    calendar.step = 3
    calendar.step = 4
    assert list(calendar.pop_limit()) == [a]
    calendar.forget_limit(b)
    assert calendar._limit == {}


def test_rows_come_and_go_and_every_token_reaches_its_sequence() -> None:
    """Tokens stay in their columns until somebody reads them, be it long after the row
    has moved or left."""
    rng = random.Random(7)
    columns = Columns()
    expected: dict[int, list[int]] = {}
    rows: dict[int, Row] = {}
    left: list[Row] = []
    for step in range(20 * HISTORY_STEPS):
        if rng.random() < 0.4:
            new = row(step)
            expected[step] = [1000 * step]
            rows[step] = new
            columns.append(new, {}, step)
        if rows and rng.random() < 0.35:
            gone = rows.pop(rng.choice(list(rows)))
            columns.remove(gone)
            assert gone.index == -1
            assert gone.seq.num_output_tokens == len(expected[gone.seq.seq_id])
            left.append(gone)
        tokens = [1000 * seq_id + step for seq_id in columns.seq_ids]
        for seq_id, token in zip(columns.seq_ids, tokens, strict=True):
            expected[seq_id].append(token)
        columns.take(tokens)
        for seq_id, one in rows.items():
            assert one.seq.num_output_tokens == len(expected[seq_id])
            assert columns.rows[one.index] is one
            if rng.random() < 0.1:
                assert one.seq.output_token_ids == expected[seq_id]
    for one in (*rows.values(), *left):
        assert one.seq.output_token_ids == expected[one.seq.seq_id]


def test_a_long_row_does_not_keep_the_columns_of_its_whole_life() -> None:
    columns = Columns()
    long = row(1)
    columns.append(long, {}, 0)
    num_steps = HISTORY_STEPS * (MAX_PAST + 3) + 5
    for step in range(num_steps):
        columns.take([step])
        assert len(long.tail.past) <= MAX_PAST
    assert len(long.tail.output) == 1 + 3 * HISTORY_STEPS
    assert long.seq.num_output_tokens == 1 + num_steps
    assert long.seq.output_token_ids == [1000, *range(num_steps)]
    assert long.tail.past == []


def test_a_row_that_leaves_in_flight_gets_no_token() -> None:
    columns = Columns()
    a, b = row(1), row(2)
    columns.append(a, {}, 0)
    columns.append(b, {}, 0)
    columns.take_off()
    columns.remove(a)
    columns.take([7, 8])
    assert columns.seqs == [a.seq, b.seq]
    columns.land()
    assert columns.seqs == [b.seq]
    assert columns.keys == [b.seq.key]
    assert a.seq.output_token_ids == [1000]
    assert b.seq.output_token_ids == [2000, 8]


def test_what_was_lent_does_not_change_with_the_rows() -> None:
    columns = Columns()
    a, b, c = row(1), row(2), row(3)
    columns.append(a, {}, 0)
    columns.append(b, {}, 0)
    seqs, keys = columns.lend()
    assert columns.lend()[0] is seqs
    columns.remove(a)
    columns.append(c, {}, 0)
    assert (seqs, keys) == ([a.seq, b.seq], [a.seq.key, b.seq.key])
    assert columns.seqs == [b.seq, c.seq]


def test_an_ended_sequence_takes_its_columns_along_at_once() -> None:
    """Nothing waits for a garbage collection that may be far away."""
    columns = Columns()
    ended, stays = row(1), row(2)
    columns.append(ended, {}, 0)
    columns.append(stays, {}, 0)
    columns.take([1, 2])
    seqs, _ = columns.lend()
    columns.remove(ended)
    gone = weakref.ref(ended.tail)
    gc.disable()
    try:
        del ended, seqs
        assert gone() is None
    finally:
        gc.enable()
    assert stays.seq.output_token_ids == [2000, 2]
