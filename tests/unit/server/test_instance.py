"""The leader's app: what watches the endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette

from pdcore.control.messages import Abort, Aborted, Submit, WorkerHealth
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.types import Role, RoomKey
from tests.unit.server.kit import TEXT, Call, World, call, run, settle

KEY = RoomKey(5, 7)


def app_of(world: World, **options: Any) -> Starlette:
    leg = LegOptions(role=Role.DECODE, instance="127.0.0.1:8100")
    return create_instance_app(
        InstanceOptions(leg, **options), TEXT, world.dispatcher, clock=world.clock
    )


def test_health_is_200_only_when_ready_and_names_what_is_missing() -> None:
    """D33, D48: the seed's health was 200 while registration had failed or a worker was dead."""

    async def play() -> None:
        world = World(num_workers=2)
        app = app_of(world, bootstrap="127.0.0.1:18800")
        reply = await call(app, "GET", "/health")
        assert reply.status == 200
        assert reply.json() == {
            "status": "Up",
            "disaggregation_mode": "DECODE",
            "instance": "127.0.0.1:8100",
            "dp_size": 1,
            "bootstrap": "127.0.0.1:18800",
            "model": "tiny",
            "problems": [],
            "refused_peers": {},
        }
        world.health("cannot register at 127.0.0.1:18800: 409", rank=1)
        reply = await call(app, "GET", "/health")
        assert (reply.status, reply.json()["status"]) == (503, "UnHealthy")
        assert reply.json()["problems"] == ["rank 1: cannot register at 127.0.0.1:18800: 409"]
        world.health(rank=1)
        world.dispatcher.on_lost(0, "killed by signal 9")
        reply = await call(app, "GET", "/health")
        assert reply.status == 503
        assert "signal 9" in reply.json()["problems"][0]

    run(play())


def test_who_hangs_is_told_to_the_leader() -> None:
    """D45; where nobody listens (an embedded worker) it stays a problem."""

    async def play() -> None:
        stuck: list[int] = []
        world = World()
        app = app_of(world, on_stuck=stuck.append)
        world.health()
        world.clock.advance(61.0)
        assert world.dispatcher.workers.check(world.clock.monotonic()) == []
        async with app.router.lifespan_context(app):
            assert stuck == [0]
        alone = World()
        app = app_of(alone)
        alone.health()
        alone.clock.advance(61.0)
        async with app.router.lifespan_context(app):
            reply = await call(app, "GET", "/health")
            assert reply.json()["problems"] == ["rank 0: no health report for 15 s"]

    run(play())


def test_requests_are_503_with_retry_after_unless_up() -> None:
    """R34."""

    async def play() -> None:
        world = World()
        world.dispatcher.on_lost(0, "gone")
        body = {
            "prompt": "x",
            "bootstrap_room": 1,
            "attempt": 1,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 1,
        }
        reply = await call(app_of(world), "POST", "/generate", body)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")

    run(play())


def test_models_and_stats() -> None:
    async def play() -> None:
        world = World()
        app = app_of(world)
        models = (await call(app, "GET", "/v1/models")).json()
        assert models["object"] == "list"
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 128)
        world.dispatcher.submit(world.request())
        world.health()
        stats = (await call(app, "GET", "/stats")).json()
        assert (stats["status"], stats["pending_requests"], stats["num_workers"]) == ("Up", 1, 1)
        assert stats["counters"] == {"submitted": 1}
        assert stats["workers"] == {"0": {"steps": 1.0}}

    run(play())


def test_metrics_have_no_label_per_room() -> None:
    async def play() -> None:
        world = World()
        world.health()
        app = app_of(world)
        await call(app, "POST", "/generate", {"prompt": "x"})
        text = (await call(app, "GET", "/metrics")).body.decode()
        assert 'pdcore_instance_requests_total{endpoint="/generate",status="400"} 1.0' in text
        assert "pdcore_instance_pending_requests 0.0" in text
        assert 'name="steps"' in text
        assert "room" not in text

    run(play())


def test_the_ledger_and_the_peers_that_get_no_work_are_shown() -> None:
    """Every state of every pool; a peer's fault is told to routers and does not make this
    instance unready (SGLang I12779)."""
    states = {"free": 9, "reserved": 1, "held": 2, "leased": 3, "quarantined": 4}
    peers = {"10.0.0.7:8001": "rank 0: it has not answered 5 heartbeats in a row"}

    async def play() -> None:
        world = World()
        health = WorkerHealth(0, [], {}, {"full": states}, peers)
        world.dispatcher.on_message(0, health)
        app = app_of(world)
        text = (await call(app, "GET", "/metrics")).body.decode()
        for state, count in states.items():
            labels = f'pool="full",rank="0",state="{state}"'
            assert f"pdcore_worker_ledger{{{labels}}} {count}.0" in text
        assert 'pdcore_instance_refused_peer{peer="10.0.0.7:8001"} 1.0' in text
        stats = (await call(app, "GET", "/stats")).json()
        assert stats["ledger"] == {"0": {"full": states}}
        reply = await call(app, "GET", "/health")
        assert (reply.status, reply.json()["refused_peers"]) == (200, peers)
        world.dispatcher.on_lost(0, "killed by signal 9")
        assert (await call(app, "GET", "/health")).json()["refused_peers"] == {}

    run(play())


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("POST", "/stop", 404, "not_found"),
    ],
)
def test_what_does_not_exist_has_the_shape_of_every_error(
    method: str, path: str, status: int, code: str
) -> None:
    """D40: POST /stop is off unless somebody turned it on."""

    async def play() -> None:
        reply = await call(app_of(World()), method, path)
        assert (reply.status, reply.json()["error"]["code"]) == (status, code)

    run(play())


def test_stop_where_it_was_enabled() -> None:
    async def play() -> None:
        calls: list[str] = []
        app = app_of(World(), on_stop=lambda: calls.append("stop"))
        assert (await call(app, "POST", "/stop")).status == 202
        assert calls == ["stop"]

    run(play())


# --- /cancel ---------------------------------------------------------------------------------


def test_a_cancel_waits_for_the_workers_word() -> None:
    async def play() -> None:
        world = World()
        app = app_of(world)
        world.dispatcher.submit(world.request())
        body = {"room": 5, "attempt": 7, "unless_received": True}
        one = Call(app, "POST", "/cancel", body)
        await settle()
        assert not one.task.done()
        assert world.link.of(Abort) == [Abort(KEY, "cancelled by the router", True)]
        world.dispatcher.on_message(0, Aborted(KEY, False))
        reply = await one.done()
        assert (reply.status, reply.json()) == (200, {"known": True, "applied": False})
        unknown = await call(app, "POST", "/cancel", {"room": 9, "attempt": 9})
        assert unknown.json() == {"known": False, "applied": False}

    run(play())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "room: is required"),
        ({"room": 0, "attempt": 1}, "room: expected int >= 1"),
        ({"room": 1, "attempt": "x"}, "attempt: expected int, got str"),
        ({"room": 1, "attempt": 1, "extra": 1}, "body: object contains unknown field extra"),
        (b"{", "body: is not valid JSON"),
        (b"x" * 5000, "the body exceeds 4096 bytes"),
    ],
)
def test_a_malformed_cancel_is_named(body: object, says: str) -> None:
    async def play() -> None:
        reply = await call(app_of(World()), "POST", "/cancel", body)
        assert reply.status in (400, 413)
        assert reply.json()["error"]["message"].startswith(says)

    run(play())


# --- lifespan --------------------------------------------------------------------------------


def test_the_end_of_the_app_fails_what_is_pending() -> None:
    """R39, and D45's watch runs while the app does."""

    async def play() -> None:
        world = World()
        app = app_of(world)
        async with app.router.lifespan_context(app):
            pending = world.dispatcher.submit(world.request())
            await asyncio.sleep(0)
        assert pending.has_ended
        assert len(world.link.of(Submit)) == 1

    run(play())
