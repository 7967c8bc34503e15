"""Instances that are killed, stopped, drained and started again."""

from __future__ import annotations

import asyncio

from pdcore.sim.clients import ask
from pdcore.sim.cluster import Cluster
from pdcore.sim.instance import SimInstance
from pdcore.sim.loop import pass_time
from pdcore.sim.plan import Request, make_plan
from pdcore.sim.world import in_world
from pdcore.types import Incarnation

REQUEST = Request(0, 0.0, "/v1/completions", (5, 6, 7), 4, False, 5.0, None, None)


def life(instance: SimInstance) -> Incarnation:
    assert instance.rank is not None
    return instance.rank.incarnation


def problems(instance: SimInstance) -> list[str]:
    assert instance.leader is not None
    return instance.leader.dispatcher.workers.problems()


def test_a_killed_worker_is_noticed_and_another_life_takes_its_place() -> None:
    async def scenario(cluster: Cluster) -> None:
        prefill = cluster.instances["p0"]
        former = life(prefill)
        prefill.kill_worker(late=False)
        await pass_time(0.1)
        assert problems(prefill)
        await pass_time(1.0)
        assert problems(prefill) == []
        assert life(prefill) != former

    in_world(make_plan(1), scenario)


def test_a_killed_leader_takes_its_worker_with_it() -> None:
    async def scenario(cluster: Cluster) -> None:
        decode = cluster.instances["d1"]
        former = decode.rank
        assert former is not None
        decode.kill_leader(late=False, back_after_s=0.5)
        assert decode.leader is None
        assert decode.rank is None
        assert former.process.is_dead
        await pass_time(1.0)
        assert problems(decode) == []

    in_world(make_plan(1), scenario)


def test_a_stopped_worker_makes_its_requests_wait_and_no_more() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name in ("d0", "d1"):
            cluster.instances[name].pause("worker")
        asked = asyncio.ensure_future(ask(cluster, REQUEST))
        await pass_time(1.0)
        assert not asked.done()
        for name in ("d0", "d1"):
            cluster.instances[name].resume()
        outcome = await asked
        assert outcome.is_ok, outcome

    in_world(make_plan(1), scenario)


def test_a_drained_instance_ends_and_comes_back() -> None:
    """D59: what runs finishes, nothing new is taken."""

    async def scenario(cluster: Cluster) -> None:
        asked = asyncio.ensure_future(ask(cluster, REQUEST))
        await pass_time(0.01)
        for instance in cluster.instances.values():
            instance.drain(3.0)
        assert (await asked).is_ok
        assert all(problems(one) for one in cluster.instances.values() if one.leader is not None)
        await pass_time(2.0)
        assert all(problems(one) == [] for one in cluster.instances.values())

    in_world(make_plan(1), scenario)


def test_a_bootstrap_server_that_forgot_everything_is_told_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.instances["p0"].restart_bootstrap(0.3)
        await pass_time(8.0)
        assert problems(cluster.instances["p0"]) == []
        for _ in range(6):
            assert (await ask(cluster, REQUEST)).is_ok

    in_world(make_plan(1), scenario)


def test_a_stopped_instance_that_is_told_to_drain_is_ended_and_not_blamed() -> None:
    async def scenario(cluster: Cluster) -> None:
        prefill = cluster.instances["p1"]
        former = life(prefill)
        prefill.pause("worker")
        prefill.drain(0.3)
        await pass_time(3.0)
        prefill.resume()
        assert life(prefill) != former
        assert problems(prefill) == []

    in_world(make_plan(1), scenario)
