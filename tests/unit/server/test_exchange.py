"""One response as its reader sees it."""

from __future__ import annotations

import asyncio

import pytest

from pdcore.server.exchange import (
    HIGH_WATER_BYTES,
    ConnectFailed,
    ConnectionLost,
    Exchange,
    PoolTimeout,
    ResponseTooLarge,
)
from tests.unit.server.kit import run, settle


class Source:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def resume(self) -> None:
        self.calls.append("resume")

    def abort(self) -> None:
        self.calls.append("abort")


def begun(source: Source | None = None) -> Exchange:
    exchange = Exchange(max_body_bytes=1000)
    exchange.sent = True
    exchange.attach(source or Source())
    exchange.headers.append((b"a", b"1"))
    exchange.on_head(200)
    return exchange


def test_head_and_chunks_come_in_order_and_the_end_is_empty() -> None:
    async def play() -> None:
        exchange = begun()
        exchange.on_body(b"one")
        exchange.on_body(b"two")
        await exchange.head()
        assert (exchange.status, exchange.header(b"a"), exchange.header(b"b")) == (200, b"1", None)
        assert await exchange.next_chunk() == b"onetwo"
        waiting = asyncio.ensure_future(exchange.next_chunk())
        await settle()
        assert not waiting.done()
        exchange.on_body(b"three")
        assert await waiting == b"three"
        exchange.on_complete()
        assert await exchange.next_chunk() == b""
        assert await exchange.next_chunk() == b""

    run(play())


def test_an_error_comes_after_every_byte_that_did_arrive() -> None:
    async def play() -> None:
        exchange = begun()
        exchange.on_body(b"half")
        exchange.fail(ConnectionLost("gone", sent=True))
        assert await exchange.next_chunk() == b"half"
        with pytest.raises(ConnectionLost):
            await exchange.next_chunk()

    run(play())


def test_the_first_error_counts_and_none_after_completion() -> None:
    async def play() -> None:
        exchange = begun()
        exchange.fail(ConnectionLost("first", sent=True))
        exchange.fail(ConnectionLost("second", sent=True))
        with pytest.raises(ConnectionLost, match="first"):
            await exchange.next_chunk()
        whole = begun()
        whole.on_complete()
        whole.fail(ConnectionLost("late", sent=True))
        assert await whole.read() == b""

    run(play())


def test_a_slow_reader_pauses_the_socket_and_reading_resumes_it() -> None:
    async def play() -> None:
        source = Source()
        exchange = begun(source)
        assert exchange.on_body(b"x") is False
        assert exchange.on_body(b"y" * HIGH_WATER_BYTES) is True
        assert exchange.is_paused
        await exchange.next_chunk()
        assert not exchange.is_paused
        assert source.calls == ["resume"]

    run(play())


def test_a_cancelled_reader_closes_the_connection() -> None:
    async def play() -> None:
        source = Source()
        exchange = begun(source)
        reading = asyncio.ensure_future(exchange.next_chunk())
        await settle()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert source.calls == ["abort"]

    run(play())


def test_a_body_past_the_limit_is_refused_and_closed() -> None:
    async def play() -> None:
        source = Source()
        exchange = begun(source)
        exchange.on_body(b"x" * 11)
        with pytest.raises(ResponseTooLarge):
            await exchange.read(10)
        assert source.calls[-1] == "abort"

    run(play())


def test_closing_twice_or_after_the_end_is_harmless() -> None:
    source = Source()
    exchange = begun(source)
    exchange.on_complete()
    exchange.close()
    exchange.close()
    assert source.calls == []


def test_only_errors_of_connecting_say_that_nothing_was_sent() -> None:
    assert not ConnectFailed("x").sent
    assert not PoolTimeout("x").sent
    assert ConnectionLost("x", sent=True).sent
