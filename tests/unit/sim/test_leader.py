"""The leader's end of a simulated link, and its apps."""

from __future__ import annotations

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcore.control.codec import encode_link
from pdcore.control.messages import Stop, WorkerHealth, WorkerMessage, WorkerReady
from pdcore.sim.clients import ask
from pdcore.sim.cluster import Cluster
from pdcore.sim.leader import SimLink
from pdcore.sim.loop import Process, pass_time
from pdcore.sim.plan import Request, make_plan
from pdcore.sim.site import Parts, make_site
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


class Counting:
    """A server around an app: by kind, what it was asked."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.kinds: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.kinds.append(scope["type"])
        await self.app(scope, receive, send)


def test_a_server_of_ones_own_stands_before_every_app_and_is_started_once_a_life() -> None:
    """Issue 3.11."""
    made: list[tuple[str, Counting]] = []

    def wrap(app: ASGIApp, name: str) -> ASGIApp:
        made.append((name, Counting(app)))
        return made[-1][1]

    async def scenario(cluster: Cluster) -> None:
        request = Request(0, 0.0, "/generate", (5, 6, 7), 4, False, 5.0, None, None)
        assert (await ask(cluster, request)).is_ok
        cluster.router.kill(0.5)
        await pass_time(1.0)
        assert (await ask(cluster, request)).is_ok

    plan = make_plan(1)
    in_world(plan, scenario, Parts(wrap_app=wrap))
    prefills = [f"p{n}" for n in range(plan.options.num_prefill)]
    decodes = [f"d{n}" for n in range(plan.options.num_decode)]
    names = [*prefills, *(f"{name}.bootstrap" for name in prefills), *decodes, "router", "router"]
    assert sorted(name for name, _ in made) == sorted(names)
    for name, server in made:
        assert server.kinds.count("lifespan") == (0 if name.endswith(".bootstrap") else 1)
        assert "http" in server.kinds


def test_a_server_that_cannot_start_is_found() -> None:
    async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
        raise OSError("no database")

    async def scenario(cluster: Cluster) -> None:
        await pass_time(0.1)

    parts = Parts(wrap_app=lambda app, name: nobody if name == "d1" else app)
    with pytest.raises(AssertionError, match="no database"):
        in_world(make_plan(1), scenario, parts)
