"""Instance: one service instance as its leader sees it.

Theory
------
  Starting   workers are spawned; not every one has said that it can serve. Problems are
             normal here (a rank that still tries to register) and are only collected, so
             that /health can name them (D33);
  Ready      every worker is ready and nobody reports a problem: the only state in which new
             requests are taken;
  Unhealthy  something is wrong that may pass (a stuck peer, a bootstrap server out of reach)
             or a worker is gone. No new requests. What runs goes on, unless a worker was
             lost: then its group cannot tick any more and everything pending is failed at
             once (D45), not after the client's own patience;
  Draining   told to stop, or given up: no new requests, running ones may finish;
  Stopped    terminal. ``problems`` that are left make the exit status non-zero, so that an
             outer supervisor knows.

Who moves it: the leader, for what workers report (``worker_ready``, ``problem_reported``,
``problem_cleared``), for what the process supervisor sees (``worker_lost``), for a signal or
POST /stop (``stop_requested``), and for its own clock (``deadline_expired``).

Not modelled here: processes and pipes, the requests themselves, how a worker is restarted
(the leader spawns it again and it reports ready), time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdcore.errors import failure
from pdcore.fsm.effects import Effect
from pdcore.fsm.machine import Event, lifecycle
from pdcore.fsm.states import InstanceState as S
from pdcore.fsm.table import Lifecycle, Row, StateInfo
from pdcore.types import Failure


class Problem(msgspec.Struct, frozen=True):
    """Why the instance is not ready: one per ``source`` (e.g. "rank 1: bootstrap"), with
    one sentence for the person who reads /health."""

    source: str
    detail: str


class WorkerLost(msgspec.Struct, frozen=True):
    rank: int
    detail: str


class FailPending(Effect, frozen=True):
    """Answer every open request of the worker's group (rank None: of all) with this."""

    failure: Failure
    rank: int | None = None


class StopWorkers(Effect, frozen=True):
    """Ask every worker to drain and exit."""


class KillWorkers(Effect, frozen=True):
    """Workers that are still alive are ended now."""


_UP = (S.STARTING, S.READY, S.UNHEALTHY)

INSTANCE = Lifecycle(
    name="instance",
    states=S,
    initial=S.STARTING,
    terminal=frozenset({S.STOPPED}),
    events=(
        "worker_ready",
        "worker_lost",
        "problem_reported",
        "problem_cleared",
        "stop_requested",
        "drained",
        "deadline_expired",
    ),
    rows=(
        *(
            Row(s, "worker_ready", S.READY, ("record_ready",), "is_last_to_be_ready")
            for s in (S.STARTING, S.UNHEALTHY)
        ),
        *(Row(s, "worker_ready", s, ("record_ready",)) for s in _UP),
        Row(S.STARTING, "problem_reported", S.STARTING, ("record_problem",)),
        Row(S.READY, "problem_reported", S.UNHEALTHY, ("record_problem",)),
        Row(S.UNHEALTHY, "problem_reported", S.UNHEALTHY, ("record_problem",)),
        *(
            Row(s, "problem_cleared", S.READY, ("clear_problem",), "is_last_problem")
            for s in (S.STARTING, S.UNHEALTHY)
        ),
        *(
            Row(s, "problem_cleared", s, ("clear_problem",), "is_problem")
            for s in (S.STARTING, S.UNHEALTHY)
        ),
        *(Row(s, "worker_lost", S.UNHEALTHY, ("record_lost", "fail_lost")) for s in _UP),
        Row(S.DRAINING, "worker_lost", S.DRAINING, ("record_lost", "fail_lost")),
        *(Row(s, "stop_requested", S.DRAINING, ("stop_workers",)) for s in _UP),
        Row(S.DRAINING, "drained", S.STOPPED, ("fail_shutdown",)),
        Row(S.STARTING, "deadline_expired", S.UNHEALTHY),
        Row(S.READY, "deadline_expired", S.UNHEALTHY, ("record_problem",)),
        Row(S.UNHEALTHY, "deadline_expired", S.DRAINING, ("stop_workers",), "has_lost_worker"),
        Row(S.UNHEALTHY, "deadline_expired", S.UNHEALTHY, ("record_problem",)),
        Row(S.DRAINING, "deadline_expired", S.STOPPED, ("fail_shutdown", "kill_workers")),
    ),
    info={
        S.STARTING: StateInfo(
            "workers load, register memory, then themselves",
            awaits="every worker's ready report",
            deadline="start_timeout_s",
        ),
        S.READY: StateInfo(
            "takes requests",
            awaits="requests; every worker's next health report",
            deadline="worker_health_timeout_s",
        ),
        S.UNHEALTHY: StateInfo(
            "takes no requests; /health names the problems",
            awaits="the sources named in problems, or the supervisor's restart of a worker",
            deadline="worker_restart_timeout_s (lost worker: drain; else reported again)",
        ),
        S.DRAINING: StateInfo(
            "stopping; running requests may finish",
            awaits="every worker's exit",
            deadline="drain_timeout_s",
        ),
        S.STOPPED: StateInfo("no worker is left"),
    },
)


@lifecycle(INSTANCE)
class Instance:
    """See the module's theory. ``num_workers`` is what the whole instance needs (R2).

    ``deadline_expired`` carries what was waited for. In Starting it is not recorded, because
    :meth:`missing` names the ranks; elsewhere it is a problem, cleared like any other.
    """

    __slots__ = ("ignored", "num_workers", "problems", "ready", "state")

    worker_ready: Event[int]
    worker_lost: Event[WorkerLost]
    problem_reported: Event[Problem]
    problem_cleared: Event[str]
    stop_requested: Event[None]
    drained: Event[None]
    deadline_expired: Event[Problem]

    def __init__(self, num_workers: int) -> None:
        self.state: S = S.STARTING
        self.ignored = 0
        self.num_workers = num_workers
        self.ready: set[int] = set()
        #: Source -> one sentence. Workers that are not ready yet are not listed here.
        self.problems: dict[str, str] = {}

    def __repr__(self) -> str:
        return (
            f"Instance({self.state.value}, ready={len(self.ready)}/{self.num_workers}, "
            f"problems={sorted(self.problems)})"
        )

    def missing(self) -> list[int]:
        """Ranks that are not ready, for /health."""
        return [rank for rank in range(self.num_workers) if rank not in self.ready]

    def is_last_to_be_ready(self, payload: int) -> bool:
        ready = len(self.ready) + (payload not in self.ready)
        return ready >= self.num_workers and not self.problems.keys() - {_lost(payload)}

    def is_problem(self, payload: str) -> bool:
        return payload in self.problems

    def is_last_problem(self, payload: str) -> bool:
        return self.problems.keys() == {payload} and len(self.ready) >= self.num_workers

    def has_lost_worker(self, payload: object) -> bool:
        return any(_lost(rank) in self.problems for rank in range(self.num_workers))

    def record_ready(self, payload: int) -> Sequence[Effect]:
        self.ready.add(payload)
        self.problems.pop(_lost(payload), None)
        return ()

    def record_problem(self, payload: Problem) -> Sequence[Effect]:
        self.problems[payload.source] = payload.detail
        return ()

    def clear_problem(self, payload: str) -> Sequence[Effect]:
        self.problems.pop(payload, None)
        return ()

    def record_lost(self, payload: WorkerLost) -> Sequence[Effect]:
        self.ready.discard(payload.rank)
        self.problems[_lost(payload.rank)] = payload.detail
        return ()

    def fail_lost(self, payload: WorkerLost) -> Sequence[Effect]:
        lost = failure("unavailable", f"worker {payload.rank} was lost: {payload.detail}")
        return (FailPending(lost, payload.rank),)

    def fail_shutdown(self, payload: object) -> Sequence[Effect]:
        return (FailPending(failure("shutting_down", "the server is shutting down")),)

    def stop_workers(self, payload: object) -> Sequence[Effect]:
        return (StopWorkers(),)

    def kill_workers(self, payload: object) -> Sequence[Effect]:
        return (KillWorkers(),)


def _lost(rank: int) -> str:
    return f"rank {rank}: process"
