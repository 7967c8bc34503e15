"""Bodies with a bound, errors in one shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import pdcore.server.http as http
from pdcore.errors import HTTP_STATUS, InvalidRequest, Overloaded, PdcoreError, RoomInUse, failure
from pdcore.server.http import (
    ClientGone,
    ShortWay,
    bounded_send,
    error_body,
    failure_of,
    read_body,
    retry_headers,
)
from pdcore.server.pending import Refused
from tests.unit.server.kit import PATIENCE_S, run


async def body_of(
    messages: list[dict[str, Any]],
    limit: int = 10,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> bytes:
    inbox = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(inbox)

    return await read_body({"headers": headers or []}, receive, limit)


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_in_one_part_or_several() -> None:
    assert run(body_of([part(b"abc")])) == b"abc"
    assert run(body_of([part(b"a", True), part(b"", True), part(b"b")])) == b"ab"


@pytest.mark.parametrize(
    ("messages", "headers"),
    [
        ([], [(b"content-length", b"11")]),
        ([part(b"x" * 11)], []),
        ([part(b"x" * 6, True), part(b"x" * 6, True)], []),
    ],
)
def test_a_body_past_the_limit_is_a_413(
    messages: list[dict[str, Any]], headers: list[tuple[bytes, bytes]]
) -> None:
    with pytest.raises(Refused, match="exceeds 10 bytes") as caught:
        run(body_of(messages, 10, headers))
    assert caught.value.failure.http_status == 413


def test_a_body_that_stalls_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.001)

    async def play() -> None:
        messages = [part(b"a", True)]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        await read_body({"headers": []}, receive, 10)

    with pytest.raises(Refused) as caught:
        run(play())
    assert caught.value.failure.http_status == 408


def test_a_client_that_leaves_while_it_sends() -> None:
    gone = {"type": "http.disconnect"}
    with pytest.raises(ClientGone):
        run(body_of([gone]))
    with pytest.raises(ClientGone):
        run(body_of([part(b"a", True), gone]))


def test_a_compressed_body_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="content-encoding: 'gzip' is not supported"):
        run(body_of([], 10, [(b"content-encoding", b"gzip")]))
    assert run(body_of([part(b"a")], 10, [(b"content-encoding", b"identity")])) == b"a"


def test_every_failure_has_openais_shape_and_its_own_status() -> None:
    """D9: a code has one status; none of them is a success."""
    for code, status in HTTP_STATUS.items():
        assert status >= 400
        error = json.loads(error_body(failure(code, "why"), "field"))["error"]
        assert error == {"message": "why", "type": error["type"], "code": code, "param": "field"}
        assert error["type"].endswith("_error")


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidRequest("stop", "is wrong"), 400, "stop"),
        (RoomInUse("in use"), 409, "bootstrap_room"),
        (Overloaded("full"), 429, None),
        (Refused(failure("unavailable", "later")), 503, None),
        (PdcoreError("?"), 500, None),
    ],
)
def test_what_is_raised_becomes_its_status(
    error: PdcoreError, status: int, param: str | None
) -> None:
    why, found = failure_of(error)
    assert (why.http_status, found) == (status, param)


def test_states_that_pass_say_when_to_try_again() -> None:
    assert dict(retry_headers(503)) == dict(retry_headers(429)) == {b"retry-after": b"1"}
    assert retry_headers(500) == []


def test_a_client_that_sends_no_body_at_all_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that promises a body, and then nothing: the first part is bounded as well."""
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.001)

    async def mutant(scope: Any, receive: Any, limit: int) -> bytes:
        """Waits for the first part without a limit."""
        first = await receive()
        return bytes(first["body"])

    async def check(read: Any) -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        reading = asyncio.ensure_future(read({"headers": []}, receive, 10))
        _, late = await asyncio.wait([reading], timeout=PATIENCE_S if read is read_body else 0.05)
        reading.cancel()
        assert not late, "it waits for ever"
        with pytest.raises(Refused) as caught:
            await reading
        assert caught.value.failure.http_status == 408

    run(check(read_body))
    with pytest.raises(AssertionError, match="for ever"):
        run(check(mutant))


def test_a_client_that_does_not_read_is_given_up_with_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "LAST_SEND_S", 0.001)

    async def play(remaining_s: float) -> None:
        sent: list[object] = []

        async def send(message: object) -> None:
            sent.append(message)
            if len(sent) > 1:
                await asyncio.Event().wait()

        bounded = bounded_send(send, remaining_s)
        await bounded({"type": "http.response.start"})
        with pytest.raises(ClientGone, match="does not read"):
            await bounded({"type": "http.response.body"})
        assert len(sent) == 2

    run(play(0.002))
    run(play(-1.0))


def test_a_peers_words_reach_a_client_as_one_clean_line_of_bounded_length() -> None:
    """D41's cousin: a failure's text may come over the control channel from anybody."""
    wild = "lost\r\nx-evil: 1\x1b[2J\x00\ud800 " + "y" * 10_000
    body = json.loads(http.error_body(failure("peer_lost", wild)))
    message = body["error"]["message"]
    assert message.isprintable()
    assert len(message) == http.MAX_DETAIL
    assert message.startswith("lost  x-evil: 1 [2J")
    assert message.endswith("yyy...")
    assert http.clean("as it is, \u00e9\u4e2d") == "as it is, \u00e9\u4e2d"


def test_a_known_method_and_path_take_the_short_way_and_nothing_else_does() -> None:
    """Not another method (405 is Starlette's), not another path, not a lifespan, and nothing
    of an app that is mounted, whose paths begin elsewhere."""
    went: list[str] = []

    def named(name: str) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            went.append(name)

        return app

    short = ShortWay(named("long"), {("POST", "/cancel"): named("short")})

    async def receive() -> Message:
        raise AssertionError("nobody asks")

    async def send(message: Message) -> None:
        raise AssertionError("nobody answers")

    post = {"type": "http", "method": "POST", "path": "/cancel"}
    for scope in (
        post,
        {**post, "root_path": ""},
        {**post, "method": "GET"},
        {**post, "path": "/cancel/"},
        {**post, "root_path": "/pd"},
        {"type": "lifespan"},
    ):
        asyncio.run(short(scope, receive, send))
    assert went == ["short", "short", "long", "long", "long", "long"]
