"""What all processes of one simulated world share: time, networks, memory, randomness."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Final

import attrs
from starlette.types import ASGIApp

from pdcore.config import CoreLimits
from pdcore.control.memory import FaultPlan, MemoryNetwork
from pdcore.engine.base import ModelRunner
from pdcore.engine.simulated import CostModel, SimulatedConfig, SimulatedRunner
from pdcore.sim.loop import SimLoop
from pdcore.sim.plan import MAX_PROMPT, VOCABULARY, Plan, WorldOptions
from pdcore.sim.wire import Wire
from pdcore.transports.base import Transport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.worker import Worker

#: Virtual time when a world begins, in seconds.
START_S: Final = 1000.0
#: What Unix time is when a world begins.
UNIX_OFFSET_S: Final = 1_800_000_000.0
#: Frames of the control network when nothing is wrong, in seconds.
CALM: Final = FaultPlan(min_delay_s=0.0002, max_delay_s=0.001)
#: One chunk of a write; a block of the simulated model has 128 bytes.
CHUNK_BYTES: Final = 256
#: Milliseconds as on a GPU: requests overlap, and nothing takes longer than a fault.
COST: Final = CostModel(
    prefill_base_s=0.006, prefill_token_s=0.0003, decode_base_s=0.008, decode_sequence_s=0.0003
)
#: The product's timers, shortened where a world would otherwise wait for nothing.
LIMITS: Final = CoreLimits(
    max_prefill_tokens=MAX_PROMPT,
    prefill_chunk_tokens=12,
    max_running=16,
    num_metadata_slots=12,
    num_reserved_decode_tokens=4,
    resend_max_s=1.0,
    topology_retry_s=0.2,
    topology_ttl_s=5.0,
    drain_timeout_s=3.0,
    linger_s=0.4,
    prefill_arrival_s=3.0,
    parked_handshake_cap=4,
    parked_handshake_ttl_s=1.0,
    # Safety depends on no memory of what is over: there is next to none here.
    tombstone_cap=4,
    tombstone_ttl_s=0.3,
    heartbeat_misses=3,
    clock_skew_s=1.0,
)
#: Of worlds whose transport has nothing better. Longer than any write takes here.
QUARANTINE_S: Final = 5.0
MODEL: Final = SimulatedConfig(
    num_layers=1,
    num_kv_heads=1,
    block_size=4,
    vocab_size=VOCABULARY,
    max_model_len=64,
    verify_all=True,
    cost=COST,
)


class SimClock:
    """Virtual time as the product asks for it."""

    def __init__(self, loop: SimLoop, skew_s: float = 0.0) -> None:
        self._loop = loop
        self._offset_s = UNIX_OFFSET_S + skew_s

    def monotonic(self) -> float:
        return self._loop.now_s

    def unix(self) -> float:
        return self._loop.now_s + self._offset_s


class Trace:
    """Everything that happened, a line each, which begins with the virtual seconds since the
    world began, as violations do."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.lines: list[str] = []

    def __call__(self, what: str, detail: str) -> None:
        self.lines.append(f"{self._loop.now_s - START_S:.6f} {what} {detail}")

    def digest(self) -> str:
        return hashlib.blake2b("".join(self.lines).encode(), digest_size=16).hexdigest()


def _simulated(sleep: Callable[[float], None], model: SimulatedConfig) -> ModelRunner:
    return SimulatedRunner(model, sleep=sleep)


def model_of(options: WorldOptions, tp_size: int, tp_rank: int) -> SimulatedConfig:
    """What one rank computes: :data:`MODEL`, and where instances have several ranks its share
    of one with a head for each of them."""
    heads = max(options.prefill_tp, options.decode_tp)
    if heads == 1:
        return MODEL
    return attrs.evolve(MODEL, num_kv_heads=heads, tp_size=tp_size, tp_rank=tp_rank)


def _as_it_is(transport: Transport) -> Transport:
    return transport


def _served_as_it_is(app: ASGIApp, name: str) -> ASGIApp:
    return app


def _untouched(worker: Worker) -> None:
    """The product's own."""


@attrs.frozen
class Parts:
    """What a world is made of besides the product: somebody's own engine, transport, queue
    or server.

    ``make_runner(sleep, model)``: the engine of one worker; it calls ``sleep`` with the seconds
    that a step costs, and must give :func:`~pdcore.engine.simulated.simulated_tokens` of
    ``model``. ``wrap_transport``: around the loopback transport of one worker.
    ``on_worker``: called with every worker before it runs, to replace what is its own.
    ``wrap_app(app, name)``: what answers HTTP in place of an app of the product, around it or
    without it, each time that its process starts: ``router``, an instance by its name (``p0``,
    ``d1``), or the bootstrap server of one (``p0.bootstrap``, which has no lifespan)."""

    make_runner: Callable[[Callable[[float], None], SimulatedConfig], ModelRunner] = _simulated
    wrap_transport: Callable[[Transport], Transport] = _as_it_is
    on_worker: Callable[[Worker], object] = _untouched
    wrap_app: Callable[[ASGIApp, str], ASGIApp] = _served_as_it_is


@attrs.define(eq=False)
class Site:
    """Build with :func:`make_site`."""

    plan: Plan
    loop: SimLoop
    trace: Trace
    rng: random.Random
    wire: Wire
    network: MemoryNetwork
    fabric: LoopbackFabric
    limits: CoreLimits
    #: Of no process: what the world itself does must not stop with one.
    context: Context
    parts: Parts
    #: Faults that took place, by kind.
    faults: Counter[str] = attrs.field(factory=Counter)
    #: What must never happen and did.
    violations: list[str] = attrs.field(factory=list)

    @property
    def clock(self) -> SimClock:
        """A clock without skew."""
        return SimClock(self.loop)

    def violate(self, text: str) -> None:
        self.trace("violation", text)
        self.violations.append(f"at {self.loop.time() - START_S:.3f} s: {text}")

    def later(self, delay_s: float, function: Callable[[], object]) -> asyncio.TimerHandle:
        """The world itself does something, whichever process runs now."""
        return self.loop.call_at(self.loop.now_s + delay_s, function, context=self.context)

    def link_delay_s(self) -> float:
        return 0.0001 + self.rng.random() * 0.0005


def make_site(plan: Plan, parts: Parts | None = None) -> Site:
    rng = random.Random(f"pdcore site {plan.seed}")
    shuffle = random.Random(rng.getrandbits(64)) if plan.options.is_shuffled else None
    loop = SimLoop(shuffle, start_s=START_S)
    clock = SimClock(loop)
    trace = Trace(loop)
    wire = Wire(loop, lambda: 0.0002 + rng.random() * 0.0015, trace)
    network = MemoryNetwork(clock, CALM, seed=rng.getrandbits(64), manual=True)
    fabric = LoopbackFabric(stepped=True, chunk_bytes=CHUNK_BYTES)
    limits = attrs.evolve(LIMITS, max_queued_requests=plan.options.max_queued)
    context = copy_context()
    made_of = parts or Parts()
    return Site(plan, loop, trace, rng, wire, network, fabric, limits, context, made_of)
