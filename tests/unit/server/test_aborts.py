"""Aborts until they are answered, and dispatches that are over."""

from __future__ import annotations

import asyncio

from pdcore.clock import ManualClock
from pdcore.control.messages import Abort
from pdcore.server.aborts import AbortTable, History
from pdcore.types import RoomKey
from tests.unit.server.kit import FakeLink, ManualTimers, run, settle

KEY = RoomKey(5, 7)


def table(link: FakeLink) -> tuple[AbortTable, ManualTimers]:
    timers = ManualTimers(ManualClock())
    return AbortTable(link, timers, initial_s=0.05, max_s=5.0), timers


def test_an_abort_is_resent_with_back_off_until_it_is_answered() -> None:
    """Rule 4: a full queue or a lost message costs time, never the abort."""
    link = FakeLink()
    aborts, timers = table(link)
    aborts.send(KEY, 0, "gone", unless_received=False)
    assert link.sent == []
    link.connected.add(0)
    timers.advance(0.05)
    assert link.of(Abort) == [Abort(KEY, "gone", False)]
    timers.advance(0.1)
    timers.advance(0.2)
    assert len(link.sent) == 3
    aborts.resolve(KEY, True)
    timers.advance(60)
    assert len(link.sent) == 3
    assert timers.armed() == 0
    assert len(aborts) == 0


def test_a_stronger_abort_replaces_a_weaker_one_and_not_the_reverse() -> None:
    link = FakeLink([0])
    aborts, timers = table(link)
    aborts.send(KEY, 0, "prefill failed", unless_received=True)
    aborts.send(KEY, 0, "client gone", unless_received=False)
    aborts.send(KEY, 0, "prefill failed", unless_received=True)
    assert [m.unless_received for m in link.of(Abort)] == [True, False]
    timers.advance(0.05)
    assert link.of(Abort)[-1].unless_received is False
    assert timers.armed() == 1


def test_everybody_who_waits_gets_the_answer() -> None:
    async def play() -> None:
        aborts, _ = table(FakeLink([0]))
        aborts.send(KEY, 0, "a", unless_received=True)
        first = asyncio.ensure_future(aborts.answer(KEY))
        await settle(3)
        aborts.send(KEY, 0, "b", unless_received=False)
        second = asyncio.ensure_future(aborts.answer(KEY))
        await settle(3)
        aborts.resolve(KEY, True)
        assert await first is True
        assert await second is True

    run(play())


def test_a_dead_worker_has_ended_what_it_had() -> None:
    async def play() -> None:
        aborts, timers = table(FakeLink([0, 1]))
        aborts.send(KEY, 0, "a", unless_received=False)
        aborts.send(RoomKey(6, 1), 1, "a", unless_received=False)
        waiting = asyncio.ensure_future(aborts.answer(KEY))
        await settle(3)
        aborts.lose(0)
        assert await waiting is True
        assert len(aborts) == 1
        aborts.clear()
        assert (len(aborts), timers.armed()) == (0, 0)

    run(play())


def test_history_is_bounded_and_expires() -> None:
    history = History(cap=2, ttl_s=10)
    for attempt in range(3):
        history.add(RoomKey(1, attempt), 0.0, was_here=attempt != 2)
    assert len(history) == 2
    assert history.get(RoomKey(1, 0), 0.0) is None
    assert history.get(RoomKey(1, 1), 9.9) is True
    assert history.get(RoomKey(1, 2), 9.9) is False
    assert history.get(RoomKey(1, 2), 10.0) is None


def test_who_gave_up_waiting_does_not_pile_up() -> None:
    """D60: POST /cancel is resent while a worker hangs; each one left a waiter."""

    async def play() -> None:
        aborts, _ = table(FakeLink([0]))
        aborts.send(KEY, 0, "a", unless_received=True)
        for _ in range(50):
            waiting = asyncio.ensure_future(aborts.answer(KEY))
            await settle(2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert list(aborts.unanswered()) == [KEY]
        assert aborts._entries[KEY].waiters == []
        last = asyncio.ensure_future(aborts.answer(KEY))
        await settle(2)
        aborts.resolve(KEY, True)
        assert await last is True
        assert list(aborts.unanswered()) == []

    run(play())
