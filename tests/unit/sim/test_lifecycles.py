"""The fixed list: names, and the known-bad variants that somebody must catch."""

from __future__ import annotations

from pdcore.sim.lifecycles import CONFIGURATIONS, MIXES
from pdcore.sim.mutants import MUTANTS


def test_names_are_distinct() -> None:
    names = [config.name for config in (*CONFIGURATIONS, *MIXES)]
    assert len(set(names)) == len(names)


def test_every_catch_is_a_mutant() -> None:
    for config in CONFIGURATIONS:
        assert set(config.catches) <= MUTANTS.keys(), config.name


def test_everything_at_once_holds_on_a_few_walks() -> None:
    for config in MIXES:
        found = config.walk(range(5))
        assert found.violations == (), config.name
        assert found.faults > 0
