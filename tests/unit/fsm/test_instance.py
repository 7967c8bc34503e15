"""Instance: ready means every worker and no problem; a lost worker is noticed at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdcore.errors import failure
from pdcore.fsm.effects import Effect
from pdcore.fsm.instance import (
    FailPending,
    Instance,
    KillWorkers,
    Problem,
    StopWorkers,
    WorkerLost,
)
from pdcore.fsm.states import InstanceState as S

STUCK = Problem("rank 0: bootstrap", "not registered: connection refused")


def ready_instance(num_workers: int = 2) -> Instance:
    instance = Instance(num_workers)
    for rank in range(num_workers):
        instance.worker_ready(rank)
    assert instance.state is S.READY
    return instance


def test_it_is_ready_when_the_last_worker_is() -> None:
    instance = Instance(2)
    assert instance.worker_ready(1) == ()
    assert (instance.state, instance.missing()) == (S.STARTING, [0])
    instance.worker_ready(1)
    assert instance.state is S.STARTING, "the same worker twice is one worker"
    instance.worker_ready(0)
    assert (instance.state, instance.missing()) == (S.READY, [])


def check_registration_problems_hold_it_back(instance: Instance) -> None:
    instance.worker_ready(0)
    instance.problem_reported(STUCK)
    instance.worker_ready(1)
    assert instance.state is not S.READY
    assert instance.problems == {STUCK.source: STUCK.detail}
    instance.problem_cleared(STUCK.source)
    assert instance.state is S.READY


def test_d33_a_rank_that_cannot_register_keeps_the_instance_unready_and_named() -> None:
    """D33: in the seed a failed registration was logged and the instance stayed "healthy"."""
    check_registration_problems_hold_it_back(Instance(2))


def test_d33_mutant_ready_in_spite_of_problems_is_found() -> None:
    class Optimist(Instance):
        def is_last_to_be_ready(self, payload: int) -> bool:
            return len(self.ready | {payload}) >= self.num_workers

    with pytest.raises(AssertionError):
        check_registration_problems_hold_it_back(Optimist(2))


def test_a_problem_makes_it_unhealthy_and_the_last_cleared_makes_it_ready() -> None:
    instance = ready_instance()
    other = Problem("peer prefill:8001/0", "draining for 30 s")
    assert instance.problem_reported(STUCK) == ()
    instance.problem_reported(other)
    assert instance.state is S.UNHEALTHY
    assert instance.problem_cleared("nobody") is None
    instance.problem_cleared(STUCK.source)
    assert instance.state is S.UNHEALTHY
    instance.problem_cleared(other.source)
    assert (instance.state, instance.problems) == (S.READY, {})


def test_an_overdue_health_report_is_a_problem() -> None:
    instance = ready_instance()
    instance.deadline_expired(Problem("rank 1: health", "no report for 10 s"))
    assert instance.state is S.UNHEALTHY
    instance.problem_cleared("rank 1: health")
    assert instance.state is S.READY


def test_a_slow_start_is_unhealthy_until_the_worker_comes() -> None:
    instance = Instance(1)
    instance.deadline_expired(Problem("start", "rank 0 is not ready after 60 s"))
    assert (instance.state, instance.missing()) == (S.UNHEALTHY, [0])
    instance.worker_ready(0)
    assert instance.state is S.READY


def check_a_lost_worker_is_noticed(instance: Instance) -> None:
    effects = instance.worker_lost(WorkerLost(1, "exit status -9"))
    assert instance.state is S.UNHEALTHY
    lost = failure("unavailable", "worker 1 was lost: exit status -9")
    assert effects == (FailPending(lost, rank=1),)


def test_d45_a_lost_worker_fails_what_is_pending() -> None:
    """D45: in the seed the watchdog only logged; clients waited 1800 s for a dead rank."""
    check_a_lost_worker_is_noticed(ready_instance())


def test_d45_mutant_a_watchdog_that_only_logs_is_found() -> None:
    class OnlyLogs(Instance):
        def fail_lost(self, payload: WorkerLost) -> Sequence[Effect]:
            return ()

    instance = OnlyLogs(2)
    instance.worker_ready(0)
    instance.worker_ready(1)
    with pytest.raises(AssertionError):
        check_a_lost_worker_is_noticed(instance)


def test_a_restarted_worker_heals_the_instance() -> None:
    instance = ready_instance()
    instance.worker_lost(WorkerLost(1, "exit status 1"))
    instance.worker_ready(1)
    assert (instance.state, instance.problems) == (S.READY, {})


def test_a_worker_that_stays_lost_drains_the_instance() -> None:
    instance = ready_instance()
    instance.problem_reported(STUCK)
    assert instance.deadline_expired(STUCK) == ()
    assert instance.state is S.UNHEALTHY, "a problem that may pass does not end the instance"
    instance.worker_lost(WorkerLost(0, "exit status 1"))
    assert instance.deadline_expired(STUCK) == (StopWorkers(),)
    assert instance.state is S.DRAINING


@pytest.mark.parametrize("before", ["Starting", "Ready", "Unhealthy"])
def test_stopping_drains_first(before: str) -> None:
    instance = Instance(1)
    if before != "Starting":
        instance.worker_ready(0)
    if before == "Unhealthy":
        instance.problem_reported(STUCK)
    assert instance.state.value == before
    assert instance.stop_requested() == (StopWorkers(),)
    assert instance.worker_ready(0) is None
    (ended,) = instance.drained() or ()
    assert ended == FailPending(failure("shutting_down", "the server is shutting down"))
    assert instance.state is S.STOPPED
    assert instance.stop_requested() is None


def test_draining_has_an_end() -> None:
    instance = ready_instance()
    instance.stop_requested()
    effects = instance.deadline_expired(Problem("drain", "rank 0 did not exit")) or ()
    assert [type(effect) for effect in effects] == [FailPending, KillWorkers]
    assert instance.state is S.STOPPED
    assert repr(instance) == "Instance(Stopped, ready=2/2, problems=[])"
