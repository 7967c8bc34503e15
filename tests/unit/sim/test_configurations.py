"""A configuration explores its own world and replays what it finds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pdcore.scheduler.decode_rooms import DecodeRooms
from pdcore.sim.configurations import configuration
from pdcore.sim.explore import Move
from pdcore.sim.mutants import MUTANTS


class Countdown:
    def __init__(self, mutant: str) -> None:
        self.is_bad = mutant == "free-on-abort"

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
    (violation,) = config.run("free-on-abort").violations
    assert [s.state for s in config.replay("free-on-abort", violation.trace)] == ["3", "2", "1"]


def test_the_product_itself_is_changed_while_the_world_is_walked() -> None:
    seen: list[bool] = []
    ((_, _, value),) = MUTANTS["free-on-abort"].patches

    @contextmanager
    def context() -> Iterator[None]:
        seen.append(DecodeRooms.quarantine is value)
        yield

    config = configuration(
        "countdown", "counts", Countdown, bounds={}, invariants=(), context=context
    )
    config.run("free-on-abort")
    config.run()
    assert seen == [True, False]
