"""The leader of one instance: HTTP app, dispatcher, bootstrap server, and its workers.

Order (R8, D34, D44): sockets are bound first, so that port 0 is known; the bootstrap server
listens before a worker is spawned; the instance is ready when every rank said so (R10).
Stopping (D59): nothing new is taken, workers drain, what is left fails with
``shutting_down``, then sockets close. It all happens on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import attrs
from starlette.types import ASGIApp

from pdcore.config import DisaggConfig, InstanceConfig, worker_config
from pdcore.control.link import LeaderLink
from pdcore.control.messages import WorkerMessage, WorkerReady
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.control.zmq import bracketed
from pdcore.errors import ConfigError
from pdcore.fsm.states import InstanceState
from pdcore.server.bootstrap import create_bootstrap_app
from pdcore.server.dispatcher import Dispatcher, DispatcherLimits
from pdcore.server.groups import GroupLives
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.launch import GaveUp, Supervisor, cpu_slice
from pdcore.server.leg import LegOptions
from pdcore.server.models import open_model
from pdcore.server.openai import SamplingDefaults
from pdcore.server.process import (
    EXIT_FAILED,
    EXIT_USAGE,
    Bound,
    Child,
    Failed,
    Health,
    Progress,
    Ready,
    Report,
    describe_exit,
    spawn,
)
from pdcore.server.serve import AppServer, bind, port_of
from pdcore.server.workers import WorkerRegistry
from pdcore.system_clock import SystemClock
from pdcore.topology import ParallelLayout, place_node
from pdcore.transports import registry
from pdcore.types import Role

WORKER_MODULE: Final = "pdcore.server.worker_main"
#: HTTP answers of failed requests still leave after the workers are gone.
LAST_ANSWERS_S: Final = 2.0


@attrs.frozen
class Place:
    """Folders of this process: converted weights, and the logs of its workers."""

    cache_dir: Path
    run_dir: Path


@attrs.frozen(eq=False)
class Sockets:
    """Everything a leader listens on, bound before anything starts (D44)."""

    http: socket.socket
    bootstrap: socket.socket | None
    link: LeaderLink
    #: ``host:port`` as others reach it; the second is empty for decode.
    instance: str
    bootstrap_address: str

    def close(self) -> None:
        """Idempotent; last messages to workers still leave."""
        self.link.close(linger_s=0.2)
        self.http.close()
        if self.bootstrap is not None:
            self.bootstrap.close()


def open_sockets(disagg: DisaggConfig, on_message: Callable[[int, WorkerMessage], None]) -> Sockets:
    """Raises ConfigError naming the address that cannot be had; then nothing stays open."""
    host = bracketed(disagg.local_ip)
    with contextlib.ExitStack() as opened:
        http = opened.enter_context(bind(disagg.host, disagg.port))
        bootstrap, address = None, ""
        if disagg.role == Role.PREFILL.value:
            bootstrap = opened.enter_context(bind(disagg.host, disagg.bootstrap_port))
            address = f"{host}:{port_of(bootstrap)}"
        link = LeaderLink(on_message, port=disagg.link_port)
        opened.pop_all()
    return Sockets(http, bootstrap, link, f"{host}:{port_of(http)}", address)


@attrs.define
class _Told:
    """What the parent was told last."""

    problems: list[str] | None = None
    was_ready: bool = False


class Leader:
    """Built in a running loop. ``report`` hears what a person or a parent must know."""

    def __init__(
        self, config: InstanceConfig, place: Place, report: Callable[[Report], None]
    ) -> None:
        """Binds every socket. Raises ConfigError for an address that cannot be had and for
        a configuration that is not served."""
        config.require_served()
        registry.require_reach(config.disagg.transport, config.disagg.other_hosts)
        self.config = config
        self._place = place
        self._report = report
        disagg, parallel = config.disagg, config.parallel
        self.node = place_node(
            parallel.world_size, disagg.devices_per_node, disagg.node_index, disagg.ips
        )
        self._sockets = open_sockets(disagg, self._on_message)
        self._token = secrets.token_urlsafe(24)
        self._clock = SystemClock()
        layout = ParallelLayout(
            parallel.world_size, parallel.attn_tp_size, parallel.cp_size, parallel.pp_size
        )
        #: Epochs go on where a former life of this leader, if there was one, left off.
        self._ranks = RankTable(
            RankTableConfig(self.instance, layout), int(self._clock.unix() * 1000)
        )
        self.dispatcher = Dispatcher(
            self._sockets.link,
            WorkerRegistry(
                parallel.world_size, parallel.dp_size, config.server.worker_health_timeout_s
            ),
            clock=self._clock,
            limits=DispatcherLimits(
                clock_skew_s=config.limits.clock_skew_s,
                history_cap=config.limits.tombstone_cap,
                history_ttl_s=config.limits.tombstone_ttl_s,
                resend_initial_s=config.limits.resend_initial_s,
                resend_max_s=config.limits.resend_max_s,
            ),
            on_kill=self.kill,
        )
        if self.node.local_world_size < parallel.world_size:
            raise ConfigError(
                f"parallel_config.world_size: {parallel.world_size} ranks, but this host has "
                f"devices_per_node {disagg.devices_per_node}: the ranks of one group must be on "
                "one host"
            )
        self._groups = GroupLives(layout.group_size, place.run_dir)
        first = self.node.rank_offset
        self.supervisor = Supervisor(
            self._spawn,
            range(first, first + self.node.local_world_size),
            config.server,
            on_lost=self._on_lost,
            on_progress=lambda rank, text: report(Progress(f"worker {rank}: {text}")),
        )
        self._told = _Told()

    @property
    def instance(self) -> str:
        """Our id, ``host:port`` of the HTTP app."""
        return self._sockets.instance

    @property
    def bootstrap(self) -> str:
        """``host:port`` of the bootstrap server; empty for decode."""
        return self._sockets.bootstrap_address

    async def run(self, stopping: asyncio.Event) -> int:
        """Serve until ``stopping`` is set or the workers give up; returns the exit status."""
        self._report(Bound(self.instance, self.bootstrap))
        started: list[AppServer] = []
        over: GaveUp | None = None
        try:
            await self._sockets.link.start()
            for app, listener in await self._apps(stopping):
                server = AppServer(app, listener)
                started.append(server)
                await server.start()
            self.supervisor.run()
            over = await self._until_over(stopping, started)
        finally:
            await self._drain()
            # What a server failed with has been said: the others must be closed all the same.
            stops = (server.stop(LAST_ANSWERS_S) for server in started)
            await asyncio.gather(*stops, return_exceptions=True)
            self._sockets.close()
        if over is None:
            return 0
        self._report(Failed(over.reason))
        return EXIT_USAGE if over.status == EXIT_USAGE else EXIT_FAILED

    def kill(self) -> None:
        """End the workers now: the second Ctrl-C, or draining that took too long."""
        self.supervisor.kill()

    async def _apps(self, stopping: asyncio.Event) -> list[tuple[ASGIApp, socket.socket]]:
        config = self.config
        model = await asyncio.to_thread(open_model, config.model, self._place.cache_dir)
        leg = LegOptions(
            role=Role(config.disagg.role),
            instance=self.instance,
            request_timeout_s=config.server.request_timeout_s,
            max_body_bytes=config.server.max_body_bytes,
            allowed_bootstraps=frozenset(config.disagg.allowed_bootstraps),
            local_hosts=frozenset({config.disagg.local_ip}),
            sampling=SamplingDefaults(
                config.data.temperature,
                config.data.top_p,
                config.data.top_k,
                config.data.seed,
                config.max_new_tokens,
            ),
        )
        options = InstanceOptions(
            leg=leg,
            bootstrap=self.bootstrap,
            on_stuck=self._on_stuck,
            on_stop=stopping.set if config.server.enable_stop else None,
        )
        app = create_instance_app(options, model.text, self.dispatcher, clock=self._clock)
        apps: list[tuple[ASGIApp, socket.socket]] = [(app, self._sockets.http)]
        if self._sockets.bootstrap is not None:
            bootstrap_app = create_bootstrap_app(self._ranks, self._clock, self._token)
            apps.insert(0, (bootstrap_app, self._sockets.bootstrap))
        return apps

    async def _until_over(
        self, stopping: asyncio.Event, servers: Sequence[AppServer]
    ) -> GaveUp | None:
        """Why the instance ends by itself; None when it was told to stop."""

        async def told() -> GaveUp | None:
            await stopping.wait()
            return None

        async def deaf(server: AppServer) -> GaveUp | None:
            return GaveUp(await server.ended(), EXIT_FAILED)

        asked = asyncio.ensure_future(told())
        ends: list[asyncio.Future[GaveUp | None]] = [
            asyncio.ensure_future(self._gave_up()),
            *(asyncio.ensure_future(deaf(server)) for server in servers),
        ]
        try:
            await asyncio.wait([asked, *ends], return_when=asyncio.FIRST_COMPLETED)
            over = next((end.result() for end in ends if end.done()), None)
        finally:
            for waiting in (asked, *ends):
                waiting.cancel()
        return None if asked.done() and not asked.cancelled() else over

    async def _gave_up(self) -> GaveUp | None:
        return await asyncio.shield(self.supervisor.gave_up)

    async def _drain(self) -> None:
        drain_s = self.config.server.drain_s
        self.dispatcher.drain(drain_s)
        await self.supervisor.stop(drain_s)
        self._groups.close()
        self.dispatcher.stop()

    def _spawn(self, rank: int) -> Child:
        config, local_rank = self.config, rank - self.node.rank_offset
        cores: tuple[int, ...] = ()
        if config.server.pin_cpus and sys.platform == "linux":
            allowed = sorted(os.sched_getaffinity(0))
            cores = cpu_slice(allowed, local_rank, self.node.local_world_size)
        links = self._groups.join(rank)
        told = worker_config(
            config,
            instance=self.instance,
            rank=rank,
            local_rank=local_rank,
            link_address=self._sockets.link.address,
            bootstrap=self.bootstrap,
            bootstrap_token=self._token,
            parent_pid=os.getpid(),
            cache_dir=str(self._place.cache_dir),
            cpu_cores=cores,
            group_link="" if links is None else links.link,
            group_rendezvous="" if links is None else links.rendezvous,
        )
        return spawn(
            f"{config.disagg.role} worker {rank}",
            WORKER_MODULE,
            told.encode(),
            log=self._place.run_dir / f"log_{rank}.log",
            num_threads=config.model.num_threads,
        )

    def _on_message(self, rank: int, message: WorkerMessage) -> None:
        self.dispatcher.on_message(rank, message)
        if isinstance(message, WorkerReady) and rank in self.supervisor.pids():
            self.supervisor.mark_ready(rank)
        self._report_changes()

    def _on_lost(self, rank: int, detail: str) -> None:
        """Its place leaves the route at once: no decode is sent to a process that is gone."""
        layout = self._ranks.config.layout
        self._ranks.lose(layout.route_key(layout.coordinates(rank)), self._clock.monotonic())
        self.dispatcher.on_lost(rank, detail)
        others = self._groups.lost(rank)
        if detail != describe_exit(0):  # else they drained together, and say their last words
            for other in others:
                # It stands in a round or a step that can never end.
                self.supervisor.end_stuck(other, f"rank {rank} of its group was lost")
        self._report_changes()

    def _on_stuck(self, rank: int) -> None:
        """What it had fails now: a process that hangs in the kernel may take long to die."""
        detail = f"no health report for {self.config.server.worker_health_timeout_s:g} s: killed"
        self._on_lost(rank, detail)
        self.supervisor.end_stuck(rank, detail)

    def _report_changes(self) -> None:
        workers = self.dispatcher.workers
        problems = workers.problems()
        if problems == self._told.problems or self.supervisor.gave_up.done():
            return  # nothing new, or the reason why it ends says it all
        self._told.problems = problems
        self._report(Health(problems))
        if workers.state is InstanceState.READY and not self._told.was_ready:
            self._told.was_ready = True
            self._report(Ready())
