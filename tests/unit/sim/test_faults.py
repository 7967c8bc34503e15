"""Every kind of fault, alone: it happens, it ends, and the cluster is well afterwards."""

from __future__ import annotations

import re

import attrs
import pytest

from pdcore.sim.cluster import Cluster
from pdcore.sim.faults import ASKED_FOR, KINDS, STANDING_STILL, Faults
from pdcore.sim.loop import pass_time
from pdcore.sim.plan import FAULT_KINDS, STRUCK_EVERY, Fault, make_plan, with_corruption
from pdcore.sim.seeds import run_seed
from pdcore.sim.world import in_world, run_world


def test_every_kind_that_a_plan_draws_exists() -> None:
    assert FAULT_KINDS.keys() == KINDS.keys() - ASKED_FOR
    assert KINDS.keys() >= STANDING_STILL


@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_survives_it(kind: str) -> None:
    """Issue 3.9: delays, drops, duplicates, reorders, partitions, crashes, restarts, pauses,
    exhausted memory. A few requests run meanwhile."""
    plan = make_plan(1)
    if kind in ASKED_FOR:
        plan = with_corruption(plan)
    fault = Fault(0, kind, 0.5, "p0", "d0", 0.4, 0.5)
    requests = [r.number for r in plan.requests if 0.4 < r.at_s < 0.7][:4]
    result = run_world(plan.only(requests=requests).with_faults((fault,)))
    assert result.violations == []
    assert result.faults[kind] == 1


def test_a_writer_is_killed_in_the_middle_of_its_write() -> None:
    """Rule 2, D32: what it had posted lands after it, and its successor is there meanwhile."""
    plan = make_plan(1)
    options = attrs.evolve(plan.options, late_writes=True, same_address=True)
    faults = tuple(Fault(n, "crash_writer", 0.5, f"p{n % 2}", "d0", 2.0, 0.5) for n in range(4))
    result = run_world(attrs.evolve(plan, options=options, faults=faults), is_traced=True)
    assert result.violations == []
    assert result.faults["crash_writer"] == 4
    assert 2 < result.faults["writer_killed"] <= 4, "two on one instance are two"
    assert result.faults["write_of_the_dead"] > 0
    assert result.trace is not None
    trace = "\n".join(result.trace)
    assert re.search(r"kill p\d\.worker\n(.*\n)*?.*start p\d\.worker(.*\n)*?.*land ", trace)


@pytest.mark.parametrize("name", ["no-incarnation", "restart-acks-for-predecessor"])
def test_a_successor_that_answers_for_the_dead_is_caught(name: str) -> None:
    """Issue 3.8: these two need exactly such a world, and the first one shows them."""
    found = run_seed(STRUCK_EVERY - 2, name, is_shrunk=False)
    assert any("whose blocks were given back" in v.message for v in found.violations)


def test_only_what_stood_still_meanwhile_excuses_a_late_answer() -> None:
    """A pause that was over before a request came gives it no more time."""

    async def scenario(cluster: Cluster) -> list[float]:
        faults, now_s = Faults(cluster), cluster.site.loop.time()
        for number, kind in enumerate(("pause_worker", "slow_writes")):
            faults.begin(Fault(number, kind, 0.0, "p0", "d0", 2.0, 0.5))
        await pass_time(3.0)
        spans = ((-2.0, -1.0), (1.0, 5.0), (-1.0, 9.0), (2.5, 9.0))
        return [faults.stood_still_s(now_s + a, now_s + b) for a, b in spans]

    assert in_world(make_plan(1), scenario) == pytest.approx([0.0, 1.0, 2.0, 0.0])
