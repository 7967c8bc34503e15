"""What goes wrong in a simulated world: each kind of fault, carried out on the cluster.

A fault begins at its time and, where it lasts, is undone after its duration. Nothing is
damaged silently: frames and connections are lost, late, repeated or out of order, processes
die, stand still or come back, memory and queues run full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import attrs

from pdcore.control.bootstrap_client import split_host_port
from pdcore.control.memory import FaultPlan
from pdcore.server.client import HttpError, Origin, Timeout
from pdcore.sim.cluster import Cluster
from pdcore.sim.plan import Fault
from pdcore.sim.site import CALM
from pdcore.sim.wire import WireClient

Undo = Callable[[], None]

#: An isolated prefill instance is not heard for so long before it hears nobody either.
UNHEARD_S: Final = 0.1
#: What was sent longer ago has arrived, unless it is held back.
ON_ITS_WAY_S: Final = 0.05


class Faults:
    """Carries out the faults of one plan."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        #: (from, until) in virtual time: processes or networks stand still.
        self._stands: list[tuple[float, float]] = []
        self._undo: dict[int, Undo] = {}

    def begin(self, fault: Fault) -> None:
        """Raises KeyError for a kind that does not exist."""
        site = self.cluster.site
        site.trace("fault", f"{fault.kind} {fault.target} {fault.duration_s:.3f}")
        site.faults[fault.kind] += 1
        if fault.kind in STANDING_STILL:
            now_s = site.loop.time()
            self._stands.append((now_s, now_s + fault.duration_s))
        undo = KINDS[fault.kind](self.cluster, fault)
        if undo is not None:
            self._undo[fault.number] = undo
            site.later(fault.duration_s, partial(self._end, fault.number))

    def stood_still_s(self, from_s: float, until_s: float) -> float:
        """How much later an answer may be that was asked for and came at these times: for as
        long as something stood still meanwhile."""
        overlaps = (min(until_s, b) - max(from_s, a) for a, b in self._stands)
        return sum(max(0.0, overlap) for overlap in overlaps)

    def calm(self) -> None:
        """Undo what still lasts, or still waits for its moment."""
        for number in list(self._undo):
            self._end(number)
        for rank in self.cluster.ranks():
            faults = self.cluster.site.fabric.faults(rank.incarnation)
            faults.fail_after_chunks, faults.corrupt_next = None, False

    def _end(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            self.cluster.site.trace("undo", str(number))
            undo()


# --- networks ------------------------------------------------------------------------------


def _frames(
    change: Callable[[FaultPlan, float], FaultPlan], cluster: Cluster, fault: Fault
) -> Undo:
    network = cluster.site.network
    network.faults = change(network.faults, fault.amount)

    def undo() -> None:
        network.faults = CALM

    return undo


def _drop(plan: FaultPlan, amount: float) -> FaultPlan:
    return attrs.evolve(plan, drop=0.05 + amount * 0.5)


def _duplicate(plan: FaultPlan, amount: float) -> FaultPlan:
    return attrs.evolve(plan, duplicate=0.1 + amount * 0.7)


def _reorder(plan: FaultPlan, amount: float) -> FaultPlan:
    return attrs.evolve(plan, reorder=0.1 + amount * 0.8, max_delay_s=0.02)


def _delay(plan: FaultPlan, amount: float) -> FaultPlan:
    return attrs.evolve(plan, max_delay_s=0.01 + amount * 0.6)


def _partition(cluster: Cluster, fault: Fault) -> Undo:
    """No control frame passes between two instances that live now."""
    network = cluster.site.network
    ranks = [cluster.rank(fault.target), cluster.rank(fault.other)]
    ends = [rank.channel.memory_address for rank in ranks if rank is not None]
    if len(ends) == 2:
        network.partition(*ends)

    def undo() -> None:
        network.heal()

    return undo


def _cut_http(cluster: Cluster, fault: Fault) -> Undo:
    """No HTTP between this instance and the router, or an instance of the other role."""
    wire = cluster.site.wire
    ends = ("router" if fault.amount < 0.6 else fault.other, fault.target)
    wire.cut(*ends)
    return lambda: wire.heal(*ends)


def _break_http(cluster: Cluster, fault: Fault) -> None:
    """Connections of an instance's leader are reset, some or all."""
    leader = cluster.instances[fault.target].leader
    if leader is not None:
        found = [c for c in cluster.site.wire.connections if c.server is leader.process]
        for connection in found[: 1 + int(fault.amount * len(found))]:
            connection.break_off("connection reset")


# --- processes -----------------------------------------------------------------------------


def _is_late(cluster: Cluster, fault: Fault) -> bool:
    return cluster.site.plan.options.late_writes and fault.amount < 0.7


def _crash_worker(cluster: Cluster, fault: Fault) -> None:
    cluster.instances[fault.target].kill_worker(late=_is_late(cluster, fault))


def _crash_writer(cluster: Cluster, fault: Fault) -> Undo:
    """The next worker of this instance that writes is killed between two pieces of its write,
    and the rest of it still lands. Counted as "writer_killed" when it happens."""
    cluster.ambushes[fault.number] = fault.target

    def undo() -> None:
        cluster.ambushes.pop(fault.number, None)

    return undo


def _crash_leader(cluster: Cluster, fault: Fault) -> None:
    instance = cluster.instances[fault.target]
    instance.kill_leader(late=_is_late(cluster, fault), back_after_s=fault.duration_s)


def _crash_router(cluster: Cluster, fault: Fault) -> None:
    cluster.router.kill(fault.duration_s)


def _crash_bootstrap(cluster: Cluster, fault: Fault) -> None:
    name = fault.target if fault.target.startswith("p") else fault.other
    cluster.instances[name].restart_bootstrap(fault.duration_s)


def _drain(cluster: Cluster, fault: Fault) -> None:
    cluster.instances[fault.target].drain(0.2 + fault.duration_s)


def _pause(what: str, cluster: Cluster, fault: Fault) -> Undo:
    instance = cluster.instances[fault.target]
    instance.pause(what)
    return instance.resume


def _pause_router(cluster: Cluster, fault: Fault) -> Undo:
    loop, process = cluster.site.loop, cluster.router.process
    loop.stop_process(process)
    return lambda: loop.resume_process(process)


def _abort_leg(cluster: Cluster, fault: Fault) -> None:
    """Somebody ends what an instance runs, or some of it, without telling the other."""
    leader, rank = cluster.instances[fault.target].leader, cluster.rank(fault.target)
    if leader is None or rank is None:
        return
    for key in rank.core.live_keys():
        if (key.attempt % 97) / 97 <= fault.amount:
            context = leader.process.context
            cluster.site.loop.call_soon(leader.dispatcher.abort, key, "aborted", context=context)


def _isolate(cluster: Cluster, fault: Fault) -> Undo:
    """A prefill instance is not heard, then hears nobody either. Meanwhile decode gives up
    what it waits for, forgets it, and is sent the same once more, as by a proxy that repeats
    itself; then the two hear each other again, and prefill hears of its own cancels last."""
    site = cluster.site
    name, other = sorted((fault.target, fault.other), reverse=True)  # p.., d..
    ends = [rank.channel.memory_address for n in (name, other) if (rank := cluster.rank(n))]
    if len(ends) == 2:
        site.network.partition(*ends, one_way=True)
    origin = Origin(*split_host_port(cluster.instances[other].seat.http))

    async def repeat(path: str, body: bytes) -> None:
        client = WireClient(site.wire, cluster.client)
        timeout = Timeout(1.0, None, 10.0)
        try:
            response = await client.request("POST", origin, path, body, timeout=timeout)
            await response.read()
        except HttpError:
            return  # nobody waits for it

    def give_up() -> None:
        site.wire.cut("router", name)
        if len(ends) == 2:
            site.network.partition(*ends)
        _abort_leg(cluster, attrs.evolve(fault, target=other, amount=1.0))

    def again() -> None:
        now_s = site.loop.now_s
        for sent_s, path, body in list(site.wire.posts.get(origin, ())):
            # A copy must not overtake its original: that would be refused as the copy's.
            if path != "/cancel" and now_s - sent_s > ON_ITS_WAY_S:
                site.loop.create_task(repeat(path, body), context=cluster.client.context)

    over_s = UNHEARD_S + site.limits.linger_s
    site.later(UNHEARD_S, give_up)
    site.later(over_s + 0.1, again)
    if len(ends) == 2:
        # Prefill is heard first: what it still has to say is of a room that was forgotten.
        site.later(over_s + 0.15, partial(site.network.heal, *ends))
        site.later(over_s + 0.2 + fault.amount, partial(site.network.heal, *reversed(ends)))

    def undo() -> None:
        site.network.heal()
        site.wire.heal("router", name)

    return undo


# --- memory, writes and load ---------------------------------------------------------------


def _fail_write(cluster: Cluster, fault: Fault) -> None:
    rank = cluster.rank(fault.target)
    if rank is not None:
        faults = cluster.site.fabric.faults(rank.incarnation)
        faults.fail_after_chunks = int(fault.amount * 3)


def _corrupt(cluster: Cluster, fault: Fault) -> None:
    """One byte of the next transfer of every rank arrives wrong."""
    for rank in cluster.ranks():
        faults = cluster.site.fabric.faults(rank.incarnation)
        faults.corrupt_next, faults.corrupt_byte = True, int(fault.amount * (1 << 30))


def _slow_writes(cluster: Cluster, fault: Fault) -> Undo:
    cluster.slowness = 3.0 + fault.amount * 20.0

    def undo() -> None:
        cluster.slowness = 1.0

    return undo


def _requests(cluster: Cluster, fault: Fault) -> None:
    """The plan has put many requests, or many long ones, at this moment: queues and pools
    run full."""


KINDS: Final[Mapping[str, Callable[[Cluster, Fault], Undo | None]]] = {
    "drop": partial(_frames, _drop),
    "duplicate": partial(_frames, _duplicate),
    "reorder": partial(_frames, _reorder),
    "delay": partial(_frames, _delay),
    "partition": _partition,
    "cut_http": _cut_http,
    "break_http": _break_http,
    "crash_worker": _crash_worker,
    "crash_writer": _crash_writer,
    "crash_leader": _crash_leader,
    "crash_router": _crash_router,
    "crash_bootstrap": _crash_bootstrap,
    "drain": _drain,
    "pause_worker": partial(_pause, "worker"),
    "pause_leader": partial(_pause, "leader"),
    "pause_router": _pause_router,
    "abort_leg": _abort_leg,
    "isolate": _isolate,
    "exhaust": _requests,
    "fail_write": _fail_write,
    "slow_writes": _slow_writes,
    "corrupt": _corrupt,
    "flood": _requests,
}
#: Kinds that are not drawn like the others: :func:`pdcore.sim.plan.with_corruption` asks for the
#: first, and some worlds have the second besides.
ASKED_FOR: Final = frozenset({"corrupt", "crash_writer"})
#: Kinds whose duration an answer may have to wait for.
STANDING_STILL: Final = frozenset(
    {"isolate", "partition", "cut_http", "pause_worker", "pause_leader", "pause_router"}
)
#: Kinds that only ask for more: nothing breaks.
LOAD: Final = frozenset({"flood", "exhaust"})
