"""Named deadlines: replaced, disarmed, in the order they fall due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcore.scheduler.timers import SLACK, Timers
from pdcore.types import RoomKey


def test_timers_fire_in_order_of_time_then_of_arming() -> None:
    """Keys that cannot be compared with each other may be due at the same moment, and a run
    replays exactly."""
    timers = Timers()
    keys: list[object] = [RoomKey(2, 1), "peers", RoomKey(1, 1), "bootstrap:1", RoomKey(2, 1)]
    for kind, key in zip(
        ("resend", "heartbeat", "drain", "topology", "deadline"), keys, strict=True
    ):
        timers.arm(kind, key, 5.0)
    timers.arm("resend", "early", 4.0)
    due = list(timers.pop_due(5.0))
    assert due == [
        ("resend", "early"),
        ("resend", RoomKey(2, 1)),
        ("heartbeat", "peers"),
        ("drain", RoomKey(1, 1)),
        ("topology", "bootstrap:1"),
        ("deadline", RoomKey(2, 1)),
    ]
    assert len(timers) == 0
    assert timers.next_s is None


def test_rearming_replaces_and_disarming_is_forgotten() -> None:
    timers = Timers()
    timers.arm("resend", 1, 3.0)
    timers.arm("resend", 1, 7.0)
    timers.arm("drain", 1, 5.0)
    timers.arm("linger", 1, 4.0)
    timers.disarm("drain", 1)
    timers.disarm("drain", 1)
    assert timers.is_armed("resend", 1)
    assert not timers.is_armed("drain", 1)
    assert timers.next_s == 4.0
    assert list(timers.pop_due(6.0)) == [("linger", 1)]
    assert timers.next_s == 7.0
    timers.arm("resend", 1, 6.5)
    assert list(timers.pop_due(10.0)) == [("resend", 1)]
    assert list(timers.pop_due(10.0)) == []


def test_a_timer_armed_by_its_own_handler_waits_for_its_time() -> None:
    timers = Timers()
    timers.arm("resend", 1, 1.0)
    fired = []
    for kind, key in timers.pop_due(2.0):
        fired.append((kind, key))
        timers.arm("resend", 1, 2.5)
    assert fired == [("resend", 1)]
    assert timers.next_s == 2.5


@given(
    st.lists(
        st.tuples(st.sampled_from(["arm", "disarm"]), st.integers(0, 3), st.integers(0, 9)),
        max_size=40,
    )
)
def test_timers_equal_a_dictionary(steps: list[tuple[str, int, int]]) -> None:
    timers, model = Timers(), dict[int, float]()
    for act, key, at_s in steps:
        if act == "arm":
            timers.arm("t", key, float(at_s))
            model[key] = float(at_s)
        else:
            timers.disarm("t", key)
            model.pop(key, None)
        assert timers.next_s == min(model.values(), default=None)
    due = [key for _, key in timers.pop_due(4.0)]
    assert sorted(due) == sorted(k for k, at_s in model.items() if at_s <= 4.0)
    assert [model[k] for k in due] == sorted(model[k] for k in due)


def test_disarmed_timers_do_not_pile_up() -> None:
    """Habit 8: a finished room does not leave its far deadline behind until that time."""
    timers = Timers()
    for key in range(20_000):
        timers.arm("deadline", key, 600.0 + key)
        timers.disarm("deadline", key)
    assert len(timers._heap) <= SLACK + 2
