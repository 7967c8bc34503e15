"""What must hold at rest, and that the checks notice when it does not."""

from __future__ import annotations

import asyncio

from pdcore.fsm.states import ReceiverState
from pdcore.scheduler.decode import DecodeCore
from pdcore.sim.checks import WriteWatch, not_ready, router_unrest, unrest
from pdcore.sim.clients import ask
from pdcore.sim.cluster import Cluster
from pdcore.sim.loop import pass_time
from pdcore.sim.plan import Request, make_plan
from pdcore.sim.world import in_world

REQUEST = Request(0, 0.0, "/v1/completions", (5,) * 20, 4, False, 5.0, None, None)


def test_a_cluster_that_served_is_at_rest() -> None:
    async def scenario(cluster: Cluster) -> None:
        for _ in range(4):
            assert (await ask(cluster, REQUEST)).is_ok
        await pass_time(4.0)
        assert unrest(cluster) == []
        assert await router_unrest(cluster) == []
        assert not await not_ready(cluster)

    in_world(make_plan(1), scenario)


def test_what_is_left_is_named() -> None:
    async def scenario(cluster: Cluster) -> None:
        rank = cluster.instances["d0"].rank
        assert rank is not None
        rank.core.blocks.allocate_slots(1 << 40, 0, 8)
        assert any("not free" in text for text in unrest(cluster))
        rank.core.blocks.free(1 << 40)
        assert unrest(cluster) == []
        cluster.instances["d1"].kill_leader(late=False, back_after_s=1.0)
        assert any("not back" in text for text in unrest(cluster))
        assert await not_ready(cluster)
        await pass_time(4.0)

    in_world(make_plan(1), scenario)


def test_every_write_is_watched_and_one_to_blocks_given_back_is_told() -> None:
    """D3: the watch asks the receiver in the moment of the write."""

    async def scenario(cluster: Cluster) -> None:
        watch = WriteWatch(cluster)
        cluster.on_write = watch
        assert (await ask(cluster, REQUEST)).is_ok
        assert watch.num_writes >= 2
        assert cluster.site.violations == []
        cluster.slowness = 1000.0
        asked = asyncio.ensure_future(ask(cluster, REQUEST))
        while not cluster.site.fabric.pending():
            await pass_time(0.001)
        for rank in cluster.ranks():
            core = rank.core
            if isinstance(core, DecodeCore):
                for record in list(core.rooms.records.values()):
                    core.blocks.release(record.seq.seq_id)
        while not cluster.site.violations:
            await pass_time(0.01)
        assert "blocks were given back" in cluster.site.violations[0]
        cluster.site.violations.clear()
        cluster.on_write = lambda action: None
        asked.cancel()

    in_world(make_plan(1), scenario)


def test_a_write_to_a_request_that_runs_is_told() -> None:
    """Rule 3: Done ends the claim, so nothing of it may come any more."""

    async def scenario(cluster: Cluster) -> None:
        cluster.slowness = 1000.0
        asked = asyncio.ensure_future(ask(cluster, REQUEST))
        while not cluster.site.fabric.pending():
            await pass_time(0.001)
        for rank in cluster.ranks():
            if isinstance(rank.core, DecodeCore):
                for record in rank.core.rooms.records.values():
                    record.receiver.state = ReceiverState.DONE
        while not cluster.site.violations:
            await pass_time(0.01)
        assert "which is Done" in cluster.site.violations[0]
        cluster.site.violations.clear()
        cluster.on_write = lambda action: None
        asked.cancel()

    in_world(make_plan(1), scenario)


def test_what_is_left_is_told_in_words_that_are_the_same_in_every_process() -> None:
    """The text is part of the trace, and so of its hash: no address of an object in it."""

    async def scenario(cluster: Cluster) -> None:
        cluster.slowness = 100.0
        asked = asyncio.ensure_future(ask(cluster, REQUEST))
        while not cluster.site.fabric.pending():
            await pass_time(0.001)
        rooms = [text for text in unrest(cluster) if "has rooms" in text]
        assert len(rooms) == 2
        assert not any(" object at 0x" in text for text in unrest(cluster))
        assert any("Receiver(" in text for text in rooms)
        await asked
        await pass_time(4.0)

    in_world(make_plan(1), scenario)
