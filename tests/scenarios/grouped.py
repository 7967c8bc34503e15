"""A prefill and a decode instance of several ranks each, in one process: groups that play rounds.

:func:`pdcore.testing.world.make_world` with more ranks. Also context parallel groups and stages
of a pipeline, which no server starts yet: the cores under them are the product's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from pdcore.assembly import WorkerOptions, build_worker
from pdcore.clock import ManualClock
from pdcore.config import CoreLimits
from pdcore.control.memory import MemoryNetwork
from pdcore.control.messages import WorkerMessage
from pdcore.engine.base import Allocate
from pdcore.engine.shadow import WORD_BYTES, ShadowCache
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner
from pdcore.fsm.events import TopologyFetched
from pdcore.kv.plan import WriteBatch
from pdcore.kv.spec import KVCacheSpec, KVPlacement
from pdcore.local import LocalPort
from pdcore.scheduler.route import route_of
from pdcore.testing.world import InlineBackground, Rank, RankOptions, TcpNamed, World
from pdcore.topology import ParallelLayout
from pdcore.transports.base import PeerSession, RemoteLease
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import NO_CHECKSUMS, Incarnation, Role

NUM_BLOCKS = 64
#: What a rank's cache consists of, from what it would be: other kinds of entries, or a stage's.
MakeSpec = Callable[[KVCacheSpec, ParallelLayout, int], KVCacheSpec]


def as_computed(spec: KVCacheSpec, layout: ParallelLayout, rank: int) -> KVCacheSpec:
    return spec


class Links:
    """Between the ranks of one group: ordered, nothing is lost."""

    def __init__(self, size: int) -> None:
        self.inboxes: list[list[tuple[int, bytes]]] = [[] for _ in range(size)]


class LinkPort:
    """One rank's end (:class:`pdcore.group_worker.GroupPort`)."""

    def __init__(self, links: Links, index: int) -> None:
        self._links = links
        self._index = index

    def send(self, rank: int, data: bytes) -> None:
        self._links.inboxes[rank].append((self._index, data))

    def receive(self) -> list[tuple[int, bytes]]:
        taken, self._links.inboxes[self._index] = self._links.inboxes[self._index], []
        return taken

    def close(self) -> None:
        return None


class WatchedTransport(LoopbackTransport):
    """Remembers what this rank wrote."""

    def __init__(self, incarnation: Incarnation, fabric: LoopbackFabric, name: str) -> None:
        super().__init__(incarnation, fabric, address=name)
        #: Decode rank -> what was written there.
        self.written: dict[Incarnation, list[WriteBatch]] = {}

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        self.written.setdefault(session.incarnation, []).extend(batches)
        return super().submit(session, batches, lease, notify)

    def times_written(self, to: Incarnation, size: int) -> NDArray[np.int64]:
        """How often each byte of that rank's cache, one region, was written by this one."""
        times = np.zeros(size, np.int64)
        for batch in self.written.get(to, ()):
            for _, remote, count in batch.pieces():
                times[remote : remote + count] += 1
        return times


class SpecRunner(SimulatedRunner):
    """A simulated runner whose cache may consist of other entries, in memory that is shown."""

    def __init__(
        self, config: SimulatedConfig, spec: KVCacheSpec, memory: dict[int, memoryview]
    ) -> None:
        super().__init__(config)
        self.kv_cache_spec = spec
        self._memory = memory

    def initialize_cache(self, num_blocks: int, allocate: Allocate) -> KVPlacement:
        def watched(size_bytes: int) -> tuple[int, memoryview]:
            region_id, buffer = allocate(size_bytes)
            self._memory[region_id] = buffer
            return region_id, buffer

        placement = super().initialize_cache(num_blocks, watched)
        if self.kv_cache_spec.model_digest:
            self._be_of_stage()
        return placement

    def _be_of_stage(self) -> None:
        """What a layer holds does not depend on where its stage begins: the constants of the
        whole model's entries, cut to ours."""
        whole = self.config.spec()
        names = [entry.name for entry in whole.entries]
        first = names.index(self.kv_cache_spec.entries[0].name)
        heads, words = whole.entries[0].num_heads, self.config.head_dim // WORD_BYTES
        model = ShadowCache(
            memoryview(b""),
            entries=len(names),
            block_size=self.config.block_size,
            words=words,
            heads=heads,
            first_head=self.config.tp_rank * self.config.num_kv_heads // self.config.tp_size,
            all_heads=self.config.num_kv_heads,
        )
        assert self._cache is not None
        self._cache._salt = model._salt[first : first + len(self.kv_cache_spec.entries)]
        self._cache._first_salt = int(self._cache._salt[0, 0, 0])


@attrs.define(eq=False)
class GroupedWorld(World):
    """Submit to ``prefill`` and ``decode``, the first ranks of the two instances: the others
    hear of it in the next round. Ranks of an instance are ``prefill``, ``prefill1``, ..."""

    transports: dict[str, WatchedTransport] = attrs.field(factory=dict)

    def instance(self, role: Role) -> list[str]:
        return [name for name in self.ranks if name.startswith(role.value)]


def make_grouped_world(
    prefill: ParallelLayout,
    decode: ParallelLayout,
    *,
    model: SimulatedConfig | None = None,
    make_spec: MakeSpec = as_computed,
    limits: CoreLimits | None = None,
    integrity: str = NO_CHECKSUMS,
    timeout_s: float = 20.0,
) -> GroupedWorld:
    """Every position is verified by the decode rank that builds on it."""
    clock, rng = ManualClock(start_s=1000.0), random.Random(1)
    network, fabric = MemoryNetwork(clock), LoopbackFabric()
    model = model or SimulatedConfig(block_size=4, max_model_len=512, verify_all=True)
    world = GroupedWorld(clock, network, fabric, model, {}, rng, timeout_s=timeout_s)

    def make_transport(incarnation: Incarnation, name: str) -> WatchedTransport:
        return WatchedTransport(incarnation, fabric, name)

    for role, layout in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        groups = [Links(layout.group_size) for _ in range(layout.world_size // layout.group_size)]
        options = RankOptions(
            role, NUM_BLOCKS, limits or CoreLimits(), make_transport, integrity=integrity
        )
        for rank in range(layout.world_size):
            group, place = divmod(rank, layout.group_size)
            port = LinkPort(groups[group], place) if layout.group_size > 1 else None
            _add_rank(world, options, layout, rank, port, make_spec)
    return world


def _add_rank(
    world: GroupedWorld,
    options: RankOptions,
    layout: ParallelLayout,
    rank: int,
    group: LinkPort | None,
    make_spec: MakeSpec,
) -> None:
    name = options.role.value + (str(rank) if rank else "")
    incarnation = Incarnation(world.rng.randbytes(16))
    transport = options.make_transport(incarnation, name)
    assert isinstance(transport, WatchedTransport)
    said: list[WorkerMessage] = []
    memory: dict[int, memoryview] = {}
    port = LocalPort(said.append)
    config = attrs.evolve(world.model, tp_size=layout.tp_size, tp_rank=layout.coordinates(rank).tp)
    worker = build_worker(
        SpecRunner(config, make_spec(config.spec(), layout, rank), memory),
        transport,
        TcpNamed(world.network.channel(name), name),
        port,
        WorkerOptions(
            role=options.role,
            instance=options.role.value,
            num_blocks=options.num_blocks,
            rank=rank,
            layout=layout,
            group=group,
            limits=options.limits,
            integrity=options.integrity,
            clock=world.clock,
            fetch_route=lambda bootstrap: TopologyFetched(
                bootstrap,
                route_of([world.ranks[n].worker.core.setup for n in world.instance(Role.PREFILL)]),
            ),
            wait=lambda timeout_s: None,
        ),
        background=InlineBackground(),
    )
    world.transports[name] = transport
    world.ranks[name] = Rank(options, worker, port, said, memory)
