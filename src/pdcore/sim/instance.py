"""One simulated instance: a leader process and its workers, killed and started again at will.

What the supervisor of :mod:`pdcore.server.launch` does with real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdcore.sim.group_life import any_of, spawn_group
from pdcore.sim.leader import SimLeader
from pdcore.sim.loop import Process
from pdcore.sim.rank import Seat, SimRank
from pdcore.sim.site import Site

#: A dead worker is noticed within this, and its successor serves so much later, in seconds.
NOTICED_S: Final = 0.02
RESTART_S: Final = 0.3
#: Hosts' clocks differ by up to this; the limits allow a second.
MAX_SKEW_S: Final = 0.4
#: A drained leader's last answers still leave.
LAST_ANSWERS_S: Final = 0.05


class SimInstance:
    """``start`` once; then whatever a plan does to it. ``on_stepped(rank)`` is called after
    every iteration of a worker's loop. Its workers are one group: they live and die together."""

    def __init__(self, site: Site, seat: Seat, on_stepped: Callable[[SimRank], None]) -> None:
        self.site = site
        self.seat = seat
        self.leader: SimLeader | None = None
        #: The workers that live, in order of rank.
        self.ranks: list[SimRank] = []
        #: Processes that were killed, for the end of the world.
        self.graves: list[Process] = []
        self._on_stepped = on_stepped
        self._is_draining = False
        #: It was stopped in this life: what it must do in a certain time may come later.
        self._stood_still = False
        self._skew_s = (site.rng.random() * 2 - 1) * MAX_SKEW_S

    @property
    def rank(self) -> SimRank | None:
        """The first of the workers, if all of them live."""
        return self.ranks[0] if len(self.ranks) == self.seat.tp_size else None

    def start(self) -> None:
        """A fresh leader, its bootstrap server, then its workers."""
        self.leader = SimLeader(self.site, self.seat, self._skew_s)
        self._is_draining = self._stood_still = False
        self._spawn(self.leader)

    # --- what a plan does -----------------------------------------------------------------

    def kill_worker(self, *, late: bool, in_write: SimRank | None = None) -> None:
        """SIGKILL of one of them. The supervisor notices, ends the others and starts all of
        them again, unless it is dead itself. ``in_write``: this one; whom it writes to hears of
        it behind its last byte, while a successor already has its address."""
        if self.ranks:
            rank = in_write or any_of(self.ranks, self.site)
            self._kill(rank, late=late, behind_writes=in_write is not None)

    def _kill(self, rank: SimRank, *, late: bool, behind_writes: bool = False) -> None:
        leader, group = self.leader, self.ranks
        group.remove(rank)
        _bury(self, rank.process)
        rank.close()
        if leader is not None:
            leader.link.detach(rank.index)
            self.site.loop.call_later(
                NOTICED_S,
                lambda: self._on_lost(leader, rank.index, group),
                context=leader.process.context,
            )
        self.site.fabric.die(rank.incarnation, late=late, behind_writes=behind_writes)
        self._on_stepped(rank)

    def kill_leader(self, *, late: bool, back_after_s: float) -> None:
        """SIGKILL of the leader; its workers die with it (D45), and so does its bootstrap."""
        leader, self.leader = self.leader, None
        if leader is None:
            return
        _bury(self, leader.process)
        leader.close()
        for rank in list(self.ranks):
            self._kill(rank, late=late)
        self.site.later(back_after_s, self.start)

    def restart_bootstrap(self, back_after_s: float) -> None:
        """Its registrations are gone, and for a while nobody answers there."""
        leader = self.leader
        if self.seat.bootstrap and leader is not None:
            leader.stop_bootstrap()
            self.site.loop.call_later(
                back_after_s, leader.start_bootstrap, context=leader.process.context
            )

    def drain(self, drain_s: float) -> None:
        """SIGTERM: what runs may finish (D59). The process ends when its worker has."""
        leader = self.leader
        if leader is None or self._is_draining:
            return
        self._is_draining = True
        if not self.ranks:
            self._exit(leader)  # no worker is started for it any more
            return
        context = leader.process.context
        self.site.loop.call_soon(leader.dispatcher.drain, drain_s, context=context)
        late_s = drain_s + 1.0
        self.site.loop.call_later(late_s, self._give_up, leader, context=context)

    def pause(self, what: str) -> None:
        """SIGSTOP of ``worker`` or ``leader``: a worker's writes stand still with it."""
        self._stood_still = True
        if what == "leader" and self.leader is not None:
            self.site.loop.stop_process(self.leader.process)
        elif what == "worker" and self.ranks:
            rank = any_of(self.ranks, self.site)
            self.site.loop.stop_process(rank.process)
            self.site.fabric.faults(rank.incarnation).stopped = True

    def resume(self) -> None:
        """SIGCONT of all of it."""
        if self.leader is not None:
            self.site.loop.resume_process(self.leader.process)
        for rank in self.ranks:
            self.site.fabric.faults(rank.incarnation).stopped = False
            self.site.loop.resume_process(rank.process)
            self._on_stepped(rank)

    # --- inside ---------------------------------------------------------------------------

    def _spawn(self, leader: SimLeader) -> None:
        self.ranks = spawn_group(self.site, self.seat, leader, self._after_step)
        for rank in self.ranks:
            rank.announce()
            self.site.trace("start", f"{rank.process.name} {rank.incarnation.hex()}")

    def _after_step(self, rank: SimRank) -> None:
        """Workers that have drained exit by themselves, and their leader after them."""
        if not rank.has_ended or rank not in self.ranks:
            self._on_stepped(rank)
        elif self.leader is not None and all(one.has_ended for one in self.ranks):
            self._exit(self.leader)

    def _give_up(self, leader: SimLeader) -> None:
        if leader is self.leader:
            if not self._stood_still:
                self.site.violate(f"{self.seat.name} has not drained in time: {leader.process}")
            self._exit(leader)

    def _exit(self, leader: SimLeader) -> None:
        """The end of a drained instance; another is started in its place."""
        self.site.loop.call_soon(leader.dispatcher.stop, context=leader.process.context)

        def gone() -> None:
            if leader is self.leader:
                late = self.site.plan.options.late_writes
                self.kill_leader(late=late, back_after_s=RESTART_S)

        self.site.later(LAST_ANSWERS_S, gone)

    def _on_lost(self, leader: SimLeader, index: int, group: list[SimRank]) -> None:
        """In the leader: a worker's process is gone. The others of its group go with it."""
        leader.dispatcher.on_lost(index, "killed")
        for rank in list(group):
            self._kill(rank, late=False)
        if self._is_draining:
            self._exit(leader)
            return

        def again() -> None:
            if leader is self.leader and not self.ranks and not self._is_draining:
                self._spawn(leader)

        self.site.loop.call_later(RESTART_S, again, context=leader.process.context)


def _bury(instance: SimInstance, process: Process) -> None:
    instance.site.loop.kill_process(process)
    instance.site.wire.lose(process)
    instance.graves.append(process)
    instance.site.trace("kill", process.name)
