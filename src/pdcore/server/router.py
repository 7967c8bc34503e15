"""The router app: one address for clients, two legs behind it (R29-R33).

| method and path | answers |
|---|---|
| POST /generate, /v1/completions, /v1/chat/completions | decode's answer verbatim, or one error |
| GET /health | 200 while a request could be served, else 503 (R9) |
| GET /v1/models | decode's |
| GET /stats, /metrics | 200 |

The inference endpoints are raw ASGI. A client's disconnect is watched from the moment its body
is read until its last byte is sent, whatever is being awaited (D47a); it cancels both legs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcore.clock import Clock
from pdcore.config.deploy import BOOTSTRAP_PORT
from pdcore.errors import HTTP_STATUS, PdcoreError, failure
from pdcore.fsm.routed import Leg
from pdcore.router.core import RouterCore, RouterLimits
from pdcore.router.events import DrainOver, InstanceEvicted, LegAnswered, LegLost, StreamEnded
from pdcore.router.fleet import Fleet, Health
from pdcore.router.policies import Rng, parse_targets, read_fields
from pdcore.router.rooms import Recorded
from pdcore.server import sse
from pdcore.server.aborts import Timers
from pdcore.server.client import Client, HttpClient, Origin, Timeout
from pdcore.server.client import Response as Upstream
from pdcore.server.exchange import HttpError
from pdcore.server.gate import Gate
from pdcore.server.http import (
    ClientGone,
    ShortWay,
    bounded_send,
    disconnected,
    error_body,
    error_handlers,
    failure_of,
    json_response,
    read_body,
    respond,
    respond_failure,
    retry_headers,
    start_stream,
)
from pdcore.server.metrics import CONTENT_TYPE, Metrics, Sample
from pdcore.server.openai import Endpoint, decode_fields
from pdcore.server.probe import Prober
from pdcore.server.session import Decision, Session, Shell, error_code

_DRAIN_OVER: Final = "the router is being stopped, and its time to drain is over; ask another one"
_MODELS_TIMEOUT: Final = Timeout(connect_s=2.0, total_s=5.0)
_MAX_MODELS_BYTES: Final = 1 << 20
#: Says that an answer is the recorded one.
REPLAYED: Final = ((b"x-pdcore-replayed", b"1"),)


def create_router_app(
    prefill_addrs: Sequence[str],
    decode_addrs: Sequence[str],
    bootstrap_ports: Sequence[int] = (BOOTSTRAP_PORT,),
    *,
    clock: Clock,
    client: Client | None = None,
    rng: Rng | None = None,
    limits: RouterLimits | None = None,
    timers: Timers | None = None,
    probe_interval_s: float = 1.0,
    max_body_bytes: int = 8 << 20,
    max_reply_bytes: int = 64 << 20,
) -> Starlette:
    """The ASGI app of a router (R29). Raises ConfigError for addresses it cannot use.

    ``bootstrap_ports``: one for all prefill addresses, or one each; 0 where the instance tells
    it in /health. A ``client`` that is passed in stays the caller's to close. Instances may be
    absent and come later: until then the answer is 503 with Retry-After (R9).
    ``app.state.give_up()`` ends what is in flight with 503 ``shutting_down``: call it when the
    time to drain is over (D59).
    """
    prefills, decodes = parse_targets(prefill_addrs, decode_addrs, bootstrap_ports)
    fleet = Fleet(prefills, decodes)
    core = RouterCore(fleet, limits or RouterLimits(), rng or random.SystemRandom())
    used = client or HttpClient()
    shell = Shell(core, used, clock, timers, max_reply_bytes=max_reply_bytes)
    prober = Prober(
        fleet,
        used,
        interval_s=probe_interval_s,
        on_evicted=lambda member, detail: shell.event(InstanceEvicted(member, detail)),
    )
    gate = Gate(core.limits.max_in_flight, core.counters)
    metrics = Metrics("pdcore_router", lambda: _samples(core))
    pages = _Pages(core, used, prober, metrics, clock)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        probing = asyncio.create_task(prober.run())
        try:
            yield
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            await shell.aclose()
            if client is None:
                await used.aclose()

    endpoints: dict[tuple[str, str], ASGIApp] = {}
    for one in Endpoint:
        made = RouterEndpoint(one, shell, prober, clock, metrics, gate, max_body_bytes)
        endpoints["POST", one.value] = made
    routes = [
        *(Route(path, app, methods=[method]) for (method, path), app in endpoints.items()),
        Route("/health", pages.health),
        Route("/v1/models", pages.models),
        Route("/stats", pages.stats),
        Route("/metrics", pages.metrics),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(ShortWay, endpoints=endpoints)],
        exception_handlers=error_handlers(),
        lifespan=lifespan,
    )
    app.state.give_up = partial(shell.event, DrainOver(failure("shutting_down", _DRAIN_OVER)))
    return app


class RouterEndpoint:
    """One inference endpoint as raw ASGI."""

    def __init__(
        self,
        endpoint: Endpoint,
        shell: Shell,
        prober: Prober,
        clock: Clock,
        metrics: Metrics,
        gate: Gate,
        max_body_bytes: int,
    ) -> None:
        self._path = endpoint.value
        self._shell = shell
        self._prober = prober
        self._clock = clock
        self._metrics = metrics
        self._gate = gate
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = self._clock.monotonic()
        status = 499
        self._metrics.in_flight += 1
        try:
            with self._gate:
                status = await self._serve(scope, receive, send, start_s)
        except ClientGone:
            pass
        except PdcoreError as error:
            why, param = failure_of(error)
            status = why.http_status
            await respond_failure(send, why, param)
        finally:
            self._metrics.in_flight -= 1
            self._metrics.finished(self._path, status, self._clock.monotonic() - start_s)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, start_s: float) -> int:
        body = await read_body(scope, receive, self._max_body_bytes)
        fields = decode_fields(body)
        read = read_fields(fields)
        watch = asyncio.create_task(disconnected(receive))
        try:
            if self._shell.core.fleet.problem() is not None:
                # Perhaps one is back; else the answer is 503.
                await _unless_gone(watch, self._prober.probe_all())
            session = self._shell.open(self._path, fields, read)
            send = bounded_send(send, self._shell.core.limits.budget_s(read))
            if isinstance(session, Recorded):
                return await _replay(session, send)
            return await self._attend(session, watch, send, start_s)
        finally:
            watch.cancel()

    async def _attend(
        self, session: Session, watch: asyncio.Future[None], send: Send, start_s: float
    ) -> int:
        """Until the client has its answer, or is gone."""
        watch.add_done_callback(
            lambda done: None if done.cancelled() else self._shell.leave(session)
        )
        try:
            decision = await session.decided
            return await self._respond(session, decision, send, start_s)
        finally:
            watch.cancel()
            self._shell.close(session)

    async def _respond(
        self, session: Session, decision: Decision, send: Send, start_s: float
    ) -> int:
        if decision.stream is not None:
            self._metrics.first_token(self._clock.monotonic() - start_s)
            return await self._pass_stream(session, decision.stream, send)
        if decision.reply is not None:
            reply = decision.reply
            retry = retry_headers(reply.status)
            if reply.retry_after is not None:
                retry = [(b"retry-after", reply.retry_after)]
            await respond(send, reply.status, reply.body, retry, reply.content_type)
            return reply.status
        why = decision.failure or failure("internal", "the request ended without an answer")
        await respond_failure(send, why)
        return why.http_status

    async def _pass_stream(self, session: Session, upstream: Upstream, send: Send) -> int:
        """Whole events, byte for byte. ``send`` waits while the client is slow, and then the
        upstream socket is not read either."""
        await start_stream(send)
        splitter = sse.EventSplitter()
        ticket, attempt, recording = session.ticket, session.attempt, session.recording
        events = b""
        end: StreamEnded | LegAnswered | LegLost
        try:
            while chunk := await upstream.next_chunk():
                if session.decode is not None:
                    session.decode.heard()
                if found := splitter.feed(chunk):
                    events = found
                    if recording is not None:
                        recording.add(found)
                    await send({"type": "http.response.body", "body": found, "more_body": True})
        except (HttpError, sse.EventTooLarge) as error:
            # Its last event was there: what becomes of the connection then changes nothing.
            end = stream_end(ticket, attempt, events)
            if isinstance(end, LegLost):
                end = LegLost(ticket, attempt, Leg.DECODE, True, str(error))
        else:
            end = stream_end(ticket, attempt, events)
        if not session.is_over:  # else the core ended it, and what is left of it was closed
            self._shell.event(end)
        if isinstance(end, LegAnswered):  # decode has told the client itself
            await send({"type": "http.response.body", "body": b""})
            return end.status
        why = session.stream_failure
        if isinstance(end, StreamEnded):
            if recording is not None and why is None:
                recording.keep(200, sse.CONTENT_TYPE)
            why = None
        elif why is None:
            raise ClientGone("client gone")
        last = b"" if why is None else sse.event(error_body(why))
        await send({"type": "http.response.body", "body": last})
        return 200 if why is None else why.http_status


def stream_end(ticket: int, attempt: int, events: bytes) -> StreamEnded | LegAnswered | LegLost:
    """What the end of a stream means, by its last event: [DONE], decode's own error, or
    anything else, which is a stream that broke off (D9)."""
    data = sse.last_data(events)
    if data == b"[DONE]":
        return StreamEnded(ticket, attempt)
    code = error_code(data)
    if code:
        return LegAnswered(ticket, attempt, Leg.DECODE, HTTP_STATUS.get(code, 500), code)
    return LegLost(ticket, attempt, Leg.DECODE, True, "its stream ended without [DONE]")


async def _unless_gone(watch: asyncio.Future[None], awaited: Coroutine[None, None, None]) -> None:
    """Await something before there is a session: a client that leaves ends the wait."""
    task = asyncio.create_task(awaited)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            raise ClientGone("client gone")
        await task
    finally:
        task.cancel()


async def _replay(recorded: Recorded, send: Send) -> int:
    """A finished room's result again, a stream as a stream (D7)."""
    if recorded.content_type.startswith(sse.CONTENT_TYPE):
        await start_stream(send, REPLAYED)
        await send({"type": "http.response.body", "body": recorded.body})
    else:
        await respond(send, recorded.status, recorded.body, REPLAYED, recorded.content_type)
    return recorded.status


class _Pages:
    """What is asked rarely."""

    def __init__(
        self, core: RouterCore, client: Client, prober: Prober, metrics: Metrics, clock: Clock
    ) -> None:
        self._core = core
        self._client = client
        self._prober = prober
        self._metrics = metrics
        self._clock = clock

    async def health(self, request: Request) -> Response:
        fleet = self._core.fleet
        if fleet.problem() is not None:
            await self._prober.probe_all()
        problem = fleet.problem()
        body = {
            "status": "Up" if problem is None else "Waiting",
            "prefill_addrs": [member.target.url for member in fleet.prefills],
            "decode_addrs": [member.target.url for member in fleet.decodes],
            "time": self._clock.unix(),
            "problems": [] if problem is None else [problem],
        }
        return json_response(body, 200 if problem is None else 503)

    async def models(self, request: Request) -> Response:
        if self._core.fleet.problem() is not None:
            await self._prober.probe_all()
        detail = "no decode instance is ready"
        for member in self._core.fleet.decodes:
            if member.health is not Health.UP:
                continue
            origin = Origin(member.target.host, member.target.port)
            try:
                answer = await self._client.request(
                    "GET", origin, "/v1/models", timeout=_MODELS_TIMEOUT
                )
                body = await answer.read(_MAX_MODELS_BYTES)
            except HttpError as error:
                detail = str(error)
                continue
            return Response(body, answer.status, media_type="application/json")
        why = failure("unavailable", detail)
        headers = {name.decode(): value.decode() for name, value in retry_headers(503)}
        return Response(error_body(why), 503, headers, media_type="application/json")

    async def stats(self, request: Request) -> Response:
        fleet = self._core.fleet
        backends = {
            role.value: [
                {
                    "address": member.target.url,
                    "health": member.health.value,
                    "detail": member.detail,
                    "in_flight": member.num_live,
                    "dp_size": member.dp_size,
                }
                for found, member in fleet.members()
                if found is role
            ]
            for role in dict.fromkeys(role for role, _ in fleet.members())
        }
        body = {
            "status": "Up" if fleet.problem() is None else "Waiting",
            "prefill_backends": backends["prefill"],
            "decode_backends": backends["decode"],
            **self._core.snapshot(),
        }
        return json_response(body)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics.render(), media_type=CONTENT_TYPE.decode())


def _samples(core: RouterCore) -> Iterator[Sample]:
    for role, member in core.fleet.members():
        labels = {"role": role.value, "instance": member.target.netloc}
        yield Sample("pdcore_router_instance_up", labels, float(member.health is Health.UP))
        yield Sample("pdcore_router_instance_in_flight", labels, float(member.num_live))
    for name, number in core.rooms.snapshot().items():
        yield Sample("pdcore_router_results", {"name": name}, float(number))
    for name, value in sorted(core.counters.items()):
        yield Sample("pdcore_router_events", {"event": name}, float(value))
