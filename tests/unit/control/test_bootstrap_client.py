"""Calls to a bootstrap server: real sockets; and the registrar, which is pure."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcore.clock import ManualClock
from pdcore.control.bootstrap_client import (
    BootstrapClient,
    CallReply,
    Registrar,
    RouteReply,
    split_host_port,
)
from pdcore.control.messages import RankRegistration, Route, RouteRank
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.errors import failure
from pdcore.server.bootstrap import create_bootstrap_app
from pdcore.topology import ParallelLayout

CONFIG = RankTableConfig("p0:8001", ParallelLayout(world_size=2, tp_size=2))
WAIT_S = 10.0


def registration(tp: int = 0, **changes: object) -> RankRegistration:
    base = RankRegistration(
        attn_tp_size=2,
        attn_tp_rank=tp,
        rank_ip="127.0.0.1",
        rank_port=40_000 + tp,
        block_sizes={"full": 16},
        kv_cache_dtype="float32",
        incarnation="1" * 32,
        layout_digest="digest",
        fingerprint="print",
        transport="shm",
        protocol_min=1,
        protocol_max=1,
    )
    return msgspec.structs.replace(base, **changes)


@contextlib.contextmanager
def serving(app: ASGIApp, host: str = "127.0.0.1") -> Iterator[str]:
    """A real server on a free port; yields ``host:port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", lifespan="off", ws="none", loop="asyncio")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)


@contextlib.contextmanager
def scripted(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads one request per connection and sends fixed bytes."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    requests.append(connection.recv(65536))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", requests
        finally:
            thread.join(WAIT_S)


def response(status: int, body: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}"
    return head.encode() + b"\r\n" + body


def client(**options: object) -> BootstrapClient:
    return BootstrapClient(ManualClock(), timeout_s=WAIT_S, **options)  # type: ignore[arg-type]


def dead_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_rank_registers_and_decode_finds_it() -> None:
    table = RankTable(CONFIG)
    calls = client()
    with serving(create_bootstrap_app(table, ManualClock())) as address:
        reply = calls.fetch_route(address)
        assert reply.failure is not None
        assert reply.failure.code == "unavailable"
        assert "answered 503: 2 of 2 ranks (dp,cp,tp) are missing" in reply.failure.detail
        for tp in range(2):
            assert calls.register(address, registration(tp)) == CallReply()
        reply = calls.fetch_route(f"http://{address}/")
        assert reply.failure is None
        assert reply.route is not None
        assert reply.route.ranks["0,0,1"] == RouteRank("127.0.0.1", 40_001, "1" * 32)
        assert reply.etag
        assert calls.fetch_route(address, reply.etag) == RouteReply(etag=reply.etag, unchanged=True)
        assert calls.deregister(address, "0,0,0", "1" * 32) == CallReply()
        assert table.missing(0.0) == ["0,0,0"]


def test_refusals_are_final_and_say_why() -> None:
    table = RankTable(CONFIG)
    with serving(create_bootstrap_app(table, ManualClock(), token="s3cret")) as address:
        reply = client().register(address, registration())
        assert reply.failure is not None
        assert reply.is_final
        assert "answered 401 to register_rank: send the bootstrap token" in reply.failure.detail
        calls = client(token="s3cret")
        assert calls.register(address, registration()) == CallReply()
        reply = calls.register(address, registration(1, kv_cache_dtype="int8"))
        assert reply.failure is not None
        assert reply.is_final
        assert "answered 409 to register_rank: kv_cache_dtype: rank 0,0,1" in reply.failure.detail


def test_ipv6_addresses_keep_their_brackets() -> None:
    """SGLang PR10389: the brackets belong to the address, not to the host."""
    try:
        with serving(create_bootstrap_app(RankTable(CONFIG), ManualClock()), "::1") as address:
            assert client().register(address, registration()) == CallReply()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:18800", ("127.0.0.1", 18800)),
        ("http://node-7:80/", ("node-7", 80)),
        ("[::1]:18800", ("::1", 18800)),
        ("http://[fe80::1%eth0]:5", ("fe80::1%eth0", 5)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split_host_port(address) == expected


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":80", "::1:80", "host:x", "host:0", "host:65536", "a/b:80", "u@h:80"],
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"in|expected"):
        split_host_port(address)
    reply = client().fetch_route(address)
    assert reply.failure is not None
    assert reply.failure.code == "unreachable"


ROUTE = Route(
    attn_tp_size=1,
    attn_cp_size=1,
    dp_size=1,
    block_sizes={"full": 16},
    kv_cache_dtype="float32",
    max_prefill_tokens=8192,
    ranks={"0,0,0": RouteRank("127.0.0.1", 5, "1" * 32)},
)


def check_checks_the_status(fetch: Callable[[str], object]) -> None:
    """A proxy's error page that happens to hold a route's JSON."""
    with scripted(response(500, msgspec.json.encode(ROUTE))) as (address, _):
        assert fetch(address) is None, "took a route out of an error"


def seed_fetch(address: str) -> object:
    """The seed's second fetch: whatever body came."""
    host, port = split_host_port(address)
    connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
    connection.request("GET", "/bootstrap/route")
    body = connection.getresponse().read()
    connection.close()
    return json.loads(body)


def test_d28_the_status_code_is_checked() -> None:
    """D28: the second fetch of the route did not look at the status."""
    check_checks_the_status(lambda address: client().fetch_route(address).route)
    with pytest.raises(AssertionError, match="out of an error"):
        check_checks_the_status(seed_fetch)


def test_d28_a_cached_route_is_asked_for_by_its_etag() -> None:
    with scripted(response(304, b"", 'ETag: "7-abc"\r\n')) as (address, requests):
        assert client().fetch_route(address, '"7-abc"').unchanged
    assert b'If-None-Match: "7-abc"\r\n' in requests[0]
    with scripted(response(304, b"")) as (address, _):
        assert client().fetch_route(address).failure is not None, "304 to a question without tag"


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (b"", "unreachable", ""),
        (b"SSH-2.0-OpenSSH\r\n", "unreachable", ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", "unreachable", ""),
        (response(200, b"<html>"), "unreachable", "sent no route"),
        (response(200, b"{}"), "unreachable", "missing required field"),
        (response(200, b"[]"), "unreachable", "is it a pdcore bootstrap server?"),
        (response(404, b"<html>nothing here"), "unreachable", "answered 404: <html>nothing here"),
        (response(302, b"", "Location: http://10.0.0.1/\r\n"), "unreachable", "answered 302"),
        (
            response(
                200,
                msgspec.json.encode(msgspec.structs.replace(ROUTE, protocol_min=7, protocol_max=9)),
            ),
            "incompatible",
            "this build speaks 1..1, the peer 7..9",
        ),
    ],
)
def test_answers_of_other_servers_are_failures(answer: bytes, code: str, text: str) -> None:
    """D14: what a bootstrap server sends never raises into the loop."""
    with scripted(answer) as (address, _):
        found = client().fetch_route(address).failure
    assert found is not None
    assert found.code == code
    assert found.detail.startswith(address)
    assert text in found.detail


def test_nobody_listening_is_unreachable() -> None:
    address = dead_address()
    calls = client()
    for found in (
        calls.fetch_route(address).failure,
        calls.register(address, registration()).failure,
    ):
        assert found == failure("unreachable", f"{address}: [Errno 111] Connection refused")
    assert not calls.register(address, registration()).is_final


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        found = BootstrapClient(ManualClock(), timeout_s=0.05).fetch_route(address).failure
    assert found is not None
    assert found.code == "unreachable"
    assert "timed out" in found.detail


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(100):
        await send({"type": "http.response.body", "body": b" " * (1 << 20), "more_body": True})


def test_an_endless_answer_is_cut_off() -> None:
    with serving(endless) as address:
        found = client().fetch_route(address).failure
    assert found is not None
    assert "over 4194304 bytes" in found.detail


def test_a_dripping_answer_is_cut_off_by_the_clock() -> None:
    """Each read is quick, the whole is not: the timeout counts for the whole body."""

    class Hurried(ManualClock):
        def monotonic(self) -> float:
            return self.advance(60.0)

    with scripted(response(200, b"x" * 100)) as (address, _):
        found = BootstrapClient(Hurried(), timeout_s=WAIT_S).fetch_route(address).failure
    assert found is not None
    assert "no complete answer within 10 s" in found.detail


# --- the registrar ----------------------------------------------------------------------

REFUSED = CallReply(failure("unreachable", "127.0.0.1:1: Connection refused"))


def make_registrar(**options: float) -> Registrar:
    return Registrar("127.0.0.1:1", jitter=lambda: 0.0, **options)  # type: ignore[arg-type]


def attempt(registrar: Registrar, now: float, reply: CallReply) -> None:
    assert registrar.is_due(now)
    registrar.handle_started(now)
    assert not registrar.is_due(now), "one call at a time"
    assert registrar.poll_deadline() is None
    registrar.handle_reply(reply, now)


def attempts_until(registrar: Registrar, end_s: float, reply: CallReply) -> list[float]:
    """When it calls, if every call is answered at once by ``reply``."""
    times: list[float] = []
    while True:
        due = registrar.poll_deadline()
        now = max(due if due is not None else 0.0, times[-1] if times else 0.0)
        if now > end_s:
            return times
        times.append(now)
        attempt(registrar, now, reply)
        assert len(times) <= 100_000


def check_retries_take_time(times: list[float]) -> None:
    assert len([t for t in times if t < 0.026]) < 3, "burned its attempts in 26 ms"


def test_d20_retries_are_spread_over_time() -> None:
    """D20: 15 attempts burned in 26 ms; a peer that starts a moment later is never found."""
    times = attempts_until(make_registrar(), 60.0, REFUSED)
    check_retries_take_time(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[:7] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0])
    assert all(gap == pytest.approx(5.0) for gap in gaps[7:])
    with pytest.raises(AssertionError, match="26 ms"):
        check_retries_take_time([i * 0.026 / 15 for i in range(15)])


def check_never_gives_up(times: list[float], problems: list[str]) -> None:
    assert times[-1] > 3_500.0, f"gave up after {times[-1]:.0f} s"
    assert problems, "nobody is told"


def test_d33_it_never_gives_up_and_says_why() -> None:
    """D33: the seed logs after 10 tries, stays "healthy", and every request dies."""
    registrar = make_registrar()
    assert registrar.problems(0.0) == ["not registered at the bootstrap server 127.0.0.1:1 yet"]
    times = attempts_until(registrar, 3_600.0, REFUSED)
    check_never_gives_up(times, registrar.problems(3_600.0))
    assert registrar.problems(3_600.0) == [
        f"not registered at the bootstrap server 127.0.0.1:1 after {len(times)} attempts: "
        "127.0.0.1:1: Connection refused"
    ]
    seed_times, seed_problems = [float(i) for i in range(10)], list[str]()
    with pytest.raises(AssertionError, match="gave up after 9 s"):
        check_never_gives_up(seed_times, seed_problems)

    attempt(registrar, 4_000.0, CallReply())
    assert registrar.problems(4_000.0) == []
    assert registrar.num_failures == 0


def test_a_lease_is_renewed_and_counts_from_the_start_of_the_call() -> None:
    registrar = make_registrar(renew_interval_s=5.0, lease_s=15.0)
    registrar.handle_started(0.0)
    registrar.handle_reply(CallReply(), 4.0)
    assert not registrar.is_due(4.9)
    assert registrar.poll_deadline() == 5.0
    assert registrar.is_registered(14.9)
    assert not registrar.is_registered(15.0)
    assert attempts_until(registrar, 21.0, CallReply()) == [5.0, 10.0, 15.0, 20.0]


def test_a_lost_server_is_a_problem_once_the_lease_may_be_over() -> None:
    registrar = make_registrar()
    attempt(registrar, 0.0, CallReply())
    attempt(registrar, 5.0, REFUSED)
    assert registrar.problems(14.9) == []
    assert "after 1 attempts" in registrar.problems(15.0)[0]
    attempt(registrar, 16.0, CallReply())
    assert registrar.problems(16.0) == []
    # A stopped process that goes on: nobody has answered anything, the lease has run out.
    assert registrar.problems(1000.0) == [
        "its lease at the bootstrap server 127.0.0.1:1 has run out"
    ]


def test_a_refusal_is_a_problem_at_once_and_asked_again_slowly() -> None:
    """409: a later process has the place, or the ranks contradict: not registered, now."""
    registrar = make_registrar()
    attempt(registrar, 0.0, CallReply())
    attempt(registrar, 5.0, CallReply(failure("incompatible", "a later process"), is_final=True))
    assert "a later process" in registrar.problems(5.0)[0]
    assert registrar.poll_deadline() == 10.0


def test_jitter_spreads_the_retries_of_many_workers() -> None:
    late, early = make_registrar(), Registrar("x:1", jitter=lambda: 0.999)
    for registrar in (late, early):
        attempt(registrar, 0.0, REFUSED)
    assert late.poll_deadline() == pytest.approx(0.1)
    assert early.poll_deadline() == pytest.approx(0.05, abs=0.001)


@pytest.mark.parametrize(
    "options",
    [
        {"renew_interval_s": 15.0},
        {"renew_interval_s": 0.0},
        {"retry_initial_s": 0.0},
        {"retry_initial_s": 6.0},
    ],
)
def test_intervals_must_make_sense(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="renew_interval_s"):
        make_registrar(**options)
