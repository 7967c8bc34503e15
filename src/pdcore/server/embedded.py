"""One instance in one process: a worker in a thread, and the app in front of it.

What :mod:`pdcore.server.leader` does with worker processes, for a host that built its worker
itself: dispatcher, rank table and apps around it. One rank, because the ranks of a group need
processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import AsyncIterator
from typing import Final

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from pdcore.clock import Clock
from pdcore.control.messages import LeaderMessage, WorkerMessage, WorkerReady
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.errors import ConfigError
from pdcore.local import LocalPort
from pdcore.scheduler.prefill import PrefillCore
from pdcore.scheduler.route import registration_of
from pdcore.server.bootstrap import create_bootstrap_app
from pdcore.server.dispatcher import Dispatcher
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.server.lifespans import run_lifespans
from pdcore.server.text import TextModel
from pdcore.server.workers import WorkerRegistry
from pdcore.system_clock import SystemClock
from pdcore.types import Role
from pdcore.worker import Worker
from pdcore.worker_thread import WorkerThread

_log: Final = logging.getLogger(__name__)
_RANK: Final = 0


class EmbeddedInstance:
    """``app`` answers as the leader of an instance does (:mod:`pdcore.server.instance`), and
    for prefill as its bootstrap server under ``/bootstrap`` too. Serve it at the root of the
    ``host:port`` that the worker's options name as its ``instance``: that is where routers
    and decode ranks look for it. Its lifespan starts and ends the worker's thread.

    ``leg`` replaces the limits and allowed bootstrap addresses of the endpoints. Everything
    here but the worker's own thread belongs to the event loop that serves ``app``.
    """

    def __init__(
        self,
        worker: Worker,
        text: TextModel,
        *,
        leg: LegOptions | None = None,
        drain_s: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Raises ConfigError unless the worker was built with a LocalPort."""
        port = worker.ports.leader
        if not isinstance(port, LocalPort):
            raise ConfigError(
                f"leader: an embedded worker needs a LocalPort, got {type(port).__name__}"
            )
        self.worker = worker
        self.drain_s = drain_s
        self._port = port
        self._clock = clock or SystemClock()
        setup = worker.core.setup
        is_prefill = isinstance(worker.core, PrefillCore)
        role = Role.PREFILL if is_prefill else Role.DECODE
        self.dispatcher = Dispatcher(_Link(port), WorkerRegistry(1), clock=self._clock)
        #: No lease: the one rank lives in the process of its bootstrap server.
        self._table = RankTable(
            RankTableConfig(setup.me.instance, setup.layout, lease_s=math.inf),
            first_epoch=int(self._clock.unix() * 1000),
        )
        options = InstanceOptions(
            leg=leg or LegOptions(role, setup.me.instance),
            bootstrap=setup.me.instance if is_prefill else "",
        )
        instance = create_instance_app(options, text, self.dispatcher, clock=self._clock)
        # D40: its only writer is in this process and uses no HTTP, so nobody knows the token.
        bootstrap = create_bootstrap_app(self._table, self._clock, secrets.token_urlsafe(24))
        served = _ByPath(instance, bootstrap)
        self._run_apps = run_lifespans(instance)
        self.app = Starlette(
            routes=[Mount("/", served if is_prefill else instance)], lifespan=self._lifespan
        )

    def abort(self, room: int, reason: str) -> bool:
        """End whatever this instance runs for a room; False when it runs nothing for it."""
        return self.dispatcher.abort_room(room, reason)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def on_message(message: WorkerMessage) -> None:
            loop.call_soon_threadsafe(self.dispatcher.on_message, _RANK, message)

        def on_end(was_told: bool) -> None:
            loop.call_soon_threadsafe(self._on_end, was_told)

        self._port.on_message = on_message
        thread = WorkerThread(self.worker, on_end)
        async with self._run_apps(app):
            try:
                await asyncio.to_thread(thread.start)
                self._announce()
                yield
            finally:
                self.dispatcher.drain(self.drain_s)
                self._port.stop(self.drain_s)
                await asyncio.to_thread(thread.join, self.drain_s + 1.0)
                left = await asyncio.to_thread(thread.stop)
                if left:
                    _log.warning("left behind: %s", "; ".join(left))

    def _announce(self) -> None:
        """Words come last: memory and sockets are there already (D34)."""
        setup = self.worker.core.setup
        self._table.register(registration_of(setup), self._clock.monotonic())
        ready = WorkerReady(
            rank=_RANK,
            dp_rank=0,
            incarnation=setup.me.incarnation,
            control_address=setup.me.address,
            max_model_len=setup.max_model_len,
            max_prefill_tokens=setup.limits.max_prefill_tokens,
            vocab_size=self.worker.runner.vocab_size,
            num_blocks=setup.placement.num_blocks,
            transport=setup.transport,
        )
        self.dispatcher.on_message(_RANK, ready)

    def _on_end(self, was_told: bool) -> None:
        setup = self.worker.core.setup
        key = setup.layout.route_key(setup.layout.coordinates(setup.me.rank))
        now_s = self._clock.monotonic()
        self._table.deregister(key, setup.me.incarnation.hex(), now_s)
        if not was_told:
            self.dispatcher.on_lost(_RANK, "the worker's loop ended with an error")


class _Link:
    """The dispatcher's way to the one worker; a queue in this process refuses nothing."""

    def __init__(self, port: LocalPort) -> None:
        self._port = port

    def send(self, rank: int, message: LeaderMessage) -> bool:
        self._port.put(message)
        return True


class _ByPath:
    """Two apps on one address: ``/bootstrap/...`` and the rest."""

    def __init__(self, instance: Starlette, bootstrap: Starlette) -> None:
        self._instance = instance
        self._bootstrap = bootstrap

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        app = self._bootstrap if path.startswith("/bootstrap/") else self._instance
        await app(scope, receive, send)
