"""Cancels until they are answered (Q5 RES)."""

from __future__ import annotations

from pdcore.fsm.routed import Leg
from pdcore.router.outbox import CancelKey, Outbox, SendCancel
from pdcore.router.policies import Target

TARGET = Target("d0:1", "d0", 1)


def cancel(attempt: int = 7, *, unless_received: bool = False) -> SendCancel:
    return SendCancel(CancelKey(5, attempt, Leg.DECODE), TARGET, unless_received)


def outbox(cap: int = 10) -> Outbox:
    return Outbox(initial_s=0.05, max_s=0.2, cap=cap)


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
