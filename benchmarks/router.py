"""router: parse a request, inject room and addresses, POST to both legs, return decode's.

64 keep-alive connections, then 4; requests of about 300 bytes; one mock prefill and one mock
decode that answer at once, in a process of their own. What counts is the CPU time of the
router's process per request: requests per second move with whatever else the machine does.
Our router runs as in production, with time-outs, cancellation, metrics and health on.

Peers: a plain gather app on httpx2 (the seed's design), and sglang-router where it is
installed. The limit is a hand-written asyncio protocol that does nothing but the task.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

import httptools
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from benchmarks.common import RUNS, Result, check, interleave, result_of, row
from pdcore.router.policies import inject
from pdcore.server.client import HttpClient, Origin
from pdcore.server.router import create_router_app
from pdcore.server.serve import AppServer, bind, port_of
from pdcore.system_clock import SystemClock

NUM_REQUESTS: Final = 4000
QUICK_REQUESTS: Final = 600
CONNECTIONS: Final = (64, 4)
BODY: Final = json.dumps(
    {"prompt": "word " * 45, "max_tokens": 16, "temperature": 0.0, "model": "tiny"}
).encode()
ANSWER: Final = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "word " * 40, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 46, "completion_tokens": 16, "total_tokens": 62},
    }
).encode()


# --- the smallest HTTP/1.1 server that keeps connections: mocks, and the limit's own side ---


class MiniServer(asyncio.Protocol):
    """Calls ``on_request(path, body, reply)`` for each request; ``reply(status, body)``."""

    def __init__(
        self, on_request: Callable[[bytes, bytes, Callable[[int, bytes], None]], None]
    ) -> None:
        self._on_request = on_request
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._on_request(self._path, b"".join(self._body), self._reply)

    def _reply(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\n" % status
        self._transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)


def mock(status: int, answer: bytes, seen: list[int]) -> Callable[..., None]:
    def on_request(path: bytes, body: bytes, reply: Callable[[int, bytes], None]) -> None:
        if path == b"/health":
            reply(200, b'{"status":"Up","dp_size":1}')
            return
        sent = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        seen[0] += "bootstrap_room" in sent and "bootstrap_host" in sent
        reply(status, answer)

    return on_request


def run_mocks(pipe: Connection) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen = [0]
        ports = []
        for status, answer in ((202, b'{"accepted":true}'), (200, ANSWER)):
            listener = bind("127.0.0.1", 0)
            ports.append(port_of(listener))
            handler = mock(status, answer, seen)
            await loop.create_server(lambda h=handler: MiniServer(h), sock=listener)
        pipe.send(ports)
        await answer_pipe(pipe, lambda: seen[0])

    asyncio.run(main())


async def answer_pipe(pipe: Connection, read: Callable[[], object]) -> None:
    """Answer every message with ``read()`` until the other end says stop."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def on_readable() -> None:
        if pipe.recv() == "stop":
            done.set()
        else:
            pipe.send(read())

    loop.add_reader(pipe.fileno(), on_readable)
    await done.wait()


# --- the sides ------------------------------------------------------------------------------


def ours(prefill: int, decode: int) -> ASGIApp:
    addresses = [f"127.0.0.1:{prefill}"], [f"127.0.0.1:{decode}"]
    return create_router_app(*addresses, clock=SystemClock())


def gather_app(prefill: int, decode: int) -> ASGIApp:
    """The seed's design: parse, inject, gather two posts of a general-purpose client."""
    import httpx2

    client = httpx2.AsyncClient(timeout=60)
    urls = [f"http://127.0.0.1:{port}/generate" for port in (prefill, decode)]
    count = iter(range(1, 1 << 62))

    async def generate(request: Request) -> Response:
        body = await request.json()
        body.update(bootstrap_room=next(count), bootstrap_host="127.0.0.1", bootstrap_port=18800)
        _, answer = await asyncio.gather(*(client.post(url, json=body) for url in urls))
        return Response(answer.content, answer.status_code, media_type="application/json")

    return Starlette(routes=[Route("/generate", generate, methods=["POST"])])


class Leg(asyncio.Protocol):
    """One kept connection of the limit to a leg."""

    def __init__(self, idle: list[Leg]) -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._done: Callable[[bytes], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def post(self, data: bytes, done: Callable[[bytes], None] | None) -> None:
        self._done = done
        self._body = []
        self._transport.write(data)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._idle.append(self)
        if self._done is not None:
            self._done(b"".join(self._body))


async def run_limit(prefill: int, decode: int) -> int:
    """Nothing but the task: no time-out, no cancellation, no error handling."""
    loop = asyncio.get_running_loop()
    idle: dict[int, list[Leg]] = {prefill: [], decode: []}
    for port, legs in idle.items():
        for _ in range(CONNECTIONS[0]):
            _, leg = await loop.create_connection(lambda to=legs: Leg(to), "127.0.0.1", port)
            legs.append(leg)
    count = iter(range(1, 1 << 62))

    def on_request(path: bytes, body: bytes, reply: Callable[[int, bytes], None]) -> None:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        added = {
            "bootstrap_room": next(count),
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 18800,
        }
        data = inject(fields, added)
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
        idle[prefill].pop().post(head + data, None)
        idle[decode].pop().post(head + data, lambda answer: reply(200, answer))

    listener = bind("127.0.0.1", 0)
    port = port_of(listener)
    await loop.create_server(lambda: MiniServer(on_request), sock=listener)
    return port


SIDES: Final[dict[str, Callable[[int, int], ASGIApp] | None]] = {
    "pdcore": ours,
    "protocol": None,
    "httpx2": gather_app,
}


def run_side(name: str, prefill: int, decode: int, pipe: Connection) -> None:
    async def main() -> None:
        make = SIDES[name]
        if make is None:
            port = await run_limit(prefill, decode)
        else:
            server = AppServer(make(prefill, decode), bind("127.0.0.1", 0))
            await server.start()
            port = server.port
        pipe.send(port)
        await answer_pipe(pipe, time.process_time)

    asyncio.run(main())


# --- load -----------------------------------------------------------------------------------


class Side:
    """One router process under load: its address and its CPU clock."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.origin = Origin("127.0.0.1", pipe.recv())
        self.rates: list[float] = []
        self.p50s_ms: list[float] = []

    def cpu_s(self) -> float:
        self._pipe.send("cpu")
        value: float = self._pipe.recv()
        return value

    def measure(self, num_connections: int, num_requests: int) -> float:
        """CPU microseconds of the router's process per request."""
        before_s = self.cpu_s()
        start_s = time.perf_counter()
        latencies = asyncio.run(load(self.origin, num_connections, num_requests))
        self.rates.append(num_requests / (time.perf_counter() - start_s))
        self.p50s_ms.append(statistics.median(latencies) * 1e3)
        return (self.cpu_s() - before_s) / num_requests * 1e6


async def load(origin: Origin, num_connections: int, num_requests: int) -> list[float]:
    client = HttpClient()
    latencies: list[float] = []
    left = iter(range(num_requests))

    async def one() -> None:
        for _ in left:
            start_s = time.perf_counter()
            response = await client.request("POST", origin, "/generate", BODY)
            answer = await response.read()
            latencies.append(time.perf_counter() - start_s)
            check(answer == ANSWER, f"the answer is not decode's: {response.status} {answer!r}")

    await asyncio.gather(*(one() for _ in range(num_connections)))
    await client.aclose()
    return latencies


@contextmanager
def process(target: Callable[..., None], *args: object) -> Iterator[Connection]:
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=target, args=(*args, there), daemon=True)
    child.start()
    there.close()
    try:
        yield here
    finally:
        here.send("stop")
        child.join(5)
        if child.is_alive():
            child.kill()
            child.join()


def run(quick: bool) -> Result:
    num_requests = QUICK_REQUESTS if quick else NUM_REQUESTS
    has_httpx2 = importlib.util.find_spec("httpx2") is not None
    names = [name for name in SIDES if name != "httpx2" or has_httpx2]
    rows: list[Result] = []
    with process(run_mocks) as mocks:
        prefill, decode = mocks.recv()
        for num_connections in CONNECTIONS:
            rows.extend(compare(names, prefill, decode, num_connections, num_requests, mocks))
    return result_of(
        "router", rows, requests=num_requests, body_bytes=len(BODY), answer_bytes=len(ANSWER)
    )


def compare(
    names: list[str],
    prefill: int,
    decode: int,
    num_connections: int,
    num_requests: int,
    mocks: Connection,
) -> Iterator[Result]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        sides = {
            name: Side(stack.enter_context(process(run_side, name, prefill, decode)))
            for name in names
        }
        mocks.send("seen")
        before = mocks.recv()
        work: dict[str, Callable[[], float]] = {
            name: lambda side=side: side.measure(num_connections, num_requests)
            for name, side in sides.items()
        }
        cpu = interleave(work, RUNS)
        mocks.send("seen")
        total = 2 * num_requests * len(names) * (RUNS + 1)
        check(mocks.recv() - before == total, "a leg did not get room and bootstrap address")
    mine, limit = sides["pdcore"], statistics.median(cpu["protocol"])
    label = f"router_{num_connections}"
    yield row(
        label,
        "CPU per request",
        "us",
        cpu["pdcore"],
        "httpx2 gather" if "httpx2" in cpu else None,
        cpu.get("httpx2", ()),
        better="lower",
        target="<= 0.05x",
        meets=lambda ratio: ratio <= 0.05,
        limit=limit,
        reason="" if "httpx2" in cpu else "httpx2 is not installed",
    )
    yield row(
        label,
        "CPU per request",
        "us",
        cpu["pdcore"],
        None,
        better="lower",
        target="<= 0.7x",
        limit=limit,
        reason="sglang-router is not installed in this environment",
    )
    yield row(
        label,
        "CPU per request",
        "us",
        cpu["pdcore"],
        "asyncio protocol",
        cpu["protocol"],
        better="lower",
        target="the limit",
        limit=limit,
    )
    for metric, unit, better, read in (
        ("requests per second", "1/s", "higher", lambda side: side.rates),
        ("p50 latency", "ms", "lower", lambda side: side.p50s_ms),
    ):
        yield row(
            label,
            metric,
            unit,
            read(mine)[1:],
            "asyncio protocol",
            read(sides["protocol"])[1:],
            better=better,
            target="the limit",
        )
