"""Deadlines and back-offs of requests in flight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.router.alarms import Alarms


def test_alarms_come_in_order_and_only_for_what_is_in_flight() -> None:
    live = {1: "a", 2: "b", 3: "c"}
    alarms = Alarms(live)
    for when_s, ticket in ((5.0, 1), (3.0, 2), (4.0, 3), (6.0, 3)):
        alarms.add(when_s, ticket)
    del live[2]
    assert alarms.next_s() == 4.0
    assert alarms.pop_due(3.9) is None
    assert [alarms.pop_due(5.0) for _ in range(3)] == [3, 1, None]
    assert alarms.next_s() == 6.0
    live.clear()
    assert alarms.next_s() is None


def check_the_heap_is_bounded_by_what_is_in_flight(kind: type[Alarms]) -> None:
    live: dict[int, str] = {}
    alarms = kind(live)
    for ticket in range(2000):
        live[ticket] = "x"
        alarms.add(1800.0 + ticket, ticket)
        live.pop(ticket - 3, None)
    assert len(alarms) < 200, "it keeps what is over"
    assert alarms.next_s() == 1800.0 + 1997


def test_requests_that_are_over_do_not_pile_up() -> None:
    """D60: at 1000 requests a second and a deadline of half an hour there were 1.8 million."""
    check_the_heap_is_bounded_by_what_is_in_flight(Alarms)

    class Keeps(Alarms):
        def add(self, when_s: float, ticket: int) -> None:
            live, self._live = self._live, range(1 << 40)
            super().add(when_s, ticket)
            self._live = live

    with pytest.raises(AssertionError, match="keeps what is over"):
        check_the_heap_is_bounded_by_what_is_in_flight(Keeps)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=300))
def test_no_alarm_of_a_live_request_is_lost(steps: list[tuple[int, bool]]) -> None:
    live: dict[int, int] = {}
    alarms = Alarms(live)
    for ticket, (when, ends) in enumerate(steps):
        live[ticket] = when
        alarms.add(float(when), ticket)
        if ends:
            live.pop(next(iter(live)))
    found = []
    while (ticket_due := alarms.pop_due(100.0)) is not None:
        found.append(ticket_due)
    assert sorted(found) == sorted(live)
    assert [live[t] for t in found] == sorted(live.values())
