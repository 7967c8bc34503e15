"""One instance as its leader sees it: two workers, their supervisor, a stop at any time.

The lifecycle is the production one (:mod:`pdcore.fsm.instance`), fed as its leader feeds it:
workers become ready, report problems and take them back, die; the supervisor restarts a worker
a bounded number of times, then gives up; timers run out; somebody asks it to stop.

Checked: Ready means that every worker is ready and no problem is known; whoever was lost has
its requests failed in that step; once it drains it takes no more requests; it stops only with
every request answered; workers are killed only when draining took too long. From every state
it becomes ready, or, where a worker is lost for good or a stop was asked, it stops.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from pdcore.fsm.effects import Effect
from pdcore.fsm.instance import INSTANCE, FailPending, Instance, KillWorkers, Problem, WorkerLost
from pdcore.fsm.states import InstanceState as S
from pdcore.sim.explore import Move
from pdcore.sim.interned import Interned

_TIMER: Final = "timer"


class InstanceWorldState(NamedTuple):
    """``workers``: "s" starting, "r" ready, "d" dead, "x" exited as it was told or given up.
    ``restarts`` are left, for all workers together; ``troubled``: workers with a problem."""

    instance: int
    workers: str
    restarts: int
    troubled: frozenset[int]
    wrong: str = ""


def _key(instance: Instance) -> Hashable:
    return instance.state, tuple(sorted(instance.ready)), tuple(sorted(instance.problems))


class InstanceWorld:
    """See the module. ``entity`` may be a known-bad variant."""

    def __init__(
        self, entity: type[Instance] = Instance, *, num_workers: int = 2, num_restarts: int = 2
    ) -> None:
        self.instances = Interned(INSTANCE, _key)
        self.start = self.instances.number(entity(num_workers))
        self.num_workers = num_workers
        self.num_restarts = num_restarts

    def initial(self) -> InstanceWorldState:
        return InstanceWorldState(
            self.start, "s" * self.num_workers, self.num_restarts, frozenset()
        )

    def moves(self, state: InstanceWorldState) -> Iterable[Move[InstanceWorldState]]:
        if state.wrong:
            return
        for rank in range(self.num_workers):
            yield from self._worker(state, rank)
        yield from self._leader(state)

    def problems(self, state: InstanceWorldState) -> Iterable[str]:
        if state.wrong:
            yield state.wrong
        instance = self.instances.entity(state.instance)
        if instance.state is S.READY and (instance.problems or instance.missing()):
            yield "it takes requests although a worker is missing or a problem is known"
        if instance.state is S.READY and "d" in state.workers:
            yield "it takes requests although a worker is dead"

    def is_goal(self, state: InstanceWorldState) -> bool:
        instance = self.instances.entity(state.instance)
        if instance.state is S.STOPPED:
            return not set(state.workers) & {"s", "r"}
        return instance.state is S.READY and state.workers == "r" * self.num_workers

    def show(self, state: InstanceWorldState) -> str:
        instance = self.instances.entity(state.instance)
        return f"{instance!r}, workers {state.workers}, restarts {state.restarts} {state.wrong}"

    # --- inside -------------------------------------------------------------------------

    def _worker(self, state: InstanceWorldState, rank: int) -> Iterator[Move[InstanceWorldState]]:
        its = state.workers[rank]
        is_stopping = self._state(state) in (S.DRAINING, S.STOPPED)
        who = f"rank {rank}"
        trouble = Problem(f"{who}: bootstrap", "out of reach")
        if its == "s" and not is_stopping:
            after = _worker_is(state, rank, "r")
            yield self._feed(after, "worker_ready", rank, f"{who} is ready")
        if its == "r" and not is_stopping:
            yield self._feed(state, "worker_ready", rank, f"{who} says so again", is_fault=True)
        if its in "sr":
            if rank not in state.troubled:
                after = state._replace(troubled=state.troubled | {rank})
                label = f"{who} reports a problem"
                yield self._feed(after, "problem_reported", trouble, label, is_fault=True)
            else:
                after = state._replace(troubled=state.troubled - {rank})
                yield self._feed(after, "problem_cleared", trouble.source, f"{who} is well again")
                yield self._feed(
                    state, "problem_reported", trouble, f"{who} reports it again", is_fault=True
                )
            dead = _worker_is(state, rank, "d")
            label = f"{who} dies"
            yield self._lose(dead, rank, label)
        if its == "d":
            if is_stopping or not state.restarts:
                yield Move(f"{who} stays down", False, _worker_is(state, rank, "x"))
            elif state.restarts:
                after = _worker_is(state._replace(restarts=state.restarts - 1), rank, "s")
                yield Move(f"{who} is started again", False, after)
        if its in "sr" and is_stopping:
            yield Move(f"{who} exits as it was told", False, _worker_is(state, rank, "x"))

    def _lose(self, dead: InstanceWorldState, rank: int, label: str) -> Move[InstanceWorldState]:
        """What it had reported goes with it (as the registry of workers does)."""
        after = dead
        if rank in dead.troubled:
            after = dead._replace(troubled=dead.troubled - {rank})
            source = f"rank {rank}: bootstrap"
            after = self._feed(after, "problem_cleared", source, label).state
        return self._feed(after, "worker_lost", WorkerLost(rank, "died"), label, is_fault=True)

    def _leader(self, state: InstanceWorldState) -> Iterator[Move[InstanceWorldState]]:
        now = self._state(state)
        late = Problem(_TIMER, "took too long")
        if now in (S.STARTING, S.READY, S.UNHEALTHY):
            yield self._feed(state, "stop_requested", None, "a stop is asked for", is_fault=True)
            # Where a worker is down for good, the timer is what ends the wait: it is sure.
            is_sure = now is S.UNHEALTHY and "x" in state.workers
            yield self._feed(
                state, "deadline_expired", late, "a timer runs out", is_fault=not is_sure
            )
        instance = self.instances.entity(state.instance)
        if _TIMER in instance.problems:
            yield self._feed(state, "problem_cleared", _TIMER, "what was late has come")
        if now is S.DRAINING:
            if not set(state.workers) & {"s", "r"}:
                yield self._feed(state, "drained", None, "every worker has exited")
            killed = state._replace(workers="x" * self.num_workers)
            yield self._feed(
                killed, "deadline_expired", late, "draining takes too long", is_fault=True
            )

    def _state(self, state: InstanceWorldState) -> S:
        return self.instances.entity(state.instance).state

    def _feed(
        self,
        state: InstanceWorldState,
        event: str,
        payload: object,
        label: str,
        *,
        is_fault: bool = False,
    ) -> Move[InstanceWorldState]:
        before = self.instances.entity(state.instance)
        done = self.instances.step(state.instance, event, payload, (event, repr(payload)))
        wrong = _judge(before, self.instances.entity(done.number), event, payload, done.effects)
        after = state._replace(instance=done.number, wrong=wrong)
        return Move(label, is_fault, after, (done.row,) if done.row else ())


def _worker_is(state: InstanceWorldState, rank: int, its: str) -> InstanceWorldState:
    workers = state.workers
    return state._replace(workers=workers[:rank] + its + workers[rank + 1 :])


def _judge(
    before: Instance, after: Instance, event: str, payload: object, effects: Sequence[Effect]
) -> str:
    failed = [effect.rank for effect in effects if isinstance(effect, FailPending)]
    is_lost = isinstance(payload, WorkerLost) and before.state is not S.STOPPED
    if is_lost and not failed:
        return "a worker was lost and its requests were not failed"
    if before.state in (S.DRAINING, S.STOPPED) and after.state not in (S.DRAINING, S.STOPPED):
        return "it was told to stop and takes requests again"
    if after.state is S.STOPPED and before.state is not S.STOPPED and None not in failed:
        return "it stopped with requests that were not answered"
    if any(isinstance(effect, KillWorkers) for effect in effects) and event != "deadline_expired":
        return "workers were killed before draining took too long"
    return ""


# --- a known-bad variant -----------------------------------------------------------------


class ReadyTooEarly(Instance):
    """``ready-too-early``: one ready worker is enough (D33: the seed counted nothing)."""

    __slots__ = ()

    def is_last_to_be_ready(self, payload: int) -> bool:
        return True


class LostInSilence(Instance):
    """``lost-in-silence``: a dead worker's requests wait for their own deadlines (D45)."""

    __slots__ = ()

    def fail_lost(self, payload: WorkerLost) -> Sequence[Effect]:
        return ()


INSTANCE_MUTANTS: Final[dict[str, type[Instance]]] = {
    "ready-too-early": ReadyTooEarly,
    "lost-in-silence": LostInSilence,
}
