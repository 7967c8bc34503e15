"""One worker process of a simulated instance: the product's worker, stepped by virtual time.

Its loop sleeps as the real one does, until its next deadline or until an input wakes it; a
step of the engine keeps it busy for what the step costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from pdcore.assembly import WorkerOptions, build_worker
from pdcore.control.bootstrap_client import BootstrapClient, CallReply, Registrar
from pdcore.control.codec import decode_leader_message
from pdcore.control.memory import MemoryChannel
from pdcore.control.messages import WorkerMessage, WorkerReady
from pdcore.kv.plan import WriteBatch
from pdcore.local import LocalPort
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.prefill import PrefillCore
from pdcore.scheduler.route import registration_of
from pdcore.server.routes import RouteFetcher
from pdcore.sim.blocking import Registering, ReplayedHttp, SimBackground
from pdcore.sim.group_links import GroupLinks
from pdcore.sim.loop import Process
from pdcore.sim.site import QUARANTINE_S, Site, model_of
from pdcore.sim.wire import WireClient
from pdcore.topology import ParallelLayout
from pdcore.transports.base import PeerSession, RemoteLease, Revocation
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import Incarnation, LeaseId, Role
from pdcore.worker import Worker

#: What an iteration of the loop takes besides the engine, and how soon one follows an input,
#: in seconds. What else arrives until then is taken with it.
STEP_S: Final = 0.0001
WAKE_S: Final = 0.0002
#: Of a registration, and what changes it needs.
LEASE_S: Final = 6.0
TOKEN: Final = "token"


@attrs.frozen
class Seat:
    """Where an instance stands, also when it starts again. ``http`` and ``bootstrap`` are
    ``host:port``; the second is empty for decode."""

    name: str
    role: Role
    http: str
    bootstrap: str
    num_blocks: int
    #: Tensor parallel ranks, one worker each.
    tp_size: int = 1

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(self.tp_size, self.tp_size)


class SimChannel:
    """A memory channel under an address as routes spell it."""

    def __init__(self, channel: MemoryChannel, name: str) -> None:
        self._channel = channel
        self.memory_address = channel.address
        self.address = f"tcp://{name}:1"

    @property
    def has_frames(self) -> bool:
        return bool(self._channel.inbox)

    def send(self, to: str, frame: bytes) -> bool:
        return self._channel.send("mem://" + to.removeprefix("tcp://").removesuffix(":1"), frame)

    def receive(self, limit: int = 256) -> list[bytes]:
        return self._channel.receive(limit)

    def fileno(self) -> int | None:
        return None

    def forget(self, to: str) -> None:
        """Frames on their way may still arrive, as with a connection that is closed late."""

    def close(self) -> None:
        self._channel.close()


class SimTransport(LoopbackTransport):
    """Loopback that remembers under which lease each of its handles writes."""

    def __init__(
        self,
        incarnation: Incarnation,
        fabric: LoopbackFabric,
        *,
        revocation: Revocation,
        address: str,
    ) -> None:
        super().__init__(incarnation, fabric, revocation=revocation, address=address)
        self.leases: dict[int, LeaseId] = {}
        if revocation is Revocation.QUARANTINE:
            self.caps = attrs.evolve(self.caps, quarantine_s=QUARANTINE_S)

    @property
    def has_events(self) -> bool:
        return bool(self._endpoint.events)

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        handle = super().submit(session, batches, lease, notify)
        self.leases[handle] = lease.lease
        return handle


@attrs.define(eq=False)
class _Pace:
    """When the loop runs next (``call``, at ``due_s``), until when the engine is at work, and
    how long the loop asked to sleep (-1: it did not)."""

    call: asyncio.TimerHandle | None = None
    due_s: float = 0.0
    busy_until_s: float = 0.0
    sleep_s: float = 0.0


class SimRank:
    """One life of a worker. Built in its process; ``announce`` is its last step. ``index``: its
    rank in the instance, which is one group; ``links`` are those of its life."""

    def __init__(
        self,
        site: Site,
        seat: Seat,
        process: Process,
        to_leader: Callable[[WorkerMessage], None],
        on_stepped: Callable[[SimRank], None],
        index: int,
        links: GroupLinks,
    ) -> None:
        self.site = site
        self.seat = seat
        self.process = process
        self.incarnation = Incarnation(site.rng.randbytes(16))
        is_fixed = site.plan.options.same_address
        place = seat.name if index == 0 else f"{seat.name}r{index}"
        name = place if is_fixed else f"{place}-{self.incarnation.hex()[:6]}"
        self.channel = SimChannel(site.network.channel(name), name)
        self._http = ReplayedHttp(WireClient(site.wire, process))
        self._on_stepped = on_stepped
        self._pace = _Pace()
        self.has_ended = False
        self.port = LocalPort(to_leader)
        revocation = site.plan.options.revocation
        self.transport = SimTransport(
            self.incarnation, site.fabric, revocation=revocation, address=name
        )
        if site.plan.options.late_writes:
            site.fabric.faults(self.incarnation).late_landing = True
        self.worker = self._build(index, links)

    @property
    def core(self) -> PrefillCore | DecodeCore:
        core = self.worker.core
        assert isinstance(core, PrefillCore | DecodeCore)
        return core

    @property
    def index(self) -> int:
        """Its rank in the instance."""
        return self.worker.core.setup.me.rank

    # --- life -----------------------------------------------------------------------------

    def announce(self) -> None:
        """Register (prefill), then tell the leader, in the product's order (D34)."""
        self.site.loop.create_task(self._announce(), context=self.process.context)
        self.wake()

    async def _announce(self) -> None:
        worker, setup = self.worker, self.worker.core.setup
        registering: Registering | None = None
        if self.seat.bootstrap:
            registrar = Registrar(
                self.seat.bootstrap,
                renew_interval_s=LEASE_S / 3,
                lease_s=LEASE_S,
                jitter=self.site.rng.random,
            )
            worker.problems = lambda: registrar.problems(self.site.clock.monotonic())
            client = BootstrapClient(self.site.clock, token=TOKEN, http=self._http)
            wanted = registration_of(setup)

            def register() -> CallReply:
                return client.register(self.seat.bootstrap, wanted)

            registering = Registering(registrar, self._http, register, self.site.loop)
            await registering.call_if_due()
        self.port.send(worker.health())
        self.port.send(
            WorkerReady(
                rank=self.index,
                dp_rank=0,
                incarnation=setup.me.incarnation,
                control_address=self.channel.address,
                max_model_len=setup.max_model_len,
                max_prefill_tokens=setup.limits.max_prefill_tokens,
                vocab_size=worker.runner.vocab_size,
                num_blocks=setup.placement.num_blocks,
                transport=setup.transport,
            )
        )
        if registering is not None:
            await registering.run()

    def receive(self, data: bytes) -> None:
        """A message of the leader has arrived."""
        self.port.put(decode_leader_message(data))

    def wake(self) -> None:
        """An input is there: the loop's next iteration comes as soon as the engine is done."""
        due_s, busy_until_s = self.site.loop.now_s + WAKE_S, self._pace.busy_until_s
        self._arm(due_s if due_s > busy_until_s else busy_until_s)

    def close(self) -> None:
        """Its addresses are free for a successor. What it sent may still arrive."""
        self.channel.close()
        if self._pace.call is not None:
            self._pace.call.cancel()

    # --- inside ---------------------------------------------------------------------------

    def _build(self, index: int, links: GroupLinks) -> Worker:
        site, seat = self.site, self.seat
        model = model_of(site.plan.options, seat.tp_size, index)
        client = BootstrapClient(site.clock, http=self._http)
        worker = build_worker(
            site.parts.make_runner(self._compute, model),
            site.parts.wrap_transport(self.transport),
            self.channel,
            self.port,
            WorkerOptions(
                role=seat.role,
                instance=seat.http,
                num_blocks=seat.num_blocks,
                rank=index,
                layout=seat.layout,
                group=links.port(index) if seat.tp_size > 1 else None,
                limits=site.limits,
                integrity=site.plan.options.integrity,
                clock=site.clock,
                fetch_route=RouteFetcher(client),
                wait=self._sleep,
            ),
            background=SimBackground(site.loop, self._http, self.wake),
        )
        site.parts.on_worker(worker)
        return worker

    def _compute(self, seconds: float) -> None:
        self._pace.busy_until_s = self.site.loop.now_s + seconds

    def _sleep(self, timeout_s: float | None) -> None:
        self._pace.sleep_s = 1.0 if timeout_s is None else timeout_s

    def _step(self) -> None:
        pace, now_s = self._pace, self.site.loop.now_s
        pace.call = None
        pace.busy_until_s = now_s + STEP_S
        pace.sleep_s = -1.0
        has_run = self.worker.step(None)
        # A loop that neither computes nor sleeps has come to its end (D59).
        self.has_ended = not has_run and pace.sleep_s < 0.0
        if not self.has_ended:
            wakes_s = now_s + pace.sleep_s
            self._arm(wakes_s if wakes_s > pace.busy_until_s else pace.busy_until_s)
        self._on_stepped(self)

    def _arm(self, due_s: float) -> None:
        pace = self._pace
        if pace.call is not None:
            if pace.due_s <= due_s:
                return
            pace.call.cancel()
        pace.due_s = due_s
        pace.call = self.site.loop.call_at(due_s, self._step, context=self.process.context)
