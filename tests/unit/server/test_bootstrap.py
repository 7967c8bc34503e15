"""The bootstrap server over ASGI: statuses, texts, and no body that makes a 500."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message, Scope

from pdcore.clock import ManualClock
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.errors import InvalidRequest
from pdcore.server import http
from pdcore.server.bootstrap import create_bootstrap_app, parse_registration
from pdcore.topology import ParallelLayout

CONFIG = RankTableConfig("p0:8001", ParallelLayout(world_size=4, tp_size=2))
BODY: dict[str, object] = {
    "attn_tp_size": 2,
    "attn_tp_rank": 0,
    "attn_cp_size": 1,
    "attn_cp_rank": 0,
    "attn_dp_size": 2,
    "attn_dp_rank": 0,
    "rank_ip": "10.0.0.1",
    "rank_port": 35123,
    "block_sizes": {"full": 32},
    "kv_cache_dtype": "bfloat16",
    "max_prefill_tokens": 8192,
    "incarnation": "1" * 32,
    "layout_digest": "digest",
    "fingerprint": "print",
    "transport": "shm",
    "protocol_min": 1,
    "protocol_max": 1,
}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def detail(self) -> str:
        assert list(self.json) == ["detail"]
        return str(self.json["detail"])


class Server:
    """One app, called directly: what it raises reaches the test."""

    def __init__(self, token: str | None = None, config: RankTableConfig = CONFIG) -> None:
        self.clock = ManualClock()
        self.table = RankTable(config)
        self.app: ASGIApp = create_bootstrap_app(
            self.table, self.clock, token, max_body_bytes=10_000
        )

    def call(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Answer:
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        return asyncio.run(self._call(method, f"/bootstrap/{path}", raw, headers or {}))

    async def _call(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "server": ("127.0.0.1", 18800),
            "client": ("127.0.0.1", 5),
            "scheme": "http",
        }
        parts = [body[i : i + 4096] for i in range(0, len(body), 4096)] or [b""]
        sent: list[Message] = []

        async def receive() -> Message:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message: Message) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        raw_headers = sent[0]["headers"]
        return Answer(
            sent[0]["status"],
            {k.decode(): v.decode() for k, v in raw_headers},
            b"".join(part.get("body", b"") for part in sent[1:]),
        )

    def register_all(self) -> None:
        for dp, tp in itertools.product(range(2), range(2)):
            body = BODY | {
                "attn_dp_rank": dp,
                "attn_tp_rank": tp,
                "rank_port": 35123 + 2 * dp + tp,
                "rank_ip": f"p{dp}",
            }
            assert self.call("PUT", "register_rank", body).status == 200


def test_r24_register_answers_ok() -> None:
    server = Server()
    answer = server.call("PUT", "register_rank", BODY)
    assert answer.status == 200
    assert answer.json == {"status": "ok"}
    assert server.table.missing(0.0) == ["0,0,1", "1,0,0", "1,0,1"]


def test_r25_r28_from_empty_to_ready() -> None:
    """R25, R28, D33, SGLang PR19288, I6413: 503 names who is missing; health is read-only and
    always 200."""
    server = Server()
    answer = server.call("GET", "route")
    assert answer.status == 503
    assert answer.detail == (
        "4 of 4 ranks (dp,cp,tp) are missing: 0,0,0 (not registered), 0,0,1 (not registered), "
        "1,0,0 (not registered), 1,0,1 (not registered)"
    )
    assert server.call("GET", "health").json == {
        "status": "ok",
        "ready": False,
        "missing": ["0,0,0", "0,0,1", "1,0,0", "1,0,1"],
    }
    server.register_all()
    answer = server.call("GET", "route")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    ranks = answer.json["ranks"]
    assert isinstance(ranks, dict)
    assert {k: (r["rank_ip"], r["rank_port"]) for k, r in ranks.items()} == {
        "0,0,0": ("p0", 35123),
        "0,0,1": ("p0", 35124),
        "1,0,0": ("p1", 35125),
        "1,0,1": ("p1", 35126),
    }
    assert answer.json["instance"] == "p0:8001"
    health = server.call("GET", "health")
    assert health.status == 200
    assert health.json == {"status": "ok", "ready": True, "missing": []}
    server.clock.advance(15.0)
    assert server.call("GET", "route").status == 503
    assert server.call("GET", "health").json["ready"] is False


def test_the_route_has_an_etag() -> None:
    server = Server()
    server.register_all()
    first = server.call("GET", "route")
    etag = first.headers["etag"]
    for known in (etag, f'"x", {etag}'):
        again = server.call("GET", "route", headers={"If-None-Match": known})
        assert (again.status, again.body) == (304, b"")
        assert again.headers["etag"] == etag
    assert server.call("GET", "route", headers={"If-None-Match": '"x"'}).status == 200
    server.call("PUT", "register_rank", BODY | {"incarnation": "2" * 32})
    changed = server.call("GET", "route", headers={"If-None-Match": etag})
    assert changed.status == 200
    assert changed.headers["etag"] != etag


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"rank_port": None}, 400, "rank_port: Expected `int`, got `null`"),
        ({"rank_port": "35123"}, 400, "rank_port: Expected `int`, got `str`"),
        ({"rank_port": True}, 400, "rank_port: Expected `int`, got `bool`"),
        ({"rank_port": 0}, 400, "rank_port: Expected `int` >= 1"),
        ({"rank_port": 70000}, 400, "rank_port: Expected `int` <= 65535"),
        ({"rank_ip": ""}, 400, "rank_ip: Expected `str` of length >= 1"),
        ({"rank_ip": 7}, 400, "rank_ip: Expected `str`, got `int`"),
        ({"block_sizes": {}}, 400, "block_sizes: Expected `object` of length >= 1"),
        ({"block_sizes": {"full": 0}}, 400, "block_sizes: Expected `int` >= 1"),
        ({"block_sizes": [32, 64]}, 400, "block_sizes: must be an object {manager key: block size"),
        ({"block_sizes": "32"}, 400, "block_sizes: Expected `object`, got `str`"),
        ({"max_prefill_tokens": -1}, 400, "max_prefill_tokens: Expected `int` >= 0"),
        ({"kv_cache_dtype": None}, 400, "kv_cache_dtype: Expected `str`, got `null`"),
        ({"incarnation": "xyz"}, 400, "incarnation: Expected `str` matching regex"),
        ({"incarnation": "1" * 32 + "\n"}, 400, "incarnation: Expected `str`"),
        ({"attn_tp_rank": 2}, 400, "attn_tp_rank: must be 0..1, got 2"),
        ({"attn_dp_rank": 99}, 400, "attn_dp_rank: must be 0..1, got 99"),
        ({"surprise": 1}, 400, "body: Object contains unknown field `surprise`"),
        ({"attn_tp_size": 4}, 409, "attn_tp_size: the rank says 4, this instance is configured"),
        ({"attn_dp_size": 1}, 409, "attn_dp_size: the rank says 1, this instance is configured"),
    ],
)
def test_refusals_name_field_and_value(changes: dict[str, object], status: int, text: str) -> None:
    """R24, D31: 400 for what is malformed or out of range, 409 for what contradicts."""
    server = Server()
    answer = server.call("PUT", "register_rank", BODY | changes)
    assert answer.status == status
    assert answer.detail.startswith(text)
    assert len(server.table.missing(0.0)) == 4


@pytest.mark.parametrize("field", sorted(set(BODY) - {"attn_cp_size", "max_prefill_tokens"}))
def test_d31_no_required_field_has_a_default(field: str) -> None:
    """D31: missing indexes defaulted to 0 and overwrote rank 0,0,0."""
    body = {k: v for k, v in BODY.items() if k != field}
    answer = Server().call("PUT", "register_rank", body)
    assert answer.status in (400, 409)
    assert field in answer.detail


def test_d31_a_second_rank_that_contradicts_the_first() -> None:
    server = Server()
    server.call("PUT", "register_rank", BODY)
    other = BODY | {"attn_tp_rank": 1, "kv_cache_dtype": "int8"}
    answer = server.call("PUT", "register_rank", other)
    assert answer.status == 409
    assert answer.detail == (
        "kv_cache_dtype: rank 0,0,1 says 'int8', rank 0,0,0 has 'bfloat16'; all ranks of an "
        "instance must agree: start this one with the same model and settings"
    )


def test_r24_the_seeds_spellings_are_understood() -> None:
    """block_size (scalar), a one-element list, and system_dp_rank."""
    plain = {k: v for k, v in BODY.items() if k not in ("block_sizes", "attn_dp_rank")}
    seed = parse_registration(json.dumps(plain | {"block_size": 32, "system_dp_rank": 1}).encode())
    assert seed.block_sizes == {"full": 32}
    assert seed.attn_dp_rank == 1
    listed = parse_registration(json.dumps(BODY | {"block_sizes": [32]}).encode())
    assert listed.block_sizes == {"full": 32}
    for alias, name in (("block_size", "block_sizes"), ("system_dp_rank", "attn_dp_rank")):
        with pytest.raises(InvalidRequest, match=f"{alias}: is another spelling of {name}"):
            parse_registration(json.dumps(BODY | {alias: 1}).encode())


@pytest.mark.parametrize("path", ["register_rank", "register_dp_rank", "query_dp_ranks"])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "body: is not JSON"),
        (b"{", "body: is not JSON"),
        (b"\xff\xfe", "body: is not JSON"),
        (b"[1", "body: is not JSON"),
        (b"null", "body: must be a JSON object, got NoneType"),
        (b'"x"', "body: must be a JSON object, got str"),
        (b"[" * 5000, "body: is not JSON"),
    ],
)
def test_d31_malformed_bodies_are_400(path: str, body: bytes, text: str) -> None:
    """D31: malformed JSON and list bodies were a 500."""
    method = "PUT" if path == "register_rank" else "POST"
    answer = Server().call(method, path, body)
    assert answer.status == 400
    assert answer.detail.startswith(text)


def test_d31_a_list_is_no_registration() -> None:
    answer = Server().call("PUT", "register_rank", [1])
    assert (answer.status, answer.detail) == (400, "body: must be a JSON object, got list")


def test_a_huge_body_is_413() -> None:
    for method, path in (("PUT", "register_rank"), ("POST", "query_dp_ranks")):
        answer = Server().call(method, path, b" " * 10_001)
        assert answer.status == 413
        assert "the body is over 10000 bytes" in answer.detail


def test_r26_r27_rooms() -> None:
    """R26, R27: 99 -> 1 known, 100 not; a bare list is accepted too."""
    server = Server()
    answer = server.call("POST", "register_dp_rank", {"bootstrap_room": 99, "dp_rank": 1})
    assert (answer.status, answer.json) == (200, {"status": "ok"})
    for body in ({"bootstrap_rooms": [99, 100]}, [99, 100]):
        assert server.call("POST", "query_dp_ranks", body).json == {"99": 1, "100": -1}
    server.clock.advance(CONFIG.room_ttl_s)
    assert server.call("POST", "query_dp_ranks", [99]).json == {"99": -1}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (
            "register_dp_rank",
            {"dp_rank": 1},
            "body: Object missing required field `bootstrap_room`",
        ),
        (
            "register_dp_rank",
            {"bootstrap_room": "9", "dp_rank": 1},
            "bootstrap_room: Expected `int`",
        ),
        ("register_dp_rank", {"bootstrap_room": 0, "dp_rank": 1}, "bootstrap_room: a room is"),
        ("register_dp_rank", {"bootstrap_room": 2**63, "dp_rank": 1}, "bootstrap_room: a room is"),
        ("register_dp_rank", {"bootstrap_room": 1, "dp_rank": 2}, "dp_rank: must be 0..1, got 2"),
        ("query_dp_ranks", {"bootstrap_rooms": ["99"]}, "bootstrap_rooms: Expected `int`"),
        ("query_dp_ranks", ["99"], "bootstrap_rooms: Expected `int`, got `str`"),
        ("query_dp_ranks", [True], "bootstrap_rooms: Expected `int`, got `bool`"),
        ("query_dp_ranks", {"bootstrap_rooms": 9}, "bootstrap_rooms: Expected `array`, got `int`"),
        ("query_dp_ranks", {}, "body: Object missing required field `bootstrap_rooms`"),
        ("query_dp_ranks", [10**400], "bootstrap_rooms: "),
    ],
)
def test_d31_rooms_are_checked(path: str, body: object, text: str) -> None:
    """D31: string rooms in the query returned -1."""
    answer = Server().call("POST", path, body)
    assert answer.status == 400
    assert answer.detail.startswith(text)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_d32_deregistration(method: str) -> None:
    server = Server()
    server.register_all()
    other = server.call(method, "deregister_rank", {"rank": "0,0,0", "incarnation": "2" * 32})
    assert other.json == {"status": "ok", "removed": False}
    mine = server.call(method, "deregister_rank", {"rank": "0,0,0", "incarnation": "1" * 32})
    assert mine.json == {"status": "ok", "removed": True}
    assert server.call("GET", "health").json["missing"] == ["0,0,0"]
    unknown = server.call(method, "deregister_rank", {"rank": "7", "incarnation": "1" * 32})
    assert unknown.status == 400
    assert unknown.detail.startswith("rank: 7 is not one of 0,0,0")


def check_needs_a_token(call: Callable[..., Answer]) -> None:
    assert call("PUT", "register_rank", BODY).status == 401, "anyone may hijack the route"


def test_d40_registration_is_not_open_to_everyone() -> None:
    """D40, SGLang I39400, PR39416: 18800 accepted registrations from anyone."""
    server = Server(token="s3cret")
    check_needs_a_token(server.call)
    for wrong in ("", "Bearer", "Bearer nope", "s3cret", "Basic s3cret", "Bearer s3cret\u00e9"):
        answer = server.call("PUT", "register_rank", BODY, {"Authorization": wrong})
        assert answer.status == 401
        assert "Authorization: Bearer" in answer.detail
    for method, path in (("POST", "deregister_rank"), ("POST", "register_dp_rank")):
        assert server.call(method, path, {}).status == 401
    assert server.table.epoch == 0
    good = {"Authorization": "Bearer s3cret"}
    assert server.call("PUT", "register_rank", BODY, good).status == 200
    assert server.call("GET", "health").status == 200
    with pytest.raises(AssertionError, match="anyone may hijack"):
        check_needs_a_token(Server().call)  # the seed has no token


def test_other_paths_and_methods_are_told_apart() -> None:
    server = Server()
    assert server.call("GET", "nothing").status == 404
    answer = server.call("POST", "route")
    assert answer.status == 405
    assert answer.detail == "POST /bootstrap/route: Method Not Allowed"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
ENDPOINTS = [
    ("PUT", "register_rank"),
    ("POST", "deregister_rank"),
    ("POST", "register_dp_rank"),
    ("POST", "query_dp_ranks"),
]
server_for_fuzz = Server()


@given(
    endpoint=st.sampled_from(ENDPOINTS),
    body=st.one_of(
        st.binary(max_size=50),
        values.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(st.sampled_from(sorted(BODY)), values, max_size=3).map(
            lambda changes: json.dumps(BODY | changes).encode()
        ),
        st.fixed_dictionaries({"rank": values, "incarnation": values}).map(
            lambda value: json.dumps(value).encode()
        ),
    ),
)
def test_no_body_makes_a_500(endpoint: tuple[str, str], body: bytes) -> None:
    answer = server_for_fuzz.call(*endpoint, body)
    assert answer.status in (200, 400, 409, 413)
    assert isinstance(answer.json, dict)


def test_a_body_that_stalls_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.001)
    server = Server()

    async def play() -> int:
        statuses: list[int] = []

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            statuses.append(message.get("status", 0))

        scope: Scope = {
            "type": "http",
            "method": "PUT",
            "path": "/bootstrap/register_rank",
            "query_string": b"",
            "headers": [],
        }
        async with asyncio.timeout(20.0):
            await server.app(scope, receive, send)
        return statuses[0]

    assert asyncio.run(play()) == 408
