"""Ranks of a group: one decision for all of them, whatever only one of them hears.

Whole instances of two ranks on virtual time, production code from router to ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import attrs
import msgspec
import pytest

from pdcore import group_worker
from pdcore.control.ballots import Ballot
from pdcore.control.messages import LeaderMessage, Stop, Submit, SubmitSampling
from pdcore.engine.base import ModelRunner
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner
from pdcore.errors import EngineError, GroupBroken
from pdcore.fsm.events import StepCompleted
from pdcore.fsm.states import SenderState
from pdcore.group_worker import MAX_ROUND_S, GroupClock, GroupWorker, how_many
from pdcore.scheduler.lockstep import Outgoing
from pdcore.scheduler.prefill import PrefillCore
from pdcore.scheduler.prefill_rooms import PrefillRecord
from pdcore.sim.checks import unrest
from pdcore.sim.clients import Outcome, ask
from pdcore.sim.cluster import Cluster
from pdcore.sim.loop import pass_time
from pdcore.sim.plan import Plan, Request, WorldOptions, make_plan
from pdcore.sim.rank import SimRank
from pdcore.sim.site import Parts
from pdcore.sim.world import in_world
from pdcore.types import Batch, RoomKey, StepOutput
from pdcore.worker import Worker

REQUEST = Request(0, 0.0, "/v1/completions", (5, 6, 7, 8, 9), 6, False, 5.0, None, None)


def plan_of(prefill_tp: int = 2, decode_tp: int = 2) -> Plan:
    options = WorldOptions(1, 1, prefill_tp=prefill_tp, decode_tp=decode_tp)
    return attrs.evolve(make_plan(1), options=options)


def ranks(cluster: Cluster, name: str) -> list[SimRank]:
    return cluster.instances[name].ranks


async def burst(cluster: Cluster, count: int = 6) -> list[Outcome]:
    requests = [
        attrs.evolve(REQUEST, number=n, prompt=tuple(range(3, 9 + n))) for n in range(count)
    ]
    return await asyncio.gather(*(ask(cluster, one) for one in requests))


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (4, 2), (2, 4), (1, 2), (2, 1)])
def test_a_group_serves_as_one(prefill_tp: int, decode_tp: int) -> None:
    """R40, D16: every rank runs the same batches; KV of every layout pair arrives (the engine
    proves it), and nothing is left on any rank."""

    async def scenario(cluster: Cluster) -> None:
        outcomes = await burst(cluster)
        assert all(outcome.is_ok for outcome in outcomes), outcomes
        await pass_time(3.0)
        assert unrest(cluster) == []
        for name, size in (("p0", prefill_tp), ("d0", decode_tp)):
            steps = {rank.worker.counters.steps for rank in ranks(cluster, name)}
            assert len(ranks(cluster, name)) == size
            assert len(steps) == 1
            assert steps != {0}

    in_world(plan_of(prefill_tp, decode_tp), scenario)


def test_an_idle_group_plays_no_rounds() -> None:
    async def scenario(cluster: Cluster) -> None:
        await burst(cluster)
        await pass_time(5.0)
        workers = [rank.worker for rank in ranks(cluster, "p0")]
        before = [w.group.lockstep.round for w in workers if isinstance(w, GroupWorker)]
        await pass_time(5.0)
        assert [w.group.lockstep.round for w in workers if isinstance(w, GroupWorker)] == before
        assert len(set(before)) == 1

    in_world(plan_of(), scenario)


def test_a_ballot_brings_what_fits_and_the_next_one_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests gather while a round is open, a gigabyte of prompts at worst; a round is one
    message, and one that is too large for the link never arrives: the group would hang."""
    monkeypatch.setattr(group_worker, "MAX_NEWS_BYTES", 40)
    brought: list[int] = []

    def watch(worker: Worker) -> None:
        if isinstance(worker, GroupWorker) and worker.group.lockstep.rank == 0:
            cast = worker.group.lockstep.cast

            def counted(ballot: Ballot) -> Outgoing:
                brought.append(sum(isinstance(one, Submit) for one in ballot.messages))
                return cast(ballot)

            vars(worker.group.lockstep)["cast"] = counted

    async def scenario(cluster: Cluster) -> None:
        outcomes = await burst(cluster, 8)
        assert all(outcome.is_ok for outcome in outcomes), outcomes
        await pass_time(3.0)
        assert unrest(cluster) == []

    in_world(plan_of(), scenario, Parts(on_worker=watch))
    assert sum(brought) == 16
    assert max(brought) == 1, "a prompt of six tokens is longer than half of what fits"


def test_order_is_kept_and_one_always_goes() -> None:
    def submit(num_bytes: int) -> Submit:
        sampling = SubmitSampling(4, 0, 0.0, 1.0, 0, None, (), False, False, 0)
        return Submit(
            RoomKey(1, 1), "r", bytes(num_bytes), sampling, 5.0, 5.0, "b", "p", "d", 0, None
        )

    messages: list[LeaderMessage] = [Stop(1.0), submit(40), submit(40), Stop(2.0), submit(400)]
    assert how_many(messages, 80) == 4
    assert how_many(messages, 79) == 2
    assert how_many(messages[4:], 79) == 1
    assert how_many(messages, 1000) == 5
    assert how_many([], 0) == 0


class _Clocks:
    """A process's clocks, that a test sets."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return 1e9 + self.now_s


def play_open_rounds(hub: GroupClock, other: GroupClock, clocks: list[_Clocks]) -> None:
    """A hundred rounds, each open for 10 ms: the clock of the group must have gone on."""
    begun_s = hub.monotonic()
    for _ in range(100):
        cast_s = hub.monotonic()
        for clock in clocks:
            clock.now_s += 0.01
        hub.set(cast_s, 0.0)
        other.set(cast_s, 0.0)
        assert other.monotonic() <= hub.monotonic()
    assert hub.monotonic() - begun_s == pytest.approx(1.0)
    assert hub.monotonic() - other.monotonic() <= 0.0101


def test_an_open_round_does_not_stop_the_clock_of_the_group() -> None:
    """A request's deadline must not move by the time that rounds were open before it."""
    clocks = [_Clocks(5.0), _Clocks(900.0)]
    play_open_rounds(
        GroupClock(clocks[0], is_hub=True), GroupClock(clocks[1], is_hub=False), clocks
    )
    clocks = [_Clocks(5.0), _Clocks(900.0)]

    class Mutant(GroupClock):
        """Sets the hub's clock back to when the round was cast, each time."""

        def set(self, now_s: float, unix_s: float) -> None:
            self._ahead_s = self._clock.monotonic() - now_s

    with pytest.raises(AssertionError):
        play_open_rounds(Mutant(clocks[0], is_hub=True), Mutant(clocks[1], is_hub=False), clocks)


class Faulty(SimulatedRunner):
    """Its ``fails_at``-th step raises, or samples what the others do not."""

    def __init__(self, config: SimulatedConfig, sleep: Callable[[float], None], how: str) -> None:
        super().__init__(config, sleep=sleep)
        self.how = how
        self.num_steps = 0

    def execute_model(self, batch: Batch) -> StepOutput:
        self.num_steps += 1
        output = super().execute_model(batch)
        if self.num_steps == 2 and self.how == "raises":
            raise EngineError("out of registers")
        if self.num_steps == 2 and self.how == "differs":
            wrong = [None if ids is None else [(ids[0] + 1) % 900] for ids in output.token_ids]
            return StepOutput(wrong)
        return output


@pytest.mark.parametrize(
    ("how", "why"), [("raises", "out of registers"), ("differs", "different tokens")]
)
def test_a_step_that_goes_wrong_on_one_rank_fails_its_requests_and_nothing_else(
    how: str, why: str
) -> None:
    """D16: an exception on one rank must not leave the others in the step; D45."""

    def make_runner(sleep: Callable[[float], None], model: SimulatedConfig) -> ModelRunner:
        if model.tp_rank == 1 and model.tp_size == 4:  # decode's second rank
            return Faulty(model, sleep, how)
        return SimulatedRunner(model, sleep=sleep)

    async def scenario(cluster: Cluster) -> None:
        first = await ask(cluster, REQUEST)
        assert (first.status, first.code) == (500, "internal")
        assert why in "".join(first.problems)
        assert (await ask(cluster, REQUEST)).is_ok
        await pass_time(3.0)
        assert unrest(cluster) == []

    in_world(plan_of(2, 4), scenario, Parts(make_runner=make_runner))


def test_a_request_that_only_one_rank_got_breaks_the_group() -> None:
    """D17: mismatch detection instead of a vote that hits another request."""

    def deaf(worker: Worker) -> None:
        if worker.core.setup.me.rank == 1 and isinstance(worker.core, PrefillCore):
            handle = worker._handle_leader

            def filtered(message: LeaderMessage, now: float) -> None:
                if not isinstance(message, Submit):
                    handle(message, now)

            vars(worker)["_handle_leader"] = filtered

    async def scenario(cluster: Cluster) -> None:
        await ask(cluster, REQUEST)

    with pytest.raises(GroupBroken, match="different requests"):
        in_world(plan_of(2, 1), scenario, Parts(on_worker=deaf))


def test_a_rank_that_stands_still_is_named_and_then_waited_for() -> None:
    """The others answer heartbeats and report their health meanwhile."""

    async def scenario(cluster: Cluster) -> None:
        stopped = ranks(cluster, "d0")[1]
        cluster.site.loop.stop_process(stopped.process)
        asked = asyncio.ensure_future(ask(cluster, REQUEST))
        await pass_time(3.5)
        leader = cluster.instances["d0"].leader
        assert leader is not None
        problems = leader.dispatcher.workers.problems()
        assert any("waits for rank 1 of its group" in text for text in problems), problems
        cluster.site.loop.resume_process(stopped.process)
        await asked
        await pass_time(3.0)
        assert leader.dispatcher.workers.problems() == []
        assert (await ask(cluster, REQUEST)).is_ok

    in_world(plan_of(), scenario)


def test_a_deadline_passes_on_all_ranks_in_one_round() -> None:
    """Clocks differ between ranks; the hub's is the group's."""

    async def scenario(cluster: Cluster) -> None:
        cluster.site.network.partition(
            *(ranks(cluster, name)[0].channel.memory_address for name in ("p0", "d0"))
        )
        outcome = await ask(cluster, attrs.evolve(REQUEST, timeout_s=0.5))
        assert outcome.code == "deadline_exceeded", outcome
        cluster.site.network.heal()
        await pass_time(5.0)
        assert unrest(cluster) == []
        assert (await ask(cluster, REQUEST)).is_ok

    in_world(plan_of(), scenario)


def test_all_ranks_drain_and_end_together() -> None:
    """D59: what runs finishes; a rank that has nothing left waits for the others."""

    async def scenario(cluster: Cluster) -> None:
        former = [*ranks(cluster, "p0"), *ranks(cluster, "d0")]
        asked = asyncio.ensure_future(burst(cluster))
        await pass_time(0.05)
        cluster.instances["d0"].drain(3.0)
        cluster.instances["p0"].drain(3.0)
        assert all(outcome.is_ok for outcome in await asked)
        await pass_time(0.5)
        assert all(rank.has_ended for rank in former)

    in_world(plan_of(), scenario)


def test_a_killed_rank_takes_its_group_along_and_another_life_serves() -> None:
    async def scenario(cluster: Cluster) -> None:
        former = ranks(cluster, "p0")
        lives = {rank.incarnation for rank in former}
        cluster.instances["p0"].kill_worker(late=False)
        await pass_time(3.0)
        now = ranks(cluster, "p0")
        assert len(now) == 2
        assert not lives & {rank.incarnation for rank in now}
        assert (await ask(cluster, REQUEST)).is_ok
        states = [r.sender.state for one in now for r in one.core.rooms.records.values()]
        assert set(states) <= {SenderState.DONE}

    in_world(plan_of(), scenario)


def test_a_first_token_that_differs_between_ranks_costs_its_request_only() -> None:
    """D16, D18: one prefill rank says another token than its group."""

    def lying(worker: Worker) -> None:
        if worker.core.setup.me.rank == 1 and isinstance(worker.core, PrefillCore):
            complete = worker.core._complete_step
            told = iter([1])

            def other_token(event: StepCompleted, now: float) -> None:
                complete(event, now)
                for record in worker.core.rooms.records.values():
                    assert isinstance(record, PrefillRecord)
                    token = record.sender.first_token
                    if token is not None and next(told, None):
                        wrong = (token.output_token_id + 1) % 900
                        record.sender.first_token = msgspec.structs.replace(
                            token, output_token_id=wrong
                        )

            vars(worker.core)["_complete_step"] = other_token

    async def scenario(cluster: Cluster) -> None:
        outcomes = await burst(cluster)
        assert sum(not outcome.is_ok for outcome in outcomes) == 1
        (bad,) = [outcome for outcome in outcomes if not outcome.is_ok]
        assert bad.code == "bad_metadata", bad
        await pass_time(3.0)
        assert unrest(cluster) == []

    in_world(plan_of(), scenario, Parts(on_worker=lying))


def test_a_round_that_never_ends_breaks_the_group() -> None:
    """Whatever keeps a rank from it: the others do not wait for ever, the group is restarted."""

    async def scenario(cluster: Cluster) -> None:
        cluster.site.loop.stop_process(ranks(cluster, "p0")[1].process)
        await ask(cluster, REQUEST)
        await pass_time(MAX_ROUND_S + 5.0)

    with pytest.raises(GroupBroken, match="did not join a round within 120 s"):
        in_world(plan_of(), scenario)
