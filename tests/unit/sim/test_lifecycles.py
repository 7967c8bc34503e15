"""The fixed list: names, and the known-bad variants that somebody must catch."""

from __future__ import annotations

from pdcore.sim.lifecycles import CONFIGURATIONS, MIXES
from pdcore.sim.mutants import MUTANTS


def test_names_are_distinct() -> None:
    names = [config.name for config in (*CONFIGURATIONS, *MIXES)]
    assert len(set(names)) == len(names)


def test_every_mutant_has_a_world_that_must_catch_it_and_no_other_is_named() -> None:
    caught = {name for config in CONFIGURATIONS for name in config.catches}
    assert caught == MUTANTS.keys()


def test_everything_at_once_holds_on_a_few_walks() -> None:
    for config in MIXES:
        found = config.walk(range(5))
        assert found.violations == (), config.name
        assert found.faults > 0
