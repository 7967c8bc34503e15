"""Several apps in one loop, on sockets bound before."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pdcore.errors import ConfigError
from pdcore.server.client import HttpClient, HttpError, Origin
from pdcore.server.serve import AppServer, StartFailed, bind, port_of, serve
from tests.unit.server.kit import run


def app_of(text: str, log: list[str]) -> Starlette:
    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse(text)

    async def slow(request: Request) -> PlainTextResponse:
        log.append(f"{text}:running")
        await request.app.state.gate.wait()
        return PlainTextResponse(text)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.gate = asyncio.Event()
        log.append(f"{text}:start")
        yield
        log.append(f"{text}:stop")

    return Starlette(routes=[Route("/", page), Route("/slow", slow)], lifespan=lifespan)


async def get(client: HttpClient, port: int, path: str = "/") -> bytes:
    return await (await client.request("GET", Origin("127.0.0.1", port), path)).read()


def test_two_apps_serve_on_free_ports_and_end_together() -> None:
    """D44: port 0, known before anything starts."""

    async def play() -> None:
        log: list[str] = []
        sockets = [bind("127.0.0.1", 0), bind("127.0.0.1", 0)]
        ports = [port_of(one) for one in sockets]
        before = signal.getsignal(signal.SIGTERM)
        stopping = asyncio.Event()
        apps = list(zip([app_of("a", log), app_of("b", log)], sockets, strict=True))
        serving = asyncio.create_task(serve(apps, stopping, drain_s=1))
        client = HttpClient()
        assert [await get(client, port) for port in ports] == [b"a", b"b"]
        assert signal.getsignal(signal.SIGTERM) is before, "signals are the caller's"
        stopping.set()
        await serving
        assert sorted(log) == ["a:start", "a:stop", "b:start", "b:stop"]
        for port in ports:
            with pytest.raises(HttpError):
                await get(client, port)
        await client.aclose()

    run(play())


def test_draining_lets_a_running_request_finish() -> None:
    """D59."""

    async def play() -> None:
        log: list[str] = []
        app = app_of("a", log)
        server = AppServer(app, bind("127.0.0.1", 0))
        await server.start()
        client = HttpClient()
        waiting = asyncio.create_task(get(client, server.port, "/slow"))
        while "a:running" not in log:
            await asyncio.sleep(0)
        stopping = asyncio.create_task(server.stop(drain_s=10))
        app.state.gate.set()
        assert await waiting == b"a"
        await stopping
        await client.aclose()

    run(play())


def test_a_port_in_use_is_one_sentence() -> None:
    taken = bind("127.0.0.1", 0)
    port = port_of(taken)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*port 0"):
        bind("127.0.0.1", port)
    taken.close()


def test_an_app_that_does_not_start_is_an_error_and_not_the_end_of_the_process() -> None:
    async def play() -> None:
        @contextlib.asynccontextmanager
        async def broken(app: Any) -> AsyncIterator[None]:
            raise RuntimeError("no model")
            yield

        with pytest.raises(StartFailed):
            await AppServer(Starlette(lifespan=broken), bind("127.0.0.1", 0)).start()

    run(play())


def test_answers_are_sent_at_once() -> None:
    """asyncio turns Nagle's algorithm off only on sockets that name their protocol; with it,
    an answer whose head and body are two writes took 40 ms on loopback."""

    async def play() -> None:
        accepted: list[int] = []

        class Server(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                found = transport.get_extra_info("socket")
                accepted.append(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        for host in ("127.0.0.1", "::1"):
            try:
                listener = bind(host, 0)
            except ConfigError:
                continue  # no IPv6 here
            loop = asyncio.get_running_loop()
            server = await loop.create_server(Server, sock=listener)
            _, transport = await asyncio.open_connection(host, port_of(listener))
            while not accepted:
                await asyncio.sleep(0)
            assert accepted.pop()
            transport.close()
            server.close()
            await server.wait_closed()

    run(play())
