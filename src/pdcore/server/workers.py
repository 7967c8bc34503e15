"""Which workers of an instance are ready, and where a request may go (D42, D45, D48).

Feeds the instance's lifecycle (:mod:`pdcore.fsm.instance`) with what the link and the
process supervisor report, and answers from it. Requests go to the first rank of a dp group,
which shares them with its group (R40).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pdcore.control.messages import WorkerHealth, WorkerReady
from pdcore.errors import failure
from pdcore.fsm.effects import Effect
from pdcore.fsm.instance import Instance, Problem, WorkerLost
from pdcore.fsm.states import InstanceState
from pdcore.server.pending import Refused

#: A worker that was silent for this share of its time-out makes the instance unhealthy: no
#: new requests for one that may hang, and no restart for one that is only slow.
SILENT_SHARE: Final = 0.25


class WorkerRegistry:
    """Expected: ``world_size`` ranks in ``dp_size`` groups of equal size. A worker that has
    not reported its health for a quarter of ``health_timeout_s`` makes the instance
    unhealthy; after all of it the worker is stuck."""

    def __init__(self, world_size: int, dp_size: int = 1, health_timeout_s: float = 60.0) -> None:
        if world_size < 1 or dp_size < 1 or world_size % dp_size:
            raise ValueError(f"dp_size must divide world_size ({world_size}), got {dp_size}")
        self.world_size = world_size
        self.dp_size = dp_size
        self.instance = Instance(world_size)
        self._health_timeout_s = health_timeout_s
        self._group = world_size // dp_size
        self._ready: dict[int, WorkerReady] = {}
        self._reported: dict[int, frozenset[str]] = {}
        self._heard_s: dict[int, float] = {}
        self._latest: dict[int, WorkerHealth] = {}

    @property
    def state(self) -> InstanceState:
        return self.instance.state

    def leader_of(self, rank: int) -> int:
        """The rank that takes the requests of this rank's dp group."""
        return rank - rank % self._group

    # --- what was heard ------------------------------------------------------------------

    def add(self, ready: WorkerReady, now_s: float) -> Sequence[Effect]:
        """Record a ready worker; another process life of that rank is thereby lost. Raises
        ValueError for a worker of another configuration."""
        rank = ready.rank
        if not 0 <= rank < self.world_size or ready.dp_rank != rank // self._group:
            raise ValueError(
                f"rank {rank} with dp rank {ready.dp_rank} does not belong to an instance of "
                f"{self.world_size} ranks in {self.dp_size} dp groups"
            )
        effects: list[Effect] = []
        former = self._ready.get(rank)
        if former is not None and former.incarnation != ready.incarnation:
            effects.extend(self.lose(rank, "it was restarted"))
        self._ready[rank] = ready
        self._heard_s[rank] = now_s
        effects.extend(self.instance.worker_ready(rank) or ())
        return effects

    def lose(self, rank: int, detail: str) -> Sequence[Effect]:
        """The process of this rank is gone. Effects: FailPending for its group."""
        self._ready.pop(rank, None)
        self._latest.pop(rank, None)
        self._heard_s.pop(rank, None)
        self._report(rank, frozenset())
        return self.instance.worker_lost(WorkerLost(rank, detail)) or ()

    def report(self, health: WorkerHealth, now_s: float) -> None:
        """A worker's own report, also before it is ready: what it still waits for (D33)."""
        rank = health.rank
        if not 0 <= rank < self.world_size:
            return
        self._heard_s[rank] = now_s
        self._latest[rank] = health
        self._report(rank, frozenset(health.problems))

    def check(self, now_s: float) -> list[int]:
        """Workers that have fallen silent become problems until they are heard again.

        Returns the ranks that are stuck: silent for the whole time-out, and silent already
        when we looked before, for after a pause of our own everybody seems to be.
        """
        silent_s = self._health_timeout_s * SILENT_SHARE
        problem = f"no health report for {silent_s:g} s"
        stuck = []
        for rank, heard_s in self._heard_s.items():
            if now_s - heard_s > silent_s:
                former = self._reported.get(rank, frozenset())
                if problem in former and now_s - heard_s > self._health_timeout_s:
                    stuck.append(rank)
                self._report(rank, former | {problem})
        return stuck

    def _report(self, rank: int, problems: frozenset[str]) -> None:
        former = self._reported.get(rank, frozenset())
        self._reported[rank] = problems
        for detail in sorted(problems - former):
            self.instance.problem_reported(Problem(f"rank {rank}: {detail}", detail))
        for detail in sorted(former - problems):
            self.instance.problem_cleared(f"rank {rank}: {detail}")

    # --- what follows --------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Why this instance is not ready, one sentence each; empty when it is (D33)."""
        found = [
            source if source.endswith(detail) else f"{source} is gone: {detail}"
            for source, detail in sorted(self.instance.problems.items())
        ]
        known = {int(p.split(":")[0].removeprefix("rank ")) for p in self.instance.problems}
        missing = [rank for rank in self.instance.missing() if rank not in known]
        if missing:
            found.append(f"not ready yet: rank {', rank '.join(map(str, missing))}")
        if self.state in (InstanceState.DRAINING, InstanceState.STOPPED):
            found.append("shutting down")
        return found

    def route(self, dp_rank: int | None, load_of: Callable[[int], int]) -> int:
        """The rank that leads ``dp_rank``; None: the least loaded, where ``load_of(rank)``
        counts requests. Raises Refused: 400 for a dp rank that does not exist, 503 while the
        instance takes no requests."""
        if self.state is not InstanceState.READY:
            code = "shutting_down" if self.state is InstanceState.DRAINING else "unavailable"
            raise Refused(failure(code, "; ".join(self.problems()) or self.state.value))
        if dp_rank is None:
            leaders = range(0, self.world_size, self._group)
            rank = 0 if len(leaders) == 1 else min(leaders, key=lambda r: (load_of(r), r))
        elif 0 <= dp_rank < self.dp_size:
            rank = dp_rank * self._group
        else:
            why = f"disagg_prefill_dp_rank: {dp_rank} is outside 0..{self.dp_size - 1}"
            raise Refused(failure("invalid_request", why))
        return rank

    def ranks(self) -> list[int]:
        """Ranks that are ready now."""
        return sorted(self._ready)

    def limits(self) -> WorkerReady | None:
        """Limits of the instance: those of its lowest rank (all ranks are equal)."""
        return self._ready[min(self._ready)] if self._ready else None

    def reports(self) -> dict[int, WorkerHealth]:
        """The latest report of every ready rank that has sent one, in order of rank."""
        return {rank: self._latest[rank] for rank in sorted(self._ready) if rank in self._latest}

    def __repr__(self) -> str:
        return f"WorkerRegistry({self.instance!r})"
