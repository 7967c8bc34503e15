"""The fixed list of worlds that ``pdcore verify lifecycles`` explores, each to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import attrs

from pdcore.sim.explore import Exploration, S, Step, World, explore, replay


class Run(Protocol):
    """Explore one world; ``mutant`` as in :func:`configuration`."""

    def __call__(
        self,
        mutant: str = "",
        *,
        max_states: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Exploration: ...


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
    replay: Callable[[str, Sequence[str]], list[Step]]


def configuration(
    name: str,
    covers: str,
    build: Callable[[str], World[S]],
    *,
    bounds: Mapping[str, int | str],
    invariants: tuple[str, ...],
    catches: tuple[str, ...] = (),
) -> Configuration:
    """``build(mutant)`` makes the world, with the known-bad variant of that name
    (:mod:`pdcore.sim.mutants`) in place of the product's rule; "" is the product itself."""

    def run(
        mutant: str = "",
        *,
        max_states: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Exploration:
        return explore(build(mutant), max_states=max_states, progress=progress)

    def walk(mutant: str, trace: Sequence[str]) -> list[Step]:
        return replay(build(mutant), trace)

    return Configuration(name, covers, bounds, invariants, catches, run, walk)


CONFIGURATIONS: Final[tuple[Configuration, ...]] = ()
