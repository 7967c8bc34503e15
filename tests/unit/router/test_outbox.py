"""Cancels until they are answered (Q5 RES)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.fsm.routed import Leg
from pdcore.router.outbox import CancelKey, Outbox, SendCancel
from pdcore.router.policies import Target

TARGET = Target("d0:1", "d0", 1)


def cancel(attempt: int = 7, *, unless_received: bool = False) -> SendCancel:
    return SendCancel(CancelKey(5, attempt, Leg.DECODE), TARGET, unless_received)


def outbox(cap: int = 10) -> Outbox:
    return Outbox(initial_s=0.05, max_s=0.2, unknown_s=30.0, cap=cap)


def test_never_heard_of_it_is_no_answer() -> None:
    """A cancel may overtake its request: it is asked again, with back-off, until it is known."""
    box = outbox()
    one = cancel()
    assert box.add(one, until_s=100.0) == one
    assert box.next_due_s() is None, "an answer is awaited"
    now_s, delays = 0.0, []
    for _ in range(4):
        box.answer(one.key, is_known=False, now_s=now_s)
        due_s = box.next_due_s()
        assert due_s is not None
        delays.append(round(due_s - now_s, 3))
        assert box.due(due_s - 0.001) == []
        assert box.due(due_s) == [one]
        now_s = due_s
    assert delays == [0.05, 0.1, 0.2, 0.2]
    box.answer(one.key, is_known=True, now_s=now_s)
    assert len(box) == 0
    box.answer(one.key, is_known=True, now_s=now_s)


def test_after_the_legs_own_deadline_it_is_given_up() -> None:
    box = outbox()
    one = cancel()
    box.add(one, until_s=1.0)
    box.answer(one.key, is_known=False, now_s=0.99)
    assert box.due(1.1) == []
    assert (len(box), box.num_given_up) == (0, 1)


def test_what_a_leg_goes_on_not_to_know_is_given_up_and_silence_is_not() -> None:
    """A request that the leg refused is never known there; a leg that does not answer may
    know it."""
    for is_known, left in ((False, 0), (None, 1)):
        box = outbox()
        one = cancel()
        box.add(one, until_s=1800.0)
        num_asked, now_s = 1, 0.0
        box.answer(one.key, is_known=is_known, now_s=now_s)
        while (due_s := box.next_due_s()) is not None and due_s < 40.0:
            now_s = due_s
            num_asked += len(box.due(now_s))
            box.answer(one.key, is_known=is_known, now_s=now_s)
        assert (len(box), box.num_given_up) == (left, 1 - left)
        assert left or 30.0 <= now_s < 30.3, "it is asked for at least 30 s"
        assert num_asked > 100


def test_a_stronger_cancel_replaces_a_weaker_one_and_not_the_reverse() -> None:
    box = outbox()
    weak, strong = cancel(unless_received=True), cancel()
    assert box.add(weak, 9.0) == weak
    assert box.add(weak, 9.0) is None
    assert box.add(strong, 9.0) == strong
    assert box.add(weak, 9.0) is None
    box.answer(strong.key, is_known=False, now_s=0.0)
    assert box.due(1.0) == [strong]


def test_the_outbox_is_bounded() -> None:
    box = outbox(cap=2)
    for attempt in range(1, 5):
        box.add(cancel(attempt), 9.0)
    assert (len(box), box.num_given_up) == (2, 2)


def test_the_next_due_time_does_not_look_at_every_cancel() -> None:
    """Asked after every event of a router with thousands of cancels: a heap's top."""

    class Counted(OrderedDict[Any, Any]):
        num_walks = 0

        def values(self) -> Any:
            self.num_walks += 1
            return super().values()

        def items(self) -> Any:
            self.num_walks += 1
            return super().items()

    class Mutant(Outbox):
        def next_due_s(self) -> float | None:
            dues = (e.due_s for e in self._entries.values() if e.due_s is not None)
            return min(dues, default=None)

    def check(kind: type[Outbox]) -> None:
        box = kind(initial_s=0.05, max_s=0.2, unknown_s=30.0, cap=2000)
        box._entries = entries = Counted()
        for attempt in range(1, 1001):
            box.add(cancel(attempt), 9.0)
            box.answer(cancel(attempt).key, is_known=False, now_s=attempt / 1e6)
            assert box.next_due_s() == 0.05 + 1 / 1e6
        assert entries.num_walks == 0, "every cancel is looked at"

    check(Outbox)
    with pytest.raises(AssertionError, match="every cancel"):
        check(Mutant)


def test_the_queue_stays_bounded_by_the_cap() -> None:
    box = outbox(cap=2)
    for attempt in range(1, 1000):
        box.add(cancel(attempt), 9.0)
        box.answer(cancel(attempt).key, is_known=False, now_s=1.0)
    assert len(box._queue) <= 2 * 2 + 65
    assert [one.key.attempt for one in box.due(2.0)] == [998, 999]


def test_a_target_that_stays_unreachable_is_asked_no_more() -> None:
    box = outbox()
    one = cancel()
    other = one._replace(key=one.key._replace(leg=Leg.PREFILL), target=Target("p0:1", "p0", 1))
    for each in (one, other):
        box.add(each, 9.0)
        box.answer(each.key, is_known=False, now_s=0.0)
    assert box.due(0.05, {TARGET}) == [other]
    assert (len(box), box.num_given_up) == (1, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=60))
def test_the_heap_agrees_with_looking_at_every_cancel(steps: list[tuple[int, int, bool]]) -> None:
    box = outbox(cap=4)
    now_s = 0.0
    for what, number, flag in steps:
        if what == 0:
            box.add(cancel(number, unless_received=flag), now_s + 1.0)
        elif what == 1:
            box.answer(cancel(number).key, is_known=flag, now_s=now_s)
        else:
            now_s += number / 50
            due = [
                e.cancel
                for e in box._entries.values()
                if e.due_s is not None and e.due_s <= now_s < e.until_s
            ]
            assert sorted(one.key[:2] for one in box.due(now_s)) == sorted(
                one.key[:2] for one in due
            )
        dues = [e.due_s for e in box._entries.values() if e.due_s is not None]
        assert box.next_due_s() == min(dues, default=None)
