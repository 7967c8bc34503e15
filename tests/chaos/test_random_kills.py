"""What the storm counts, without a storm."""

from __future__ import annotations

import os
from collections import Counter

from tests.chaos.leaks import Holding, holding
from tests.chaos.random_kills import Tally, told
from tests.scenarios.soak_client import Outcome


def tally_of(*kinds: str, router_died: bool = False) -> Tally:
    tally = Tally(sent=len(kinds))
    for kind in kinds:
        tally.count(Outcome(kind, "", 0.1), router_died)
    return tally


def test_a_death_explains_some_errors_and_not_others() -> None:
    """Every request of a broken cluster may be answered precisely."""
    assert tally_of("ok", "peer_lost", "unavailable", "deadline_exceeded").is_clean
    for kind in ("internal", "incompatible", "bad_metadata", "invalid_request"):
        tally = tally_of("ok", kind)
        assert not tally.is_clean
        assert kind in tally.examples[0]


def test_a_connection_may_break_with_its_router_only() -> None:
    assert tally_of("ok", "lost", router_died=True).is_clean
    assert not tally_of("ok", "lost").is_clean
    assert not tally_of("wrong", router_died=True).is_clean


def test_each_request_is_counted_once() -> None:
    tally = tally_of("ok", "peer_lost", "lost", "wrong")
    assert tally.num_ended == tally.sent
    assert not Tally(sent=2, ok=1).is_clean
    assert Tally(sent=2, ok=2).is_clean


def test_what_was_open_is_told_for_start_and_end() -> None:
    """So that a leak within its margin can be seen to grow from run to run."""
    before = Holding(Counter(socket=3, pipe=2), 5)
    now = holding(os.getpid())
    assert told({"router": before}, {"router": now})["router"] == {
        "start": {"fds": 5, "sockets": 3, "threads": 5},
        "end": {
            "fds": now.descriptors.total(),
            "sockets": now.descriptors["socket"],
            "threads": now.threads,
        },
    }
