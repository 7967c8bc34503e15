"""The leader's table of requests in flight.

Seed's dispatcher (requirements 1.6): sends without mandatory routing, waits for results in a
thread pool, knows no worker states. Mutants below bring these rules back.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pdcore.control.messages import Abort, Aborted, LeaderMessage, Stop, Submit, Tokens
from pdcore.errors import CodecError, Overloaded, RoomInUse, failure
from pdcore.server.dispatcher import CancelOutcome, DispatcherLimits
from pdcore.server.pending import Ended, NewTokens, Refused
from pdcore.types import RoomKey, SamplingParams
from tests.unit.server.kit import FakeLink, World, ready, run, settle

KEY = RoomKey(5, 7)


def status(error: pytest.ExceptionInfo[Refused]) -> int:
    return error.value.failure.http_status


def test_a_request_reaches_its_worker_whole_and_its_results_come_back() -> None:
    async def play() -> None:
        world = World()
        sampling = SamplingParams(max_tokens=9, temperature=0.5, seed=3, stop_token_ids=(2,))
        request = world.request(sampling=sampling, bootstrap="h:1", prefill="p:1", decode="d:1")
        pending = world.dispatcher.submit(request)
        (submit,) = world.link.of(Submit)
        assert np.frombuffer(submit.prompt, "<i4").tolist() == [1, 2, 3]
        assert submit.sampling.seed == 3
        assert submit.sampling.stop_token_ids == (2,)
        assert (submit.bootstrap, submit.prefill, submit.decode) == ("h:1", "p:1", "d:1")
        world.accept(KEY)
        assert await pending.admitted() is None
        world.tokens(KEY, [4, 5])
        assert await pending.next() == NewTokens([4, 5], [])
        world.finish(KEY, "length")
        assert await pending.next() == Ended("length", None, 3, 2, {"queue": 0.5})
        assert world.dispatcher.num_pending == 0
        assert world.timers.armed() == 0

    run(play())


# --- D42: mandatory routing and a registry of who is ready --------------------------------


def check_not_connected_is_refused_at_once(link: FakeLink) -> None:
    """A rank whose connection is gone: the caller hears of it now, not after 1800 s."""

    async def play() -> None:
        world = World()
        world.dispatcher._link = link
        with pytest.raises(Refused) as caught:
            world.dispatcher.submit(world.request())
        assert status(caught) == 503
        assert world.dispatcher.num_pending == 0

    run(play())


class SilentLink(FakeLink):
    """Mutant: a ROUTER without the mandatory flag drops what it cannot route."""

    def send(self, rank: int, message: LeaderMessage) -> bool:
        super().send(rank, message)
        return True


def test_a_rank_without_connection_is_a_503_at_once() -> None:
    """D42: submit to a rank that is not connected never vanishes."""
    check_not_connected_is_refused_at_once(FakeLink())
    with pytest.raises(pytest.fail.Exception):
        check_not_connected_is_refused_at_once(SilentLink())


def test_nothing_is_dispatched_before_every_worker_is_ready() -> None:
    """D42: the registry decides, not the socket; health says what is missing."""
    world = World(num_workers=2)
    world.dispatcher.on_lost(1, "exit code 1")
    with pytest.raises(Refused, match="exit code 1") as caught:
        world.dispatcher.submit(world.request())
    assert status(caught) == 503
    assert world.link.of(Submit) == []


def test_a_dp_rank_that_was_asked_for_is_honoured() -> None:
    """D21: no constant 0."""
    world = World(num_workers=4, dp_size=2)
    world.dispatcher.submit(world.request(1, 1), dp_rank=1)
    world.dispatcher.submit(world.request(2, 2), dp_rank=0)
    assert [rank for rank, _ in world.link.sent] == [2, 0]
    with pytest.raises(Refused, match="disagg_prefill_dp_rank") as caught:
        world.dispatcher.submit(world.request(3, 3), dp_rank=2)
    assert status(caught) == 400


def test_without_a_wish_the_least_loaded_dp_rank_takes_it() -> None:
    world = World(num_workers=2, dp_size=2)
    for attempt in range(1, 5):
        world.dispatcher.submit(world.request(attempt, attempt))
    assert [rank for rank, _ in world.link.sent] == [0, 1, 0, 1]


# --- D43: results are not waited for in threads -------------------------------------------


async def by_futures(world: World, num_old: int) -> bool:
    old = [
        asyncio.ensure_future(world.dispatcher.submit(world.request(room, 1)).next())
        for room in range(1, num_old + 1)
    ]
    pending = world.dispatcher.submit(world.request(99, 1))
    reading = asyncio.ensure_future(pending.next())
    await settle()
    world.tokens(RoomKey(99, 1), [1])
    await settle()
    assert not any(one.done() for one in old)
    return reading.done()


async def by_threads(world: World, num_old: int) -> bool:
    """Mutant: the seed awaits each result in the loop's default pool (2 CPUs: 6 threads)."""
    import threading

    release = threading.Event()
    done = threading.Event()
    with ThreadPoolExecutor(6) as pool:
        loop = asyncio.get_running_loop()
        waits = [loop.run_in_executor(pool, release.wait) for _ in range(num_old)]
        reading = loop.run_in_executor(pool, done.set)
        await settle()
        is_delivered = done.is_set()
        release.set()
        await asyncio.gather(*waits, reading)
    return is_delivered


def test_forty_waiting_requests_do_not_delay_one_that_is_finished() -> None:
    """D43: futures set on the loop; the seed's pool of six delivered 0 of 24 in a second."""

    async def play() -> None:
        assert await by_futures(World(), 40)
        with pytest.raises(AssertionError):
            assert await by_threads(World(), 40)

    run(play())


# --- D45: a dead worker fails what it had -------------------------------------------------


def test_a_dead_worker_fails_its_requests_and_refuses_new_ones() -> None:
    """D45: pending requests end with 503 at once; the instance is unhealthy until restart."""

    async def play() -> None:
        world = World(num_workers=4, dp_size=2)
        lost = world.dispatcher.submit(world.request(1, 1), 1)
        spared = world.dispatcher.submit(world.request(2, 2), 0)
        world.dispatcher.on_lost(3, "killed by signal 9")
        ended = await lost.next()
        assert isinstance(ended, Ended)
        assert ended.failure is not None
        assert (ended.failure.code, ended.failure.http_status) == ("worker_lost", 503)
        assert "signal 9" in ended.failure.detail
        assert not spared.has_ended
        with pytest.raises(Refused):
            world.dispatcher.submit(world.request(3, 3))
        world.dispatcher.on_message(3, ready(3, 1, b"\x02" * 16))
        world.dispatcher.submit(world.request(3, 3), 1)

    run(play())


def test_a_restart_nobody_noticed_fails_the_old_lifes_requests() -> None:
    async def play() -> None:
        world = World()
        pending = world.dispatcher.submit(world.request())
        world.dispatcher.on_message(0, ready(0, 0, b"\x02" * 16))
        ended = await pending.next()
        assert isinstance(ended, Ended)
        assert ended.failure is not None
        world.dispatcher.submit(world.request(attempt=8))

    run(play())


def test_a_worker_of_another_configuration_is_counted_and_ignored() -> None:
    world = World()
    world.dispatcher.on_message(5, ready(5))
    assert world.dispatcher.counters["foreign_workers"] == 1
    world.dispatcher.submit(world.request())


# --- bounds, deadlines, duplicates --------------------------------------------------------


def test_more_than_the_limit_is_a_429_and_nothing_is_sent() -> None:
    """D60: a bounded table."""
    world = World(limits=DispatcherLimits(max_pending=1))
    world.dispatcher.submit(world.request(1, 1))
    with pytest.raises(Overloaded):
        world.dispatcher.submit(world.request(2, 2))
    assert len(world.link.of(Submit)) == 1
    world.finish(RoomKey(1, 1))
    world.dispatcher.submit(world.request(2, 2))


def check_a_worker_that_hangs_is_not_given_more(world: World) -> None:
    """Clients that leave and come again, and a worker that answers nothing."""
    for attempt in range(1, 10):
        key = RoomKey(attempt, attempt)
        try:
            world.dispatcher.submit(world.request(*key))
        except Overloaded:
            break
        world.dispatcher.abort(key, "the client is gone")
    assert len(world.link.of(Submit)) <= 3, "more than it may hold"


def test_requests_whose_abort_is_not_answered_are_in_flight() -> None:
    """D60: they were forgotten at once, so that nothing bounded them while a worker hung."""
    limits = DispatcherLimits(max_pending=3)
    world = World(limits=limits)
    check_a_worker_that_hangs_is_not_given_more(world)
    world.dispatcher.on_message(0, Aborted(RoomKey(1, 1), True))
    world.dispatcher.submit(world.request(20, 20))

    class Forgets(World):
        """Mutant: only what a handler waits for counts."""

        def __init__(self) -> None:
            super().__init__(limits=limits)
            self.dispatcher._aborts.unanswered = tuple  # type: ignore[method-assign]

    with pytest.raises(AssertionError, match="more than it may hold"):
        check_a_worker_that_hangs_is_not_given_more(Forgets())


def test_a_prompt_too_large_for_the_link_is_a_413() -> None:
    class Small(FakeLink):
        def send(self, rank: int, message: LeaderMessage) -> bool:
            raise CodecError("20000000 bytes, the limit is 16777216")

    world = World()
    world.dispatcher._link = Small()
    with pytest.raises(Refused) as caught:
        world.dispatcher.submit(world.request())
    assert status(caught) == 413


def test_the_deadline_ends_a_request_and_aborts_it_at_the_worker() -> None:
    """R36: 504, after the worker's own timer had its chance (rule 8)."""

    async def play() -> None:
        world = World()
        pending = world.dispatcher.submit(world.request(remaining_s=10.0))
        world.timers.advance(10.9)
        assert not pending.has_ended
        world.timers.advance(0.2)
        ended = await pending.next()
        assert isinstance(ended, Ended)
        assert ended.failure is not None
        assert ended.failure.http_status == 504
        assert set(world.link.of(Abort)) == {Abort(KEY, "deadline exceeded", False)}

    run(play())


def test_a_result_that_meets_the_deadline_wins() -> None:
    async def play() -> None:
        world = World()
        pending = world.dispatcher.submit(world.request(remaining_s=10.0))
        world.timers.advance(10.5)
        world.finish(KEY)
        world.timers.advance(10)
        ended = await pending.next()
        assert isinstance(ended, Ended)
        assert ended.failure is None
        assert world.link.of(Abort) == []

    run(play())


@pytest.mark.parametrize("change", [{"remaining_s": 0.0}, {"expires_at_s": 0.0}])
def test_a_request_that_arrives_after_its_time_is_refused(change: dict[str, float]) -> None:
    """Rule 8 (Q5 ABS): a late or duplicate arrival starts no work nobody waits for."""
    world = World()
    with pytest.raises(Refused) as caught:
        world.dispatcher.submit(world.request(**change))
    assert status(caught) == 504
    assert world.link.sent == []
    skewed = world.request(expires_at_s=world.clock.unix() - 4.9)
    world.dispatcher.submit(skewed)


def test_one_room_has_one_live_request_unless_it_is_replaced() -> None:
    """D7: a duplicate is a 409, a re-dispatch names what it replaces."""
    world = World()
    world.dispatcher.submit(world.request(5, 7))
    for request in (
        world.request(5, 7),
        world.request(5, 8),
        world.request(5, 8, replaces=6),
    ):
        with pytest.raises(RoomInUse):
            world.dispatcher.submit(request)
    world.dispatcher.submit(world.request(5, 8, replaces=7))
    assert world.dispatcher.num_pending == 2
    world.finish(RoomKey(5, 8))
    with pytest.raises(RoomInUse, match="dispatched before"):
        world.dispatcher.submit(world.request(5, 8))
    world.finish(RoomKey(5, 7))
    world.dispatcher.submit(world.request(5, 9))


def test_a_dispatch_that_was_replaced_and_comes_again_does_not_take_its_own_place() -> None:
    """D7: its client is gone behind a connection that broke without a word, so it is still in
    flight when what replaced it is over; a proxy then repeats it. Its first handler waited for
    ever: nothing led to it any more. Seed 3000195 of `verify cluster`."""

    async def play() -> None:
        world = World()
        first = world.dispatcher.submit(world.request(5, 7))
        world.dispatcher.submit(world.request(5, 8, replaces=7))
        world.finish(RoomKey(5, 8), "length")
        with pytest.raises(RoomInUse, match="dispatched before"):
            world.dispatcher.submit(world.request(5, 7))
        world.finish(RoomKey(5, 7), "length")
        assert first.has_ended
        assert world.dispatcher.num_pending == 0

    run(play())


def test_late_and_foreign_results_are_dropped_and_counted() -> None:
    """R39: a result after the end, or of a rank that never had the request."""

    async def play() -> None:
        world = World(num_workers=2, dp_size=2)
        pending = world.dispatcher.submit(world.request(), 0)
        world.dispatcher.on_message(1, Tokens([KEY], [[9]]))
        world.finish(KEY)
        world.tokens(KEY, [9])
        world.finish(KEY)
        assert world.dispatcher.counters["late_results"] == 3
        ended = await pending.next()
        assert isinstance(ended, Ended)

    run(play())


def test_an_end_that_is_no_success_always_carries_a_failure() -> None:
    """D9: a finish reason like "error" or "abort" can never be answered 200."""

    async def play() -> None:
        for reason in ("error", "abort", "preempted_oom", ""):
            world = World()
            pending = world.dispatcher.submit(world.request())
            world.finish(KEY, reason)
            ended = await pending.next()
            assert isinstance(ended, Ended)
            assert ended.failure is not None
            assert ended.failure.http_status >= 500
        world = World()
        pending = world.dispatcher.submit(world.request())
        world.finish(KEY, "error", failure("out_of_memory", "no block is free"))
        ended = await pending.next()
        assert isinstance(ended, Ended)
        assert ended.failure == failure("out_of_memory", "no block is free")

    run(play())


# --- cancels ------------------------------------------------------------------------------


def test_a_client_that_is_gone_ends_its_request_at_once() -> None:
    async def play() -> None:
        world = World()
        pending = world.dispatcher.submit(world.request())
        assert world.dispatcher.abort(KEY, "client gone")
        ended = await pending.next()
        assert isinstance(ended, Ended)
        assert ended.failure is not None
        assert ended.failure.http_status == 499
        assert world.link.of(Abort) == [Abort(KEY, "client gone", False)]
        assert not world.dispatcher.abort(KEY, "client gone")

    run(play())


def test_an_abort_by_room_finds_the_attempt_in_flight() -> None:
    async def play() -> None:
        world = World()
        world.dispatcher.submit(world.request(attempt=7))
        second = world.dispatcher.submit(world.request(attempt=8, replaces=7))
        assert not world.dispatcher.abort_room(6, "another room")
        assert world.dispatcher.abort_room(5, "enough")
        assert [abort.key for abort in world.link.of(Abort)] == [RoomKey(5, 8)]
        ended = await second.next()
        assert isinstance(ended, Ended)
        assert ended.failure == failure("cancelled", "enough")
        assert not world.dispatcher.abort_room(5, "again")

    run(play())


def test_a_cancel_is_answered_by_the_worker() -> None:
    """A decode that has its KV ignores a cancel with ``unless_received`` and goes on."""

    async def play() -> None:
        for applied in (True, False):
            world = World()
            pending = world.dispatcher.submit(world.request())
            asking = asyncio.ensure_future(
                world.dispatcher.cancel(KEY, "prefill failed", unless_received=True)
            )
            await settle(5)
            assert world.link.of(Abort) == [Abort(KEY, "prefill failed", True)]
            world.dispatcher.on_message(0, Aborted(KEY, applied))
            assert await asking == CancelOutcome(known=True, applied=applied)
            assert not pending.has_ended, "the worker's own result ends it"

    run(play())


def test_a_cancel_that_overtakes_its_request_is_asked_for_again_and_leaves_a_tombstone() -> None:
    """Q5 RES and TOMB: "never heard of it" is no answer, and the request is refused."""

    async def play() -> None:
        world = World()
        outcome = await world.dispatcher.cancel(KEY, "x", unless_received=False)
        assert outcome == CancelOutcome(known=False, applied=False)
        with pytest.raises(Refused, match="cancelled before") as caught:
            world.dispatcher.submit(world.request())
        assert status(caught) == 499
        world.clock.advance(121)
        world.dispatcher.submit(world.request(expires_at_s=world.clock.unix() + 1))

    run(play())


def test_a_cancel_of_what_is_over_is_known_and_changes_nothing() -> None:
    async def play() -> None:
        world = World()
        world.dispatcher.submit(world.request())
        world.finish(KEY)
        outcome = await world.dispatcher.cancel(KEY, "x", unless_received=False)
        assert outcome == CancelOutcome(known=True, applied=False)
        assert world.link.of(Abort) == []

    run(play())


# --- the end ------------------------------------------------------------------------------


def test_stopping_fails_everything_and_takes_nothing_new() -> None:
    """R39: stop() fails all pending with shutting_down."""

    async def play() -> None:
        world = World()
        pending = world.dispatcher.submit(world.request())
        asking = asyncio.ensure_future(world.dispatcher.cancel(KEY, "x", unless_received=True))
        await settle(5)
        world.dispatcher.stop()
        ended = await pending.next()
        assert isinstance(ended, Ended)
        assert ended.failure is not None
        assert ended.failure.code == "shutting_down"
        assert await asking == CancelOutcome(known=True, applied=False)
        assert world.link.of(Stop) == [Stop(0.0)]
        with pytest.raises(Refused):
            world.dispatcher.submit(world.request(6, 6))
        world.dispatcher.stop()
        assert world.timers.armed() == 0

    run(play())


def test_draining_lets_running_requests_finish() -> None:
    async def play() -> None:
        world = World()
        pending = world.dispatcher.submit(world.request())
        world.dispatcher.drain(30.0)
        assert world.link.of(Stop) == [Stop(30.0)]
        with pytest.raises(Refused) as caught:
            world.dispatcher.submit(world.request(6, 6))
        assert caught.value.failure.code == "shutting_down"
        world.finish(KEY)
        ended = await pending.next()
        assert isinstance(ended, Ended)
        assert ended.failure is None

    run(play())
