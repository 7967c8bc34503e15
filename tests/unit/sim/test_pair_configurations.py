"""The pair worlds of the list: bounds are told, small ones hold here and now."""

from __future__ import annotations

import pytest

from pdcore.sim.mutants import MUTANTS
from pdcore.sim.pair_configurations import INVARIANTS, PAIR_CONFIGURATIONS

BY_NAME = {c.name: c for c in PAIR_CONFIGURATIONS}


def test_every_configuration_tells_its_bounds_and_invariants() -> None:
    for config in PAIR_CONFIGURATIONS:
        assert config.invariants == INVARIANTS
        assert {
            "faults",
            "writes",
            "ticks",
            "deadlines_counted_on",
            "network",
        } <= config.bounds.keys()
        assert set(config.catches) <= MUTANTS.keys()


def test_one_pair_with_every_fault_of_one_life_holds() -> None:
    """Issue 3, point 8: safety, no deadlock, liveness, explored to the end."""
    found = BY_NAME["pair"].run()
    assert found.violations == ()
    assert found.exhausted
    assert found.states > 10_000


def test_every_configuration_holds_as_far_as_there_is_time() -> None:
    """The first hundreds of states of each; all of them in `nox -s verify`."""
    for config in PAIR_CONFIGURATIONS:
        assert config.run(max_states=300).violations == (), config.name


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("pair", "free-on-abort"),
        ("pair", "free-while-computing"),
        ("pair", "send-once"),
        ("pair", "done-when-posted"),
        ("reuse", "free-on-abort"),
    ],
)
def test_known_bad_variants_are_caught(name: str, mutant: str) -> None:
    """D3, D4, D26, rule 9: a proof that cannot fail proves nothing. The others are caught
    in `nox -s verify`."""
    assert mutant in BY_NAME[name].catches
    (violation,) = BY_NAME[name].run(mutant).violations
    steps = BY_NAME[name].replay(mutant, violation.trace)
    assert [step.label for step in steps[1:]] == list(violation.trace)
    assert steps[-1].state == violation.state
