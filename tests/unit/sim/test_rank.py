"""One worker on virtual time: it sleeps until something is due, and wakes for what comes."""

from __future__ import annotations

from pdcore.sim.clients import ask
from pdcore.sim.cluster import Cluster
from pdcore.sim.loop import pass_time
from pdcore.sim.plan import Request, make_plan
from pdcore.sim.world import in_world

REQUEST = Request(0, 0.0, "/generate", (5, 6, 7), 6, False, 5.0, None, None)


def test_an_idle_worker_steps_for_its_health_report_and_little_else() -> None:
    async def scenario(cluster: Cluster) -> None:
        rank = cluster.instances["p0"].rank
        assert rank is not None
        steps: list[float] = []
        inner = rank.core.poll_deadline

        class Counting:
            """Every iteration reads the clock first."""

            def monotonic(self) -> float:
                steps.append(cluster.site.loop.time())
                return steps[-1]

            def unix(self) -> float:
                return cluster.site.clock.unix()

        rank.worker.clock = Counting()
        await pass_time(10.0)
        assert inner() is None
        assert 5 <= len(set(steps)) <= 40

    in_world(make_plan(1), scenario)


def test_the_engine_takes_the_time_that_its_model_costs() -> None:
    async def scenario(cluster: Cluster) -> None:
        started_s = cluster.site.loop.time()
        assert (await ask(cluster, REQUEST)).is_ok
        took_s = cluster.site.loop.time() - started_s
        assert 5 * 0.008 < took_s < 0.5

    in_world(make_plan(1), scenario)


def test_a_transport_remembers_under_which_lease_it_writes() -> None:
    async def scenario(cluster: Cluster) -> None:
        assert (await ask(cluster, REQUEST)).is_ok
        leases = [lease for rank in cluster.ranks() for lease in rank.transport.leases.values()]
        decodes = {r.incarnation for r in cluster.ranks() if r.seat.name.startswith("d")}
        assert leases
        assert {lease.incarnation for lease in leases} <= decodes

    in_world(make_plan(1), scenario)


def test_addresses_follow_the_plan_after_a_restart() -> None:
    for seed in range(20):
        plan = make_plan(seed)

        async def scenario(cluster: Cluster, is_fixed: bool = plan.options.same_address) -> None:
            instance = cluster.instances["d0"]
            assert instance.rank is not None
            former = instance.rank.channel.address
            instance.kill_worker(late=False)
            await pass_time(1.0)
            assert instance.rank is not None
            assert (instance.rank.channel.address == former) == is_fixed

        if plan.options.same_address == (seed % 2 == 0):
            in_world(plan, scenario)
            return
