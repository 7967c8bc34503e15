"""Public reports, group B: reads after free, late writes, wrong bytes behind a 200.

SGLang, vLLM, vllm-ascend, Mooncake and who packages them. The simulated engine proves every
position that it builds on, so a wrong byte is an engine error or other tokens, never luck.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.config import CoreLimits
from pdcore.control.messages import Finished, Tokens, WorkerHealth
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import failure
from pdcore.fsm.states import PeerState
from pdcore.scheduler.route import registration_of
from pdcore.scheduler.timers import Timers
from pdcore.testing.transport_checks_data import tiny_and_huge
from pdcore.testing.transport_harness import LoopbackHarness
from pdcore.testing.world import Rank, World, make_world
from pdcore.types import RoomKey, SamplingParams
from tests.scenarios.reports.fleet import (
    FIVE,
    PROMPT,
    check_failed_without_text,
    check_nothing_leaked,
    check_right,
    is_posted,
    let_bytes_move,
)


def run_moving(world: World, until: Callable[[], bool]) -> None:
    def moved() -> bool:
        let_bytes_move(world)
        return until()

    world.run(moved)


def check_a_read_after_the_lease_is_no_success(world: World) -> None:
    key = world.submit(PROMPT, sampling=FIVE, timeout_s=3.0)
    world.run(lambda: is_posted(world))
    until_s = world.clock.monotonic() + 3.5
    world.run(lambda: world.clock.monotonic() > until_s)
    run_moving(world, lambda: world.decode.result(key) is not None)
    world.settle()
    assert check_failed_without_text(world.decode, key) == "deadline_exceeded"
    check_nothing_leaked(world)


@pytest.mark.parametrize("late", [False, True])
def test_bytes_that_arrive_after_the_lease_ended_are_no_answer(late: bool) -> None:
    """aws-do-eks #84: the transfer ends after its time was over. That request has failed;
    nothing is generated from blocks that may belong to somebody else by then."""
    world = make_world(num_blocks=10, prefill_blocks=64, stepped=True, seed=3)
    world.fabric.faults(world.prefill.worker.core.setup.me.incarnation).late_landing = late
    check_a_read_after_the_lease_is_no_success(world)


def test_the_mutant_that_only_logs_the_expiry_is_caught() -> None:
    """The reported rule: an expired lease is a log line, the read goes on."""
    world = make_world(num_blocks=10, prefill_blocks=64, stepped=True, seed=3)
    for rank in world.ranks.values():
        rank.worker.core.rooms.timers = NoDeadlines()
    with pytest.raises(AssertionError):
        check_a_read_after_the_lease_is_no_success(world)


class NoDeadlines(Timers):
    def arm(self, kind: str, key: object, at_s: float) -> None:
        if kind != "deadline":
            super().arm(kind, key, at_s)


class StopsAtTheFirstLiveOne(Timers):
    """The reported sweep: entries in the order in which they came, until one still lives."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[float, str, object]] = []

    def arm(self, kind: str, key: object, at_s: float) -> None:
        self.entries.append((at_s, kind, key))

    def pop_due(self, now: float):
        while self.entries and self.entries[0][0] <= now:
            _, kind, key = self.entries.pop(0)
            yield kind, key


def check_everybody_ends_at_his_own_time(timers: Timers, ends: list[int]) -> None:
    for number, at_s in enumerate(ends):
        timers.arm("deadline", number, float(at_s))
    for now in range(max(ends) + 1):
        due = sorted(key for _, key in timers.pop_due(float(now)))
        assert due == [n for n, at_s in enumerate(ends) if at_s == now], now


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12))
@settings(max_examples=60)
def test_a_long_lease_in_front_does_not_hide_short_ones(ends: list[int]) -> None:
    """vllm #41383: leases of different lengths, in any order, each end on time."""
    check_everybody_ends_at_his_own_time(Timers(), ends)


def test_the_mutant_that_stops_at_the_first_live_lease_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_everybody_ends_at_his_own_time(StopsAtTheFirstLiveOne(), [9, 1, 2])


def test_short_requests_expire_behind_a_long_one() -> None:
    """vllm #41383: the same on the product's own cores, where nobody makes progress."""
    world = make_world(num_blocks=64, stepped=True)
    times = [60.0, 2.0, 4.0, 3.0]
    start_s = world.clock.monotonic()
    keys = [world.submit(PROMPT, sampling=FIVE, timeout_s=t) for t in times]
    for key, timeout_s in zip(keys[1:], times[1:], strict=True):
        world.run(lambda key=key: world.decode.result(key) is not None)
        assert timeout_s == pytest.approx(world.decode.result(key).timeline["finished"], abs=0.2)
    assert world.clock.monotonic() - start_s < 10.0
    run_moving(world, lambda: world.decode.result(keys[0]) is not None)
    check_right(world.decode, keys[0], world.model, PROMPT, 5)


def test_a_renewal_never_shortens_a_registration() -> None:
    """vllm #41383: a lease that is renewed ends a whole period after the renewal, however
    often and in whatever rhythm it is renewed."""
    world = make_world()
    setup = world.prefill.worker.core.setup
    registration = registration_of(setup)
    table = RankTable(RankTableConfig(setup.me.instance, setup.layout, lease_s=10.0), first_epoch=1)
    for now_s in (0.0, 9.0, 9.5, 17.0):
        table.register(registration, now_s)
        assert table.route(now_s + 9.9) is not None, now_s
    assert table.route(27.1) is None


class Ear:
    """What decode says, read once: a soak must not look at everything again for each room."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._num_read = 0
        self.tokens: dict[RoomKey, list[int]] = {}
        self.ended: dict[RoomKey, Finished] = {}

    def hear(self) -> int:
        """How many ended since the last call."""
        news = self._rank.said[self._num_read :]
        self._num_read += len(news)
        before = len(self.ended)
        for message in news:
            if isinstance(message, Tokens):
                for key, ids in zip(message.keys, message.token_ids, strict=True):
                    self.tokens.setdefault(key, []).extend(ids)
            elif isinstance(message, Finished):
                assert message.key not in self.ended
                self.ended[message.key] = message
        return len(self.ended) - before


def soak(world: World, num_requests: int) -> int:
    """Many requests through few blocks, a dozen at a time, some of them ended anywhere;
    how many were served to their end."""
    ear = Ear(world.decode)
    prompts: dict[RoomKey, list[int]] = {}
    num_served = 0
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    for number in range(num_requests):
        prompt = [3 + (number * 7 + i) % 990 for i in range(1 + number % 19)]
        key = world.submit(prompt, sampling=sampling)
        prompts[key] = prompt
        if number % 9 == 8:
            world.abort(key, at=("decode", "prefill")[number % 2])
        if len(prompts) - len(ear.ended) >= 12:
            world.run(lambda: ear.hear() > 0)
    world.run(lambda: ear.hear() < 0 or len(ear.ended) == num_requests)
    for key, prompt in prompts.items():
        tokens = ear.tokens.get(key, [])
        wanted = simulated_tokens(world.model, prompt, 3)
        assert tokens == wanted[: len(tokens)]
        if ear.ended[key].failure is None:
            assert tokens == wanted
            num_served += 1
        else:
            assert ear.ended[key].failure.code == "cancelled"
    world.settle()
    check_nothing_leaked(world)
    return num_served


def test_the_thousandth_request_is_as_right_as_the_first() -> None:
    """sglang #23020: 1,000 requests through a few blocks that are used again and again,
    every position of each verified where it arrives."""
    limits = CoreLimits(num_reserved_decode_tokens=4, num_metadata_slots=8, linger_s=0.5)
    world = make_world(num_blocks=40, prefill_blocks=40, limits=limits, seed=6)
    assert soak(world, 1000) >= 888


def test_what_fails_to_load_fails_alone_with_the_same_prompt_beside_it() -> None:
    """vllm #49250: two requests with one prompt, the first one's transfer fails. Nobody
    resumes from the other's blocks: no block has two owners."""
    world = make_world(num_blocks=64, stepped=True)
    prefill = world.prefill.worker.core.setup.me.incarnation
    world.fabric.faults(prefill).fail_after_chunks = 0
    keys = [world.submit(PROMPT, sampling=FIVE) for _ in range(2)]
    world.run(lambda: len(world.decode.worker.core.rooms.records) == 2 and is_posted(world))
    tables = [
        set(world.decode.worker.core.blocks.get_block_ids(r.seq.seq_id)["full"])
        for r in world.decode.worker.core.rooms.records.values()
    ]
    assert not tables[0] & tables[1]
    run_moving(world, lambda: all(world.decode.result(key) for key in keys))
    failed = [key for key in keys if world.decode.result(key).failure is not None]
    assert len(failed) == 1
    assert check_failed_without_text(world.decode, failed[0]) == "transfer_failed"
    (other,) = set(keys) - set(failed)
    check_right(world.decode, other, world.model, PROMPT, 5)
    world.settle()
    check_nothing_leaked(world)


@pytest.mark.parametrize("chunks", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_a_failed_transfer_is_an_error_and_never_text(chunks: int, late: bool) -> None:
    """vllm-ascend #5660: whatever part of the bytes arrived before the transfer failed."""
    world = make_world(stepped=True)
    world.fabric.chunk_bytes = 256
    faults = world.fabric.faults(world.prefill.worker.core.setup.me.incarnation)
    faults.fail_after_chunks, faults.late_landing = chunks, late
    key = world.submit(PROMPT, sampling=FIVE)
    run_moving(world, lambda: world.decode.result(key) is not None)
    assert check_failed_without_text(world.decode, key) == "transfer_failed"
    result = world.decode.result(key)
    assert result is not None
    assert result.failure.http_status >= 500
    run_moving(world, lambda: not world.decode.worker.core.live_keys())
    check_nothing_leaked(world)
    after = world.submit(PROMPT, sampling=FIVE)
    run_moving(world, lambda: world.decode.result(after) is not None)
    check_right(world.decode, after, world.model, PROMPT, 5)


def refuse_sending(world: World) -> Callable[[], None]:
    """The channel of decode takes no frame any more; returns what ends that."""
    channel = world.decode.worker.ports.channel
    channel.send = lambda to, frame: False
    return lambda: channel.__dict__.pop("send")


def test_sends_that_fail_count_as_silence_of_the_peer() -> None:
    """wtdcode/vllm-backport #33: heartbeats that cannot even be sent are missed heartbeats.
    After so many of them the peer is suspect; nothing in between is answered as a success."""
    limits = CoreLimits(heartbeat_interval_s=1.0, heartbeat_misses=3)
    world = make_world(stepped=True, limits=limits)
    key = world.submit(PROMPT, sampling=FIVE, timeout_s=8.0)
    world.run(lambda: is_posted(world))
    heal = refuse_sending(world)
    start_s = world.clock.monotonic()
    book = world.prefill.worker.core.rooms.peers  # whose heartbeats nobody can answer
    world.run(lambda: any(p.state is PeerState.SUSPECT for p in book.peers.values()))
    assert world.clock.monotonic() - start_s <= 5.0
    world.run(lambda: world.decode.result(key) is not None)
    assert check_failed_without_text(world.decode, key) == "deadline_exceeded"
    heal()
    run_moving(world, lambda: not any(r.worker.core.live_keys() for r in world.ranks.values()))
    check_nothing_leaked(world)
    again = world.submit(PROMPT, sampling=FIVE)
    run_moving(world, lambda: world.decode.result(again) is not None)
    assert world.decode.tokens(again) == simulated_tokens(world.model, PROMPT, 5)
    assert [m for m in world.decode.said if isinstance(m, WorkerHealth)]


def test_done_means_the_last_byte() -> None:
    """Mooncake partial batch: a transfer of one tiny and one huge piece is done when the
    huge one is."""
    tiny_and_huge(LoopbackHarness())


def test_failures_have_statuses() -> None:
    """vllm-ascend #5660: every word that a transfer can fail with is an error to HTTP."""
    for code in ("transfer_failed", "peer_lost", "deadline_exceeded", "bad_metadata"):
        assert failure(code, "x").http_status >= 500
