"""The worlds beside the pairs, as the list has them."""

from __future__ import annotations

import functools

import pytest

from pdcore.fsm.table import Lifecycle
from pdcore.sim.any_order import peer_alone, routed_alone
from pdcore.sim.configurations import Configuration
from pdcore.sim.explore import Exploration, explore
from pdcore.sim.firing import ROW_IDS, TABLES
from pdcore.sim.group_world import GROUP_MUTANTS
from pdcore.sim.other_configurations import OTHER_CONFIGURATIONS
from pdcore.sim.router_world import ROUTER_MUTANTS

SMALL = [config for config in OTHER_CONFIGURATIONS if config.name in ("peer", "rank", "instance")]


@functools.cache
def walked(name: str) -> Exploration:
    (config,) = (config for config in SMALL if config.name == name)
    return config.run()


@pytest.mark.parametrize("name", [config.name for config in SMALL])
def test_small_worlds_are_walked_to_their_ends(name: str) -> None:
    found = walked(name)
    assert found.violations == ()
    assert found.exhausted


@pytest.mark.parametrize(
    "config",
    [config for config in OTHER_CONFIGURATIONS if config not in SMALL],
    ids=lambda config: config.name,
)
def test_large_worlds_begin_soundly(config: Configuration) -> None:
    """``pdcore verify lifecycles`` walks them to their ends."""
    assert config.run(max_states=500).violations == ()


@pytest.mark.parametrize("name", ["peer", "rank registration", "instance", "routed request"])
def test_every_row_of_a_small_table_is_taken(name: str) -> None:
    """A row that somebody adds and no world takes fails here."""
    alone = [explore(routed_alone()), explore(peer_alone())]
    taken = {row for found in alone for row in found.rows}
    taken |= {row for config in SMALL for row in walked(config.name).rows}
    table: Lifecycle = TABLES[name]
    assert set(ROW_IDS[table.name]) <= taken


def test_every_variant_has_a_world_that_catches_it() -> None:
    caught = {name for config in OTHER_CONFIGURATIONS for name in config.catches}
    assert GROUP_MUTANTS.keys() | ROUTER_MUTANTS.keys() <= caught


@pytest.mark.parametrize("config", SMALL, ids=lambda config: config.name)
def test_what_a_small_world_says_it_catches_it_catches(config: Configuration) -> None:
    for mutant in config.catches:
        assert config.run(mutant).violations, mutant


@pytest.mark.parametrize(
    ("name", "mutant", "words"),
    [
        ("router-lossy", "unknown-is-failure", "a healthy answer was thrown away"),
        ("router-retry", "any-attempt", "an outcome of a replaced attempt counted"),
        ("router-retry", "no-retry-cancels", "goes on uncancelled"),
        ("peer", "silence-kills", "a process that lives was declared dead"),
        ("rank", "replaced-comes-back", "is in the route again"),
        ("instance", "ready-too-early", "takes requests although a worker is missing"),
        ("instance", "lost-in-silence", "its requests were not failed"),
    ],
)
def test_a_variant_is_caught_by_the_rule_that_it_undoes(name: str, mutant: str, words: str) -> None:
    """A deadlock that follows much later would not prove the rule."""
    config = next(c for c in OTHER_CONFIGURATIONS if c.name == name)
    assert mutant in config.catches
    (violation,) = config.run(mutant).violations
    assert words in violation.problem
