"""An instance in one process: what a leader promises, with the worker in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from pdcore.assembly import WorkerOptions, build_worker
from pdcore.control.messages import LeaderMessage, WorkerHealth, WorkerMessage
from pdcore.control.zmq import ZmqChannel
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner, simulated_tokens
from pdcore.errors import ConfigError
from pdcore.local import LocalPort, local_route
from pdcore.server.bootstrap import create_bootstrap_app
from pdcore.server.embedded import EmbeddedInstance
from pdcore.server.text import IdDetokenizer, IdTokenizer, TextModel
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import Incarnation, Role, RoomKey
from pdcore.worker import LeaderPort, Worker
from tests.unit.server.kit import App, Call, call, run

MODEL = SimulatedConfig(block_size=4, max_model_len=4096)
TEXT = TextModel("simulated", IdTokenizer(), IdDetokenizer)
PROMPT = [5, 6, 7, 8, 9]


def make_worker(
    role: Role,
    fabric: LoopbackFabric,
    port: LeaderPort,
    prefills: Sequence[Worker] = (),
) -> Worker:
    route = local_route([w.core.setup for w in prefills]) if prefills else None
    transport = LoopbackTransport(Incarnation(role.value[:1].encode() * 16), fabric)
    options = WorkerOptions(role, f"127.0.0.1:{len(role.value)}", 1100, fetch_route=route)
    return build_worker(SimulatedRunner(MODEL), transport, ZmqChannel(), port, options)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[EmbeddedInstance, EmbeddedInstance]]:
    """Prefill at 127.0.0.1:7, decode at 127.0.0.1:6; nobody listens there: calls are ASGI."""
    fabric = LoopbackFabric()
    first = make_worker(Role.PREFILL, fabric, LocalPort())
    second = make_worker(Role.DECODE, fabric, LocalPort(), [first])
    prefill, decode = EmbeddedInstance(first, TEXT), EmbeddedInstance(second, TEXT)
    async with contextlib.AsyncExitStack() as stack:
        for one in (prefill, decode):
            await stack.enter_async_context(one.app.router.lifespan_context(one.app))
        yield prefill, decode
    assert not [t for t in threading.enumerate() if t.name.startswith("worker-")]


def body(room: int, max_tokens: int, **more: object) -> dict[str, object]:
    return {
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "bootstrap_room": room,
        "attempt": 1,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 7,
        "prefill_instance": "127.0.0.1:7",
        "decode_instance": "127.0.0.1:6",
        **more,
    }


def test_both_legs_serve_a_request() -> None:
    async def play() -> None:
        async with pair() as (prefill, decode):
            legs = [
                call(one.app, "POST", "/v1/completions", body(1, 12)) for one in (prefill, decode)
            ]
            accepted, answer = await asyncio.gather(*legs)
            assert (accepted.status, answer.status) == (202, 200)
            text = answer.json()["choices"][0]["text"]
            assert [int(word) for word in text.split()] == simulated_tokens(MODEL, PROMPT, 12)

    run(play())


def test_health_tells_routers_who_it_is_and_where_to_bootstrap() -> None:
    async def play() -> None:
        async with pair() as (prefill, decode):
            health = (await call(prefill.app, "GET", "/health")).json()
            assert (health["status"], health["disaggregation_mode"]) == ("Up", "PREFILL")
            assert health["instance"] == health["bootstrap"] == "127.0.0.1:7"
            health = (await call(decode.app, "GET", "/health")).json()
            assert (health["disaggregation_mode"], health["bootstrap"]) == ("DECODE", None)

    run(play())


def test_prefill_is_its_own_bootstrap_server_while_its_worker_lives() -> None:
    async def play() -> None:
        async with pair() as (prefill, decode):
            route = await call(prefill.app, "GET", "/bootstrap/route")
            assert route.json()["instance"] == "127.0.0.1:7"
            rank = route.json()["ranks"]["0,0,0"]
            assert rank["incarnation"] == b"p".hex() * 16
            assert (await call(decode.app, "GET", "/bootstrap/route")).status == 404
        assert (await call(prefill.app, "GET", "/bootstrap/route")).status == 503

    run(play())


def test_abort_by_room_ends_the_request_at_once() -> None:
    async def play() -> None:
        async with pair() as (prefill, decode):
            assert not decode.abort(2, "nobody knows this room")
            await call(prefill.app, "POST", "/v1/completions", body(2, 4000))
            streaming = Call(decode.app, "POST", "/v1/completions", body(2, 4000, stream=True))
            await streaming.until(lambda reply: len(reply.events()) > 0)
            assert decode.abort(2, "the user pressed stop")
            reply = await streaming.done()
            assert reply.events()[-1]["error"]["message"] == "the user pressed stop"
            assert not decode.abort(2, "again")

    run(play())


def test_a_loop_that_fails_is_an_unhealthy_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """D45: what waits fails at once, and nobody is routed here any more."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    async def play() -> None:
        async with pair() as (_, decode):
            waiting = Call(decode.app, "POST", "/v1/completions", body(3, 8))
            while not decode.dispatcher.num_pending:
                await asyncio.sleep(0)

            def broken(limit: int = 256) -> list[LeaderMessage]:
                raise RuntimeError("a bug")

            monkeypatch.setattr(decode.worker.ports.leader, "receive", broken)
            decode.worker.background.wake()
            reply = await waiting.done()
            assert (reply.status, reply.json()["error"]["code"]) == (503, "worker_lost")
            health = await call(decode.app, "GET", "/health")
            assert health.status == 503
            assert "ended with an error" in health.json()["problems"][0]

    run(play())


def test_stopping_lets_what_runs_finish_and_takes_nothing_new() -> None:
    """D59."""

    async def play() -> None:
        async with pair() as (prefill, decode):
            await call(prefill.app, "POST", "/v1/completions", body(4, 30))
            streaming = Call(decode.app, "POST", "/v1/completions", body(4, 30, stream=True))
            await streaming.until(lambda reply: len(reply.events()) > 0)
        reply = await streaming.done()
        assert reply.events()[-1] == "[DONE]"
        late = await call(decode.app, "POST", "/v1/completions", body(5, 8))
        assert late.status == 503

    run(play())


def test_a_worker_with_another_port_is_refused() -> None:
    class OtherPort:
        def receive(self, limit: int = 256) -> list[LeaderMessage]:
            return []

        def send(self, message: WorkerMessage) -> None:
            assert isinstance(message, WorkerHealth)

    worker = make_worker(Role.PREFILL, LoopbackFabric(), OtherPort())
    with pytest.raises(ConfigError, match="needs a LocalPort, got OtherPort"):
        EmbeddedInstance(worker, TEXT)
    worker.close()


def test_abort_reaches_only_the_room_that_was_named() -> None:
    async def play() -> None:
        async with pair() as (_, decode):
            calls = [Call(decode.app, "POST", "/v1/completions", body(room, 8)) for room in (6, 7)]
            while decode.dispatcher.num_pending < 2:
                await asyncio.sleep(0)
            assert decode.abort(6, "this one")
            assert (await calls[0].done()).status == 499
            assert decode.dispatcher.num_pending == 1
            assert decode.dispatcher.abort(RoomKey(7, 1), "the other")
            assert (await calls[1].done()).status == 499

    run(play())


REGISTRATION = {
    "attn_tp_size": 1,
    "attn_tp_rank": 0,
    "rank_ip": "10.6.6.6",
    "rank_port": 666,
    "block_sizes": {"full": 4},
    "kv_cache_dtype": "int32",
    "max_prefill_tokens": 1024,
    "incarnation": "6" * 32,
    "layout_digest": "digest",
    "fingerprint": "print",
    "transport": "loopback",
    "protocol_min": 1,
    "protocol_max": 1,
}


def test_nobody_registers_at_an_embedded_instance() -> None:
    """D40: its bootstrap server took registrations and farewells from anyone."""

    async def check(app: App) -> None:
        for method, path, told in (
            ("PUT", "register_rank", REGISTRATION),
            ("POST", "deregister_rank", {"rank": "0,0,0", "incarnation": b"p".hex() * 16}),
            ("POST", "register_dp_rank", {"bootstrap_room": 1, "dp_rank": 0}),
        ):
            headers = [(b"authorization", b"Bearer ")]
            reply = await call(app, method, f"/bootstrap/{path}", told, headers)
            assert reply.status == 401, f"anyone may {path}"

    async def play() -> None:
        async with pair() as (prefill, _):
            await check(prefill.app)
            route = await call(prefill.app, "GET", "/bootstrap/route")
            assert route.json()["ranks"]["0,0,0"]["incarnation"] == b"p".hex() * 16
            mutant = create_bootstrap_app(prefill._table, prefill._clock)
            with pytest.raises(AssertionError, match="anyone may"):
                await check(mutant)

    run(play())
