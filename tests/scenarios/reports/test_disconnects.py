"""Clients that leave, through the whole stack: router, leaders, worker threads, real cores."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import attrs
from starlette.applications import Starlette

from pdcore.assembly import WorkerOptions, build_worker
from pdcore.config import CoreLimits
from pdcore.control.messages import WorkerMessage
from pdcore.control.zmq import ZmqChannel
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner, simulated_tokens
from pdcore.local import LocalPort, local_route
from pdcore.server.dispatcher import Dispatcher
from pdcore.server.embedded import EmbeddedInstance
from pdcore.server.router import create_router_app
from pdcore.server.serve import AppServer, bind
from pdcore.server.text import IdDetokenizer, IdTokenizer, TextModel
from pdcore.system_clock import SystemClock
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import Incarnation, Role
from pdcore.worker import Worker
from tests.unit.server.kit import PATIENCE_S, Call, call

MODEL = SimulatedConfig(block_size=4, max_model_len=4096)
TEXT = TextModel("simulated", IdTokenizer(), IdDetokenizer)
LIMITS = CoreLimits(max_queued_requests=512, heartbeat_interval_s=0.05, linger_s=0.2)
NUM_CLIENTS = 400
NUM_BLOCKS = 1100
PROMPT = [5, 6, 7, 8, 9]


@attrs.frozen
class Stack:
    router: Starlette
    instances: tuple[EmbeddedInstance, EmbeddedInstance]
    #: Set by every message of a worker; each reports its health twenty times a second.
    news: asyncio.Event = attrs.field(factory=asyncio.Event)

    def ask(self, max_tokens: int, *, stream: bool) -> Call:
        body = {
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        return Call(self.router, "POST", "/v1/completions", body)

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Look again whenever a worker has said something."""
        while not await condition():
            self.news.clear()
            await self.news.wait()

    async def ledgers(self) -> list[dict[str, float]]:
        """What each rank's last health report counts."""
        found = []
        for instance in self.instances:
            stats = (await call(instance.app, "GET", "/stats")).json()
            found.append(stats["workers"].get("0", {}))
        return found

    async def is_at_rest(self) -> bool:
        stats = (await call(self.router, "GET", "/stats")).json()
        health = (await call(self.router, "GET", "/health")).json()
        if stats["in_flight"] or stats["cancels"] or health["status"] != "Up":
            return False
        return all(one.get("kv_free") == NUM_BLOCKS - 1 for one in await self.ledgers())

    async def is_in_the_middle(self, calls: Sequence[Call]) -> bool:
        """Some stream, and both instances have got most of the others."""
        if sum(one.reply.status == 200 for one in calls) < 10:
            return False
        for instance in self.instances:
            stats = (await call(instance.app, "GET", "/stats")).json()
            if stats["counters"].get("submitted", 0) < NUM_CLIENTS // 2:
                return False
        return True


def make_worker(
    role: Role, name: str, fabric: LoopbackFabric, prefills: Sequence[Worker] = ()
) -> Worker:
    route = local_route([w.core.setup for w in prefills]) if prefills else None
    transport = LoopbackTransport(Incarnation(role.value[:1].encode() * 16), fabric)
    options = WorkerOptions(role, name, NUM_BLOCKS, limits=LIMITS, fetch_route=route)
    return build_worker(SimulatedRunner(MODEL), transport, ZmqChannel(), LocalPort(), options)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Stack]:
    fabric = LoopbackFabric()
    listeners = [bind("127.0.0.1", 0) for _ in range(2)]
    names = [f"127.0.0.1:{one.getsockname()[1]}" for one in listeners]
    first = make_worker(Role.PREFILL, names[0], fabric)
    second = make_worker(Role.DECODE, names[1], fabric, [first])
    instances = EmbeddedInstance(first, TEXT), EmbeddedInstance(second, TEXT)
    async with contextlib.AsyncExitStack() as stack:
        for instance, listener in zip(instances, listeners, strict=True):
            server = AppServer(instance.app, listener)
            await server.start()
            stack.push_async_callback(server.stop)
        router = create_router_app(
            # One probe, at the start: a machine that is busy with this must not look dead.
            names[:1],
            names[1:],
            (0,),
            clock=SystemClock(),
            probe_interval_s=3600.0,
        )
        await stack.enter_async_context(router.router.lifespan_context(router))
        made = Stack(router, instances)
        for instance in instances:
            tell(instance.dispatcher, made.news)
        yield made


def tell(dispatcher: Dispatcher, news: asyncio.Event) -> None:
    hear = dispatcher.on_message

    def heard(rank: int, message: WorkerMessage) -> None:
        hear(rank, message)
        news.set()

    vars(dispatcher)["on_message"] = heard


def test_four_hundred_clients_leave_and_everything_is_as_before() -> None:
    """SGLang I8177, I8439: disconnects were not passed on, piled up, and decode hung. Four
    hundred requests, waiting, in transfer and running, lose their clients at once: the pools
    of both instances are whole again, and the next request is served."""

    async def scene() -> None:
        async with asyncio.timeout(3 * PATIENCE_S), running() as stack:
            await stack.until(stack.is_at_rest)
            calls = [stack.ask(3000, stream=i % 2 == 0) for i in range(NUM_CLIENTS)]
            await stack.until(lambda: stack.is_in_the_middle(calls))
            for one in calls:
                one.leave()
            await asyncio.gather(*(one.task for one in calls))
            await stack.until(stack.is_at_rest)
            reply = await stack.ask(12, stream=False).done()
            assert reply.status == 200
            words = json.loads(reply.body)["choices"][0]["text"].split()
            assert [int(word) for word in words] == simulated_tokens(MODEL, PROMPT, 12)

    asyncio.run(scene())
