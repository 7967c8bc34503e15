"""One seed from beginning to end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdcore.router import core
from pdcore.router.fleet import Member
from pdcore.router.retry import choose
from pdcore.sim.cluster import Cluster
from pdcore.sim.loop import pass_time
from pdcore.sim.plan import make_plan
from pdcore.sim.world import in_world, run_world


def test_a_world_with_its_faults_holds() -> None:
    result = run_world(make_plan(3))
    assert result.violations == []
    assert result.num_requests >= 54
    assert sum(result.faults.values()) >= 5
    assert sum(result.outcomes.values()) == result.num_requests
    assert 0.0 < result.virtual_s < 100.0


def test_without_faults_everything_succeeds_but_what_is_too_much() -> None:
    result = run_world(make_plan(1).only(faults=[]))
    assert result.violations == []
    # Some of the requests have hardly any time.
    assert result.outcomes.keys() <= {"ok", "left", "overloaded", "deadline_exceeded"}
    assert result.outcomes["ok"] > result.num_requests / 2


def test_a_router_that_refuses_what_it_could_serve_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every request is answered, in time and with a precise code: it is broken all the same."""
    num = 0

    def one_in_ten(
        room: int, prefills: list[Member], decodes: list[Member]
    ) -> tuple[Member, Member] | None:
        nonlocal num
        num += 1
        return None if num % 10 == 0 else choose(room, prefills, decodes)

    monkeypatch.setattr(core, "choose", one_in_ten)
    result = run_world(make_plan(3))
    assert any("nothing had gone wrong yet" in text for text in result.violations)


def test_the_same_seed_is_the_same_world_in_any_process() -> None:
    """Issue 3.9: same seed, same trace, whatever the hash seed."""
    code = (
        "from pdcore.sim.plan import make_plan; from pdcore.sim.world import run_world;"
        "print(run_world(make_plan(5).only(requests=range(25))).digest)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout.strip()
        for seed in ("1", "77")
    }
    found.add(run_world(make_plan(5).only(requests=range(25)), is_traced=True).digest)
    assert len(found) == 1
    assert run_world(make_plan(6).only(requests=range(25))).digest not in found


def test_what_a_scenario_raises_is_raised() -> None:
    async def scenario(cluster: Cluster) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_world(make_plan(1), scenario)


def test_what_no_world_may_do_fails_a_scenario() -> None:
    async def scenario(cluster: Cluster) -> None:
        await pass_time(0.1)
        cluster.site.violate("it broke")

    with pytest.raises(AssertionError, match="it broke"):
        in_world(make_plan(1), scenario)
