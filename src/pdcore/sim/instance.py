"""One simulated instance: a leader process and its worker, killed and started again at will.

What the supervisor of :mod:`pdcore.server.launch` does with real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

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
    every iteration of its worker's loop."""

    def __init__(self, site: Site, seat: Seat, on_stepped: Callable[[SimRank], None]) -> None:
        self.site = site
        self.seat = seat
        self.leader: SimLeader | None = None
        self.rank: SimRank | None = None
        #: Processes that were killed, for the end of the world.
        self.graves: list[Process] = []
        self._on_stepped = on_stepped
        self._is_draining = False
        #: It was stopped in this life: what it must do in a certain time may come later.
        self._stood_still = False
        self._skew_s = (site.rng.random() * 2 - 1) * MAX_SKEW_S

    def start(self) -> None:
        """A fresh leader, its bootstrap server, then its worker."""
        self.leader = SimLeader(self.site, self.seat, self._skew_s)
        self._is_draining = self._stood_still = False
        self._spawn(self.leader)

    # --- what a plan does -----------------------------------------------------------------

    def kill_worker(self, *, late: bool) -> None:
        """SIGKILL. The supervisor notices and starts another, unless it is dead itself."""
        rank, leader = self.rank, self.leader
        self.rank = None
        if rank is None:
            return
        self._bury(rank.process)
        rank.close()
        if leader is not None:
            leader.link.attach(None)
            self.site.loop.call_later(
                NOTICED_S, lambda: self._on_lost(leader), context=leader.process.context
            )
        self.site.fabric.die(rank.incarnation, late=late)
        self._on_stepped(rank)

    def kill_leader(self, *, late: bool, back_after_s: float) -> None:
        """SIGKILL of the leader; its worker dies with it (D45), and so does its bootstrap."""
        leader, self.leader = self.leader, None
        if leader is None:
            return
        self._bury(leader.process)
        leader.close()
        self.kill_worker(late=late)
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
        if self.rank is None:
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
        elif what == "worker" and self.rank is not None:
            self.site.loop.stop_process(self.rank.process)
            self.site.fabric.faults(self.rank.incarnation).stopped = True

    def resume(self) -> None:
        """SIGCONT of all of it."""
        if self.leader is not None:
            self.site.loop.resume_process(self.leader.process)
        if self.rank is not None:
            self.site.fabric.faults(self.rank.incarnation).stopped = False
            self.site.loop.resume_process(self.rank.process)
            self._on_stepped(self.rank)

    # --- inside ---------------------------------------------------------------------------

    def _spawn(self, leader: SimLeader) -> None:
        process = Process(f"{self.seat.name}.worker", self.seat.name)

        def build() -> SimRank:
            return SimRank(
                self.site,
                self.seat,
                process,
                lambda data: leader.link.from_worker(rank.incarnation, data),
                self._after_step,
            )

        rank = process.context.run(build)
        self.rank = rank
        leader.link.attach(rank)
        rank.announce()
        self.site.trace("start", f"{process.name} {rank.incarnation.hex()}")

    def _after_step(self, rank: SimRank) -> None:
        if rank.has_ended and rank is self.rank:
            self._end_drain(rank)
        else:
            self._on_stepped(rank)

    def _end_drain(self, rank: SimRank) -> None:
        """The worker exits by itself, and its leader after it."""
        if self.leader is not None:
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

    def _on_lost(self, leader: SimLeader) -> None:
        """In the leader: its worker's process is gone."""
        leader.dispatcher.on_lost(0, "killed")
        if self._is_draining:
            self._exit(leader)
            return

        def again() -> None:
            if leader is self.leader and self.rank is None and not self._is_draining:
                self._spawn(leader)

        self.site.loop.call_later(RESTART_S, again, context=leader.process.context)

    def _bury(self, process: Process) -> None:
        self.site.loop.kill_process(process)
        self.site.wire.lose(process)
        self.graves.append(process)
        self.site.trace("kill", process.name)
