"""Public reports about the HTTP side: routers, leaders, clients and what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette

from pdcore.clock import ManualClock
from pdcore.control.messages import Abort, Submit
from pdcore.server.dispatcher import Dispatcher
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.server.workers import WorkerRegistry
from pdcore.types import Role
from tests.unit.router.test_core import Router as CoreRouter
from tests.unit.server.kit import (
    TEXT,
    Call,
    FakeLink,
    ManualTimers,
    World,
    call,
    run,
    settle,
)
from tests.unit.server.legs_kit import Arrival, Cluster, Play, hold, module_cluster, player

PD: dict[str, Any] = {
    "bootstrap_room": 5,
    "attempt": 7,
    "bootstrap_host": "127.0.0.1",
    "bootstrap_port": 18800,
}
HI: dict[str, Any] = {"prompt": "hi", **PD}
INFO = ("/health", "/stats", "/v1/models", "/metrics")


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.Runner, Cluster]]:
    yield from module_cluster()


@pytest.fixture
def play(running: tuple[asyncio.Runner, Cluster]) -> Callable[[Play], None]:
    return player(*running)


async def answer(arrival: Arrival) -> None:
    await arrival.json(200, {"choices": [{"text": "ok"}]})


def leader(world: World, role: Role = Role.DECODE) -> Starlette:
    leg = LegOptions(role=role, instance="127.0.0.1:8100")
    return create_instance_app(InstanceOptions(leg), TEXT, world.dispatcher, clock=world.clock)


# --- what asks about a server, and what a worker is busy with -----------------------------


@pytest.mark.parametrize("path", INFO)
@pytest.mark.parametrize("is_started", [False, True])
def test_who_asks_how_a_server_is_does_not_wait_for_its_workers(
    path: str, is_started: bool
) -> None:
    """SGLang PR24115: server info awaited the scheduler, which answered after minutes at the
    start. A leader answers from what it has been told: here its worker never says a word, or
    has a request and is silent over it."""

    async def scene() -> None:
        world = World()
        if is_started:
            world.dispatcher.submit(world.request())
            app = leader(world)
        else:
            clock = ManualClock()
            silent = Dispatcher(
                FakeLink(), WorkerRegistry(1, 1), clock=clock, timers=ManualTimers(clock)
            )
            leg = LegOptions(role=Role.DECODE, instance="127.0.0.1:8100")
            app = create_instance_app(InstanceOptions(leg), TEXT, silent, clock=clock)
        asked = Call(app, "GET", path)
        await settle()
        assert asked.task.done(), f"{path} waits for somebody"
        status = asked.reply.status
        assert status == (503 if path == "/health" and not is_started else 200)

    run(scene())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi"},
        {"prompt": "hi", "bootstrap_room": None},
        {"prompt": "hi", "bootstrap_room": 0, "attempt": 7},
        {"prompt": "hi", "bootstrap_room": "5", "attempt": 7},
        {},
        [],
        "hi",
    ],
)
def test_a_request_without_a_room_is_refused_and_reaches_no_worker(role: Role, body: Any) -> None:
    """SGLang PR8063: a health check sent straight to an instance had no room, and its worker
    crashed. What a request lacks is a 400 that names it; the worker never sees it."""

    async def scene() -> None:
        world = World()
        app = leader(world, role)
        reply = await call(app, "POST", "/generate", body)
        assert reply.status == 400
        assert reply.json()["error"]["message"]
        assert world.link.of(Submit) == []
        assert (await call(app, "GET", "/health")).status == 200

    run(scene())


# --- one request is one room --------------------------------------------------------------


def test_samples_of_one_prompt_are_requests_with_rooms_of_their_own() -> None:
    """SGLang PR26486: n samples of a prompt shared the rooms of a repeated list, and got
    stuck. Here n above 1 is refused by name, before anything is queued, and a client that
    wants three samples sends three requests: three rooms, three attempts."""

    async def scene() -> None:
        world = World()
        app = leader(world)
        for path, more in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            reply = await call(app, "POST", path, {**PD, **more, "n": 3})
            assert reply.status == 400
            assert reply.json()["error"]["param"] == "n"
        assert world.link.of(Submit) == []

    run(scene())
    router = CoreRouter()
    dispatches = [router.submit()[1] for _ in range(3)]
    assert len({d.added["bootstrap_room"] for d in dispatches}) == 3
    assert len({d.attempt for d in dispatches}) == 3


# --- how long the router waits ------------------------------------------------------------


def test_a_slow_prefill_has_the_time_that_was_configured(play: Any) -> None:
    """SGLang PR9803: under load prefill took longer than two seconds that were written into
    the client, and its requests were aborted. There is one time, the request's, and no other
    anywhere on the way: here prefill answers nothing for 299 of 300 s."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router(request_timeout_s=300.0)
        router.prefill.behave = hold
        gate = asyncio.Event()

        async def late(arrival: Arrival) -> None:
            await gate.wait()
            await answer(arrival)

        router.decode.behave = late
        one = Call(router.app, "POST", "/generate", {"prompt": "hi"})
        await router.decode.arrival()
        await router.prefill.arrival()
        for _ in range(299):
            router.timers.advance(1.0)
            await settle(5)
        assert not one.task.done()
        assert router.prefill.cancels == router.decode.cancels == []
        gate.set()
        assert (await one.done()).status == 200
        for leg in (router.prefill, router.decode):
            assert leg.arrivals[0].body["remaining_s"] == pytest.approx(300.0, abs=1.0)

    play(scene)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_worker_is_told_how_long_it_has_and_is_not_given_up_before(path: str) -> None:
    """SGLang PR9803: the same at the leader: it waits as long as the request says."""

    async def scene() -> None:
        world = World()
        one = Call(leader(world), "POST", path, {**HI, "remaining_s": 120.0})
        while not world.link.of(Submit):
            await asyncio.sleep(0)
        (submit,) = world.link.of(Submit)
        assert submit.remaining_s == pytest.approx(120.0, abs=1.0)
        world.timers.advance(119.0)
        await settle()
        assert not one.task.done()
        assert world.link.of(Abort) == []
        world.tokens(submit.key, [104])
        world.finish(submit.key)
        assert (await one.done()).status == 200

    run(scene())


# --- connections --------------------------------------------------------------------------


def test_three_hundred_requests_use_the_connections_of_a_few(play: Any) -> None:
    """SGLang I19271, PR31543: every query opened a connection, until the ports were used up.
    The router's client keeps a bounded pool for each instance: eight at a time, three
    hundred in all, and no more connections than that needs."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = answer
        opened = cluster.client.num_opened
        gate = asyncio.Semaphore(8)

        async def one() -> int:
            async with gate:
                return (await Call(router.app, "POST", "/generate", {"prompt": "hi"}).done()).status

        assert set(await asyncio.gather(*(one() for _ in range(300)))) == {200}
        assert len(router.decode.arrivals) == 300
        # A leg's answer may still be read while the next request is sent.
        assert cluster.client.num_opened - opened <= 2 * 2 * 8
        assert cluster.client.num_connections <= 2 * 2 * 8 + 8

    play(scene)


# --- what one leg knows of the other ------------------------------------------------------


@pytest.mark.parametrize("status", [400, 500])
def test_a_decode_that_refuses_ends_prefill_too(play: Any, status: int) -> None:
    """SGLang PR29482, 37961: decode's dispatch failed, and prefill went on waiting for a
    handshake that nobody would send. It is cancelled with the answer, and the cancel is
    repeated until it is known."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()

        async def refuse(arrival: Arrival) -> None:
            await router.prefill.arrival()
            await arrival.json(status, {"error": {"message": "no", "code": "x"}})

        router.decode.behave = refuse
        router.prefill.knows_cancels = False
        reply = await Call(router.app, "POST", "/generate", {"prompt": "hi"}).done()
        assert reply.status == status
        while len(router.prefill.cancels) < 3:
            router.timers.advance(0.01)
            await asyncio.sleep(0)
        room = router.prefill.arrivals[0].body["bootstrap_room"]
        assert {cancel["room"] for cancel in router.prefill.cancels} == {room}

    play(scene)
