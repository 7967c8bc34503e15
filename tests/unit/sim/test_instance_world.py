"""An instance with two workers, whatever happens to them."""

from __future__ import annotations

import pytest

from pdcore.fsm.instance import INSTANCE
from pdcore.sim.explore import explore, replay
from pdcore.sim.firing import ROW_IDS
from pdcore.sim.instance_world import INSTANCE_MUTANTS, InstanceWorld


def test_it_becomes_ready_or_stops_with_everything_answered() -> None:
    """D33, D45, D59: and it takes every row of its table."""
    found = explore(InstanceWorld())
    assert found.violations == ()
    assert found.exhausted
    assert set(ROW_IDS[INSTANCE.name]) == found.rows.keys()


@pytest.mark.parametrize("mutant", INSTANCE_MUTANTS)
def test_a_known_bad_variant_is_caught(mutant: str) -> None:
    """D33, D45: what readiness and a lost worker mean."""
    found = explore(InstanceWorld(INSTANCE_MUTANTS[mutant]))
    with pytest.raises(AssertionError, match=r"takes requests although|were not failed"):
        assert not found.violations, found.violations[0].problem


def test_a_worker_that_cannot_be_started_any_more_ends_the_instance() -> None:
    way = ["rank 0 dies", "rank 0 stays down", "a timer runs out", "rank 1 exits as it was told"]
    steps = replay(InstanceWorld(num_restarts=0), [*way, "every worker has exited"])
    assert "Stopped" in steps[-1].state
