"""What must hold in a simulated cluster: while it runs, and when it is at rest.

At rest means that every request has ended and nothing is wrong any more. Then nothing may be
left: no room, no block or slot that is not free, no load or cancel in the router, no task
that serves nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from pdcore.errors import OwnershipError
from pdcore.fsm.states import ReceiverState
from pdcore.scheduler.decode import DecodeCore
from pdcore.server.client import HttpError, Timeout
from pdcore.sim.cluster import ROUTER, Cluster
from pdcore.sim.rank import SimRank
from pdcore.sim.wire import WireClient
from pdcore.transports.base import Revocation
from pdcore.transports.loopback_fabric import Action

#: Tasks of a leader (its app's life), of a router (that, its probing, and the request for
#: its numbers), of a prefill worker (its registration).
MAX_IDLE_TASKS: Final = {"leader": 1, "router": 2, "worker": 1, "client": 0}


#: Blocks are kept for their writers.
_KEPT: Final = (ReceiverState.TRANSFERRING, ReceiverState.DRAINING)


class WriteWatch:
    """No write moves while the memory it goes to is not its lease's any more.

    The rank that is written to is asked in the moment of the write: the lease must belong to
    a room that still has its blocks and keeps them for its writers: a request that runs is
    written by nobody. Where the receiver enforces, it refuses the write."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        options = cluster.site.plan.options
        self._is_on = options.revocation is not Revocation.RECEIVER_ENFORCED
        self.num_writes = 0

    def __call__(self, action: Action) -> None:
        if action.kind == "deliver" or not self._is_on:
            return
        self.num_writes += 1
        receiver = self._cluster.lives.get(action.receiver)
        sender = self._cluster.lives.get(action.sender)
        if receiver is None or sender is None or receiver.process.is_dead:
            return
        lease = sender.transport.leases[action.handle]
        core = receiver.core
        assert isinstance(core, DecodeCore)
        for record in core.rooms.records.values():
            if record.receiver.lease == lease and record.seq.seq_id in core.blocks:
                if record.receiver.state in _KEPT:
                    return
                state = record.receiver.state.value
                self._cluster.site.violate(
                    f"{sender.process.name} still writes to {receiver.process.name} under lease "
                    f"{lease.counter}, which is {state}"
                )
                return
        self._cluster.site.violate(
            f"{sender.process.name} still writes to {receiver.process.name} under lease "
            f"{lease.counter}, whose blocks were given back"
        )


def unrest(cluster: Cluster) -> list[str]:
    """What is still going on or was left behind, one sentence each; empty: at rest (apart
    from the router, see :func:`router_unrest`)."""
    found: list[str] = []
    for name, instance in cluster.instances.items():
        leader = instance.leader
        if leader is None or instance.rank is None:
            found.append(f"{name} is not back")
            continue
        if leader.dispatcher.num_pending:
            found.append(f"{name}.leader waits for {leader.dispatcher.num_pending} requests")
        problems = leader.dispatcher.workers.problems()
        if problems:
            found.append(f"{name} is not ready: {problems}")
        for rank in instance.ranks:
            found += rank_unrest(rank)
        found += _tasks(f"{name}.leader", "leader", len(leader.process.tasks))
    if cluster.router.process.is_dead:
        found.append("the router is not back")
    found += _tasks("client", "client", len(cluster.client.tasks))
    if cluster.site.fabric.pending():
        found.append(f"writes are on their way: {cluster.site.fabric.pending()}")
    return found


def rank_unrest(rank: SimRank) -> Iterator[str]:
    """Rooms, blocks and slots that a worker still holds."""
    core, name = rank.core, rank.process.name
    if live := core.live_keys():
        yield f"{name} has rooms: {[core.rooms.records[key].entity for key in live]}"
    try:
        ledgers = core.blocks.audit()
    except OwnershipError as error:
        yield f"{name}: the ledger does not add up: {error}"
        return
    for key, ledger in ledgers.items():
        if ledger.free != ledger.total:
            yield f"{name}: blocks of {key} are not free: {ledger}"
    if isinstance(core, DecodeCore):
        slots = core.rooms.slots
        if slots.available != slots.capacity:
            yield f"{name}: metadata slots are not free: {slots}"
    yield from _tasks(name, "worker", len(rank.process.tasks))


async def not_ready(cluster: Cluster) -> bool:
    """Whether any instance, or what the router knows of it, is still coming back, or what a
    proxy repeated still waits there for its end, or a queue is full of what nobody waits for
    any more (its 429 is right, and not an answer of a world that serves again)."""
    try:
        stats = await _router_stats(cluster)
    except HttpError:
        return True
    if any(one.health != "Up" for one in (*stats.prefill_backends, *stats.decode_backends)):
        return True
    # Last, for nothing may come in between: the moment a stopped leader goes on, it is handed
    # all that the others had given up meanwhile.
    if cluster.client.tasks:
        return True
    limit = cluster.site.limits.max_queued_requests
    if any(len(rank.core.live_keys()) >= limit for rank in cluster.ranks()):
        return True
    for instance in cluster.instances.values():
        leader = instance.leader
        if leader is None or instance.rank is None or leader.dispatcher.workers.problems():
            return True
        if leader.dispatcher.num_pending >= limit:
            return True
    return False


class _Backend(msgspec.Struct):
    address: str
    health: str
    in_flight: int


class _RouterStats(msgspec.Struct):
    in_flight: int
    cancels: int
    prefill_backends: list[_Backend]
    decode_backends: list[_Backend]


async def router_unrest(cluster: Cluster) -> list[str]:
    """What the router still counts, by its own GET /stats."""
    try:
        stats = await _router_stats(cluster)
    except HttpError as error:
        return [f"the router does not tell its numbers: {error}"]
    found = []
    if stats.in_flight or stats.cancels:
        found.append(f"the router has {stats.in_flight} requests and {stats.cancels} cancels")
    found += [
        f"the router counts {one.in_flight} requests at {one.address}"
        for one in (*stats.prefill_backends, *stats.decode_backends)
        if one.in_flight
    ]
    found += _tasks("router", "router", len(cluster.router.process.tasks))
    return found


async def _router_stats(cluster: Cluster) -> _RouterStats:
    """Raises HttpError."""
    client = WireClient(cluster.site.wire, cluster.client)
    response = await client.request("GET", ROUTER, "/stats", timeout=Timeout(1.0, None, 2.0))
    return msgspec.json.decode(await response.read(), type=_RouterStats)


def _tasks(name: str, kind: str, count: int) -> Iterator[str]:
    if count > MAX_IDLE_TASKS[kind]:
        yield f"{name} runs {count} tasks, at most {MAX_IDLE_TASKS[kind]} when idle"
