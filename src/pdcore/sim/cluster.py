"""A whole cluster in one event loop: router, instances, their networks, and their memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

from pdcore.control.bootstrap_client import split_host_port
from pdcore.router.core import RouterLimits
from pdcore.server.client import Origin
from pdcore.server.router import create_router_app
from pdcore.sim.instance import SimInstance
from pdcore.sim.leader import run_app
from pdcore.sim.loop import Process
from pdcore.sim.plan import names
from pdcore.sim.rank import Seat, SimRank
from pdcore.sim.site import QUARANTINE_S, Site
from pdcore.sim.wire import WireClient
from pdcore.transports.base import Revocation
from pdcore.transports.loopback_fabric import Action, Choice
from pdcore.types import Incarnation, Role

HOST: Final = "127.0.0.1"
ROUTER: Final = Origin(HOST, 8000)
GRACE_S: Final = 2.0
PROBE_S: Final = 1.0
#: Writes that outlive their handle or their process land within this, in seconds; those of the
#: dead, where there is a quarantine for them, until shortly before its end.
MAX_LATE_S: Final = 1.5
MAX_DEAD_S: Final = QUARANTINE_S - 1.5
#: One chunk of a write.
MAX_STEP_S: Final = 0.004


class SimRouter:
    """The router process, killed and started again like any other."""

    def __init__(self, site: Site, seats: list[Seat]) -> None:
        self.site = site
        self.process = Process("router")
        self.graves: list[Process] = []
        #: (killed, serving again) in virtual time; what was in flight then is excused.
        self.outages: list[tuple[float, float]] = []
        self._seats = seats

    def start(self) -> None:
        self.process = Process("router")
        self.process.context.run(self._start)

    def kill(self, back_after_s: float) -> None:
        if self.process.is_dead:
            return
        now_s = self.site.loop.now_s
        self.site.loop.kill_process(self.process)
        self.site.wire.unlisten(ROUTER)
        self.site.wire.lose(self.process)
        self.graves.append(self.process)
        self.outages.append((now_s, now_s + back_after_s))
        self.site.trace("kill", "router")
        self.site.later(back_after_s, self.start)

    def _start(self) -> None:
        site = self.site
        prefills = [seat for seat in self._seats if seat.role is Role.PREFILL]
        made = create_router_app(
            [seat.http for seat in prefills],
            [seat.http for seat in self._seats if seat.role is Role.DECODE],
            [split_host_port(seat.bootstrap)[1] for seat in prefills],
            clock=site.clock,
            client=WireClient(site.wire, self.process),
            rng=random.Random(site.rng.getrandbits(64)),
            limits=RouterLimits(
                max_in_flight=40,
                request_timeout_s=10.0,
                grace_s=GRACE_S,
                cancel_max_s=1.0,
                cancel_unknown_s=4.0,
                on_prefill_loss=site.plan.options.on_prefill_loss,
                max_results=8,
                result_ttl_s=2.0,
            ),
            probe_interval_s=PROBE_S,
        )
        app = site.parts.wrap_app(made, "router")
        site.wire.listen(ROUTER, self.process, app)
        site.loop.create_task(run_app(app))


class Cluster:
    """Everything of one world that lives. ``instances`` in the order of their names."""

    def __init__(self, site: Site) -> None:
        self.site = site
        seats = make_seats(site)
        self.instances = {seat.name: SimInstance(site, seat, self._on_stepped) for seat in seats}
        self.router = SimRouter(site, seats)
        self.client = Process("client")
        #: Ranks whose memory may still be written, by process life.
        self.lives: dict[Incarnation, SimRank] = {}
        self._net_call: asyncio.TimerHandle | None = None
        self._fabric_call: asyncio.TimerHandle | None = None
        #: Writes are slower by this factor while a fault says so.
        self.slowness = 1.0
        #: When late writes go on, by sender and handle.
        self._late: dict[tuple[Incarnation, int], float] = {}
        #: Called with every write that moved or landed, before anybody else can run.
        self.on_write: Callable[[Action], None] = _unwatched
        #: Instances whose next write is their last, by fault: see "crash_writer".
        self.ambushes: dict[int, str] = {}

    def start(self) -> None:
        for instance in self.instances.values():
            instance.start()
        self.router.start()

    def rank(self, name: str) -> SimRank | None:
        """The first worker of an instance; None while it is down."""
        return self.instances[name].rank

    def ranks(self) -> list[SimRank]:
        """Workers that live."""
        return [rank for instance in self.instances.values() for rank in instance.ranks]

    def processes(self) -> list[Process]:
        """Every process there ever was, the client's last."""
        found = [*self.router.graves, self.router.process]
        for instance in self.instances.values():
            found += instance.graves
            if instance.leader is not None:
                found.append(instance.leader.process)
            found += [rank.process for rank in instance.ranks]
        return [*dict.fromkeys(found), self.client]

    # --- networks -------------------------------------------------------------------------

    def _on_stepped(self, rank: SimRank) -> None:
        self.lives[rank.incarnation] = rank
        self.arm_network()
        call = self._fabric_call
        if call is not None and call.when() > self.site.loop.now_s + MAX_STEP_S * self.slowness:
            call.cancel()  # it waits for a late write only
            call = self._fabric_call = None
        if call is None and self.site.fabric.choices():
            self._arm_fabric()

    def arm_network(self) -> None:
        """Wake up when the next frame arrives."""
        due_s = self.site.network.next_due_s()
        if due_s is None:
            return
        call = self._net_call
        if call is not None:
            if call.when() <= due_s:
                return
            call.cancel()
        self._net_call = self.site.loop.call_at(due_s, self._deliver, context=self.site.context)

    def _deliver(self) -> None:
        self._net_call = None
        self.site.network.deliver_due()
        for instance in self.instances.values():
            for rank in instance.ranks:
                if rank.channel.has_frames:
                    self.site.trace("frames", rank.process.name)
                    rank.wake()
        self.arm_network()

    def _arm_fabric(self) -> None:
        delay_s = self.slowness * self.site.rng.random() * MAX_STEP_S
        self._fabric_call = self.site.later(delay_s, self._move)

    def _move(self) -> None:
        """One chunk of one transfer moves; whoever may care looks."""
        self._fabric_call = None
        fabric, now_s = self.site.fabric, self.site.loop.now_s
        may_move: list[Choice] = []
        first_s = float("inf")
        for choice in fabric.choices():
            due_s = self._lands_s(choice[0]) if choice[0].kind == "land" else now_s
            if due_s <= now_s:
                may_move.append(choice)
            elif due_s < first_s:
                first_s = due_s
        if may_move:
            self._tell(fabric.do(self.site.rng.choice(may_move)))
            self._arm_fabric()
        elif first_s < float("inf"):
            self._fabric_call = self.site.later(first_s - now_s, self._move)

    def _lands_s(self, action: Action) -> float:
        """When a write that outlived its handle may go on landing: at once, or much later."""
        key = action.sender, action.handle
        due_s = self._late.get(key)
        if due_s is None:
            rng, writer = self.site.rng, self.lives.get(action.sender)
            is_dead = writer is not None and writer.process.is_dead
            has_period = self.site.plan.options.revocation is Revocation.QUARANTINE
            longest_s = MAX_DEAD_S if has_period and is_dead else MAX_LATE_S
            delay_s = rng.random() * longest_s if rng.random() < 0.7 else 0.0
            due_s = self._late[key] = self.site.loop.now_s + delay_s
        return due_s

    def _tell(self, action: Action) -> None:
        self.site.trace(action.kind, f"{action.handle} {action.receiver.hex()[:8]}")
        if action.kind == "land":
            # The control: checks that no late write hurts say nothing where none comes.
            writer = self.lives.get(action.sender)
            is_dead = writer is not None and writer.process.is_dead
            self.site.faults["write_of_the_dead" if is_dead else "write_too_late"] += 1
        self.on_write(action)
        self._strike(action)
        for incarnation in (action.sender, action.receiver):
            rank = self.lives.get(incarnation)
            if rank is not None and rank.transport.has_events and not rank.process.is_dead:
                rank.wake()

    def _strike(self, action: Action) -> None:
        """Kill who writes, if it is waited for and not done with this write."""
        writer = self.lives.get(action.sender)
        if not self.ambushes or writer is None or action.kind != "move":
            return
        waiting = [number for number, name in self.ambushes.items() if name == writer.seat.name]
        if waiting and action in self.site.fabric.pending():
            del self.ambushes[waiting[0]]
            self.site.faults["writer_killed"] += 1
            self.instances[writer.seat.name].kill_worker(late=True, in_write=writer)


def make_seats(site: Site) -> list[Seat]:
    prefills, decodes = names(site.plan.options)
    options = site.plan.options
    seats = []
    for i, name in enumerate(prefills):
        http, bootstrap = f"{HOST}:{8100 + i}", f"{HOST}:{8300 + i}"
        blocks, tp_size = options.prefill_blocks, options.prefill_tp
        seats.append(Seat(name, Role.PREFILL, http, bootstrap, blocks, tp_size))
    for i, name in enumerate(decodes):
        blocks, tp_size = options.decode_blocks, options.decode_tp
        seats.append(Seat(name, Role.DECODE, f"{HOST}:{8200 + i}", "", blocks, tp_size))
    return seats


def _unwatched(action: Action) -> None:
    """Nobody checks writes."""
