"""The router app against legs that are real Starlette apps on sockets.

Every defect of the seed's router that is about HTTP has its rule here, and the seed's rule
beside it as a mutant.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from pdcore.server import http
from pdcore.server import router as router_module
from pdcore.server.client import HttpClient, Origin
from pdcore.server.serve import AppServer, bind
from tests.unit.server.kit import Call, Reply, call, settle
from tests.unit.server.legs_kit import (
    Arrival,
    Cluster,
    Leg,
    Play,
    Router,
    hold,
    module_cluster,
    player,
)

HI: dict[str, Any] = {"prompt": "hi"}


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.Runner, Cluster]]:
    yield from module_cluster()


@pytest.fixture
def play(running: tuple[asyncio.Runner, Cluster]) -> Callable[[Play], None]:
    return player(*running)


async def answer(arrival: Arrival) -> None:
    await arrival.json(200, {"choices": [{"text": "ok"}]})


def answering(status: int, body: object, *headers: tuple[bytes, bytes]) -> Any:
    async def behave(arrival: Arrival) -> None:
        await arrival.json(status, body, *headers)

    return behave


async def breaking(arrival: Arrival) -> None:
    """The connection breaks in the middle of the head: uvicorn closes without an answer."""
    await arrival.send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]}
    )
    await arrival.send({"type": "http.response.body", "body": b"half", "more_body": True})


def generate(router: Router, **fields: Any) -> Call:
    return Call(router.app, "POST", "/generate", {**HI, **fields})


# --- the happy path -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_both_legs_get_the_request_and_decodes_answer_is_the_clients(play: Any, path: str) -> None:
    """R29, R31, R32."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = answer
        reply = await call(
            router.app, "POST", path, {"x": 1.50, "messages": [], "bootstrap_room": 9}
        )
        assert (reply.status, reply.json()) == (200, {"choices": [{"text": "ok"}]})
        (p,), (d,) = router.prefill.arrivals, router.decode.arrivals
        assert p.body == d.body
        assert p.path == d.path == path
        assert p.body["bootstrap_room"] == 9
        assert p.body["bootstrap_host"] == "127.0.0.1"
        assert p.body["bootstrap_port"] == 18800
        assert p.body["prefill_instance"] == router.prefill.address
        assert p.body["decode_instance"] == router.decode.address
        assert p.body["disagg_prefill_dp_rank"] == 9 % 4
        assert 0 < p.body["attempt"] < 1 << 63
        assert (p.body["x"], p.body["messages"]) == (1.5, [])
        assert router.prefill.cancels == router.decode.cancels == []

    play(scene)


def test_a_stream_is_passed_through_event_by_event(play: Any) -> None:
    """D47a: the seed's router does not stream."""

    async def scene(cluster: Cluster) -> None:
        gate = asyncio.Event()

        async def stream(arrival: Arrival) -> None:
            await arrival.begin()
            await arrival.event(b'data: {"text":"a"}\n\n')
            await gate.wait()
            await arrival.event(b'data: {"te')
            await arrival.event(b'xt":"b"}\n\n')
            await arrival.end()

        router = cluster.router()
        router.decode.behave = stream
        one = generate(router, stream=True)
        await one.until(lambda reply: b'"a"' in reply.body)
        assert not one.reply.is_complete
        assert one.reply.headers["content-type"].startswith("text/event-stream")
        gate.set()
        reply = await one.done()
        assert reply.events() == [{"text": "a"}, {"text": "b"}, "[DONE]"]
        assert reply.is_complete

    play(scene)


# --- D47b: verbatim -------------------------------------------------------------------------------

ERROR = {
    "error": {"message": "why", "type": "server_error", "code": "transfer_failed", "param": None}
}


def check_verbatim(reply: Reply, status: int, body: object) -> None:
    assert reply.status == status
    assert reply.json() == body


def seeds_relay(status: int, body: object) -> Reply:
    """Mutant: FastAPI's HTTPException(status, detail=response.text)."""
    reply = Reply()
    reply.status = status
    reply.body = json.dumps({"detail": json.dumps(body)}).encode()
    return reply


@pytest.mark.parametrize("status", [400, 413, 429, 500, 502, 503, 504])
def test_an_error_of_decode_is_passed_on_verbatim(play: Any, status: int) -> None:
    """D47b: the seed encodes decode's error body a second time inside {"detail": "..."}."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = answering(status, ERROR, (b"retry-after", b"7"))
        reply = await generate(router).done()
        check_verbatim(reply, status, ERROR)
        assert reply.headers["retry-after"] == "7"
        with pytest.raises(AssertionError):
            check_verbatim(seeds_relay(status, ERROR), status, ERROR)
        await router.prefill.until(lambda leg: len(leg.cancels) == 1)

    play(scene)


def test_a_200_that_is_no_json_object_is_a_502(play: Any) -> None:
    """R32."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = answering(200, b"<html>")
        reply = await generate(router).done()
        assert (reply.status, reply.json()["error"]["code"]) == (502, "bad_gateway")

    play(scene)


# --- D9, D10, D11: a prefill that refuses ---------------------------------------------------------


async def prefill_refuses(cluster: Cluster, post: Callable[[Router], Awaitable[Reply]]) -> None:
    router = cluster.router()
    error = {"error": {"message": "97 tokens, more than 96", "code": "prompt_too_long"}}
    router.prefill.behave = answering(413, error)
    reply = await post(router)
    assert (reply.status, reply.json()) == (413, error), "the refusal did not reach the client"
    await router.decode.until(lambda leg: len(leg.cancels) == 1)
    (cancel,) = router.decode.cancels
    arrival = router.decode.arrivals[0]
    assert cancel["attempt"] == arrival.body["attempt"]
    assert cancel["room"] == arrival.body["bootstrap_room"]
    assert cancel["unless_received"] is True
    await arrival.dropped.wait()


def test_a_prefill_refusal_reaches_the_client_and_ends_decode(play: Any) -> None:
    """D10, D11, D9: prompt accepted by decode, rejected by prefill; nobody told decode, which
    waited its 60 s with KV and slot pinned, and the client got 200 with empty text."""

    async def scene(cluster: Cluster) -> None:
        await prefill_refuses(cluster, lambda router: generate(router).done())

    async def seeds(cluster: Cluster) -> None:
        """Mutant: gather both posts, discard prefill's answer, return decode's."""

        async def gather(router: Router) -> Reply:
            body = json.dumps({**HI, "bootstrap_room": 1, "attempt": 1}).encode()

            async def post(leg: Leg) -> tuple[int, bytes]:
                origin = Origin("127.0.0.1", leg.port)
                response = await cluster.client.request("POST", origin, "/generate", body)
                return response.status, await response.read()

            router.decode.behave = answering(200, {"output": "", "finish_reason": "error"})
            _, (status, data) = await asyncio.gather(post(router.prefill), post(router.decode))
            reply = Reply()
            reply.status, reply.body = status, data
            return reply

        await prefill_refuses(cluster, gather)

    play(scene)
    with pytest.raises(AssertionError, match="did not reach"):
        play(seeds)


def test_a_fast_decode_failure_does_not_wait_for_prefill(play: Any) -> None:
    """D10: both posts were gathered, so decode's failure was withheld up to 1800 s. vllm
    #41269: prefill is told at once that nobody will fetch what it has."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.prefill.behave = hold
        router.decode.behave = answering(502, ERROR)
        reply = await generate(router).done()
        check_verbatim(reply, 502, ERROR)
        await router.prefill.until(lambda leg: len(leg.cancels) == 1)
        assert router.prefill.cancels[0]["unless_received"] is False
        await (await router.prefill.arrival()).dropped.wait()

    play(scene)


def test_a_broken_connection_to_prefill_leaves_it_to_decode(play: Any) -> None:
    """Q5 UNK: a request whose KV has already arrived is not killed."""

    async def scene(cluster: Cluster) -> None:
        gate = asyncio.Event()

        async def later(arrival: Arrival) -> None:
            await gate.wait()
            await answer(arrival)

        router = cluster.router()
        router.prefill.behave = breaking
        router.decode.behave = later
        one = generate(router)
        await router.prefill.arrival()
        await settle()
        assert not one.task.done()
        gate.set()
        assert (await one.done()).status == 200
        assert router.decode.cancels == []

    play(scene)


def test_a_broken_connection_to_decode_is_a_503_and_cancels_both(play: Any) -> None:
    """SGLang PR29482, 37961."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = breaking
        reply = await generate(router).done()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        for leg in (router.prefill, router.decode):
            await leg.until(lambda leg: len(leg.cancels) == 1)

    play(scene)


# --- a decode that is lost in mid-stream ----------------------------------------------------------


def test_decode_lost_in_mid_stream_ends_with_a_clean_error_event(play: Any) -> None:
    """Half an event is not passed on, an error event follows, and no [DONE]."""

    async def scene(cluster: Cluster) -> None:
        gate = asyncio.Event()

        async def stream(arrival: Arrival) -> None:
            await arrival.begin()
            await arrival.event(b'data: {"text":"a"}\n\ndata: {"text":"ha')
            await gate.wait()  # and return without ending the body: the connection breaks

        router = cluster.router()
        router.decode.behave = stream
        one = generate(router, stream=True)
        await one.until(lambda reply: b'"a"' in reply.body)
        gate.set()
        reply = await one.done()
        first, error = reply.events()
        assert first == {"text": "a"}
        assert error["error"]["code"] == "unavailable"
        assert reply.is_complete
        await router.decode.until(lambda leg: len(leg.cancels) == 1)

    play(scene)


def test_d59_what_a_router_gives_up_at_the_end_of_its_drain_is_told_so(play: Any) -> None:
    """D59: a 503 that names the reason, or an error event where something was streamed; its
    legs are told to cancel. Without it uvicorn cancels the handlers: a bare 500."""

    async def scene(cluster: Cluster) -> None:
        async def stream(arrival: Arrival) -> None:
            await arrival.begin()
            await arrival.event(b'data: {"text":"a"}\n\n')
            await arrival.until_dropped()

        router = cluster.router()
        whole = generate(router)
        await router.decode.arrival()
        router.decode.behave = stream
        streamed = generate(router, stream=True)
        await streamed.until(lambda reply: b'"a"' in reply.body)
        router.app.state.give_up()
        reply = await whole.done()
        assert (reply.status, reply.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in reply.headers
        reply = await streamed.done()
        first, error = reply.events()
        assert first == {"text": "a"}
        assert error["error"]["code"] == "shutting_down"
        assert reply.is_complete
        await router.decode.until(lambda leg: len(leg.cancels) == 2)

    play(scene)


# --- D47a: a client that is gone ------------------------------------------------------------------


async def leave(cluster: Cluster, point: str, app: Callable[[Router], Any]) -> None:
    async def stream(arrival: Arrival) -> None:
        await arrival.begin()
        await arrival.event(b"data: 1\n\n")
        await arrival.until_dropped()

    router = cluster.router()
    if point != "admission":
        router.decode.behave = stream if point.startswith("stream") else hold
    else:
        router.prefill.behave = hold
    one = Call(app(router), "POST", "/generate", {**HI, "stream": point.startswith("stream")})
    prefill, decode = await router.prefill.arrival(), await router.decode.arrival()
    if point == "stream-slow":
        one.reads.clear()
        await settle()
    elif point == "stream":
        await one.until(lambda reply: b"1" in reply.body)
    one.leave()
    await settle(100)
    try:
        async with asyncio.timeout(0.5):
            for leg in (router.prefill, router.decode):
                await leg.until(lambda leg: len(leg.cancels) == 1)
            await decode.dropped.wait()
    except TimeoutError:
        raise AssertionError("a leg was not told") from None
    finally:
        one.reads.set()
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
    assert {c["attempt"] for c in (*router.prefill.cancels, *router.decode.cancels)} == {
        prefill.body["attempt"]
    }
    while await router.is_busy():
        await asyncio.sleep(0)


@pytest.mark.parametrize("point", ["admission", "waiting", "stream", "stream-slow"])
def test_a_client_that_leaves_cancels_both_legs_at_every_point(play: Any, point: str) -> None:
    """D47a, vllm #50425: no cancellation on client disconnect. dynamo #13855: what prefill
    has prepared never waits for a decode that hears of neither the request nor its end."""

    def deaf(router: Router) -> Any:
        """Mutant: nobody watches for the disconnect while something else is awaited."""

        async def run_app(scope: Any, receive: Any, send: Any) -> None:
            async def hears_only_the_body() -> Any:
                message = await receive()
                if message["type"] == "http.disconnect":
                    await asyncio.Event().wait()
                return message

            await router.app(scope, hears_only_the_body, send)

        return run_app

    async def scene(cluster: Cluster) -> None:
        await leave(cluster, point, lambda router: router.app)

    play(scene)
    if point == "waiting":

        async def mutant(cluster: Cluster) -> None:
            await leave(cluster, point, deaf)

        with pytest.raises(AssertionError, match="not told"):
            play(mutant)


def test_a_client_that_hangs_up_a_real_connection_is_noticed(play: Any) -> None:
    """The same through uvicorn, with sockets on all sides."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        server = AppServer(router.app, bind("127.0.0.1", 0))
        await server.start()
        client = HttpClient()
        origin = Origin("127.0.0.1", server.port)
        body = json.dumps(HI).encode()
        one = asyncio.create_task(client.request("POST", origin, "/generate", body))
        await router.decode.arrival()
        one.cancel()
        for leg in (router.prefill, router.decode):
            await leg.until(lambda leg: len(leg.cancels) == 1)
        await client.aclose()
        await server.stop()

    play(scene)


def test_four_hundred_clients_that_leave_leave_nothing_behind(play: Any) -> None:
    """SGLang I8177, I8439: disconnects must not pile up: everything is back to the start."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router(num=2)
        calls = [generate(router) for _ in range(400)]
        while sum(len(leg.arrivals) for leg in cluster.legs) < 800:
            await asyncio.sleep(0)
        for one in calls:
            one.leave()
        await asyncio.gather(*(one.task for one in calls))
        for legs in (cluster.prefills, cluster.decodes):
            while sum(len(leg.cancels) for leg in legs) < 400:
                await asyncio.sleep(0)
        while await router.is_busy():
            await asyncio.sleep(0)
        stats = (await call(router.app, "GET", "/stats")).json()
        backends = stats["prefill_backends"] + stats["decode_backends"]
        assert [backend["in_flight"] for backend in backends] == [0] * 4

    play(scene)


# --- backpressure ---------------------------------------------------------------------------------


def test_a_slow_client_stops_decode_not_the_routers_memory(play: Any) -> None:
    async def scene(cluster: Cluster) -> None:
        sent = 0
        finished = asyncio.Event()

        async def flood(arrival: Arrival) -> None:
            nonlocal sent
            await arrival.begin()
            event = b"data: " + b"x" * 32_000 + b"\n\n"
            for _ in range(1000):
                await arrival.event(event)
                sent += 1
            await arrival.end()
            finished.set()

        router = cluster.router()
        router.decode.behave = flood
        one = generate(router, stream=True)
        await one.until(lambda reply: reply.status == 200)
        one.reads.clear()
        before = -1
        while sent != before:
            before = sent
            await settle(300)
        assert not finished.is_set()
        one.reads.set()
        reply = await one.done()
        assert len(reply.body) == 1000 * 32_008 + len(b"data: [DONE]\n\n")

    play(scene)


def test_a_client_that_never_reads_holds_no_handler_beyond_its_time(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LAST_SEND_S", 0.001)

    async def flood(arrival: Arrival) -> None:
        await arrival.begin()
        await arrival.event(b"data: 1\n\n")
        await arrival.until_dropped()

    async def check(cluster: Cluster) -> None:
        router = cluster.router(request_timeout_s=0.2)
        router.decode.behave = flood
        one = generate(router, stream=True)
        one.reads.clear()
        done, _ = await asyncio.wait([one.task], timeout=1.0)
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
        assert done, "the handler is held for ever"

    async def scene(cluster: Cluster) -> None:
        await check(cluster)
        monkeypatch.setattr(router_module, "bounded_send", lambda send, remaining_s: send)
        with pytest.raises(AssertionError, match="for ever"):
            await check(cluster)

    play(scene)


# --- cancels and deadlines ------------------------------------------------------------------------


def test_cancels_are_resent_until_the_leg_knows_of_them(play: Any) -> None:
    """Q5 RES: a cancel that overtakes its request must not vanish."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.prefill.knows_cancels = False
        router.decode.behave = answering(502, ERROR)
        await generate(router).done()
        while len(router.prefill.cancels) < 3:
            router.timers.advance(0.01)
            await asyncio.sleep(0)
        router.prefill.knows_cancels = True
        while await router.is_busy():
            router.timers.advance(0.01)
        answered = len(router.prefill.cancels)
        router.timers.advance(30.0)
        await settle()
        assert len(router.prefill.cancels) == answered

    play(scene)


def test_the_routers_deadline_answers_504_and_cancels_both(play: Any) -> None:
    """Q5 DLR; D47b: time-outs surfaced as 503."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.prefill.behave = hold
        one = generate(router, timeout=10)
        await router.decode.arrival()
        await router.prefill.arrival()
        assert router.decode.arrivals[0].body["remaining_s"] == 10
        router.timers.advance(15.1)
        reply = await one.done()
        assert (reply.status, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
        for leg in (router.prefill, router.decode):
            await leg.until(lambda leg: len(leg.cancels) == 1)

    play(scene)


def test_a_deadline_in_mid_stream_ends_it_with_an_error_event(play: Any) -> None:
    async def scene(cluster: Cluster) -> None:
        async def stream(arrival: Arrival) -> None:
            await arrival.begin()
            await arrival.event(b"data: 1\n\n")
            await arrival.until_dropped()

        router = cluster.router()
        router.decode.behave = stream
        one = generate(router, stream=True, timeout=10)
        await one.until(lambda reply: b"1" in reply.body)
        router.timers.advance(16)
        reply = await one.done()
        assert reply.events()[-1]["error"]["code"] == "deadline_exceeded"

    play(scene)


# --- R9, D47b: instances that are absent ----------------------------------------------------------


def test_absent_instances_are_503_with_retry_after_and_are_found_when_they_come(play: Any) -> None:
    """R9: the router may start before anything else."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.health = (503, {"status": "Starting", "problems": ["rank 0 not ready"]})
        router.decode.behave = answer
        reply = await generate(router).done()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "rank 0 not ready" in reply.json()["error"]["message"]
        health = await call(router.app, "GET", "/health")
        assert (health.status, health.json()["status"]) == (503, "Waiting")
        assert (await call(router.app, "GET", "/v1/models")).status == 503
        router.decode.health = (200, {"status": "Up"})
        assert (await generate(router).done()).status == 200
        assert router.prefill.cancels == []

    play(scene)


def test_a_dead_instance_is_avoided_and_its_request_goes_to_another(play: Any) -> None:
    """D47b: no health-aware selection or retry."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router(num=2)
        for leg in cluster.decodes:
            leg.behave = answer
        assert (await generate(router, bootstrap_room=1).done()).status == 200
        dead = cluster.decodes[0]
        port = dead.port
        server = cluster._servers[2]
        assert server.port == port
        await server.stop()
        try:
            replies = [await generate(router, bootstrap_room=room).done() for room in range(2, 9)]
            assert [reply.status for reply in replies] == [200] * 7
            stats = (await call(router.app, "GET", "/stats")).json()
            assert stats["counters"]["retried"] == 1
            retried = [a for a in cluster.decodes[1].arrivals if a.body["replaces"]]
            assert len(retried) == 1
        finally:
            cluster._servers[2] = AppServer(dead.app, bind("127.0.0.1", port))
            await cluster._servers[2].start()

    play(scene)


# --- D41, D21, D7, D60 ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_host": "169.254.169.254"},
        {"bootstrap_host": "127.0.0.1", "bootstrap_port": 22},
        {"bootstrap_port": 1},
    ],
)
def test_a_client_cannot_send_decode_to_another_host(play: Any, fields: dict[str, Any]) -> None:
    """D41: the seed honoured a client's bootstrap address; decode then contacted any host."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = answer
        reply = await generate(router, **fields).done()
        assert reply.status == 400
        assert reply.json()["error"]["param"] in fields
        assert router.decode.arrivals == router.prefill.arrivals == []
        allowed = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 18800}
        assert (await generate(router, **allowed).done()).status == 200

    play(scene)


def test_dp_ranks_follow_the_room_or_the_client(play: Any) -> None:
    """D21."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = answer
        for room in (4, 5, 6, 7):
            await generate(router, bootstrap_room=room).done()
        await generate(router, disagg_prefill_dp_rank=2).done()
        ranks = [a.body["disagg_prefill_dp_rank"] for a in router.prefill.arrivals]
        assert sorted(ranks[:4]) == [0, 1, 2, 3]
        assert ranks[4] == 2
        reply = await generate(router, disagg_prefill_dp_rank=4).done()
        assert (reply.status, reply.json()["error"]["param"]) == (400, "disagg_prefill_dp_rank")

    play(scene)


def test_a_room_in_use_is_a_409_and_the_first_goes_on(play: Any) -> None:
    """D7."""

    async def scene(cluster: Cluster) -> None:
        gate = asyncio.Event()

        async def later(arrival: Arrival) -> None:
            await gate.wait()
            await answer(arrival)

        router = cluster.router()
        router.decode.behave = later
        first = generate(router, bootstrap_room=5)
        await router.decode.arrival()
        second = await generate(router, bootstrap_room=5).done()
        assert (second.status, second.json()["error"]["code"]) == (409, "room_in_use")
        gate.set()
        assert (await first.done()).status == 200

    play(scene)


def test_too_many_requests_are_a_429(play: Any) -> None:
    """D60."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router(max_in_flight=1)
        first = generate(router)
        await router.decode.arrival()
        reply = await generate(router).done()
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        first.leave()
        await first.done()

    play(scene)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "body: is not valid JSON"),
        (b"{", "body: is not valid JSON"),
        (b"[1]", "body: expected object, got array"),
        (b'"text"', "body: expected object, got str"),
        (b"\xff", "body: is not valid JSON"),
        ({"prompt": ["a", "b"]}, "prompt: holds 2 prompts"),
        ({"bootstrap_room": "5"}, "bootstrap_room: expected an integer"),
        ({"bootstrap_room": -1}, "bootstrap_room: expected an integer"),
        ({"attempt": 5}, "attempt: is set by the router"),
        ({"expires_at_s": 5}, "expires_at_s: is set by the router"),
        ({"timeout": "soon"}, "timeout: expected seconds above 0"),
        ({"replaces": 0}, "replaces: expected an integer"),
        (b"x" * (9 << 20), "the body exceeds 8388608 bytes"),
    ],
)
def test_a_mistake_is_one_sentence_and_the_router_goes_on(
    play: Any, body: object, says: str
) -> None:
    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = answer
        reply = await call(router.app, "POST", "/v1/completions", body)
        assert reply.status in (400, 413)
        assert reply.json()["error"]["message"].startswith(says)
        assert router.decode.arrivals == []
        assert (await generate(router).done()).status == 200

    play(scene)


# --- pages ----------------------------------------------------------------------------------------


def test_health_stats_models_and_metrics(play: Any) -> None:
    """R29."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router(num=2)
        for leg in cluster.decodes:
            leg.behave = answer
        health = await call(router.app, "GET", "/health")
        assert health.status == 200
        assert health.json() == {
            "status": "Up",
            "prefill_addrs": [f"http://{leg.address}" for leg in cluster.prefills],
            "decode_addrs": [f"http://{leg.address}" for leg in cluster.decodes],
            "time": router.clock.unix(),
            "problems": [],
        }
        await generate(router).done()
        await call(router.app, "POST", "/generate", {"timeout": 0})
        stats = (await call(router.app, "GET", "/stats")).json()
        assert stats["status"] == "Up"
        assert [b["address"] for b in stats["prefill_backends"]] == health.json()["prefill_addrs"]
        assert stats["decode_backends"][0]["health"] == "Up"
        assert stats["counters"] == {"done": 1, "received": 1}
        models = await call(router.app, "GET", "/v1/models")
        assert (models.status, models.json()["data"]) == (200, [{"id": "decode"}])
        text = (await call(router.app, "GET", "/metrics")).body.decode()
        assert 'pdcore_router_requests_total{endpoint="/generate",status="200"} 1.0' in text
        assert 'pdcore_router_requests_total{endpoint="/generate",status="400"} 1.0' in text
        assert "pdcore_router_instance_up" in text
        assert "room" not in text
        assert (await call(router.app, "GET", "/generate")).status == 405

    play(scene)
