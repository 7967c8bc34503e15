"""The few things every ASGI endpoint here needs: a bounded body, an answer, the disconnect.

Plain ASGI instead of a framework's Request and Response: the router's hot path pays for each
of them, and base classes for middleware hide a client's disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcore.errors import InvalidRequest, Overloaded, PdcoreError, RoomInUse, failure
from pdcore.server.pending import Refused
from pdcore.server.within import Within
from pdcore.types import Failure

Headers = Sequence[tuple[bytes, bytes]]

JSON: Final = b"application/json"
#: Sent with 429 and 503: the states that pass by themselves (D9).
RETRY_AFTER_S: Final = 1
#: A client that stops sending its body may not hold its place for ever.
BODY_TIMEOUT_S: Final = 30.0
#: What is sent after a request's deadline waits this long for a client that does not read.
LAST_SEND_S: Final = 5.0

#: With decode's 200: drawn without a seed, so the same request would get another answer. Only
#: the instance knows, for it has defaults of its own; the router keeps no such result (D7).
SAMPLED: Final = ((b"x-pdcore-sampled", b"1"),)

#: Characters of an error's message that a client gets.
MAX_DETAIL: Final = 2000

_TYPES: Final = {404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}


class ClientGone(PdcoreError):
    """The client closed its connection or does not read; there is nobody to answer."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """The body of every error, OpenAI's shape: {"error": {...}}."""

    message: str
    type: str
    code: str
    param: str | None = None


def error_body(why: Failure, param: str | None = None) -> bytes:
    kind = "invalid_request_error" if why.http_status < 500 else "server_error"
    kind = _TYPES.get(why.http_status, kind)
    return msgspec.json.encode({"error": ErrorDetail(clean(why.detail), kind, why.code, param)})


def clean(text: str) -> str:
    """A failure's text may be a peer's: on its way to a client it is one line of bounded
    length, without control characters, which terminals and logs would obey."""
    if len(text) <= MAX_DETAIL and text.isprintable():
        return text
    cut = text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 3] + "..."
    return "".join(c if c.isprintable() else " " for c in cut)


def failure_of(error: PdcoreError) -> tuple[Failure, str | None]:
    """(failure, field) of an error that a request may meet before it is dispatched."""
    if isinstance(error, Refused):
        return error.failure, error.param
    if isinstance(error, InvalidRequest):
        return failure("invalid_request", str(error)), error.field
    if isinstance(error, RoomInUse):
        return failure("room_in_use", str(error)), "bootstrap_room"
    if isinstance(error, Overloaded):
        return failure("overloaded", str(error)), None
    return failure("internal", str(error)), None


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The request's body. Raises Refused (413 past the limit, 408 for a body that stalls),
    InvalidRequest for an encoding we do not read, ClientGone."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limit_bytes:
            raise Refused(failure("body_too_large", f"the body exceeds {limit_bytes} bytes"))
        if name == b"content-encoding" and value.lower() != b"identity":
            coding = value.decode("latin-1")
            raise InvalidRequest("content-encoding", f"{coding!r} is not supported: send it plain")
    parts: list[bytes] = []
    size = 0
    # The first part too: a client may send a head and then nothing.
    until_s = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
    while size <= limit_bytes:
        try:
            message = await Within(until_s, receive())
        except TimeoutError:
            raise Refused(failure("request_timeout", body_late())) from None
        if message["type"] == "http.disconnect":
            raise ClientGone("client gone")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body"):
            break
    if size > limit_bytes:
        raise Refused(failure("body_too_large", f"the body exceeds {limit_bytes} bytes"))
    return b"".join(parts)


def body_late() -> str:
    return f"the body did not arrive within {BODY_TIMEOUT_S:g} s"


def bounded_send(send: Send, remaining_s: float) -> Send:
    """``send`` that waits for a slow client until the request's time is over, and raises
    ClientGone then: a client that stops reading may not hold its handler for ever. What is
    sent later, such as an error event, has :data:`LAST_SEND_S` to leave."""
    until_s = asyncio.get_running_loop().time() + remaining_s

    def bounded(message: Message) -> Within[None]:
        return Within(until_s, send(message), at_least_s=LAST_SEND_S, late=_unread)

    return bounded


def _unread() -> ClientGone:
    return ClientGone("the client does not read its answer")


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed its connection. Only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    send: Send, status: int, body: bytes, headers: Headers = (), content_type: bytes = JSON
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def respond_failure(send: Send, why: Failure, param: str | None = None) -> None:
    await respond(send, why.http_status, error_body(why, param), retry_headers(why.http_status))


def retry_headers(status: int) -> Headers:
    return [(b"retry-after", b"%d" % RETRY_AFTER_S)] if status in (429, 503) else []


async def start_stream(send: Send, headers: Headers = ()) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # a proxy in front must not hold tokens back
                *headers,
            ],
        }
    )


def json_response(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


class ShortWay:
    """Middleware for endpoints that are raw ASGI, by method and path, and answer their own
    errors. What asks for one of them goes there at once: Starlette looks at every route for each
    request and puts two coroutines around each message of the answer. All else goes on to
    ``app``, and so does what is asked of an app that is mounted somewhere."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not scope.get("root_path"):
            app = self._endpoints.get((scope["method"], scope["path"]), app)
        await app(scope, receive, send)


def error_handlers() -> dict[type[Exception] | int, Callable[..., Awaitable[Response]]]:
    """404, 405 and a bug of ours in the shape of every other error."""
    codes = {404: "not_found", 405: "method_not_allowed"}

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = f"{request.method} {request.url.path}: no such endpoint or method"
        why = failure(codes.get(status, "internal"), detail)
        return Response(error_body(why), status, media_type="application/json")

    async def bug(request: Request, error: Exception) -> Response:
        why = failure("internal", "an internal error; the server's log has the details")
        return Response(error_body(why), 500, media_type="application/json")

    return {HTTPException: http, Exception: bug}
