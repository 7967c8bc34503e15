"""The kernel of proof 1, on worlds small enough to count by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pdcore.sim.explore import DEADLOCK, LIVENESS, SAFETY, Move, ReplayError, explore, replay

State = tuple[int, int]
Moves = Callable[[State], Iterable[Move[State]]]


class Grid:
    """(x, y) from (0, 0); the end is (2, 2)."""

    def __init__(self, moves: Moves, bad: Callable[[State], bool] = lambda s: False) -> None:
        self._moves = moves
        self._bad = bad

    def initial(self) -> State:
        return (0, 0)

    def moves(self, state: State) -> Iterable[Move[State]]:
        return self._moves(state)

    def problems(self, state: State) -> Iterable[str]:
        if self._bad(state):
            yield f"bad {state}"

    def is_goal(self, state: State) -> bool:
        return state == (2, 2)

    def show(self, state: State) -> str:
        return repr(state)


def steps(state: State, *, x_is_fault: bool = False) -> Iterable[Move[State]]:
    x, y = state
    if x < 2:
        yield Move("x", x_is_fault, (x + 1, y), ("row x",))
    if y < 2:
        yield Move("y", False, (x, y + 1), ("row y", "row both"))
    yield Move("stay", False, state, ("row stay",))


def test_every_state_is_seen_and_every_row_counted() -> None:
    found = explore(Grid(steps))
    assert (found.states, found.transitions, found.depth) == (9, 12, 4)
    assert found.exhausted
    assert found.violations == ()
    assert found.rows == {"row both": 6, "row stay": 9, "row x": 6, "row y": 6}


def test_a_broken_invariant_comes_with_a_shortest_trace_that_replays() -> None:
    world = Grid(steps, bad=lambda s: sum(s) == 3)
    found = explore(world)
    (violation,) = found.violations
    assert violation.kind == SAFETY
    assert len(violation.trace) == 3
    assert not found.exhausted
    walked = replay(world, violation.trace)
    assert walked[-1].problems == (violation.problem,)
    assert [s.problems for s in walked[:-1]] == [(), (), ()]


def test_a_bad_initial_state_is_found() -> None:
    (violation,) = explore(Grid(steps, bad=lambda s: s == (0, 0))).violations
    assert violation.trace == ()


def test_a_state_that_only_a_fault_leaves_is_a_deadlock() -> None:
    (violation,) = explore(Grid(lambda s: steps(s, x_is_fault=True))).violations
    assert violation.kind == DEADLOCK
    assert violation.trace == ("y", "y")


def test_going_round_for_ever_is_found_where_no_goal_can_be_reached() -> None:
    def circle(state: State) -> Iterable[Move[State]]:
        yield from steps(state)
        if state == (1, 0):
            yield Move("into the circle", True, (7, 0))
        if state[0] >= 7:
            yield Move("round", False, (15 - state[0], 0))

    def only_round(state: State) -> Iterable[Move[State]]:
        return (m for m in circle(state) if state[0] < 7 or m.label == "round")

    found = explore(Grid(only_round))
    (violation,) = found.violations
    assert violation.kind == LIVENESS
    assert violation.trace == ("x", "into the circle")
    assert "2 of 11 states" in violation.problem


def test_a_way_to_the_end_that_needs_a_fault_does_not_count() -> None:
    def trap(state: State) -> Iterable[Move[State]]:
        if state == (0, 0):
            yield Move("trap", True, (9, 9))
            yield from steps(state)
        elif state == (9, 9):
            yield Move("out", True, (0, 0))
            yield Move("round", False, (9, 8))
        elif state == (9, 8):
            yield Move("round", False, (9, 9))
        else:
            yield from steps(state)

    (violation,) = explore(Grid(trap)).violations
    assert violation.kind == LIVENESS


def test_a_bound_is_not_called_exhausted() -> None:
    found = explore(Grid(steps), max_states=4)
    assert not found.exhausted
    assert found.violations == ()
    assert 4 <= found.states < 9


def test_a_trace_of_another_world_is_refused_with_what_was_possible() -> None:
    with pytest.raises(ReplayError, match="step 2 is 'z', but what can happen there is: x, y"):
        replay(Grid(steps), ("x", "z"))
