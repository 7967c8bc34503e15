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
from pdcore.server import serve as serve_module
from pdcore.server.client import HttpClient, HttpError, Origin
from pdcore.server.serve import AppServer, StartFailed, _Protocol, bind, port_of, serve
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


def test_a_connection_whose_client_reads_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is given up closes its connection, and closing waited for the client."""
    monkeypatch.setattr(serve_module, "CLOSE_TIMEOUT_S", 0.001)

    async def gives_up(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        part = {"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                while True:
                    await send(part)

    async def check() -> None:
        server = AppServer(gives_up, bind("127.0.0.1", 0))
        server._server.config.lifespan = "off"
        await server.start()
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            connections = server._server.server_state.connections
            while not connections:
                await asyncio.sleep(0)
            deadline_s = loop.time() + 1.0
            while connections and loop.time() < deadline_s:
                await asyncio.sleep(0)
            try:
                assert not connections, "it is kept for ever"
            finally:
                client.close()
                await server.stop()

    run(check())
    monkeypatch.setattr(_Protocol, "_watch", lambda self: None)
    with pytest.raises(AssertionError, match="kept for ever"):
        run(check())
