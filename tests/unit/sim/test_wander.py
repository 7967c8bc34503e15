"""Random walks: the same seed walks the same way, and what is bad is met."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pdcore.sim import wander as module
from pdcore.sim.explore import DEADLOCK, LIVENESS, SAFETY, Move, replay
from pdcore.sim.wander import wander


class Line:
    """From 0 to 20; a fault goes back. ``bad`` is no place to be, ``wall`` nothing passes."""

    def __init__(self, *, bad: int = -1, wall: int = -1, circle: bool = False) -> None:
        self.bad, self.wall, self.circle = bad, wall, circle

    def initial(self) -> int:
        return 0

    def moves(self, state: int) -> Iterable[Move[int]]:
        if state > 0 and state != self.wall:
            yield Move("back", True, state - 1)
        if state < 20 and state != self.wall:
            ahead = 0 if self.circle and state == 10 else state + 1
            yield Move("on", False, ahead, ("row",))

    def problems(self, state: int) -> Iterable[str]:
        if state == self.bad:
            yield "bad"

    def is_goal(self, state: int) -> bool:
        return state == 20

    def show(self, state: int) -> str:
        return str(state)


def test_walks_end_and_count_what_they_did() -> None:
    found = wander(Line(), range(10), num_moves=5)
    assert found.violations == ()
    assert found.walks == 10
    assert found.rows["row"] == found.moves - found.faults
    assert found.faults > 0


def test_the_same_seed_walks_the_same_way() -> None:
    first, second = (wander(Line(bad=7), range(3)) for _ in range(2))
    assert first.violations == second.violations
    assert len(first.violations) == 3


def test_what_is_met_replays() -> None:
    (found,) = wander(Line(bad=7), range(1)).violations
    assert found.kind == SAFETY
    steps = replay(Line(bad=7), found.trace)
    assert steps[-1].problems == ("bad",)


def test_who_cannot_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    (stuck,) = wander(Line(wall=7), range(1)).violations
    assert stuck.kind == DEADLOCK
    monkeypatch.setattr(module, "MAX_FAIR_MOVES", 50)
    (round_and_round,) = wander(Line(circle=True), range(1)).violations
    assert round_and_round.kind == LIVENESS
