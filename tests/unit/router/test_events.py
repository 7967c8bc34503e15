"""Events and effects are values: they can be kept, compared and replayed."""

from __future__ import annotations

import typing

from pdcore.fsm.routed import Leg
from pdcore.router import events


def test_every_event_and_effect_is_an_immutable_value() -> None:
    for kind in (*typing.get_args(events.RouterEvent), *typing.get_args(events.RouterEffect)):
        assert issubclass(kind, tuple)
        assert kind.__doc__ or kind is events.ClientLeft


def test_equal_events_are_equal() -> None:
    first = events.LegAnswered(1, 7, Leg.DECODE, 200)
    assert first == events.LegAnswered(1, 7, Leg.DECODE, 200)
    assert first != first._replace(attempt=8)
