"""Putting a worker together: runner + transport + channel + core, in the one right order.

Memory is registered before anything is published (D34): the runner takes its KV cache from
the transport, then the core learns where it lies, then peers can hear of this rank.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs
import numpy as np

from pdcore.background import Background, BackgroundCalls
from pdcore.clock import Clock
from pdcore.config import DEFAULT_LIMITS, CoreLimits
from pdcore.control.base import ControlChannel
from pdcore.control.zmq import Poller, ZmqChannel, ZmqSource
from pdcore.engine.base import ModelRunner
from pdcore.errors import ConfigError, failure
from pdcore.executor import Executor, FetchRoute
from pdcore.fsm.events import TopologyFetched
from pdcore.group_worker import FollowerPort, Group, GroupPort, GroupWorker
from pdcore.kv.cache import KVBlocks
from pdcore.kv.checksums import ByteArray
from pdcore.local import LocalPort
from pdcore.scheduler.consensus import Consensus, LocalConsensus
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.lockstep import HUB, Lockstep, Voting
from pdcore.scheduler.prefill import PrefillCore
from pdcore.scheduler.setup import CoreSetup
from pdcore.system_clock import SystemClock
from pdcore.topology import ParallelLayout
from pdcore.transports.base import Revocation, Transport
from pdcore.types import INTEGRITY, NO_CHECKSUMS, PeerRef, Role
from pdcore.worker import Core, LeaderPort, Ports, Worker

#: How often parts without a descriptor are looked at, in seconds.
LOOK_S: Final = 0.001


@attrs.frozen
class WorkerOptions:
    """What a worker needs besides its parts.

    ``instance`` is the leader's advertised ``host:port``; ``num_blocks`` counts KV blocks,
    the null block included. ``sources`` are the ZMQ channel and link to sleep on; empty: the
    channel, if it is one of ZMQ.
    """

    role: Role
    instance: str
    num_blocks: int
    rank: int = 0
    #: Of the instance. Where its groups have several ranks, ``group`` links this one to its own.
    layout: ParallelLayout = attrs.field(factory=lambda: ParallelLayout(1))
    group: GroupPort | None = None
    limits: CoreLimits = DEFAULT_LIMITS
    #: ``crc32``: decode asks for checksums with its KV and compares them; prefill serves only a
    #: decode that asks. ``none`` at prefill: what decode asks for.
    integrity: str = NO_CHECKSUMS
    sources: Sequence[ZmqSource] = ()
    clock: Clock = attrs.field(factory=SystemClock)
    consensus: Consensus = attrs.field(factory=LocalConsensus)
    #: Decode: how to get a route; without it every request fails as unreachable.
    fetch_route: FetchRoute | None = None
    #: Replaces sleeping in a poller: tests and simulations that step their own clock.
    wait: Callable[[float | None], object] | None = None


def build_worker(
    runner: ModelRunner,
    transport: Transport,
    channel: ControlChannel,
    leader: LeaderPort,
    options: WorkerOptions,
    *,
    background: BackgroundCalls | None = None,
) -> Worker:
    """A worker that is ready to :meth:`~pdcore.worker.Worker.run`. Nothing is published
    yet: registering with a bootstrap server is the caller's last step (D34).

    All ranks of a group must be given the same limits and ``num_blocks``: they decide alike.
    Raises ConfigError for a rank of a group without the link to it."""
    group = join_group(options)
    memory: dict[int, ByteArray] = {}
    setup = take_memory(runner, transport, channel, options, memory)
    blocks = KVBlocks(runner.kv_cache_spec, options.num_blocks, runner.max_model_len)
    core: Core
    if options.role is Role.PREFILL:
        core = PrefillCore(setup, blocks)
    else:
        core = DecodeCore(setup, blocks)
    background = background or Background()
    if isinstance(leader, LocalPort):
        leader.wake = background.wake
    port = FollowerPort(leader) if group is not None and group.lockstep.rank != HUB else leader
    executor = Executor(
        setup,
        transport,
        channel,
        port.send,
        options.consensus if group is None else group.voting,
        background,
        options.fetch_route or _no_route,
        memory,
    )
    own = (channel,) if isinstance(channel, ZmqChannel) else ()
    wait = options.wait or make_wait(
        options.sources or own, (channel.fileno(), transport.fileno(), background.fileno())
    )
    ports = Ports(transport, channel, port, wait)
    if group is None:
        return Worker(core, runner, ports, executor, background, options.clock)
    return GroupWorker(core, runner, ports, executor, background, options.clock, group)


def join_group(options: WorkerOptions) -> Group | None:
    """None for a rank that is alone. Raises ConfigError."""
    size = options.layout.group_size
    if size == 1:
        return None
    if options.group is None:
        raise ConfigError(
            f"rank {options.rank} is one of a group of {size} ranks: it needs the link to them"
        )
    first = options.layout.group_ranks(options.rank)[0]
    return Group(options.group, Lockstep(options.rank - first, size), Voting())


def take_memory(
    runner: ModelRunner,
    transport: Transport,
    channel: ControlChannel,
    options: WorkerOptions,
    memory: dict[int, ByteArray] | None = None,
) -> CoreSetup:
    """Let the runner take registered KV memory; returns what the core must know. ``memory`` is
    given what of it this process can read, by region.

    Raises ConfigError for an unknown ``integrity``, or one for memory that cannot be read."""
    readable: dict[int, ByteArray] = {} if memory is None else memory

    def allocate(size_bytes: int) -> tuple[int, memoryview]:
        region = transport.allocate(size_bytes)
        readable[region.region_id] = np.frombuffer(region.buffer, np.uint8)
        return region.region_id, region.buffer

    placement = runner.initialize_cache(options.num_blocks, allocate)
    caps = transport.caps
    is_host_memory = set(placement.regions) <= readable.keys() and "cpu" in caps.device_kinds
    _check_integrity(options.integrity, is_host_memory)
    return CoreSetup(
        me=PeerRef(options.instance, options.rank, transport.incarnation, channel.address),
        limits=options.limits,
        spec=runner.kv_cache_spec,
        placement=placement,
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        vocab_size=runner.vocab_size,
        fingerprint=runner.fingerprint,
        transport=transport.name,
        transport_descriptor=transport.descriptor(),
        quarantine_s=caps.quarantine_s if caps.revocation is Revocation.QUARANTINE else 0.0,
        layout=options.layout,
        group_size=options.layout.group_size,
        integrity=options.integrity,
        is_host_memory=is_host_memory,
    )


def _check_integrity(integrity: str, is_host_memory: bool) -> None:
    if integrity not in INTEGRITY:
        raise ConfigError(f"integrity: {integrity!r}; use one of {', '.join(INTEGRITY)}")
    if integrity != NO_CHECKSUMS and not is_host_memory:
        raise ConfigError(
            f"integrity: {integrity} needs a KV cache in memory that this process can read, and "
            f"this one is in device memory; set it to {NO_CHECKSUMS}"
        )


def make_wait(
    sources: Sequence[ZmqSource], fds: Iterable[int | None]
) -> Callable[[float | None], object]:
    """A sleep that ends when any source or descriptor is readable. ``fds`` are those of the
    channel, the transport and the background, in this order; parts without one (None) are
    looked at every millisecond."""
    known = list(fds)
    readable = [fd for fd in known if fd is not None]
    if sources:
        # A ZMQ channel's own descriptor is edge-triggered: the poller knows how to wait.
        known = known[1:]
        readable = [fd for fd in known if fd is not None]
        sleep: Callable[[float | None], object] = Poller(sources, readable).wait
    else:
        poll = select.poll()
        for fd in readable:
            poll.register(fd, select.POLLIN)

        def sleep(timeout_s: float | None) -> object:
            return poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))

    if len(readable) == len(known):
        return sleep
    return lambda timeout_s: sleep(LOOK_S if timeout_s is None else min(timeout_s, LOOK_S))


def _no_route(bootstrap: str) -> TopologyFetched:
    why = failure("unreachable", f"this worker has no way to ask {bootstrap}: set fetch_route")
    return TopologyFetched(bootstrap, None, why)
