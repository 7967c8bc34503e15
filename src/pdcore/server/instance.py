"""The app of one instance's leader: three inference endpoints and what watches them (R34).

| method and path | answers |
|---|---|
| POST /generate, /v1/completions, /v1/chat/completions | prefill 202 at admission, decode 200 |
| POST /cancel {room, attempt, unless_received} | 200 {known, applied} |
| GET /health | 200 while ready, else 503 with the problems (D33, D48) |
| GET /v1/models, /stats, /metrics | 200 |
| POST /stop | 202, only where it was enabled (D40) |

Runs on one event loop; nothing here may be called from another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import attrs
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcore.clock import Clock
from pdcore.errors import PdcoreError, failure
from pdcore.fsm.states import InstanceState
from pdcore.server.dispatcher import Dispatcher
from pdcore.server.http import (
    ShortWay,
    error_body,
    error_handlers,
    failure_of,
    json_response,
    read_body,
    respond,
    respond_failure,
)
from pdcore.server.leg import LegEndpoint, LegOptions
from pdcore.server.metrics import CONTENT_TYPE, Metrics, Sample
from pdcore.server.openai import Endpoint, Id63, explain
from pdcore.server.text import TextModel
from pdcore.server.within import Within
from pdcore.server.workers import WorkerRegistry
from pdcore.types import RoomKey

#: R34's words for the states of an instance.
STATUS: Final = {
    InstanceState.STARTING: "Starting",
    InstanceState.READY: "Up",
    InstanceState.UNHEALTHY: "UnHealthy",
    InstanceState.DRAINING: "Draining",
    InstanceState.STOPPED: "Stopped",
}
#: A worker that does not answer a cancel for this long: the router asks again.
_CANCEL_TIMEOUT_S: Final = 5.0
_SMALL_BODY: Final = 4096
_HEALTH_CHECK_S: Final = 1.0


class CancelBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /cancel. ``unless_received``: a decode that has its KV ignores it."""

    room: Id63
    attempt: Id63
    unless_received: bool = False
    reason: str = "cancelled by the router"


_CANCEL: Final = msgspec.json.Decoder(CancelBody)


@attrs.frozen
class InstanceOptions:
    """``leg`` says what the endpoints need; ``bootstrap`` is the ``host:port`` of a prefill
    instance's bootstrap server, which routers read from /health. ``on_stuck(rank)`` hears of
    a worker that hangs; ``on_stop`` enables POST /stop."""

    leg: LegOptions
    bootstrap: str = ""
    on_stuck: Callable[[int], None] | None = None
    on_stop: Callable[[], None] | None = None


def create_instance_app(
    options: InstanceOptions, text: TextModel, dispatcher: Dispatcher, *, clock: Clock
) -> Starlette:
    """The ASGI app of one leader. The caller feeds ``dispatcher`` from the link."""
    metrics = Metrics("pdcore_instance", lambda: _samples(dispatcher))
    pages = _Pages(options, text, dispatcher, metrics, clock)
    endpoints: dict[tuple[str, str], ASGIApp] = {
        ("POST", one.value): LegEndpoint(one, options.leg, text, dispatcher, clock, metrics)
        for one in Endpoint
    }
    endpoints["POST", "/cancel"] = _Cancel(dispatcher)
    endpoints["GET", "/health"] = _Health(options, text, dispatcher)
    routes = [
        *(Route(path, app, methods=[method]) for (method, path), app in endpoints.items()),
        Route("/v1/models", pages.models),
        Route("/stats", pages.stats),
        Route("/metrics", pages.metrics),
        Route("/stop", pages.stop, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(ShortWay, endpoints=endpoints)],
        exception_handlers=error_handlers(),
        lifespan=lambda app: _watch_health(dispatcher, clock, options.on_stuck),
    )


@contextlib.asynccontextmanager
async def _watch_health(
    dispatcher: Dispatcher, clock: Clock, on_stuck: Callable[[int], None] | None
) -> AsyncIterator[None]:
    """Workers that fall silent are noticed once a second (D45, D48)."""
    loop = asyncio.get_running_loop()
    handle: asyncio.TimerHandle | None = None

    def check() -> None:
        nonlocal handle
        # First of all: a callback that raises must not end the watching of the others.
        handle = loop.call_later(_HEALTH_CHECK_S, check)
        for rank in dispatcher.workers.check(clock.monotonic()):
            if on_stuck is not None:
                on_stuck(rank)

    check()
    try:
        yield
    finally:
        if handle is not None:
            handle.cancel()
        dispatcher.stop()


class _Cancel:
    """POST /cancel, raw ASGI: the router resends it until it is answered."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, _SMALL_BODY)
            try:
                wanted = _CANCEL.decode(body)
            except msgspec.DecodeError as error:
                raise explain(error) from None
            key = RoomKey(wanted.room, wanted.attempt)
            until_s = asyncio.get_running_loop().time() + _CANCEL_TIMEOUT_S
            answered = self._dispatcher.cancel(
                key, wanted.reason, unless_received=wanted.unless_received
            )
            outcome = await Within(until_s, answered)
        except TimeoutError:
            why = failure("deadline_exceeded", "the worker has not answered the cancel yet")
            await respond_failure(send, why)
        except PdcoreError as error:
            await respond_failure(send, *failure_of(error))
        else:
            await respond(send, 200, msgspec.json.encode(outcome._asdict()))


class _Health:
    """GET /health, raw ASGI: every router asks every second."""

    def __init__(self, options: InstanceOptions, text: TextModel, dispatcher: Dispatcher) -> None:
        self._options = options
        self._model = text.name
        self._workers = dispatcher.workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        workers, leg = self._workers, self._options.leg
        state = workers.state
        body = {
            "status": STATUS[state],
            "disaggregation_mode": leg.role.name,
            "instance": leg.instance,
            "dp_size": workers.dp_size,
            "bootstrap": self._options.bootstrap or None,
            "model": self._model,
            "problems": workers.problems(),
            "refused_peers": refused_peers(workers),
        }
        is_ready = state is InstanceState.READY
        await respond(send, 200 if is_ready else 503, msgspec.json.encode(body))


class _Pages:
    """What is asked rarely: plain Starlette endpoints."""

    def __init__(
        self,
        options: InstanceOptions,
        text: TextModel,
        dispatcher: Dispatcher,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._options = options
        self._text = text
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._created_s = int(clock.unix())

    async def models(self, request: Request) -> Response:
        limits = self._dispatcher.workers.limits()
        model = {
            "id": self._text.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "pdcore",
            "max_model_len": limits.max_model_len if limits is not None else None,
        }
        return json_response({"object": "list", "data": [model]})

    async def stats(self, request: Request) -> Response:
        workers = self._dispatcher.workers
        body = {
            "status": STATUS[workers.state],
            "pending_requests": self._dispatcher.num_pending,
            "num_workers": len(workers.ranks()),
            "counters": dict(sorted(self._dispatcher.counters.items())),
            "workers": {str(rank): one.counters for rank, one in workers.reports().items()},
            "ledger": {str(rank): one.ledger for rank, one in workers.reports().items()},
        }
        return json_response(body)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics.render(), media_type=CONTENT_TYPE.decode())

    async def stop(self, request: Request) -> Response:
        if self._options.on_stop is None:
            why = failure("not_found", "POST /stop is not enabled on this instance")
            return Response(error_body(why), why.http_status, media_type="application/json")
        self._options.on_stop()
        return json_response({"status": "Draining"}, 202)


def _samples(dispatcher: Dispatcher) -> Iterator[Sample]:
    yield Sample("pdcore_instance_pending_requests", {}, dispatcher.num_pending)
    yield Sample("pdcore_instance_ready_workers", {}, len(dispatcher.workers.ranks()))
    for name, value in sorted(dispatcher.counters.items()):
        yield Sample("pdcore_instance_events", {"event": name}, value)
    for rank, report in dispatcher.workers.reports().items():
        for name, number in sorted(report.counters.items()):
            yield Sample("pdcore_worker", {"rank": str(rank), "name": name}, number)
        for pool, states in report.ledger.items():
            for state, count in states.items():
                labels = {"rank": str(rank), "pool": pool, "state": state}
                yield Sample("pdcore_worker_ledger", labels, count)
    for peer in refused_peers(dispatcher.workers):
        yield Sample("pdcore_instance_refused_peer", {"peer": peer}, 1)


def refused_peers(workers: WorkerRegistry) -> dict[str, str]:
    """Instances at the other end that get no new work from here, and why (D25): no fault of
    ours, so we stay ready, and a router chooses another pair."""
    found: dict[str, str] = {}
    for report in workers.reports().values():
        found.update(report.refused_peers)
    return found
