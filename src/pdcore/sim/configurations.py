"""What ``pdcore verify lifecycles`` explores: a world with its name, its bounds, its duty.

The fixed list of them is :data:`pdcore.sim.lifecycles.CONFIGURATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import attrs

from pdcore.sim.explore import Exploration, S, Step, World, can_end, explore, replay
from pdcore.sim.mutants import planted
from pdcore.sim.wander import Wandering, wander


class Run(Protocol):
    """Explore one world; ``mutant`` as in :func:`configuration`."""

    def __call__(
        self,
        mutant: str = "",
        *,
        max_states: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Exploration: ...


class Walk(Protocol):
    """Random walks through one world, one per seed."""

    def __call__(
        self,
        seeds: range,
        mutant: str = "",
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Wandering: ...


@attrs.frozen
class Configuration:
    """One world of the list. ``bounds`` says what makes it finite, ``covers`` what it is
    there for, ``catches`` names the known-bad variants that this world must find."""

    name: str
    covers: str
    bounds: Mapping[str, int | str]
    invariants: tuple[str, ...]
    catches: tuple[str, ...]
    run: Run
    walk: Walk
    replay: Callable[[str, Sequence[str]], list[Step]]
    #: Whether the end can be reached without a fault from where a trace leads.
    can_end: Callable[[str, Sequence[str]], bool]


def configuration(
    name: str,
    covers: str,
    build: Callable[[str], World[S]],
    *,
    bounds: Mapping[str, int | str],
    invariants: tuple[str, ...],
    catches: tuple[str, ...] = (),
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Configuration:
    """``build(mutant)`` makes the world, with the known-bad variant of that name
    (:mod:`pdcore.sim.mutants`) in place of the product's rule; "" is the product itself.
    Worlds that run the product need not look at it: it is planted around them. ``context``
    is open while the world is made and walked."""

    def run(
        mutant: str = "",
        *,
        max_states: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Exploration:
        with planted(mutant), context():
            return explore(build(mutant), max_states=max_states, progress=progress)

    def walk(
        seeds: range,
        mutant: str = "",
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Wandering:
        with planted(mutant), context():
            return wander(build(mutant), seeds, progress=progress)

    def walk_again(mutant: str, trace: Sequence[str]) -> list[Step]:
        with planted(mutant), context():
            return replay(build(mutant), trace)

    def look_on(mutant: str, trace: Sequence[str]) -> bool:
        with planted(mutant), context():
            return can_end(build(mutant), trace)

    return Configuration(name, covers, bounds, invariants, catches, run, walk, walk_again, look_on)
