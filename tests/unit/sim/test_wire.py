"""HTTP on the simulated wire: the client's protocol with everything that can happen to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Receive, Scope, Send

from pdcore.server.client import (
    ConnectFailed,
    ConnectionLost,
    HttpError,
    Origin,
    ResponseTimeout,
    Timeout,
)
from pdcore.sim.loop import Process, SimLoop, pass_time
from pdcore.sim.wire import Wire, WireClient

HERE = Origin("127.0.0.1", 8000)


class Net:
    """A client and a server on one wire; each byte takes a millisecond."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.loop = SimLoop(start_s=0.0)
        self.trace: list[str] = []
        self.wire = Wire(self.loop, lambda: 0.001, lambda what, text: self.trace.append(what))
        self.server = Process("server")
        self.client = Process("client")
        self.wire.listen(HERE, self.server, app)

    def run(self, main: Callable[[WireClient], Awaitable[None]]) -> None:
        async def inner() -> None:
            await main(WireClient(self.wire, self.client))

        async def outer() -> None:
            await self.loop.create_task(inner(), context=self.client.context)
            await pass_time(1.0)
            for process in (self.server, self.client):
                await self.loop.bury(process)

        self.loop.run(outer())


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
    await send({"type": "http.response.body", "body": scope["path"].encode() + body})


class Stream:
    """One event a second until the client is gone."""

    def __init__(self) -> None:
        self.gone_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(5):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.wait([gone], timeout=1.0)
            if gone.done():
                self.gone_s = asyncio.get_running_loop().time()
                return
        gone.cancel()
        await send({"type": "http.response.body", "body": b"y"})


def test_a_request_and_its_answer() -> None:
    net = Net(echo)

    async def main(client: WireClient) -> None:
        response = await client.request("POST", HERE, "/a", b"body")
        assert response.status == 200
        assert response.header(b"x-a") == b"b"
        assert await response.read() == b"/abody"
        assert net.loop.time() == pytest.approx(0.003)  # connecting, there, and back

    net.run(main)
    assert net.trace == ["request", "answer"]
    assert not net.wire.connections


def test_chunks_arrive_as_they_are_sent() -> None:
    net = Net(Stream())

    async def main(client: WireClient) -> None:
        response = await client.request("GET", HERE, "/")
        times = []
        while chunk := await response.next_chunk():
            times.append((round(net.loop.time()), chunk))
        assert times == [(0, b"x"), (1, b"x"), (2, b"x"), (3, b"x"), (4, b"x"), (5, b"y")]

    net.run(main)


def test_nobody_listens() -> None:
    net = Net(echo)
    net.wire.unlisten(HERE)

    async def main(client: WireClient) -> None:
        with pytest.raises(ConnectFailed, match="refused") as caught:
            await client.request("GET", HERE, "/")
        assert not caught.value.sent

    net.run(main)


def test_a_killed_server_breaks_its_connections() -> None:
    net = Net(Stream())

    async def main(client: WireClient) -> None:
        response = await client.request("GET", HERE, "/")
        net.loop.kill_process(net.server)
        net.wire.lose(net.server)
        assert await response.next_chunk() == b"x"
        with pytest.raises(ConnectionLost) as caught:
            await response.next_chunk()
        assert caught.value.sent

    net.run(main)


def test_a_stopped_server_says_nothing_and_the_request_times_out() -> None:
    net = Net(echo)

    async def main(client: WireClient) -> None:
        net.loop.stop_process(net.server)
        with pytest.raises(ResponseTimeout):
            await client.request("GET", HERE, "/", timeout=Timeout(1.0, None, 2.0))
        net.loop.resume_process(net.server)

    net.run(main)


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_client_that_leaves_is_a_disconnect_at_the_server(how: str) -> None:
    app = Stream()
    net = Net(app)

    async def main(client: WireClient) -> None:
        response = await client.request("GET", HERE, "/")
        await response.next_chunk()
        if how == "closed":
            response.close()
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await response.next_chunk()

    net.run(main)
    assert app.gone_s is not None
    assert app.gone_s < 1.0


def test_a_partition_holds_bytes_back_until_it_heals() -> None:
    net = Net(echo)

    async def main(client: WireClient) -> None:
        net.wire.cut("client", "server")
        net.loop.call_later(3.0, net.wire.heal, "client", "server")
        response = await client.request("POST", HERE, "/", b"z", timeout=Timeout(5.0, None, 5.0))
        assert await response.read() == b"/z"
        assert net.loop.time() == pytest.approx(3.0, abs=0.1)

    net.run(main)


def test_a_partition_that_lasts_is_a_failed_connect() -> None:
    net = Net(echo)

    async def main(client: WireClient) -> None:
        net.wire.cut("client", "server")
        with pytest.raises(ConnectFailed, match="did not accept"):
            await client.request("GET", HERE, "/", timeout=Timeout(1.0, None, 2.0))

    net.run(main)


def test_an_app_that_raises_is_told_and_its_client_loses_the_connection() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    net = Net(broken)

    async def main(client: WireClient) -> None:
        with pytest.raises(HttpError):
            await client.request("GET", HERE, "/")

    net.run(main)
    assert net.wire.errors == ["server GET /: ZeroDivisionError()"]


def test_aclose_ends_what_the_process_still_reads() -> None:
    net = Net(Stream())

    async def main(client: WireClient) -> None:
        response = await client.request("GET", HERE, "/")
        await client.aclose()
        assert await response.next_chunk() == b"x"
        with pytest.raises(ConnectionLost):
            await response.next_chunk()

    net.run(main)
