"""Our HTTP client against every way bytes may arrive: split anywhere, cut anywhere, garbage.

The reference is the message itself: whatever the split, the same response; whatever is cut,
one typed error; whatever garbage, never an exception of another kind and never a hang.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.server.exchange import (
    ClientLimits,
    ConnectionLost,
    Exchange,
    HttpError,
    ProtocolError,
    ResponseTooLarge,
    Timeout,
)
from pdcore.server.http1 import Connection

LIMITS = ClientLimits(max_header_bytes=4096)


class Socket(asyncio.Transport):
    """A transport that only remembers what was done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False
        self.is_paused = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def deliver(
    pieces: list[bytes], *, eof: bool, socket: Socket | None = None
) -> tuple[Exchange, Connection, list[Connection]]:
    idle: list[Connection] = []
    connection = Connection(LIMITS, idle.append, lambda gone: None)
    connection.connection_made(socket or Socket())
    exchange = Exchange(1 << 20)
    assert connection.start(exchange, b"GET / HTTP/1.1\r\n\r\n", Timeout())
    for piece in pieces:
        connection.data_received(piece)
    if eof:
        connection.connection_lost(None)
    return exchange, connection, idle


async def read(exchange: Exchange) -> tuple[int, bytes]:
    await exchange.head()
    return exchange.status, await exchange.read()


def outcome(pieces: list[bytes], *, eof: bool) -> tuple[int, bytes] | HttpError:
    async def play() -> tuple[int, bytes] | HttpError:
        exchange, _, _ = deliver(pieces, eof=eof)
        try:
            async with asyncio.timeout(5):
                return await read(exchange)
        except HttpError as error:
            return error

    return asyncio.run(play())


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({min(c, len(data)) for c in cuts})
    edges = [0, *at, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


def chunked(body: bytes, sizes: list[int]) -> bytes:
    out = b""
    for piece in split(body, sizes):
        out += b"%x\r\n%s\r\n" % (len(piece), piece)
    return out + b"0\r\n\r\n"


statuses = st.sampled_from([200, 202, 400, 413, 429, 500, 503])
bodies = st.binary(max_size=300)
cuts = st.lists(st.integers(0, 600), max_size=12)


@given(statuses, bodies, cuts)
def test_a_sized_response_is_the_same_however_it_is_split(
    status: int, body: bytes, at: list[int]
) -> None:
    data = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nA: b\r\n\r\n%s" % (status, len(body), body)
    assert outcome(split(data, at), eof=False) == (status, body)


@given(statuses, bodies, cuts, st.lists(st.integers(0, 300), max_size=5))
def test_a_chunked_response_is_the_same_however_it_is_split(
    status: int, body: bytes, at: list[int], sizes: list[int]
) -> None:
    data = b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % status
    assert outcome(split(data + chunked(body, sizes), at), eof=False) == (status, body)


@given(bodies, cuts)
def test_a_body_without_length_ends_with_the_connection(body: bytes, at: list[int]) -> None:
    data = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body
    assert outcome(split(data, at), eof=True) == (200, body)


@given(st.binary(min_size=1, max_size=200), st.data(), st.booleans())
def test_a_response_that_is_cut_is_lost_never_shortened(
    body: bytes, data: st.DataObject, is_chunked: bool
) -> None:
    """D9's sibling on the wire: half an answer is no answer."""
    if is_chunked:
        whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(body, [7])
    else:
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    end = data.draw(st.integers(0, len(whole) - 1))
    assert isinstance(outcome([whole[:end]] if end else [], eof=True), ConnectionLost)


@given(st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=6))
def test_garbage_is_a_typed_error_and_closes_the_connection(pieces: list[bytes]) -> None:
    async def play() -> None:
        exchange, connection, idle = deliver(pieces, eof=False)
        connection.connection_lost(None)
        with pytest.raises(HttpError) as caught:
            async with asyncio.timeout(5):
                await read(exchange)
        assert caught.value.sent
        assert not idle, "a connection that spoke garbage was kept"

    asyncio.run(play())


@given(st.integers(0, 80), cuts)
def test_bytes_after_the_response_end_the_connection(extra: int, at: list[int]) -> None:
    """What nobody asked for must not become the answer to the next request."""

    async def play() -> None:
        data = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + b"HTTP/1.1 200 OK\r\n" * extra
        socket = Socket()
        exchange, _, _ = deliver(split(data, at), eof=False, socket=socket)
        assert await read(exchange) == (200, b"ok")
        assert socket.is_closed is (extra > 0)

    asyncio.run(play())


@given(st.integers(4200, 9000), st.booleans(), cuts)
def test_a_head_past_the_limit_is_refused(size: int, is_one: bool, at: list[int]) -> None:
    head = b"X: " + b"a" * size + b"\r\n" if is_one else b"H: v\r\n" * size
    data = b"HTTP/1.1 200 OK\r\n" + head + b"Content-Length: 0\r\n\r\n"
    assert isinstance(outcome(split(data, at), eof=False), ResponseTooLarge)


def test_an_upgrade_is_refused() -> None:
    data = b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
    assert isinstance(outcome([data], eof=True), ProtocolError | ConnectionLost)


def test_interim_answers_are_skipped() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"
    assert outcome([data], eof=False) == (200, b"x")
