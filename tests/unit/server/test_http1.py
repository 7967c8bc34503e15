"""One client connection, driven byte by byte without a socket.

tests/property/test_http_client.py splits, cuts and garbles; here is what needs a clock or
an order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdcore.server.exchange import (
    HIGH_WATER_BYTES,
    ClientLimits,
    ConnectionLost,
    Exchange,
    ResponseTimeout,
    Timeout,
)
from pdcore.server.http1 import Connection
from tests.property.test_http_client import Socket
from tests.unit.server.kit import run

REQUEST = b"GET / HTTP/1.1\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def connected() -> tuple[Connection, Socket, list[str]]:
    log: list[str] = []
    connection = Connection(
        ClientLimits(), lambda c: log.append("idle"), lambda c: log.append("closed")
    )
    socket = Socket()
    connection.connection_made(socket)
    return connection, socket, log


def test_one_connection_serves_one_request_after_another() -> None:
    async def play() -> None:
        connection, socket, log = connected()
        for _ in range(3):
            exchange = Exchange(100)
            assert connection.start(exchange, REQUEST, Timeout())
            connection.data_received(OK)
            assert await exchange.read() == b"ok"
        assert log == ["idle"] * 3
        assert socket.written == REQUEST * 3

    run(play())


def test_a_connection_that_will_close_is_not_kept() -> None:
    async def play() -> None:
        connection, socket, log = connected()
        exchange = Exchange(100)
        connection.start(exchange, REQUEST, Timeout())
        connection.data_received(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        assert await exchange.read() == b"ok"
        assert log == []
        assert socket.is_closed

    run(play())


def test_an_answer_before_the_whole_request_was_sent_closes() -> None:
    """A 413 comes while our body is still in the buffer: the rest must not become a request."""

    class Full(Socket):
        def get_write_buffer_size(self) -> int:
            return 1

    async def play() -> None:
        connection, _, log = connected()
        socket = Full()
        connection.connection_made(socket)
        connection.start(Exchange(100), REQUEST, Timeout())
        connection.data_received(OK)
        assert socket.is_closed
        assert log == []

    run(play())


def test_a_write_that_fails_at_once_sent_nothing() -> None:
    class Dead(Socket):
        def write(self, data: object) -> None:
            self.is_closed = True

    async def play() -> None:
        connection, _, _ = connected()
        connection.connection_made(Dead())
        exchange = Exchange(100)
        assert connection.start(exchange, REQUEST, Timeout()) is False
        assert not exchange.sent

    run(play())


def test_bytes_nobody_asked_for_close_the_connection() -> None:
    async def play() -> None:
        connection, socket, _ = connected()
        connection.data_received(OK)
        assert socket.is_closed

    run(play())


def test_a_paused_socket_resumes_when_the_response_is_complete() -> None:
    async def play() -> None:
        connection, socket, _ = connected()
        exchange = Exchange(1 << 20)
        connection.start(exchange, REQUEST, Timeout())
        size = HIGH_WATER_BYTES + 10
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        connection.data_received(b"x" * (size - 1))
        assert socket.is_paused
        connection.data_received(b"x")
        assert not socket.is_paused
        assert len(await exchange.read()) == size

    run(play())


class _Clock:
    """Replaces the loop's clock and timers, so that time-outs need no waiting."""

    def __init__(self, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.armed: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(loop, "time", lambda: self.now_s)
        monkeypatch.setattr(loop, "call_at", self._call_at)

    def _call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        entry = (when, callback)
        self.armed.append(entry)
        clock = self

        class Handle(asyncio.TimerHandle):
            def __init__(self) -> None:
                pass

            def cancel(self) -> None:
                if entry in clock.armed:
                    clock.armed.remove(entry)

        return Handle()

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for entry in [e for e in self.armed if e[0] <= self.now_s]:
            self.armed.remove(entry)
            entry[1]()


@pytest.mark.parametrize("timeout", [Timeout(5, None, 10), Timeout(5, 10, None)])
def test_silence_and_total_time_are_bounded(
    timeout: Timeout, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        with monkeypatch.context() as patch:
            clock = _Clock(asyncio.get_running_loop(), patch)
            connection, socket, _ = connected()
            exchange = Exchange(100)
            connection.start(exchange, REQUEST, timeout)
            clock.advance(9.9)
            assert not socket.is_closed
            clock.advance(0.2)
            assert socket.is_closed
        with pytest.raises(ResponseTimeout) as caught:
            await exchange.head()
        assert caught.value.sent

    run(play())


def test_a_byte_resets_the_silence_but_not_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        with monkeypatch.context() as patch:
            clock = _Clock(asyncio.get_running_loop(), patch)
            connection, socket, _ = connected()
            connection.start(Exchange(100), REQUEST, Timeout(5, 10, 25))
            connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(2):
                clock.advance(9)
                connection.data_received(b"1\r\nx\r\n")
                assert not socket.is_closed
            clock.advance(8)
            assert socket.is_closed

    run(play())


def test_a_slow_reader_of_ours_is_not_the_peers_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        with monkeypatch.context() as patch:
            clock = _Clock(asyncio.get_running_loop(), patch)
            connection, socket, _ = connected()
            exchange = Exchange(1 << 20)
            connection.start(exchange, REQUEST, Timeout(5, 10, None))
            connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            size = HIGH_WATER_BYTES + 1
            connection.data_received(b"%x\r\n%s\r\n" % (size, b"x" * size))
            clock.advance(100)
            assert not socket.is_closed
            await exchange.next_chunk()
            clock.advance(100)
            assert socket.is_closed

    run(play())


def test_losing_the_connection_fails_the_exchange_once() -> None:
    async def play() -> None:
        connection, _, log = connected()
        exchange = Exchange(100)
        connection.start(exchange, REQUEST, Timeout())
        connection.connection_lost(OSError("reset"))
        assert log == ["closed"]
        with pytest.raises(ConnectionLost, match="reset"):
            await exchange.head()

    run(play())
