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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdcore.errors import ConfigError
from pdcore.server import serve as serve_module
from pdcore.server.client import HttpClient, HttpError, Origin
from pdcore.server.serve import AppServer, HeadLimits, StartFailed, _Protocol, bind, port_of, serve
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


def test_an_empty_host_is_not_taken_for_all_interfaces() -> None:
    """Decision 5: nobody is reachable from outside who did not ask for it."""
    with pytest.raises(ConfigError, match=r"host to listen on is empty: 127\.0\.0\.1, or"):
        bind("", 0)


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


# --- the head of a request --------------------------------------------------------------------


async def says(
    limits: HeadLimits, *pieces: bytes, endless: bytes = b"", patience_s: float = 5.0
) -> bytes:
    """Everything that a server with these limits answers until it closes the connection."""
    log: list[str] = []
    server = AppServer(app_of("hello", log), bind("127.0.0.1", 0), limits)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    num_sent = 0
    try:
        async with asyncio.timeout(patience_s):
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                while endless and not reader.at_eof() and num_sent < 1 << 20:
                    writer.write(endless)
                    await writer.drain()
                    num_sent += len(endless)
                    await asyncio.sleep(0)
            return await reader.read()
    except ConnectionResetError:
        return b"reset"
    except TimeoutError:
        raise AssertionError("the connection is kept") from None
    finally:
        writer.close()
        await server.stop()


REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n"
SMALL = HeadLimits(max_bytes=1000, timeout_s=60.0)
QUICK = HeadLimits(timeout_s=0.02)


def unbounded(patch: pytest.MonkeyPatch) -> None:
    """Mutant: uvicorn's own rule."""
    patch.setattr(_Protocol, "data_received", HttpToolsProtocol.data_received)
    patch.setattr(_Protocol, "_arm", lambda self: None)


@pytest.mark.parametrize("size", [1001, 200_000])
@pytest.mark.parametrize("is_one_value", [True, False])
def test_headers_that_are_too_large_are_a_431(
    size: int, is_one_value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished headers were buffered without end."""
    filler = b"a: " + b"x" * size if is_one_value else b"a: b\r\n" * (size // 6 + 1)

    async def check(patience_s: float = 5.0) -> None:
        answer = await says(SMALL, REQUEST + filler, patience_s=patience_s)
        assert answer.startswith(b"HTTP/1.1 431 ") or answer == b"reset"

    run(check())
    unbounded(monkeypatch)
    with pytest.raises(AssertionError, match="is kept"):
        run(check(0.1))


def test_a_head_without_end_is_cut() -> None:
    async def play() -> None:
        for endless in (b"a: b\r\n", b"\r\n"):
            start = REQUEST if endless[0] == 97 else b""
            answer = await says(SMALL, start, endless=endless)
            assert answer == b"reset" or answer.startswith(b"HTTP/1.1 431 ")

    run(play())


def test_the_limit_is_exact_and_holds_for_every_request_of_a_connection() -> None:
    """A body, and requests behind one another, are no headers."""
    end = b"connection: close\r\n\r\n"
    full = REQUEST + b"a: " + b"x" * (1000 - len(REQUEST + end) - 5) + b"\r\n"
    post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n" + b"x" * 5000

    async def play() -> None:
        assert len(full + end) == 1000
        assert (await says(SMALL, full + end)).startswith(b"HTTP/1.1 200 ")
        over = full.replace(b"a: ", b"ab: ")
        assert (await says(SMALL, over + end)).startswith(b"HTTP/1.1 431 ")
        answer = await says(SMALL, post + full + b"\r\n" + full + end)
        assert answer.count(b"HTTP/1.1 405 ") == 1
        assert answer.count(b"HTTP/1.1 200 ") == 2

    run(play())


@pytest.mark.parametrize("sent", [b"", b"G", REQUEST, b"\r\n"])
def test_headers_that_do_not_arrive_in_time_are_a_408(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client could hold a connection for ever; one that has asked nothing is only closed."""

    async def check(patience_s: float = 5.0) -> None:
        answer = await says(QUICK, sent, patience_s=patience_s)
        assert answer.count(b"HTTP/1.1 408 ") == bool(sent)

    run(check())
    unbounded(monkeypatch)
    with pytest.raises(AssertionError, match="is kept"):
        run(check(0.1))


def test_an_answer_may_take_longer_than_a_head() -> None:
    """Neither the request that is answered nor the one behind it is late meanwhile."""

    async def play() -> None:
        log: list[str] = []
        app = app_of("slow", log)
        server = AppServer(app, bind("127.0.0.1", 0), HeadLimits(timeout_s=0.001))
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(REQUEST.replace(b"/ ", b"/slow ") + b"\r\n")
        while "slow:running" not in log:
            await asyncio.sleep(0)
        writer.write(b"GET /")
        (protocol,) = server._server.server_state.connections
        assert isinstance(protocol, _Protocol)
        due: set[asyncio.TimerHandle] = set()
        while len(due) < 3:  # its timer came up more than once
            await asyncio.sleep(0)
            if protocol._head_timer is not None:
                due.add(protocol._head_timer)
        app.state.gate.set()
        async with asyncio.timeout(2.0):
            answer = await reader.read()
        assert answer.index(b"HTTP/1.1 200 ") < answer.index(b"HTTP/1.1 408 ")
        writer.close()
        await server.stop()

    run(play())


def test_d45_a_server_that_ends_by_itself_says_so() -> None:
    """D45: whoever runs it must not look alive without it."""

    async def play() -> None:
        server = AppServer(app_of("a", []), bind("127.0.0.1", 0))
        with pytest.raises(RuntimeError, match="start"):
            await server.ended()
        await server.start()
        ending = asyncio.ensure_future(server.ended())
        server._server.should_exit = True
        assert await ending == f"the HTTP server on port {server.port} has ended"
        await server.stop()

    run(play())
