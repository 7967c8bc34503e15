"""A configuration explores its own world and replays what it finds."""

from __future__ import annotations

from collections.abc import Iterable

from pdcore.sim.configurations import CONFIGURATIONS, configuration
from pdcore.sim.explore import Move


class Countdown:
    def __init__(self, mutant: str) -> None:
        self.is_bad = mutant == "stops"

    def initial(self) -> int:
        return 3

    def moves(self, state: int) -> Iterable[Move[int]]:
        if state > (1 if self.is_bad else 0):
            yield Move("tick", False, state - 1)

    def problems(self, state: int) -> Iterable[str]:
        return ()

    def is_goal(self, state: int) -> bool:
        return state == 0

    def show(self, state: int) -> str:
        return str(state)


def test_a_mutant_is_built_in_and_its_trace_walks_again() -> None:
    config = configuration("countdown", "counts", Countdown, bounds={"n": 3}, invariants=())
    assert config.run().exhausted
    (violation,) = config.run("stops").violations
    assert [s.state for s in config.replay("stops", violation.trace)] == ["3", "2", "1"]


def test_names_are_distinct() -> None:
    names = [c.name for c in CONFIGURATIONS]
    assert len(set(names)) == len(names)
