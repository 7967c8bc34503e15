"""Events are frozen values with a past-tense name."""

from __future__ import annotations

import re

import pytest

from pdcore.fsm import events
from pdcore.fsm.events import Event, HandleEnded, PeerLost, VotesReduced
from pdcore.types import Incarnation

KINDS = [
    kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_is_frozen_and_in_the_past_tense(kind: type[Event]) -> None:
    assert kind.__struct_config__.frozen
    assert re.search(r"(ed|Lost)$", kind.__name__)


def test_events_compare_by_value() -> None:
    assert HandleEnded(3, quiesced=True) == HandleEnded(3, True)
    assert PeerLost(Incarnation(b"p" * 16), fenced=False).detail == ""
    assert VotesReduced(1, (2, 1)).diverged is False
    with pytest.raises(AttributeError):
        HandleEnded(3, quiesced=True).handle = 4
