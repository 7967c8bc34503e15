"""Groups by exhaustive exploration, from the production tables and the production tick.

``pdcore verify lifecycles`` walks these worlds to their ends; here the interesting part is
walked, from the point where both ranks of both groups are bound to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from pdcore.sim.explore import Exploration, Move, explore, replay
from pdcore.sim.group_world import GROUP_MUTANTS, GroupState, GroupWorld, group_world

#: Both ranks admitted; both prefill ranks claimed.
BOUND = (
    "learns the route",
    "learns the route",
    "tick D",
    "tick D",
    "gets HANDSHAKE",
    "gets HANDSHAKE",
    "tick P",
)
GRANTED = (*BOUND, "gets CLAIM", "gets CLAIM", "gets GRANT", "gets GRANT")
WRITING = (*GRANTED, "both prefill ranks compute", "has computed", "has computed", "tick P")


class From:
    """The same world, from a later state."""

    def __init__(self, world: GroupWorld, way: Sequence[str]) -> None:
        self.world = world
        self.start = world.initial()
        for text in way:
            found = [move.state for move in world.moves(self.start) if text in move.label]
            assert found, f"{text!r} is not possible in {world.show(self.start)}"
            self.start = found[0]

    def initial(self) -> GroupState:
        return self.start

    def moves(self, state: GroupState) -> Iterable[Move[GroupState]]:
        return self.world.moves(state)

    def problems(self, state: GroupState) -> Iterable[str]:
        return self.world.problems(state)

    def is_goal(self, state: GroupState) -> bool:
        return self.world.is_goal(state)

    def show(self, state: GroupState) -> str:
        return self.world.show(state)


def walk(world: GroupWorld, way: Sequence[str]) -> Exploration:
    return explore(From(world, way))


def test_a_group_that_writes_ends_well_whatever_happens() -> None:
    """D17: from the state in which both ranks write, aborts, deadlines and broken transfers of
    single ranks lead to one end on all ranks, and no block is freed under a writer."""
    found = walk(group_world(), WRITING)
    assert found.violations == ()
    assert found.exhausted
    assert found.states > 500


@pytest.mark.parametrize("split", ["D", "P"])
def test_a_tick_that_is_not_atomic_keeps_the_same_promises(split: str) -> None:
    """Architecture, section 9: the vote is a snapshot and its result binds; what happens in
    between is handled in the state that results."""
    world = group_world(split=split)
    way = ("learns the route", "learns the route", *([f"{split}0 votes"] if split == "D" else []))
    found = explore(From(world, way), max_states=4000)
    assert found.violations == ()
    assert any(row.endswith("--advanced--> Transferring") for row in found.rows)


@pytest.mark.parametrize(
    ("mutant", "way", "num_chunks", "problem"),
    [
        ("min-over-states", GRANTED, 1, "blocks that decode has freed"),
        ("failed-is-ack", WRITING, 1, "blocks that decode has freed"),
        ("no-poison", (*WRITING, "both prefill ranks compute"), 2, "blocks that decode has freed"),
        ("deaf", WRITING, 1, "cannot be reached|nothing but a fault"),
        ("no-release-vote", WRITING, 1, "blocks that decode has freed"),
    ],
)
def test_a_known_bad_variant_is_caught(
    mutant: str, way: Sequence[str], num_chunks: int, problem: str
) -> None:
    """D17, protocol models Q1: each rule of a group that is left out has a counterexample."""
    found = walk(group_world(mutant, num_chunks=num_chunks), way)
    assert found.violations
    with pytest.raises(AssertionError, match=problem):
        assert not found.violations, found.violations[0].problem


def test_every_known_bad_variant_is_tried() -> None:
    assert set(GROUP_MUTANTS) == {
        "min-over-states",
        "failed-is-ack",
        "no-poison",
        "deaf",
        "no-release-vote",
    }


def test_a_counterexample_replays() -> None:
    """The trace of a violation leads to it again in a fresh world, whatever order states are
    met in there; the product does not offer its last step, or is not broken by it."""
    start = From(group_world("no-release-vote"), WRITING)
    trace = explore(start).violations[0].trace
    again = From(group_world("no-release-vote"), WRITING)
    steps = replay(again, trace)
    assert steps[-1].problems
    assert all(not step.problems for step in steps[:-1])
    good = From(group_world(), WRITING)
    state = good.initial()
    for label in trace:
        offered = {move.label: move.state for move in good.moves(state)}
        if label not in offered:
            break
        state = offered[label]
        assert not list(good.problems(state))


def test_ranks_are_interchangeable() -> None:
    """The reduction: a state and its mirror are one, whichever rank moved."""
    world = group_world()
    learned = [m.state for m in world.moves(world.initial()) if "learns" in m.label]
    assert len(learned) == 2
    assert learned[0] == learned[1]


def test_the_initial_state_is_sound_and_shown() -> None:
    world = group_world()
    state = world.initial()
    assert list(world.problems(state)) == []
    assert not world.is_goal(state)
    assert world.show(state).count("Bootstrapping") == 4
