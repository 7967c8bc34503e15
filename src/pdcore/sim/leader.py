"""One life of a simulated leader: its apps, its dispatcher, and its end of the link.

What :mod:`pdcore.server.leader` builds in a real process; the apps, the dispatcher, the rank
table and the messages of the link are the product's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message

from pdcore.control.bootstrap_client import split_host_port
from pdcore.control.codec import decode_worker_message, encode_link
from pdcore.control.messages import LeaderMessage, WorkerMessage, WorkerReady
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.server.bootstrap import create_bootstrap_app
from pdcore.server.client import Origin
from pdcore.server.dispatcher import Dispatcher, DispatcherLimits
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.server.text import IdDetokenizer, IdTokenizer, TextModel
from pdcore.server.workers import WorkerRegistry
from pdcore.sim.loop import Process
from pdcore.sim.rank import LEASE_S, TOKEN, Seat, SimRank
from pdcore.sim.site import SimClock, Site
from pdcore.types import Incarnation, Role

TEXT: Final = TextModel("simulated", IdTokenizer(), IdDetokenizer)


class SimLink:
    """The leader's end of the links to its workers: each is ordered, and refuses where no
    worker is connected."""

    def __init__(self, site: Site, leader: Process) -> None:
        self._site = site
        self._leader = leader
        self._ranks: dict[int, SimRank] = {}
        self._due_s: dict[tuple[int, int], float] = {}
        #: The life of each worker that counts.
        self._current: dict[int, Incarnation] = {}
        self.deliver: Callable[[int, WorkerMessage], None] = _nowhere

    def attach(self, rank: SimRank) -> None:
        self._ranks[rank.index] = rank

    def detach(self, index: int) -> None:
        self._ranks.pop(index, None)

    def send(self, rank: int, message: LeaderMessage) -> bool:
        worker = self._ranks.get(rank)
        if worker is None or worker.process.is_dead:
            return False
        data = encode_link(message)
        due_s = self._due(rank, 0)
        self._site.loop.call_at(due_s, worker.receive, data, context=worker.process.context)
        return True

    def from_worker(self, index: int, incarnation: Incarnation, data: bytes) -> None:
        """The worker sends: it arrives in the leader, if that life still counts then."""
        due_s, context = self._due(index, 1), self._leader.context
        self._site.loop.call_at(due_s, self._arrive, index, incarnation, data, context=context)

    def _arrive(self, index: int, incarnation: Incarnation, data: bytes) -> None:
        message = decode_worker_message(data)
        if isinstance(message, WorkerReady):
            self._current[index] = incarnation
        if self._current.get(index, incarnation) == incarnation:
            self.deliver(index, message)

    def _due(self, index: int, direction: int) -> float:
        site, way = self._site, (index, direction)
        due_s = site.loop.now_s + site.link_delay_s()
        last_s = self._due_s.get(way, 0.0)
        if last_s > due_s:
            due_s = last_s
        self._due_s[way] = due_s
        return due_s


class SimLeader:
    """One leader process: serving from its construction until :meth:`close`."""

    def __init__(self, site: Site, seat: Seat, skew_s: float) -> None:
        self.site = site
        self.seat = seat
        self.process = Process(f"{seat.name}.leader", seat.name)
        self.link = SimLink(site, self.process)
        self._clock = SimClock(site.loop, skew_s)
        self.dispatcher = Dispatcher(
            self.link,
            WorkerRegistry(seat.tp_size, 1, health_timeout_s=20.0),
            clock=self._clock,
            limits=DispatcherLimits(clock_skew_s=1.0, history_cap=4, history_ttl_s=0.3),
        )
        self.link.deliver = self.dispatcher.on_message
        self.process.context.run(self._start)

    def close(self) -> None:
        """The process is gone: nobody answers at its addresses."""
        for address in (self.seat.http, self.seat.bootstrap):
            if address:
                self.site.wire.unlisten(Origin(*split_host_port(address)))

    def stop_bootstrap(self) -> None:
        """Nobody answers there."""
        self.site.wire.unlisten(Origin(*split_host_port(self.seat.bootstrap)))

    def start_bootstrap(self) -> None:
        """With an empty table, and an epoch that is later than any before."""
        config = RankTableConfig(self.seat.http, self.seat.layout, lease_s=LEASE_S)
        table = RankTable(config, first_epoch=int(self._clock.unix() * 1000))
        made = create_bootstrap_app(table, self._clock, TOKEN)
        app = self.site.parts.wrap_app(made, f"{self.seat.name}.bootstrap")
        self.site.wire.listen(Origin(*split_host_port(self.seat.bootstrap)), self.process, app)

    def _start(self) -> None:
        site, seat = self.site, self.seat
        leg = LegOptions(seat.role, seat.http, request_timeout_s=10.0)
        options = InstanceOptions(leg, bootstrap=seat.bootstrap)
        made = create_instance_app(options, TEXT, self.dispatcher, clock=self._clock)
        app = site.parts.wrap_app(made, seat.name)
        site.wire.listen(Origin(*split_host_port(seat.http)), self.process, app)
        site.loop.create_task(run_app(app))
        if seat.role is Role.PREFILL:
            self.start_bootstrap()


async def run_app(app: ASGIApp) -> None:
    """An app's life, as its server runs it: started, and told to stop when its process is
    unwound, for an app that is cancelled instead writes down where it was."""
    heard: list[Message] = [{"type": "lifespan.startup"}]

    async def receive() -> Message:
        if not heard:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return {"type": "lifespan.shutdown"}
        return heard.pop()

    said: list[str] = []

    async def send(message: Message) -> None:
        said.append(message["type"])
        if message["type"] == "lifespan.startup.failed":
            raise RuntimeError(f"an app cannot start: {message.get('message') or 'no reason'}")

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    if "lifespan.startup.complete" not in said:
        raise RuntimeError("an app was never started: it returned from its lifespan at once")


def _nowhere(index: int, message: WorkerMessage) -> None:
    """Nobody listens yet."""
