"""Which workers are ready, and where a request may go."""

from __future__ import annotations

import pytest

from pdcore.control.messages import WorkerHealth
from pdcore.fsm.instance import FailPending
from pdcore.fsm.states import InstanceState
from pdcore.server.pending import Refused
from pdcore.server.workers import WorkerRegistry
from tests.unit.server.kit import ready


def full(world_size: int = 4, dp_size: int = 2) -> WorkerRegistry:
    workers = WorkerRegistry(world_size, dp_size, health_timeout_s=40)
    for rank in range(world_size):
        workers.add(ready(rank, rank // (world_size // dp_size)), 0.0)
    return workers


def test_ready_only_when_every_rank_is_and_health_names_the_rest() -> None:
    """D33: the instance says which ranks are missing."""
    workers = WorkerRegistry(3)
    workers.add(ready(1), 0.0)
    assert workers.state is InstanceState.STARTING
    assert workers.problems() == ["not ready yet: rank 0, rank 2"]
    with pytest.raises(Refused) as caught:
        workers.route(None, lambda rank: 0)
    assert caught.value.failure.http_status == 503
    assert "rank 0" in caught.value.failure.detail
    workers.add(ready(0), 0.0)
    workers.add(ready(2), 0.0)
    assert workers.state is InstanceState.READY
    assert workers.problems() == []


def test_a_request_goes_to_the_leader_of_its_dp_group() -> None:
    """D21: the dp rank that was chosen is honoured; a wrong one is a 400 with its name."""
    workers = full()
    assert [workers.route(d, lambda rank: 0) for d in (0, 1)] == [0, 2]
    assert workers.route(None, lambda rank: {0: 5, 2: 1}[rank]) == 2
    assert workers.route(None, lambda rank: 0) == 0
    for wrong in (-1, 2):
        with pytest.raises(Refused, match="disagg_prefill_dp_rank") as caught:
            workers.route(wrong, lambda rank: 0)
        assert caught.value.failure.http_status == 400
    assert [workers.leader_of(rank) for rank in range(4)] == [0, 0, 2, 2]


def test_a_lost_worker_makes_the_instance_unhealthy_until_its_next_life() -> None:
    """D45, D48: liveness is per rank."""
    workers = full()
    effects = workers.lose(3, "exit code -9")
    assert isinstance(effects[0], FailPending)
    assert workers.state is InstanceState.UNHEALTHY
    assert any("rank 3" in p and "exit code -9" in p for p in workers.problems())
    workers.add(ready(3, 1, b"\x02" * 16), 0.0)
    assert workers.state is InstanceState.READY


def test_a_new_life_without_a_notice_is_a_loss_too() -> None:
    workers = full()
    assert not workers.add(ready(0), 0.0), "the same life may say so again"
    effects = workers.add(ready(0, 0, b"\x02" * 16), 0.0)
    assert [e.rank for e in effects if isinstance(e, FailPending)] == [0]
    assert workers.state is InstanceState.READY


def test_a_worker_of_another_configuration_is_refused() -> None:
    workers = full()
    for stranger in (ready(4, 2), ready(1, 1)):
        with pytest.raises(ValueError, match="does not belong"):
            workers.add(stranger, 0.0)


def test_reported_problems_come_and_go() -> None:
    """D33: a registration that fails is visible, and serving stops and starts with it."""
    workers = full()
    workers.report(WorkerHealth(1, ["bootstrap server refused: 409"], {"steps": 3.0}), 1.0)
    assert workers.state is InstanceState.UNHEALTHY
    assert workers.problems() == ["rank 1: bootstrap server refused: 409"]
    assert workers.reports()[1].counters == {"steps": 3.0}
    workers.report(WorkerHealth(1, [], {}), 2.0)
    assert workers.state is InstanceState.READY
    workers.report(WorkerHealth(9, ["not ours"], {}), 2.0)
    assert workers.problems() == []


def test_a_silent_worker_is_a_problem_until_it_speaks() -> None:
    """D48: a worker that hangs does not stay healthy because its process lives."""
    workers = full(1, 1)
    workers.check(10.0)
    assert workers.state is InstanceState.READY
    workers.check(10.1)
    assert workers.problems() == ["rank 0: no health report for 10 s"]
    workers.check(11.0)
    workers.report(WorkerHealth(0, [], {}), 12.0)
    workers.check(13.0)
    assert workers.state is InstanceState.READY


def check_that_a_pause_of_ours_kills_nobody(workers: WorkerRegistry) -> None:
    """The leader itself stood still for longer than the time-out: reports are waiting."""
    assert workers.check(1000.0) == []
    workers.report(WorkerHealth(0, [], {}), 1000.5)
    assert workers.check(1001.0) == []
    assert workers.state is InstanceState.READY


def test_a_worker_is_stuck_after_its_whole_time_out() -> None:
    """D45: a worker that hangs holds its requests as a dead one does."""
    workers = full(1, 1)
    assert workers.check(10.1) == []
    assert workers.check(40.0) == []
    assert workers.check(40.1) == [0]
    workers.lose(0, "it hangs")
    assert workers.check(50.0) == []


def test_a_pause_of_the_leader_is_no_silence_of_its_workers() -> None:
    class Hasty(WorkerRegistry):
        """Mutant: whoever was not heard is stuck."""

        def check(self, now_s: float) -> list[int]:
            super().check(now_s)
            return super().check(now_s)

    check_that_a_pause_of_ours_kills_nobody(full(1, 1))
    hasty = Hasty(1, health_timeout_s=40)
    hasty.add(ready(), 0.0)
    with pytest.raises(AssertionError):
        check_that_a_pause_of_ours_kills_nobody(hasty)


def test_sizes_must_fit() -> None:
    with pytest.raises(ValueError, match="dp_size must divide"):
        WorkerRegistry(4, 3)


def test_limits_are_the_lowest_ranks() -> None:
    assert WorkerRegistry(1).limits() is None
    limits = full().limits()
    assert limits is not None
    assert limits.rank == 0
    assert full().ranks() == [0, 1, 2, 3]
