"""Fake legs on real sockets: Starlette apps whose answers a test decides.

The sockets live as long as the test module; a router is made for each test and called
in-process, so that its client may leave, stall or read slowly at any point.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdcore.clock import ManualClock
from pdcore.router.core import RouterLimits
from pdcore.server.client import HttpClient
from pdcore.server.http import respond, start_stream
from pdcore.server.router import create_router_app
from pdcore.server.serve import AppServer, bind
from tests.unit.server.kit import PATIENCE_S, ManualTimers, call

Behave = Callable[["Arrival"], Awaitable[None]]


class Arrival:
    """One request as a leg received it, and the means to answer it."""

    def __init__(self, body: dict[str, Any], path: str, receive: Receive, send: Send) -> None:
        self.body = body
        self.path = path
        self.receive = receive
        self.send = send
        #: Set when the router has closed this leg's connection.
        self.dropped = asyncio.Event()

    async def json(self, status: int, body: object, *headers: tuple[bytes, bytes]) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await respond(self.send, status, data, headers)

    async def accept(self) -> None:
        await self.json(202, {"accepted": True})

    async def begin(self) -> None:
        await start_stream(self.send)

    async def event(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"data: [DONE]\n\n") -> None:
        await self.send({"type": "http.response.body", "body": data})

    async def until_dropped(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.dropped.set()


class Break(Exception):
    """Raised by a behaviour: the leg's connection breaks."""


async def accept(arrival: Arrival) -> None:
    await arrival.accept()


async def hold(arrival: Arrival) -> None:
    """Never answers; notices when the router gives up."""
    await arrival.until_dropped()


class Leg:
    """One instance: what it received, what it was told to cancel, how it answers."""

    def __init__(self, role: str) -> None:
        self.role = role
        routes = [Route(path, _Endpoint(self), methods=["POST"]) for path in _PATHS]
        self.app = Starlette(
            routes=[
                *routes,
                Route("/cancel", self._cancel, methods=["POST"]),
                Route("/health", self._health),
                Route("/v1/models", self._models),
            ]
        )
        self.port = 0
        self.reset()

    def reset(self) -> None:
        self.behave: Behave = accept if self.role == "prefill" else hold
        self.arrivals: list[Arrival] = []
        self.cancels: list[dict[str, Any]] = []
        self.knows_cancels = True
        self.health: tuple[int, dict[str, Any]] = (200, {"status": "Up", "dp_size": 4})
        self._news = asyncio.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def tell(self) -> None:
        self._news.set()

    async def until(self, condition: Callable[[Leg], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                self._news.clear()
                await self._news.wait()

    async def arrival(self, index: int = 0) -> Arrival:
        await self.until(lambda leg: len(leg.arrivals) > index)
        return self.arrivals[index]

    async def _cancel(self, request: Request) -> Response:
        self.cancels.append(await request.json())
        self.tell()
        return JSONResponse({"known": self.knows_cancels, "applied": self.knows_cancels})

    async def _health(self, request: Request) -> Response:
        status, body = self.health
        return JSONResponse(body, status)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.role}]})


_PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


class _Endpoint:
    def __init__(self, leg: Leg) -> None:
        self._leg = leg

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = b""
        while True:
            message = await receive()
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        try:
            body = json.loads(data)
        except ValueError:  # as a real leg: the router does not read all of a body
            await respond(send, 400, b'{"error": {"message": "the body is not JSON"}}')
            return
        arrival = Arrival(body, scope["path"], receive, send)
        self._leg.arrivals.append(arrival)
        self._leg.tell()
        await self._leg.behave(arrival)
        self._leg.tell()


class Cluster:
    """Two prefill and two decode legs on sockets, in one loop that lives for the module."""

    def __init__(self) -> None:
        self.prefills = [Leg("prefill"), Leg("prefill")]
        self.decodes = [Leg("decode"), Leg("decode")]
        self.routers: list[Router] = []
        self._servers: list[AppServer] = []

    @property
    def legs(self) -> list[Leg]:
        return [*self.prefills, *self.decodes]

    async def start(self) -> None:
        for leg in self.legs:
            server = AppServer(leg.app, bind("127.0.0.1", 0))
            leg.port = server.port
            await server.start()
            self._servers.append(server)
        self.client = HttpClient()

    async def stop(self) -> None:
        await self.client.aclose()
        await asyncio.gather(*(server.stop() for server in self._servers))

    def reset(self) -> None:
        for leg in self.legs:
            leg.reset()

    def router(self, num: int = 1, **limits: Any) -> Router:
        self.routers.append(Router(self, num, **limits))
        return self.routers[-1]

    async def quiet(self) -> None:
        """Until nothing of the routers made so far is under way: the next test starts clean."""
        for leg in self.legs:
            leg.knows_cancels = True
        for router in self.routers:
            while await router.is_busy():
                router.timers.advance(1.0)
        self.routers.clear()


class Router:
    """A router over the first ``num`` legs of each role, in manual time."""

    def __init__(self, cluster: Cluster, num: int, **limits: Any) -> None:
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.prefill, self.decode = cluster.prefills[0], cluster.decodes[0]
        self.app = create_router_app(
            [leg.address for leg in cluster.prefills[:num]],
            [leg.address for leg in cluster.decodes[:num]],
            clock=self.clock,
            client=cluster.client,
            rng=random.Random(7),
            limits=RouterLimits(**limits),
            timers=self.timers,
        )

    async def is_busy(self) -> bool:
        stats = (await call(self.app, "GET", "/stats")).json()
        return bool(stats["in_flight"] or stats["cancels"])


def module_cluster() -> Iterator[tuple[asyncio.Runner, Cluster]]:
    """For a module-scoped fixture."""
    with asyncio.Runner() as runner:
        cluster = Cluster()
        runner.run(cluster.start())
        yield runner, cluster
        runner.run(cluster.stop())


#: One scene of a test: it ends within PATIENCE_S, and leaves the cluster quiet.
Play = Callable[[Cluster], Coroutine[Any, Any, None]]


def player(runner: asyncio.Runner, cluster: Cluster) -> Callable[[Play], None]:
    """For a ``play`` fixture on a :func:`module_cluster`."""

    async def bounded(scene: Play) -> None:
        async with asyncio.timeout(PATIENCE_S):
            try:
                await scene(cluster)
            finally:
                await cluster.quiet()

    def run_scene(scene: Play) -> None:
        cluster.reset()
        runner.run(bounded(scene))

    return run_scene
