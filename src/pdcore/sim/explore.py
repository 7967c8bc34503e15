"""Exhaustive exploration of a small world: every state it can reach, shortest way first.

A *world* is data and one function: a state is a hashable value, :meth:`World.moves` gives
what may happen next. Moves are of two kinds. A *fault* (loss of a process, abort, deadline,
forgetting) may or may not happen; every other move happens in the end if it stays possible.
Three things are checked:

  safety     :meth:`World.problems` of every reachable state is empty;
  deadlock   every state that is no goal has a move that is no fault and changes something;
  liveness   from *every* reachable state some goal can be reached by moves that are no
             faults: whatever went wrong before, nothing more has to go wrong for it to end.

The search is breadth first, so the first counterexample is a shortest one, and it depends on
nothing but the order in which a world lists its moves: a world must not iterate over sets.
Labels of the moves of one state are distinct: a trace is a list of labels, and
:func:`replay` walks it again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import attrs

from pdcore.errors import PdcoreError

S = TypeVar("S", bound=Hashable)

SAFETY: Final = "safety"
DEADLOCK: Final = "deadlock"
LIVENESS: Final = "liveness"

#: Between two calls of ``progress``, in states.
PROGRESS_EVERY: Final = 4096

_INT: Final = "i"


class Move(NamedTuple, Generic[S]):
    """One thing that may happen. ``rows``: ids of the table rows it takes
    (:func:`pdcore.sim.firing.row_id`), counted whether the state changes or not."""

    label: str
    is_fault: bool
    state: S
    rows: tuple[str, ...] = ()


class World(Protocol[S]):
    """A closed system. Deterministic: the same state gives the same moves in the same order."""

    def initial(self) -> S: ...

    def moves(self, state: S) -> Iterable[Move[S]]: ...

    def problems(self, state: S) -> Iterable[str]:
        """Broken invariants of this state, in words; asked once per state."""
        ...

    def is_goal(self, state: S) -> bool:
        """Every request has ended and everything it held is back."""
        ...

    def show(self, state: S) -> str:
        """One line for people: what a replay prints after each step."""
        ...


@attrs.frozen
class Violation:
    """``trace`` leads from the initial state to the one that breaks ``problem``."""

    kind: str
    problem: str
    trace: tuple[str, ...]
    state: str


@attrs.frozen
class Exploration:
    """``exhausted``: every reachable state was seen and every check was made of all of them.
    ``rows``: id of a table row -> moves that took it."""

    states: int
    transitions: int
    seconds: float
    depth: int
    exhausted: bool
    violations: tuple[Violation, ...]
    rows: Mapping[str, int]


class _Graph(Generic[S]):
    """States by number, how each was first reached, and the edges that are no faults."""

    def __init__(self, world: World[S]) -> None:
        start = world.initial()
        self.world = world
        self.order: list[S] = [start]
        self.numbers: dict[S, int] = {start: 0}
        self.parent = array(_INT, [-1])
        self.labels: list[str] = [""]
        self.sources = array(_INT)
        self.targets = array(_INT)
        self.transitions = 0
        self.rows: dict[tuple[str, ...], int] = {}
        self._label_pool: dict[str, str] = {}

    def reach(self, source: int, move: Move[S]) -> bool:
        """Add the state a move leads to; True when it is new."""
        number = self.numbers.get(move.state)
        is_new = number is None
        if number is None:
            number = len(self.order)
            self.numbers[move.state] = number
            self.order.append(move.state)
            self.parent.append(source)
            self.labels.append(self._label_pool.setdefault(move.label, move.label))
        if not move.is_fault and number != source:
            self.sources.append(source)
            self.targets.append(number)
        return is_new

    def expand(self, source: int) -> tuple[int, bool]:
        """Take every move of one state: (first new number, some fair move changes it)."""
        state = self.order[source]
        first_new = len(self.order)
        edges_before = len(self.sources)
        rows = self.rows
        for move in self.world.moves(state):
            if move.rows:
                rows[move.rows] = rows.get(move.rows, 0) + 1
            if move.state == state:
                continue
            self.transitions += 1
            self.reach(source, move)
        return first_new, len(self.sources) > edges_before

    def trace(self, number: int) -> tuple[str, ...]:
        out: list[str] = []
        while self.parent[number] >= 0:
            out.append(self.labels[number])
            number = self.parent[number]
        return tuple(reversed(out))

    def violation(self, kind: str, problem: str, number: int) -> Violation:
        return Violation(kind, problem, self.trace(number), self.world.show(self.order[number]))

    def depth(self) -> int:
        depths = array(_INT, [0])
        for parent in self.parent[1:]:
            depths.append(depths[parent] + 1)
        return depths[-1]

    def row_counts(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for taken, count in self.rows.items():
            for row in taken:
                out[row] = out.get(row, 0) + count
        return dict(sorted(out.items()))

    def stuck(self) -> tuple[int, int]:
        """(number of the first state that reaches no goal by fair moves, how many), or
        (-1, 0): backwards from all goals over fair edges."""
        size = len(self.order)
        offsets, incoming = self._incoming()
        is_live = bytearray(size)
        stack = [n for n, state in enumerate(self.order) if self.world.is_goal(state)]
        for number in stack:
            is_live[number] = 1
        while stack:
            target = stack.pop()
            for source in incoming[offsets[target] : offsets[target + 1]]:
                if not is_live[source]:
                    is_live[source] = 1
                    stack.append(source)
        return is_live.find(0), size - sum(is_live)

    def _incoming(self) -> tuple[array[int], array[int]]:
        """The fair edges by target: sources of t are ``incoming[offsets[t]:offsets[t+1]]``."""
        offsets = array(_INT, bytes(4 * (len(self.order) + 1)))
        for target in self.targets:
            offsets[target + 1] += 1
        for number in range(len(self.order)):
            offsets[number + 1] += offsets[number]
        place = array(_INT, offsets)
        incoming = array(_INT, bytes(4 * len(self.targets)))
        for source, target in zip(self.sources, self.targets, strict=True):
            incoming[place[target]] = source
            place[target] += 1
        return offsets, incoming


def explore(
    world: World[S],
    *,
    max_states: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exploration:
    """Walk every reachable state of ``world``, breadth first, and check all of them.

    Stops at the first broken invariant or deadlock (a shortest way to one); liveness is
    judged when everything has been seen. ``max_states`` bounds the walk: then ``exhausted``
    is False and liveness is not judged. ``progress(states, waiting)`` is called now and then.
    """
    started = time.perf_counter()
    graph = _Graph(world)
    violations: list[Violation] = []
    number, is_complete = 0, True

    def judge(candidate: int) -> bool:
        for problem in world.problems(graph.order[candidate]):
            violations.append(graph.violation(SAFETY, problem, candidate))
            return False
        return True

    is_sound = judge(0)
    while is_sound and number < len(graph.order):
        first_new, is_moving = graph.expand(number)
        if not is_moving and not world.is_goal(graph.order[number]):
            problem = "nothing but a fault can happen any more, and not everything has ended"
            violations.append(graph.violation(DEADLOCK, problem, number))
            break
        is_sound = all(judge(new) for new in range(first_new, len(graph.order)))
        number += 1
        if progress is not None and number % PROGRESS_EVERY == 0:
            progress(len(graph.order), len(graph.order) - number)
        if max_states is not None and len(graph.order) >= max_states:
            is_complete = number == len(graph.order)
            break
    if is_complete and not violations:
        first, count = graph.stuck()
        if first >= 0:
            problem = (
                f"from here ({count} of {len(graph.order)} states) the end cannot be reached "
                "without another fault"
            )
            violations.append(graph.violation(LIVENESS, problem, first))
    return Exploration(
        states=len(graph.order),
        transitions=graph.transitions,
        seconds=time.perf_counter() - started,
        depth=graph.depth(),
        exhausted=is_complete and not violations,
        violations=tuple(violations),
        rows=graph.row_counts(),
    )


def can_end(world: World[S], trace: Sequence[str]) -> bool:
    """Whether a goal can be reached by moves that are no faults from where ``trace`` leads:
    what a deadlock or a broken liveness denies. Raises ReplayError."""
    waiting = [_walked(world, trace)[-1][1]]
    seen = set(waiting)
    while waiting:
        state = waiting.pop()
        if world.is_goal(state):
            return True
        for move in world.moves(state):
            if not move.is_fault and move.state not in seen:
                seen.add(move.state)
                waiting.append(move.state)
    return False


class ReplayError(PdcoreError):
    """A trace names a move that its world does not offer at that point."""


@attrs.frozen
class Step:
    """One step of a replay; ``label`` is "" for the initial state."""

    label: str
    state: str
    rows: tuple[str, ...]
    problems: tuple[str, ...]


def replay(world: World[S], trace: Sequence[str]) -> list[Step]:
    """Walk ``trace`` again, step by step. Raises ReplayError naming the step and what could
    happen instead."""
    return [
        Step(label, world.show(state), rows, tuple(world.problems(state)))
        for label, state, rows in _walked(world, trace)
    ]


def _walked(world: World[S], trace: Sequence[str]) -> list[tuple[str, S, tuple[str, ...]]]:
    """(label, state, rows) of the beginning and of each step."""
    state = world.initial()
    steps: list[tuple[str, S, tuple[str, ...]]] = [("", state, ())]
    for position, label in enumerate(trace, 1):
        offered = list(world.moves(state))
        found = [move for move in offered if move.label == label]
        if not found:
            raise ReplayError(
                f"step {position} is {label!r}, but what can happen there is: "
                f"{', '.join(move.label for move in offered) or 'nothing'}"
            )
        state = found[0].state
        steps.append((label, state, found[0].rows))
    return steps
