"""The leader's end of a simulated link, and its apps."""

from __future__ import annotations

from pdcore.control.codec import encode_link
from pdcore.control.messages import Stop, WorkerHealth, WorkerMessage, WorkerReady
from pdcore.sim.cluster import Cluster
from pdcore.sim.leader import SimLink
from pdcore.sim.loop import Process, pass_time
from pdcore.sim.plan import make_plan
from pdcore.sim.site import make_site
from pdcore.sim.world import in_world
from pdcore.types import Incarnation

OLD, NEW = Incarnation(b"o" * 16), Incarnation(b"n" * 16)


def ready(incarnation: Incarnation) -> bytes:
    message = WorkerReady(
        rank=0,
        dp_rank=0,
        incarnation=incarnation,
        control_address="tcp://x:1",
        max_model_len=64,
        max_prefill_tokens=40,
        vocab_size=100,
        num_blocks=8,
        transport="loopback",
    )
    return encode_link(message)


def test_messages_arrive_in_order_and_a_former_life_is_not_heard() -> None:
    site = make_site(make_plan(0))
    leader = Process("leader")
    link = SimLink(site, leader)
    heard: list[WorkerMessage] = []
    link.deliver = lambda index, message: heard.append(message)

    async def main() -> None:
        link.from_worker(0, OLD, ready(OLD))
        for n in range(20):
            link.from_worker(0, OLD, encode_link(WorkerHealth(0, [], {"n": float(n)})))
        link.from_worker(0, NEW, ready(NEW))
        link.from_worker(0, OLD, encode_link(WorkerHealth(0, ["from the past"], {})))
        await pass_time(1.0)

    site.loop.run(main())
    numbers = [m.counters["n"] for m in heard if isinstance(m, WorkerHealth)]
    assert numbers == [float(n) for n in range(20)]
    assert isinstance(heard[-1], WorkerReady)


def test_without_a_worker_a_message_is_refused() -> None:
    """D42: never dropped silently."""
    link = SimLink(make_site(make_plan(0)), Process("leader"))
    assert not link.send(0, Stop(0.0))


def test_a_leader_serves_from_its_start_to_its_close() -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = cluster.instances["p0"].leader
        assert leader is not None
        mine = [o for o, at in cluster.site.wire.listeners.items() if at.process is leader.process]
        assert len(mine) == 2
        leader.close()
        assert not set(mine) & set(cluster.site.wire.listeners)

    in_world(make_plan(1), scenario)
