"""The router when something is lost: attempts, finished rooms, clients that leave, by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from pdcore.router.fleet import Member
from pdcore.router.limits import OnPrefillLoss
from pdcore.server.client import ConnectFailed, Origin
from pdcore.server.http import SAMPLED, start_stream
from pdcore.server.router import stream_end
from tests.unit.server.kit import Call, Reply, call, settle
from tests.unit.server.legs_kit import (
    Arrival,
    Break,
    Cluster,
    Play,
    Router,
    hold,
    module_cluster,
    player,
)

LOST = {"error": {"message": "a prefill rank is gone", "code": "peer_lost"}}


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.Runner, Cluster]]:
    yield from module_cluster()


@pytest.fixture
def play(running: tuple[asyncio.Runner, Cluster]) -> Callable[[Play], None]:
    return player(*running)


def generate(router: Router, **fields: Any) -> Call:
    return Call(router.app, "POST", "/generate", {"prompt": "hi", **fields})


def says(text: str) -> Any:
    async def behave(arrival: Arrival) -> None:
        await arrival.json(200, {"output": text})

    return behave


def fails(status: int, body: object) -> Any:
    async def behave(arrival: Arrival) -> None:
        await arrival.json(status, body)

    return behave


def streams(*texts: str) -> Any:
    async def behave(arrival: Arrival) -> None:
        await arrival.begin()
        for text in texts:
            await arrival.event(b'data: {"text":"%s"}\n\n' % text.encode())
        await arrival.end()

    return behave


async def breaks(arrival: Arrival) -> None:
    await arrival.send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]}
    )
    await arrival.send({"type": "http.response.body", "body": b"half", "more_body": True})


async def stats(router: Router) -> dict[str, Any]:
    found: dict[str, Any] = (await call(router.app, "GET", "/stats")).json()
    return found


def one_each(cluster: Cluster, first: Any, then: Any) -> None:
    """Whichever decode is asked first behaves like ``first``, the next like ``then``."""
    left = [first]

    async def behave(arrival: Arrival) -> None:
        await (left.pop() if left else then)(arrival)

    for leg in cluster.decodes:
        leg.behave = behave


# --- another attempt ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [fails(503, LOST), breaks], ids=["prefill", "decode"])
def test_what_is_lost_before_the_first_token_is_done_again_elsewhere(play: Any, first: Any) -> None:
    """A prefill that dies, a decode that dies: the client gets its answer all the same."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router(num=2)
        one_each(cluster, first, says("ok"))
        reply = await generate(router, bootstrap_room=1).done()
        assert (reply.status, reply.json()) == (200, {"output": "ok"})
        arrivals = [a.body for leg in cluster.decodes for a in leg.arrivals]
        former, second = sorted(arrivals, key=lambda body: body["replaces"] or 0)
        assert second["replaces"] == former["attempt"]
        assert second["decode_instance"] != former["decode_instance"]
        assert second["remaining_s"] <= former["remaining_s"]
        assert second["expires_at_s"] == former["expires_at_s"]
        found = await stats(router)
        assert found["counters"] == {"done": 1, "received": 1, "retried": 1}

    play(scene)


def test_on_prefill_loss_fail_passes_the_loss_on(play: Any) -> None:
    async def scene(cluster: Cluster) -> None:
        router = cluster.router(num=2, on_prefill_loss=OnPrefillLoss.FAIL)
        one_each(cluster, fails(503, LOST), says("ok"))
        reply = await generate(router).done()
        assert (reply.status, reply.json(), reply.headers["retry-after"]) == (503, LOST, "1")

    play(scene)


def test_on_prefill_loss_local_prefill_asks_decode_alone(play: Any) -> None:
    async def scene(cluster: Cluster) -> None:
        router = cluster.router(num=2, on_prefill_loss=OnPrefillLoss.LOCAL_PREFILL)
        one_each(cluster, fails(503, LOST), says("ok"))
        reply = await generate(router, local_prefill=True).done()
        assert (reply.status, reply.json()["error"]["param"]) == (400, "local_prefill")
        assert (await generate(router).done()).json() == {"output": "ok"}
        arrivals = [a.body for leg in cluster.decodes for a in leg.arrivals]
        assert [body.get("local_prefill") for body in arrivals] == [None, True]
        assert sum(len(leg.arrivals) for leg in cluster.prefills) == 1

    play(scene)


def test_a_loss_on_all_attempts_is_the_last_ones_answer(play: Any) -> None:
    """Bounded: a request that kills whatever runs it stops after max_attempts."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router(num=2, max_attempts=3)
        for leg in cluster.decodes:
            leg.behave = fails(503, LOST)
        one = generate(router)
        while not one.task.done():
            router.timers.advance(0.05)
            await asyncio.sleep(0)
        assert (one.reply.status, one.reply.json()) == (503, LOST)
        assert sum(len(leg.arrivals) for leg in cluster.decodes) == 3
        assert (await stats(router))["counters"]["failed"] == 1

    play(scene)


def test_nothing_is_done_again_after_a_token(play: Any) -> None:
    """The stream ends with an error event, and nobody else gets the request."""

    async def first(arrival: Arrival) -> None:
        await arrival.begin()
        await arrival.event(b'data: {"text":"a"}\n\n')

    async def scene(cluster: Cluster) -> None:
        router = cluster.router(num=2)
        one_each(cluster, first, streams("b"))
        reply = await generate(router, stream=True).done()
        token, error = reply.events()
        assert token == {"text": "a"}
        assert error["error"]["code"] == "unavailable"
        assert sum(len(leg.arrivals) for leg in cluster.decodes) == 1

    play(scene)


def test_mistakes_are_refused_and_not_failed(play: Any) -> None:
    """/stats counted a client's 400 as a failure of the cluster."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        wrong = {"error": {"message": "temperature: ...", "code": "invalid_request"}}
        router.decode.behave = fails(400, wrong)
        assert (await generate(router).done()).status == 400
        assert (await stats(router))["counters"] == {"received": 1, "refused": 1}

    play(scene)


# --- the end of a stream ------------------------------------------------------------------------


def test_the_last_event_says_how_a_stream_ended() -> None:
    """D9: without [DONE] it is no success, whatever HTTP says."""
    assert type(stream_end(1, 2, b"data: 1\n\ndata: [DONE]\n\n")).__name__ == "StreamEnded"
    failed = stream_end(1, 2, b'data: 1\n\ndata: {"error":{"code":"out_of_memory"}}\n\n')
    assert (failed.status, failed.code) == (503, "out_of_memory")  # type: ignore[union-attr]
    for rest in (b"", b"data: 1\n\n", b"data: {}\n\n", b": ping\n\n"):
        assert "without [DONE]" in stream_end(1, 2, rest).detail  # type: ignore[union-attr]


def test_decodes_own_error_event_ends_a_stream_once_and_as_failed(play: Any) -> None:
    async def first(arrival: Arrival) -> None:
        await arrival.begin()
        await arrival.event(b'data: {"text":"a"}\n\n')
        await arrival.end(b'data: {"error":{"message":"full","code":"out_of_memory"}}\n\n')

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = first
        reply = await generate(router, stream=True, bootstrap_room=5).done()
        assert [list(event) for event in reply.events()] == [["text"], ["error"]]
        assert (await stats(router))["counters"] == {"failed": 1, "received": 1}
        router.decode.behave = streams("b")
        again = await generate(router, stream=True, bootstrap_room=5).done()
        assert again.events() == [{"text": "b"}, "[DONE]"], "what failed is not a result"

    play(scene)


def test_a_stream_that_just_stops_gets_an_error_event(play: Any) -> None:
    async def first(arrival: Arrival) -> None:
        await arrival.begin()
        await arrival.end(b'data: {"text":"a"}\n\n')

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = first
        reply = await generate(router, stream=True).done()
        assert reply.events()[0] == {"text": "a"}
        assert "without [DONE]" in reply.events()[1]["error"]["message"]

    play(scene)


def test_nothing_follows_the_end_of_a_stream(play: Any) -> None:
    """The connection broke behind [DONE]: the client had everything, and an error event too."""

    async def first(arrival: Arrival) -> None:
        await arrival.begin()
        await arrival.event(b'data: {"text":"a"}\n\ndata: [DONE]\n\n')
        raise Break

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = first
        reply = await generate(router, stream=True, bootstrap_room=5).done()
        assert reply.events() == [{"text": "a"}, "[DONE]"]
        again = await generate(router, stream=True, bootstrap_room=5).done()
        assert again.headers["x-pdcore-replayed"] == "1"
        assert (await stats(router))["counters"]["done"] == 1

    play(scene)


def test_nothing_follows_decode_s_own_error(play: Any) -> None:
    """It said why, and the connection broke behind it: a second error event would name the
    connection instead (found by a simulated world, seed 32 with twice as many requests)."""

    async def first(arrival: Arrival) -> None:
        await arrival.begin()
        await arrival.event(b'data: {"text":"a"}\n\n')
        await arrival.event(b'data: {"error":{"message":"late","code":"deadline_exceeded"}}\n\n')
        raise Break

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = first
        reply = await generate(router, stream=True).done()
        assert [list(event) for event in reply.events()] == [["text"], ["error"]]
        assert reply.events()[1]["error"]["code"] == "deadline_exceeded"
        assert (await stats(router))["counters"] == {"failed": 1, "received": 1}

    play(scene)


async def check_a_stream_outlives_its_probes(cluster: Cluster, num_probes: int) -> Reply:
    """The instance sends tokens and is too busy to answer /health in time."""
    original = cluster.client.request

    async def request(
        method: str, origin: Origin, target: str, body: bytes = b"", **more: Any
    ) -> Any:
        if target != "/cancel" and origin.port == cluster.decodes[0].port:
            raise ConnectFailed("it did not answer in 2 s")
        return await original(method, origin, target, body, **more)

    go_on = asyncio.Event()

    async def busy(arrival: Arrival) -> None:
        await arrival.begin()
        for number in range(num_probes):
            await arrival.event(b"data: %d\n\n" % number)
            await go_on.wait()
            go_on.clear()
        await arrival.end()

    router = cluster.router()
    router.decode.behave = busy
    one = generate(router, stream=True)
    try:
        for number in range(num_probes):
            await one.until(
                lambda reply, n=number: b"data: %d\n" % n in reply.body or b"error" in reply.body
            )
            if not number:
                cluster.client.request = request  # type: ignore[method-assign]
                assert (await generate(router).done()).status == 503  # and it is Down
            assert (await call(router.app, "GET", "/health")).status == 503
            go_on.set()
    finally:
        cluster.client.request = original  # type: ignore[method-assign]
    reply = await one.done()
    assert reply.events()[-1] == "[DONE]", reply.events()[-1]
    return reply


def test_an_instance_whose_tokens_come_is_not_gone(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten probes without an answer ended every stream of an instance that was only busy. The
    mutant counts nothing but probes."""

    async def scene(cluster: Cluster) -> None:
        await check_a_stream_outlives_its_probes(cluster, 12)

    play(scene)
    monkeypatch.setattr(Member, "heard", lambda self: None)
    with pytest.raises(AssertionError, match="10 probes"):
        play(scene)


# --- D7: finished rooms -------------------------------------------------------------------------


async def check_asked_again(router: Router, ask: Callable[[], Coroutine[Any, Any, Reply]]) -> None:
    first, second = await ask(), await ask()
    assert first.status == second.status == 200
    assert second.body == first.body, "another answer under the same room"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert len(router.decode.arrivals) == 1, "it ran twice"
    assert "x-pdcore-replayed" not in first.headers
    assert second.headers["x-pdcore-replayed"] == "1"


@pytest.mark.parametrize("stream", [False, True])
def test_d7_a_finished_room_gives_its_recorded_result(play: Any, stream: bool) -> None:
    """D7: the seed advertised idempotent retry, and the second request stayed in its queue
    for ever. The mutant runs it again."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = streams("a", "b") if stream else says("ok")

        async def ask(**more: Any) -> Reply:
            return await generate(router, bootstrap_room=5, stream=stream, **more).done()

        await check_asked_again(router, ask)
        found = (await stats(router))["rooms"]
        assert (found["results"], found["replayed"]) == (1, 1)
        other = await ask(max_tokens=3)
        assert (other.status, other.json()["error"]["code"]) == (409, "room_in_use")

    async def mutant(cluster: Cluster) -> None:
        router = cluster.router(result_ttl_s=0.0)
        router.decode.behave = says("ok")

        async def ask() -> Reply:
            return await generate(router, bootstrap_room=5).done()

        await check_asked_again(router, ask)

    play(scene)
    with pytest.raises(AssertionError, match="it ran twice"):
        play(mutant)


def test_d7_a_sampled_result_is_not_given_twice(play: Any) -> None:
    """Neither is it drawn a second time: 409."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = says("ok")
        for seed, status in ((None, 409), (1, 200)):
            fields = {"temperature": 0.8, "seed": seed, "bootstrap_room": 5 + (seed or 0)}
            assert (await generate(router, **fields).done()).status == 200
            assert (await generate(router, **fields).done()).status == status

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_d7_what_an_instance_draws_by_its_own_default_is_not_given_twice(
    play: Any, stream: bool
) -> None:
    """D7: a request without a temperature is greedy, but not at an instance whose default is
    another one. Its answer says so, or the router would give a draw again as idempotent."""

    async def drawn(arrival: Arrival) -> None:
        if not stream:
            await arrival.json(200, {"output": "ok"}, *SAMPLED)
            return
        await start_stream(arrival.send, SAMPLED)
        await arrival.end()

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = drawn
        replies = [await generate(router, bootstrap_room=5, stream=stream).done() for _ in "ab"]
        assert [reply.status for reply in replies] == [200, 409]
        assert "neither greedy nor seeded" in replies[1].json()["error"]["message"]

    play(scene)


@pytest.mark.parametrize("sampled", [False, True])
def test_d7_a_finished_room_does_not_run_again_for_a_client_that_replaces_it(
    play: Any, sampled: bool
) -> None:
    """D7: ``replaces`` is for a room that is live. Of one that has finished meanwhile its
    client gets the result, or a 409. (It ran again; and when that client left in the middle of
    a stream, the piece was given as the room's recorded result, 200 and without [DONE].)"""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.decode.behave = streams("a", "b")
        fields = {"bootstrap_room": 5, "stream": True, "temperature": 0.8 if sampled else 0}
        first = await generate(router, **fields).done()
        router.decode.behave = endless
        again = [await generate(router, **fields, **more).done() for more in ({"replaces": 7}, {})]
        if sampled:
            assert [reply.status for reply in again] == [409, 409]
        else:
            assert [reply.body for reply in again] == [first.body] * 2
        assert len(router.decode.arrivals) == 1

    play(scene)


def test_a_result_that_nobody_heard_is_there_when_the_client_asks_again(play: Any) -> None:
    """The very case idempotent retry is for: the connection broke after the work was done."""

    async def scene(cluster: Cluster) -> None:
        gate = asyncio.Event()

        async def later(arrival: Arrival) -> None:
            await gate.wait()
            await arrival.json(200, {"output": "ok"})

        router = cluster.router()
        router.decode.behave = later
        one = generate(router, bootstrap_room=5)
        one.reads.clear()
        await router.decode.arrival()
        gate.set()
        while (await stats(router))["in_flight"]:
            await asyncio.sleep(0)
        one.leave()
        one.reads.set()
        await one.done()
        again = await generate(router, bootstrap_room=5).done()
        assert (again.status, again.json()) == (200, {"output": "ok"})
        assert len(router.decode.arrivals) == 1

    play(scene)


# --- D47a: a client that leaves, at each point by name --------------------------------------------


async def gone_during_the_body(cluster: Cluster) -> None:
    router = cluster.router()
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": b'{"prompt"', "more_body": True})
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}

    async def send(message: Any) -> None:
        raise AssertionError("there is nobody to answer")

    task = asyncio.ensure_future(router.app(scope, inbox.get, send))
    await settle()
    inbox.put_nowait({"type": "http.disconnect"})
    await task
    assert router.prefill.arrivals == router.decode.arrivals == []


async def gone_before_dispatch(cluster: Cluster) -> None:
    """While the router asks its instances whether one is back."""
    router = cluster.router()
    gate = asyncio.Event()
    asked = asyncio.Event()

    original = cluster.client.request

    async def request(method: str, origin: Any, target: str, *args: Any, **more: Any) -> Any:
        if target == "/health":
            asked.set()
            await gate.wait()
        return await original(method, origin, target, *args, **more)

    cluster.client.request = request  # type: ignore[method-assign]
    try:
        one = generate(router)
        await asked.wait()
        one.leave()
        await one.done()
        assert one.reply.status == 0
        gate.set()
        await settle(100)
    finally:
        cluster.client.request = original  # type: ignore[method-assign]
    assert router.prefill.arrivals == router.decode.arrivals == []
    assert (await stats(router))["counters"] == {}


async def both_are_told(router: Router, one: Call) -> None:
    one.leave()
    for leg in (router.prefill, router.decode):
        await leg.until(lambda leg: len(leg.cancels) >= 1)
    await one.done()


async def gone_while_prefill_is_pending(cluster: Cluster) -> None:
    router = cluster.router()
    router.prefill.behave = hold
    one = generate(router)
    await router.prefill.arrival()
    await router.decode.arrival()
    await both_are_told(router, one)


async def gone_while_decode_is_pending(cluster: Cluster) -> None:
    router = cluster.router()
    one = generate(router)
    await router.decode.arrival()
    await both_are_told(router, one)


async def endless(arrival: Arrival) -> None:
    await arrival.begin()
    await arrival.event(b"data: 1\n\n")
    await arrival.until_dropped()


async def gone_in_mid_stream(cluster: Cluster) -> None:
    router = cluster.router()
    router.decode.behave = endless
    one = generate(router, stream=True)
    await one.until(lambda reply: b"1" in reply.body)
    await both_are_told(router, one)


async def gone_during_a_back_off(cluster: Cluster) -> None:
    """Both lost attempts are cancelled already; no third one is made."""
    router = cluster.router(num=2)
    for leg in cluster.decodes:
        leg.behave = fails(503, LOST)
    one = generate(router)
    while (await stats(router))["counters"].get("retried") != 2:
        await asyncio.sleep(0)
    one.leave()
    await one.done()
    router.timers.advance(10.0)
    await settle(100)
    assert sum(len(leg.arrivals) for leg in cluster.decodes) == 2
    assert (await stats(router))["counters"]["cancelled"] == 1


@pytest.mark.parametrize(
    "point",
    [
        gone_during_the_body,
        gone_before_dispatch,
        gone_while_prefill_is_pending,
        gone_while_decode_is_pending,
        gone_in_mid_stream,
        gone_during_a_back_off,
    ],
)
def test_a_client_may_leave_at_every_point(play: Any, point: Play) -> None:
    """D47a: no cancellation on client disconnect."""

    async def scene(cluster: Cluster) -> None:
        await point(cluster)
        for router in cluster.routers:
            while await router.is_busy():
                router.timers.advance(0.01)
                await asyncio.sleep(0)
            found = await stats(router)
            backends = found["prefill_backends"] + found["decode_backends"]
            assert {backend["in_flight"] for backend in backends} == {0}

    play(scene)


# --- bounds ---------------------------------------------------------------------------------------


def test_requests_whose_body_is_on_its_way_have_a_bound_too(play: Any) -> None:
    """D60: they are in no table yet, and each may hold 8 MiB."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router(max_in_flight=1)
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}

        async def send(message: Any) -> None:
            raise AssertionError("unused")

        task = asyncio.ensure_future(router.app(scope, inbox.get, send))
        await settle()
        reply = await generate(router).done()
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        inbox.put_nowait({"type": "http.disconnect"})
        await task
        router.decode.behave = says("ok")
        assert (await generate(router).done()).status == 200

    play(scene)


def test_an_instance_under_the_wrong_role_is_refused_by_name(play: Any) -> None:
    """It took its half of each request and failed it."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        router.prefill.health = (200, {"status": "Up", "disaggregation_mode": "DECODE"})
        reply = await generate(router).done()
        assert reply.status == 503
        message = reply.json()["error"]["message"]
        assert f"{router.prefill.address} is listed in prefill_addrs" in message
        assert "it says that it is a decode instance" in message
        assert router.prefill.arrivals == []

    play(scene)


def test_a_504_says_what_was_awaited(play: Any) -> None:
    """D23."""

    async def scene(cluster: Cluster) -> None:
        router = cluster.router()
        one = generate(router, timeout=10)
        await router.decode.arrival()
        router.timers.advance(15.1)
        reply = await one.done()
        message = reply.json()["error"]["message"]
        assert "waiting since 15." in message
        assert "decode's first token or result" in message
        assert f"decode {router.decode.address}" in message

    play(scene)
