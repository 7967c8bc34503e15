"""Random walks through worlds that are too large to be explored to their end.

A walk takes any move for a while, faults included, and then only moves that are no faults,
until everything has ended. It proves nothing; it finds what small worlds are too small for.
The same seed walks the same way, and what it finds replays like any other counterexample.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

import attrs

from pdcore.sim.explore import DEADLOCK, LIVENESS, SAFETY, Move, S, Violation, World

#: A world that has not ended after this many moves that are no faults goes round in circles.
MAX_FAIR_MOVES: int = 3000

#: How often a fault may be taken where something else could happen: a walk of faults alone
#: ends before it gets anywhere.
FAULT_SHARE: Final = 0.3


@attrs.frozen
class Wandering:
    """What some walks met. ``violations`` stop the walk they happened in, not the others."""

    walks: int
    moves: int
    faults: int
    seconds: float
    violations: tuple[Violation, ...]
    rows: dict[str, int]


@attrs.define
class _Walk:
    """One walk so far."""

    trace: list[str]
    rows: dict[str, int]
    faults: int = 0

    def take(self, move: Move[S]) -> S:
        self.trace.append(move.label)
        self.faults += move.is_fault
        for row in move.rows:
            self.rows[row] = self.rows.get(row, 0) + 1
        return move.state


def wander(
    world: World[S],
    seeds: range,
    *,
    num_moves: int = 150,
    progress: Callable[[int, int], None] | None = None,
) -> Wandering:
    """One walk per seed: ``num_moves`` of any kind, then on to the end without faults."""
    started = time.perf_counter()
    violations: list[Violation] = []
    rows: dict[str, int] = {}
    moves = faults = 0
    for number, seed in enumerate(seeds, 1):
        walk = _Walk([], rows)
        found = _walk(world, random.Random(seed), walk, num_moves)
        if found is not None:
            violations.append(found)
        moves += len(walk.trace)
        faults += walk.faults
        if progress is not None:
            progress(moves, len(seeds) - number)
    took = time.perf_counter() - started
    return Wandering(len(seeds), moves, faults, took, tuple(violations), rows)


def _walk(world: World[S], rng: random.Random, walk: _Walk, num_moves: int) -> Violation | None:
    state = world.initial()

    def broken(kind: str, problem: str) -> Violation:
        return Violation(kind, problem, tuple(walk.trace), world.show(state))

    for count in range(num_moves + MAX_FAIR_MOVES):
        for problem in world.problems(state):
            return broken(SAFETY, problem)
        is_calm = count >= num_moves
        if is_calm and world.is_goal(state):
            return None
        offered = [
            move
            for move in world.moves(state)
            if move.state != state and not (is_calm and move.is_fault)
        ]
        if not offered:
            if world.is_goal(state):
                return None
            if is_calm:
                return broken(DEADLOCK, "nothing but a fault can happen any more")
            continue
        if rng.random() >= FAULT_SHARE:
            offered = [move for move in offered if not move.is_fault] or offered
        state = walk.take(rng.choice(offered))
    return broken(LIVENESS, f"not over after {MAX_FAIR_MOVES} moves without a fault")
