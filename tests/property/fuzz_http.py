"""Bodies of requests to the HTTP apps, damaged; the apps are called in this process.

No body makes a status of 500 or an exception; honest requests beside them are answered.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import json
import random
from collections.abc import Sequence

from starlette.types import ASGIApp

from pdcore.clock import ManualClock
from pdcore.control.messages import Accepted, Finished, LeaderMessage, Submit, Tokens
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.server.bootstrap import create_bootstrap_app
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.topology import ParallelLayout
from pdcore.types import Role
from tests.property.fuzz_mutations import mutated_json, pick
from tests.unit.server.kit import TEXT, FakeLink, Reply, World, call
from tests.unit.server.legs_kit import Arrival, Cluster

Request = tuple[str, str, bytes]

PROMPTS: tuple[dict[str, object], ...] = (
    {"prompt": "hi", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 3},
    {"prompt": [4, 5, 6], "max_tokens": 2, "stop_token_ids": [2], "ignore_eos": True},
    {"prompt": "hi", "stream": True, "logprobs": 1, "n": 1, "timeout": 20.0},
    {"prompt": "hi", "stop": ["x", "yy"], "stream": False, "return_token_ids": True},
)
CHATS: tuple[dict[str, object], ...] = (
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
)


def requests_of(extra: dict[str, object]) -> list[Request]:
    """Valid bodies of the three endpoints, each with ``extra`` fields."""
    found: list[Request] = []
    for path in ("/generate", "/v1/completions"):
        found += [("POST", path, json.dumps({**one, **extra}).encode()) for one in PROMPTS]
    path = "/v1/chat/completions"
    return found + [("POST", path, json.dumps({**one, **extra}).encode()) for one in CHATS]


def packed(request: Request) -> bytes:
    """A target's input is bytes: method and path in front of the body."""
    method, path, body = request
    return f"{method} {path}\n".encode() + body


def unpacked(data: bytes) -> Request:
    line, _, body = data.partition(b"\n")
    method, _, path = line.decode().partition(" ")
    return method, path, body


class HttpTarget(abc.ABC):
    """One app, its valid requests and what an honest caller sees."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._runner = asyncio.Runner()
        self._num_fed = 0
        self._requests: Sequence[Request] = ()

    def draw(self, rng: random.Random) -> tuple[bytes, bool]:
        method, path, body = pick(rng, self._requests)
        _, _, other = pick(rng, self._requests)
        return packed((method, path, mutated_json(rng, body, other))), True

    def feed(self, data: bytes) -> None:
        self._num_fed += 1
        self._runner.run(self._feed(data))
        if self._num_fed % 50 == 0:
            self.finish()

    async def _feed(self, data: bytes) -> None:
        async with asyncio.timeout(60.0):
            reply = await self.ask(*unpacked(data))
        assert reply.is_complete, "no end"
        assert 200 <= reply.status < 500 or reply.status == 503, (reply.status, reply.body)
        if reply.status >= 400:
            json.loads(reply.body)

    @abc.abstractmethod
    def app(self) -> ASGIApp: ...

    async def ask(self, method: str, path: str, body: bytes) -> Reply:
        return await call(self.app(), method, path, body)

    def finish(self) -> None:
        self._runner.run(self._finish())

    @abc.abstractmethod
    async def _finish(self) -> None:
        """An honest caller is answered."""
        ...

    def close(self) -> None:
        self._runner.close()


class AnsweringLink(FakeLink):
    """A worker that answers every request with two tokens."""

    def __init__(self) -> None:
        super().__init__([0])
        self.world: World | None = None

    def send(self, rank: int, message: LeaderMessage) -> bool:
        if isinstance(message, Submit) and self.world is not None:
            key, on_message = message.key, self.world.dispatcher.on_message
            loop = asyncio.get_running_loop()
            loop.call_soon(on_message, 0, Accepted(key))
            loop.call_soon(on_message, 0, Tokens([key], [[104, 105]]))
            loop.call_soon(on_message, 0, Finished(key, "length", None, 2, 2, {}))
        return True


class InstanceTarget(HttpTarget):
    def __init__(self) -> None:
        super().__init__("instance bodies")
        self._rooms = itertools.count(1 << 40)
        extra: dict[str, object] = {
            "bootstrap_room": 5,
            "attempt": 7,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 18800,
        }
        cancel: dict[str, object] = {"room": 5, "attempt": 7, "unless_received": False}
        self._requests = [
            *requests_of(extra),
            ("POST", "/cancel", json.dumps(cancel).encode()),
            ("POST", "/abort_request", json.dumps({"rid": "r", "bootstrap_room": 5}).encode()),
        ]
        self._runner.run(self._start())

    async def _start(self) -> None:
        link = AnsweringLink()
        self._world = World()
        self._world.link = link
        self._world.dispatcher._link = link
        link.world = self._world
        leg = LegOptions(role=Role.DECODE, instance="127.0.0.1:8100")
        self._app = create_instance_app(
            InstanceOptions(leg), TEXT, self._world.dispatcher, clock=self._world.clock
        )

    def app(self) -> ASGIApp:
        return self._app

    async def _finish(self) -> None:
        # Later than any room that is remembered as finished.
        self._world.timers.advance(120.0)
        self._world.health()
        body = {
            "prompt": "hi",
            "max_tokens": 2,
            "bootstrap_room": next(self._rooms),
            "attempt": next(self._rooms),
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 18800,
        }
        reply = await call(self._app, "POST", "/generate", body)
        assert reply.status == 200, reply.body
        assert b'"hi"' in reply.body, reply.body
        assert self._world.dispatcher.num_pending == 0


class RouterTarget(HttpTarget):
    """Against legs on sockets that answer at once."""

    def __init__(self) -> None:
        super().__init__("router bodies")
        self._requests = requests_of({"bootstrap_room": 9})
        self._runner.run(self._start())

    async def _start(self) -> None:
        self._cluster = Cluster()
        await self._cluster.start()
        for leg in self._cluster.decodes:
            leg.behave = self._answer
        self._router = self._cluster.router()

    async def _answer(self, arrival: Arrival) -> None:
        await arrival.json(200, {"text": "ok"})

    def app(self) -> ASGIApp:
        return self._router.app

    async def _finish(self) -> None:
        async with asyncio.timeout(60.0):
            while await self._router.is_busy():
                self._router.timers.advance(1.0)
        reply = await call(self._router.app, "POST", "/generate", {"prompt": "hi"})
        assert (reply.status, reply.json()) == (200, {"text": "ok"}), reply.body
        for leg in self._cluster.legs:
            leg.arrivals.clear()
            leg.cancels.clear()

    def close(self) -> None:
        self._runner.run(self._cluster.stop())
        super().close()


REGISTRATION: dict[str, object] = {
    "attn_tp_size": 2,
    "attn_tp_rank": 0,
    "attn_cp_size": 1,
    "attn_cp_rank": 0,
    "attn_dp_size": 1,
    "attn_dp_rank": 0,
    "rank_ip": "10.0.0.1",
    "rank_port": 35123,
    "block_sizes": {"full": 32},
    "kv_cache_dtype": "bfloat16",
    "max_prefill_tokens": 8192,
    "incarnation": "1" * 32,
    "layout_digest": "digest",
    "fingerprint": "print",
    "transport": "shm",
    "protocol_min": 1,
    "protocol_max": 1,
}


class BootstrapTarget(HttpTarget):
    """Whoever may register can also take a rank's place; a body that is not one cannot."""

    def __init__(self) -> None:
        super().__init__("bootstrap bodies")
        self._clock = ManualClock()
        self._lives = itertools.count(1 << 100)
        self._renew()
        bodies: list[tuple[str, str, object]] = [
            ("PUT", "register_rank", REGISTRATION),
            ("PUT", "register_rank", REGISTRATION | {"attn_tp_rank": 1}),
            ("POST", "deregister_rank", {"rank": "0,0,0", "incarnation": "2" * 32}),
            ("POST", "register_dp_rank", {"bootstrap_room": 5, "dp_rank": 0}),
            ("POST", "query_dp_ranks", {"bootstrap_rooms": [5, 6]}),
        ]
        self._requests = [
            (method, f"/bootstrap/{path}", json.dumps(body).encode())
            for method, path, body in bodies
        ]

    def _renew(self) -> None:
        layout = ParallelLayout(world_size=2, tp_size=2)
        table = RankTable(RankTableConfig("p0:8001", layout))
        self._app = create_bootstrap_app(table, self._clock, max_body_bytes=10_000)

    def app(self) -> ASGIApp:
        return self._app

    async def _finish(self) -> None:
        """What was registered by damaged bodies expires; then both ranks register well."""
        self._clock.advance(10_000.0)
        for tp_rank in (0, 1):
            body = REGISTRATION | {
                "attn_tp_rank": tp_rank,
                "rank_port": 40_000 + tp_rank,
                "incarnation": f"{next(self._lives):032x}",
            }
            reply = await call(self._app, "PUT", "/bootstrap/register_rank", body)
            assert reply.status == 200, reply.body
        reply = await call(self._app, "GET", "/bootstrap/route")
        assert reply.status == 200, reply.body
        assert {r["rank_port"] for r in reply.json()["ranks"].values()} == {40_000, 40_001}
