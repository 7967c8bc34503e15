"""A simulated cluster serves: the product's own processes, in one loop."""

from __future__ import annotations

import asyncio

import msgspec

from pdcore.server.client import Timeout
from pdcore.sim.clients import ask
from pdcore.sim.cluster import ROUTER, Cluster
from pdcore.sim.loop import pass_time
from pdcore.sim.plan import Request, make_plan
from pdcore.sim.wire import WireClient
from pdcore.sim.world import in_world

REQUEST = Request(0, 0.0, "/v1/completions", (5, 6, 7), 4, True, 5.0, None, None)


def test_a_request_goes_through_router_instances_and_memory() -> None:
    async def scenario(cluster: Cluster) -> None:
        outcome = await ask(cluster, REQUEST)
        assert outcome.is_ok, outcome
        assert outcome.has_done
        assert len(outcome.text.split()) == 4

    in_world(make_plan(1), scenario)


def test_every_pair_of_instances_is_used() -> None:
    async def scenario(cluster: Cluster) -> None:
        for _ in range(12):
            assert (await ask(cluster, REQUEST)).is_ok
        for instance in cluster.instances.values():
            assert instance.leader is not None
            assert instance.leader.dispatcher.counters["submitted"] > 0

    in_world(make_plan(1), scenario)


def test_a_killed_router_breaks_its_connections_and_comes_back() -> None:
    async def scenario(cluster: Cluster) -> None:
        asked = asyncio.ensure_future(ask(cluster, REQUEST))
        await pass_time(0.015)
        cluster.router.kill(1.0)
        outcome = await asked
        assert outcome.lost
        assert not outcome.is_refused
        refused = await ask(cluster, REQUEST)
        assert refused.is_refused
        await pass_time(1.5)
        assert (await ask(cluster, REQUEST)).is_ok
        assert len(cluster.router.outages) == 1

    in_world(make_plan(1), scenario)


def test_the_router_tells_its_numbers() -> None:
    async def scenario(cluster: Cluster) -> None:
        client = WireClient(cluster.site.wire, cluster.client)
        timeout = Timeout(1.0, None, 1.0)
        response = await client.request("GET", ROUTER, "/stats", timeout=timeout)
        stats = msgspec.json.decode(await response.read())
        assert len(stats["prefill_backends"]) == cluster.site.plan.options.num_prefill

    in_world(make_plan(1), scenario)


def test_processes_names_all_that_ever_lived() -> None:
    async def scenario(cluster: Cluster) -> None:
        before = len(cluster.processes())
        cluster.instances["d0"].kill_worker(late=False)
        await pass_time(1.0)
        names = [process.name for process in cluster.processes()]
        assert len(names) == before + 1
        assert names.count("d0.worker") == 2
        assert names[-1] == "client"

    in_world(make_plan(1), scenario)


def test_writes_that_outlive_their_process_land_and_are_counted() -> None:
    """The control of D3: where nothing came late, nothing would have been checked."""

    async def scenario(cluster: Cluster) -> None:
        cluster.slowness = 100.0
        asked = asyncio.ensure_future(ask(cluster, REQUEST))
        while not cluster.site.fabric.pending():
            await pass_time(0.001)
        writer = cluster.site.fabric.pending()[0].sender
        name = cluster.lives[writer].seat.name
        cluster.instances[name].kill_worker(late=True)
        await asked
        await pass_time(4.0)
        assert cluster.site.faults["write_of_the_dead"] > 0

    in_world(make_plan(1), scenario)
