"""A small world in one process: prefill and decode workers, real cores and real bytes.

Everything is the product's own code except time (a manual clock), the control network (in
memory, with planned faults) and the engine (simulated, whose KV proves itself). Nothing
sleeps: when nobody has anything to do, the clock jumps to the next moment something is due.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import attrs

from pdcore.assembly import WorkerOptions, build_worker
from pdcore.background import FailedCall
from pdcore.clock import ManualClock
from pdcore.config import CoreLimits
from pdcore.control.codec import pack_token_ids
from pdcore.control.memory import FaultPlan, MemoryChannel, MemoryNetwork
from pdcore.control.messages import (
    Abort,
    Finished,
    Submit,
    SubmitSampling,
    Tokens,
    WorkerMessage,
)
from pdcore.engine.base import Allocate
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner
from pdcore.errors import failure
from pdcore.fsm.events import Event, TopologyFetched
from pdcore.kv.spec import KVPlacement
from pdcore.local import LocalPort
from pdcore.scheduler.route import route_of
from pdcore.transports.base import Revocation, Transport
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import NO_CHECKSUMS, Incarnation, Role, RoomKey, SamplingParams
from pdcore.worker import Worker

#: ``make(incarnation, name)``: the transport of a rank's next process life.
MakeTransport = Callable[[Incarnation, str], Transport]


class TcpNamed:
    """A memory channel under a ``tcp://name:1`` address, as routes spell addresses."""

    def __init__(self, channel: MemoryChannel, name: str) -> None:
        self._channel = channel
        self.address = f"tcp://{name}:1"

    def send(self, to: str, frame: bytes) -> bool:
        return self._channel.send("mem://" + to.removeprefix("tcp://").removesuffix(":1"), frame)

    def receive(self, limit: int = 256) -> list[bytes]:
        return self._channel.receive(limit)

    def fileno(self) -> int | None:
        return None

    def forget(self, to: str) -> None:
        return None

    def close(self) -> None:
        self._channel.close()


@attrs.frozen
class RankOptions:
    """What a rank is built from, also when it starts again."""

    role: Role
    num_blocks: int
    limits: CoreLimits
    make_transport: MakeTransport
    #: Tokens per block where it is not the model's.
    block_size: int | None = None
    integrity: str = NO_CHECKSUMS


@attrs.define(eq=False)
class Rank:
    """One worker of the world and everything it told its leader."""

    options: RankOptions
    worker: Worker
    port: LocalPort
    said: list[WorkerMessage]
    #: Its KV memory by region id, as peers write it.
    memory: dict[int, memoryview] = attrs.field(factory=dict, repr=False)

    def result(self, key: RoomKey) -> Finished | None:
        return next((m for m in self.said if isinstance(m, Finished) and m.key == key), None)

    def tokens(self, key: RoomKey) -> list[int]:
        """All output tokens of a room, in order of arrival."""
        spoken = [
            ids
            for m in self.said
            if isinstance(m, Tokens)
            for k, ids in zip(m.keys, m.token_ids, strict=True)
            if k == key
        ]
        return list(itertools.chain.from_iterable(spoken))


@attrs.define(eq=False)
class World:
    """Build with :func:`make_world`; ``submit``, ``run``, look."""

    clock: ManualClock
    network: MemoryNetwork
    fabric: LoopbackFabric
    model: SimulatedConfig
    ranks: dict[str, Rank]
    rng: random.Random
    timeout_s: float = 60.0
    is_manual: bool = False

    @property
    def prefill(self) -> Rank:
        return self.ranks["prefill"]

    @property
    def decode(self) -> Rank:
        return self.ranks["decode"]

    def submit(
        self,
        prompt: Sequence[int],
        *,
        key: RoomKey | None = None,
        to: Sequence[str] = ("prefill", "decode"),
        sampling: SamplingParams | None = None,
        timeout_s: float | None = None,
    ) -> RoomKey:
        """Dispatch to both legs at once, as the router does."""
        key = key or RoomKey(self.rng.getrandbits(62) + 1, self.rng.getrandbits(62) + 1)
        remaining_s = self.timeout_s if timeout_s is None else timeout_s
        message = Submit(
            key=key,
            request_id=f"r{key.room}",
            prompt=pack_token_ids(prompt),
            sampling=SubmitSampling(**attrs.asdict(sampling or SamplingParams(max_tokens=8))),
            expires_at_s=self.clock.unix() + remaining_s,
            remaining_s=remaining_s,
            bootstrap="bootstrap:1",
            prefill="prefill",
            decode="decode",
            prefill_dp_rank=0,
            replaces=None,
        )
        for name in to:
            self.ranks[name].port.put(message)
        return key

    def abort(self, key: RoomKey, *, at: str = "decode", unless_received: bool = False) -> None:
        self.ranks[at].port.put(Abort(key, "the client is gone", unless_received))

    def restart(self, name: str, *, late: bool = False) -> Rank:
        """The process of this rank is killed and another one starts in its place: same
        addresses, another incarnation, nothing remembered. ``late``: what it had posted
        still lands. Frames it had sent still arrive. Returns the former life."""
        former = self.ranks[name]
        former.worker.ports.channel.close()
        self.fabric.die(former.worker.core.setup.me.incarnation, late=late)
        self.ranks[name] = _make_rank(self, former.options)
        return former

    def step(self) -> bool:
        """One loop iteration of every worker; deliver what is due. True when an engine ran."""
        if not self.is_manual:
            self.network.deliver_due()
        worked = [rank.worker.step(0.0) for rank in self.ranks.values()]
        return any(worked)

    def run(self, until: Callable[[], bool], *, max_steps: int = 20_000) -> None:
        """Step, and jump the clock over idle time, until the condition holds.

        Raises AssertionError with every core's state when it does not come true."""
        for _ in range(max_steps):
            worked = self.step()
            if until():
                return
            if not worked:
                self.jump()
        states = "\n".join(f"{n}: {r.worker.core.snapshot()}" for n, r in self.ranks.items())
        raise AssertionError(f"the condition did not come true in {max_steps} steps\n{states}")

    def run_request(
        self, prompt: Sequence[int], sampling: SamplingParams | None = None
    ) -> list[int]:
        """Submit, run to the end, return the tokens. Raises AssertionError on failure."""
        key = self.submit(prompt, sampling=sampling)
        self.run(lambda: self.decode.result(key) is not None)
        result = self.decode.result(key)
        assert result is not None
        assert result.failure is None, result
        return self.decode.tokens(key)

    def settle(self) -> None:
        """Run until no rank holds a room that can still touch a block."""
        self.run(lambda: not any(r.worker.core.live_keys() for r in self.ranks.values()))

    def jump(self) -> None:
        """To the next moment anything is due, a millisecond at least every idle step."""
        now = self.clock.monotonic()
        due = [r.worker.core.poll_deadline() for r in self.ranks.values()]
        due.append(self.network.next_due_s())
        if any(r.worker.core.wants_tick for r in self.ranks.values()):
            return
        moments = [moment for moment in due if moment is not None and moment > now]
        wait_s = min(moments, default=now + 0.001) - now
        self.clock.advance(min(max(wait_s, 1e-6), 0.05))


def make_world(
    *,
    model: SimulatedConfig | None = None,
    limits: CoreLimits | None = None,
    num_blocks: int = 128,
    prefill_blocks: int | None = None,
    faults: FaultPlan | None = None,
    seed: int = 0,
    stepped: bool = False,
    manual: bool = False,
    revocation: Revocation = Revocation.SENDER_ACK,
    transport: MakeTransport | None = None,
    decode_block_size: int | None = None,
    integrity: str = NO_CHECKSUMS,
) -> World:
    """One prefill and one decode rank over loopback. ``stepped`` leaves the fabric to the
    caller (``world.fabric.step``), so that writes land when the test says so; ``manual``
    leaves it every control frame (``world.network.deliver``, ``drop``, ``duplicate``).
    ``transport``: what moves KV instead of loopback; nothing then steps the fabric.
    ``decode_block_size``: tokens per block of decode, where they are not prefill's.
    ``integrity``: of both; ``fabric.faults(...).corrupt_next`` is what it is for."""
    clock = ManualClock(start_s=1000.0)
    network = MemoryNetwork(clock, faults, seed=seed, manual=manual)
    fabric = LoopbackFabric(stepped=stepped)
    rng = random.Random(seed)
    config = model or SimulatedConfig(block_size=4, max_model_len=512, verify_all=True)
    world = World(clock, network, fabric, config, {}, rng, is_manual=manual)

    def loopback(incarnation: Incarnation, name: str) -> Transport:
        return LoopbackTransport(incarnation, fabric, revocation=revocation, address=name)

    for role in (Role.PREFILL, Role.DECODE):
        blocks = prefill_blocks if role is Role.PREFILL and prefill_blocks else num_blocks
        size = decode_block_size if role is Role.DECODE and decode_block_size else None
        make = transport or loopback
        options = RankOptions(role, blocks, limits or CoreLimits(), make, size, integrity)
        world.ranks[role.value] = _make_rank(world, options)
    return world


def _make_rank(world: World, options: RankOptions) -> Rank:
    said: list[WorkerMessage] = []
    port = LocalPort(said.append)
    name = options.role.value
    incarnation = Incarnation(world.rng.randbytes(16))
    memory: dict[int, memoryview] = {}
    size = options.block_size or world.model.block_size
    worker = build_worker(
        _WatchedRunner(attrs.evolve(world.model, block_size=size), memory),
        options.make_transport(incarnation, name),
        TcpNamed(world.network.channel(name), name),
        port,
        WorkerOptions(
            role=options.role,
            instance=name,
            num_blocks=options.num_blocks,
            limits=options.limits,
            integrity=options.integrity,
            clock=world.clock,
            fetch_route=lambda bootstrap: _route_of(world, bootstrap),
            wait=lambda timeout_s: None,
        ),
        background=InlineBackground(),
    )
    return Rank(options, worker, port, said, memory)


class _WatchedRunner(SimulatedRunner):
    """Tells where its cache lies."""

    def __init__(self, config: SimulatedConfig, memory: dict[int, memoryview]) -> None:
        super().__init__(config)
        self._memory = memory

    def initialize_cache(self, num_blocks: int, allocate: Allocate) -> KVPlacement:
        def watched(size_bytes: int) -> tuple[int, memoryview]:
            region_id, buffer = allocate(size_bytes)
            self._memory[region_id] = buffer
            return region_id, buffer

        return super().initialize_cache(num_blocks, watched)


class InlineBackground:
    """Background calls made at once, answered at the next poll: deterministic."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def run(self, call: Callable[[], Event], failed: FailedCall) -> None:
        """An error here is the test's own and propagates."""
        self._events.append(call())

    def compute(self, call: Callable[[], Event], failed: FailedCall) -> None:
        self.run(call, failed)

    def wake(self) -> None:
        return None

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        return None


def _route_of(world: World, bootstrap: str) -> TopologyFetched:
    """What the bootstrap server of the prefill rank would answer."""
    rank = world.ranks.get("prefill")
    if rank is None:
        return TopologyFetched(bootstrap, None, failure("unreachable", "no prefill here"))
    return TopologyFetched(bootstrap, route_of([rank.worker.core.setup]))
