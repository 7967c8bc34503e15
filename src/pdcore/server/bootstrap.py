"""The bootstrap server of a prefill instance: R22-R28 over HTTP, JSON bodies only.

| method and path under /bootstrap | body                                | answers            |
|----------------------------------|-------------------------------------|--------------------|
| PUT register_rank                | :class:`RankRegistration`           | 200, 400, 401, 409 |
| POST or DELETE deregister_rank   | {"rank": "dp,cp,tp", "incarnation"} | 200, 400, 401      |
| GET route                        |                                     | 200, 304, 503      |
| POST register_dp_rank            | {"bootstrap_room", "dp_rank"}       | 200, 400, 401      |
| POST query_dp_ranks              | {"bootstrap_rooms": [..]} or [..]   | 200, 400           |
| GET health                       |                                     | 200                |

Every refusal is ``{"detail": text}`` and names the field; a body over the limit is a 413,
one that stalls a 408.
No body makes a 500 (D31). With a token, what changes the table needs
``Authorization: Bearer <token>`` (D40).

Registration takes the seed's spellings too: ``system_dp_rank`` for ``attn_dp_rank``, and
``block_size`` or a one-element ``block_sizes`` list for ``{"full": n}`` (R24). What pdcore
adds (incarnation, layout digest, fingerprint, transport, protocol range) is required: a rank
that cannot say who it is could not be paired safely (D14, D32, D35).
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdcore.clock import Clock
from pdcore.control.messages import RankRegistration
from pdcore.control.rank_table import RankTable
from pdcore.errors import InvalidRequest, RegistrationConflict
from pdcore.server import http

#: 4,096 rooms of 20 digits are 90 KB; a registration with many manager keys is below 4 KB.
MAX_BODY_BYTES: Final = 256 << 10
#: The manager key of a model with one kind of attention, for the seed's scalar block size.
DEFAULT_MANAGER_KEY: Final = "full"

T = TypeVar("T")


class _Deregistration(msgspec.Struct, forbid_unknown_fields=True):
    rank: str
    incarnation: str


class _RoomRank(msgspec.Struct, forbid_unknown_fields=True):
    bootstrap_room: int
    dp_rank: int


class _RoomQuery(msgspec.Struct, forbid_unknown_fields=True):
    bootstrap_rooms: list[int]


def create_bootstrap_app(
    table: RankTable,
    clock: Clock,
    token: str | None = None,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Starlette:
    """An ASGI app over ``table``, which it owns: serve it from one event loop."""
    server = _Bootstrap(table, clock, token, max_body_bytes)
    return Starlette(
        routes=[
            Route("/bootstrap/register_rank", server.writes(server.register_rank), methods=["PUT"]),
            Route(
                "/bootstrap/deregister_rank",
                server.writes(server.deregister_rank),
                methods=["POST", "DELETE"],
            ),
            Route("/bootstrap/route", server.route, methods=["GET"]),
            Route(
                "/bootstrap/register_dp_rank",
                server.writes(server.register_dp_rank),
                methods=["POST"],
            ),
            Route(
                "/bootstrap/query_dp_ranks", server.reads(server.query_dp_ranks), methods=["POST"]
            ),
            Route("/bootstrap/health", server.health, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _as_json},
    )


def parse_registration(body: bytes) -> RankRegistration:
    """JSON, in pdcore's or the seed's spelling. Raises InvalidRequest naming the field."""
    fields = _decode_object(body)
    for alias, name in (("system_dp_rank", "attn_dp_rank"), ("block_size", "block_sizes")):
        if alias in fields:
            if name in fields:
                raise InvalidRequest(alias, f"is another spelling of {name}: send one of them")
            fields[name] = fields.pop(alias)
    sizes = fields.get("block_sizes")
    if isinstance(sizes, list):
        if len(sizes) != 1:
            raise InvalidRequest(
                "block_sizes", "must be an object {manager key: block size in tokens}"
            )
        sizes = sizes[0]
    if isinstance(sizes, int):
        fields["block_sizes"] = {DEFAULT_MANAGER_KEY: sizes}
    for axis in ("cp", "dp"):
        # A missing index must never mean rank 0 of several (D31).
        if f"attn_{axis}_size" in fields and f"attn_{axis}_rank" not in fields:
            raise InvalidRequest(f"attn_{axis}_rank", f"is required beside attn_{axis}_size")
    return _convert(fields, RankRegistration)


class _Bootstrap:
    def __init__(
        self, table: RankTable, clock: Clock, token: str | None, max_body_bytes: int
    ) -> None:
        self._table = table
        self._clock = clock
        self._token = token.encode() if token else None
        self._max_body_bytes = max_body_bytes

    def reads(
        self, handle: Callable[[bytes], Response]
    ) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that reads its body within the limit; refusals become JSON."""

        async def endpoint(request: Request) -> Response:
            try:
                body = await self._body(request)
                return handle(body)
            except InvalidRequest as error:
                return _refusal(400, str(error))
            except RegistrationConflict as error:
                return _refusal(409, str(error))
            except ClientDisconnect:
                return _refusal(400, "the client closed the connection before its body ended")

        return endpoint

    def writes(
        self, handle: Callable[[bytes], Response]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Like ``reads``, for callers that hold the token."""
        endpoint = self.reads(handle)

        async def guarded(request: Request) -> Response:
            if self._token is not None and not self._is_authorized(request):
                return _refusal(401, "send the bootstrap token as Authorization: Bearer <token>")
            return await endpoint(request)

        return guarded

    def register_rank(self, body: bytes) -> Response:
        self._table.register(parse_registration(body), self._clock.monotonic())
        return JSONResponse({"status": "ok"})

    def deregister_rank(self, body: bytes) -> Response:
        wanted = _convert(_decode_object(body), _Deregistration)
        removed = self._table.deregister(wanted.rank, wanted.incarnation, self._clock.monotonic())
        return JSONResponse({"status": "ok", "removed": removed})

    async def route(self, request: Request) -> Response:
        now = self._clock.monotonic()
        encoded = self._table.route(now)
        if encoded is None:
            return _refusal(503, self._table.why_not_ready(now))
        headers = {"etag": encoded.etag}
        known = request.headers.get("if-none-match", "")
        if encoded.etag in (tag.strip() for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(encoded.body, media_type="application/json", headers=headers)

    def register_dp_rank(self, body: bytes) -> Response:
        wanted = _convert(_decode_object(body), _RoomRank)
        self._table.rooms.register(wanted.bootstrap_room, wanted.dp_rank, self._clock.monotonic())
        return JSONResponse({"status": "ok"})

    def query_dp_ranks(self, body: bytes) -> Response:
        value = _decode(body)
        fields = _object({"bootstrap_rooms": value} if isinstance(value, list) else value)
        rooms = _convert(fields, _RoomQuery).bootstrap_rooms
        return JSONResponse(self._table.rooms.query(rooms, self._clock.monotonic()))

    async def health(self, request: Request) -> Response:
        missing = self._table.missing(self._clock.monotonic())
        return JSONResponse({"status": "ok", "ready": not missing, "missing": missing})

    def _is_authorized(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return (
            scheme.lower() == "bearer"
            and self._token is not None
            and hmac.compare_digest(given.strip().encode(), self._token)
        )

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(http.BODY_TIMEOUT_S):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_body_bytes:
                        raise HTTPException(413, f"the body is over {self._max_body_bytes} bytes")
        except TimeoutError:
            raise HTTPException(408, http.body_late()) from None
        return bytes(body)


async def _as_json(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return _refusal(status, f"{request.method} {request.url.path}: {detail}")


def _refusal(status: int, detail: str) -> Response:
    # A client's lone surrogates may be quoted in the text; UTF-8 has no place for them.
    text = detail.encode("utf-8", "replace").decode()
    return JSONResponse({"detail": text}, status_code=status)


def _decode(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest("body", f"must be a JSON object, got {type(value).__name__}")
    return value


def _decode_object(body: bytes) -> dict[str, object]:
    return _object(_decode(body))


def _convert(fields: dict[str, object], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        reason, _, path = str(error).partition(" - at `$")
        field = path.strip(".`").partition(".")[0].partition("[")[0] or "body"
        raise InvalidRequest(field, reason) from None
