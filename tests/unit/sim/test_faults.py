"""Every kind of fault, alone: it happens, it ends, and the cluster is well afterwards."""

from __future__ import annotations

import pytest

from pdcore.sim.faults import KINDS, STANDING_STILL
from pdcore.sim.plan import FAULT_KINDS, Fault, make_plan
from pdcore.sim.world import run_world


def test_every_kind_that_a_plan_draws_exists() -> None:
    assert FAULT_KINDS.keys() == KINDS.keys()
    assert KINDS.keys() >= STANDING_STILL


@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_survives_it(kind: str) -> None:
    """Issue 3.9: delays, drops, duplicates, reorders, partitions, crashes, restarts, pauses,
    exhausted memory. A few requests run meanwhile."""
    plan = make_plan(1)
    fault = Fault(0, kind, 0.5, "p0", "d0", 0.4, 0.5)
    requests = [r.number for r in plan.requests if 0.4 < r.at_s < 0.7][:4]
    result = run_world(plan.only(requests=requests).with_faults((fault,)))
    assert result.violations == []
    assert result.faults[kind] == 1
