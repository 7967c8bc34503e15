"""The pool against real loopback sockets."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pdcore.server.client import (
    ClientLimits,
    ConnectFailed,
    ConnectionLost,
    HttpClient,
    HttpError,
    Origin,
    OutOfConnections,
    PoolTimeout,
    ResponseTimeout,
    Timeout,
)
from pdcore.server.serve import bind, port_of
from tests.unit.server.kit import run, settle

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Peer:
    """A server on a real socket whose every byte a test decides."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.gone = asyncio.Event()

    async def __aenter__(self) -> Peer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.origin = Origin("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            await self._handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.gone.set()
            writer.close()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        size = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        body = await reader.readexactly(size)
        self.requests.append(head + body)
        return head + body


def serving(answer: bytes = OK) -> Peer:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await peer.request(reader)
            writer.write(answer)
            await writer.drain()

    peer = Peer(handle)
    return peer


def test_a_request_reads_well_on_the_wire_and_the_connection_is_kept() -> None:
    async def play() -> None:
        async with serving() as peer:
            client = HttpClient()
            for _ in range(3):
                response = await client.request(
                    "POST", peer.origin, "/generate", b'{"a":1}', headers=[("x-a", "b")]
                )
                assert (response.status, await response.read()) == (200, b"ok")
            assert peer.num_connections == client.num_opened == 1
            head, _, body = peer.requests[0].partition(b"\r\n\r\n")
            assert head.split(b"\r\n") == [
                b"POST /generate HTTP/1.1",
                b"host: " + peer.origin.netloc.encode(),
                b"content-type: application/json",
                b"content-length: 7",
                b"x-a: b",
            ]
            assert body == b'{"a":1}'
            await client.aclose()

    run(play())


def test_a_refused_connection_sent_nothing() -> None:
    async def play() -> None:
        listener = bind("127.0.0.1", 0)
        port = port_of(listener)
        listener.close()
        client = HttpClient()
        with pytest.raises(ConnectFailed, match=f"127.0.0.1:{port}") as caught:
            await client.request("GET", Origin("127.0.0.1", port), "/")
        assert caught.value.sent is False
        assert client.num_connections == 0

    run(play())


def test_a_stale_connection_is_replaced_before_a_byte_is_sent() -> None:
    async def play() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await peer.request(reader)
            writer.write(OK)
            await writer.drain()  # and close: the kept connection is stale

        async with Peer(handle) as peer:
            client = HttpClient()
            for _ in range(3):
                response = await client.request("POST", peer.origin, "/", b"x")
                assert await response.read() == b"ok"
                await peer.gone.wait()
                peer.gone.clear()
            assert len(peer.requests) == 3
            assert client.num_opened == 3
            await client.aclose()

    run(play())


def test_a_request_that_may_have_arrived_is_never_sent_again() -> None:
    """Q5 UNK: the peer got the request and died; whether it acted on it is unknown."""

    async def play() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await peer.request(reader)

        async with Peer(handle) as peer:
            client = HttpClient()
            with pytest.raises(ConnectionLost) as caught:
                await client.request("POST", peer.origin, "/", b"x")
            assert caught.value.sent is True
            assert len(peer.requests) == 1

    run(play())


def test_cancelling_closes_the_connection() -> None:
    """The peer learns that nobody waits; the next request gets a connection of its own."""

    async def play() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await peer.request(reader)
            arrived.set()
            assert await reader.read() == b""

        arrived = asyncio.Event()
        async with Peer(handle) as peer:
            client = HttpClient()
            waiting = asyncio.ensure_future(client.request("POST", peer.origin, "/", b"x"))
            await arrived.wait()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await peer.gone.wait()
            assert client.num_connections == 0

    run(play())


def test_a_slow_reader_stops_the_sender() -> None:
    """Backpressure: what the reader does not take stays with the sender."""

    async def play() -> None:
        chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
        written = 0

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            await peer.request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(2000):
                writer.write(chunk)
                await writer.drain()
                written += 1
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            finished.set()
            await reader.read()

        finished = asyncio.Event()
        async with Peer(handle) as peer:
            client = HttpClient()
            response = await client.request("GET", peer.origin, "/")
            before = -1
            while written != before:  # until the sender makes no progress any more
                before = written
                await settle(200)
            assert not finished.is_set()
            size = 0
            while data := await response.next_chunk():
                size += len(data)
            assert size == 2000 * 0x8000
            await client.aclose()

    run(play())


def test_connections_to_one_origin_are_bounded_and_handed_on_in_order() -> None:
    """SGLang I19271, PR31543."""

    async def play() -> None:
        release = asyncio.Semaphore(0)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await peer.request(reader)
                await release.acquire()
                writer.write(OK)
                await writer.drain()

        async with Peer(handle) as peer:
            client = HttpClient(ClientLimits(max_connections=2))

            async def one() -> bytes:
                return await (await client.request("GET", peer.origin, "/")).read()

            tasks = [asyncio.ensure_future(one()) for _ in range(6)]
            for _ in tasks:
                release.release()
            assert await asyncio.gather(*tasks) == [b"ok"] * 6
            assert client.num_connections == peer.num_connections == 2
            await client.aclose()

    run(play())


def test_waiting_for_a_connection_is_bounded_too() -> None:
    async def play() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with Peer(handle) as peer:
            client = HttpClient(ClientLimits(max_connections=1))
            first = asyncio.ensure_future(client.request("GET", peer.origin, "/"))
            await settle(10)
            with pytest.raises(PoolTimeout) as caught:
                await client.request("GET", peer.origin, "/", timeout=Timeout(connect_s=0.01))
            assert caught.value.sent is False
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    run(play())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
def test_what_we_lack_ourselves_says_nothing_of_the_peer(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router without a free descriptor took every instance for gone, and after ten probes
    ended the streams that they were serving."""

    async def play() -> None:
        async def full(*args: Any, **more: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", full)
        client = HttpClient()
        with pytest.raises(OutOfConnections, match="cannot open a connection"):
            await client.request("GET", Origin("127.0.0.1", 1), "/")
        assert client.num_connections == 0

    run(play())


def test_silence_is_a_timeout_and_closes() -> None:
    async def play() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with Peer(handle) as peer:
            client = HttpClient()
            with pytest.raises(ResponseTimeout):
                await client.request("GET", peer.origin, "/", timeout=Timeout(total_s=0.01))
            await peer.gone.wait()

    run(play())


def test_closing_the_client_fails_what_runs_and_refuses_what_comes() -> None:
    async def play() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await peer.request(reader)
            arrived.set()
            await reader.read()

        arrived = asyncio.Event()
        async with Peer(handle) as peer:
            client = HttpClient()
            waiting = asyncio.ensure_future(client.request("GET", peer.origin, "/"))
            await arrived.wait()
            await client.aclose()
            with pytest.raises(HttpError):
                await waiting
            with pytest.raises(ConnectFailed):
                await client.request("GET", peer.origin, "/")

    run(play())


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("GET", "/a b", ()),
        ("GET", "/a\r\nx: y", ()),
        ("GET", "no-slash", ()),
        ("G\r\nET", "/", ()),
        ("GET", "/", [("x", "a\r\nb: c")]),
        ("GET", "/", [("x y", "a")]),
    ],
)
def test_a_request_cannot_be_smuggled(
    method: str, target: str, headers: list[tuple[str, str]]
) -> None:
    async def play() -> None:
        with pytest.raises(ValueError):
            await HttpClient().request(method, Origin("127.0.0.1", 1), target, headers=headers)

    run(play())


def test_an_ipv6_origin_is_bracketed() -> None:
    assert Origin("::1", 80).netloc == "[::1]:80"
    assert Origin("localhost", 80).netloc == "localhost:80"


@pytest.mark.parametrize(
    "origin",
    [
        Origin("a..b", 80),
        Origin("x" * 70 + ".org", 80),
        Origin("b\u00fccher.example", 80),
        Origin("a\0b", 80),
        Origin("127.0.0.1", 1 << 40),
    ],
)
def test_a_host_that_is_no_name_is_a_connection_that_failed(origin: Origin) -> None:
    """IDNA raises UnicodeError, not OSError: it ended the prober, and with it /health."""

    async def play() -> None:
        client = HttpClient()
        for _ in range(2):
            with pytest.raises(ConnectFailed, match="is no address"):
                await client.request("GET", origin, "/health")
        assert client.num_connections == 0
        await client.aclose()

    run(play())
