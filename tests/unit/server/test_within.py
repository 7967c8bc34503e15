"""A time limit: what asyncio.timeout_at does, in every case that a handler can meet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine

import pytest

from pdcore.server.within import Within
from pdcore.sim.loop import SimLoop, pass_time


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_what_is_done_in_time_is_not_disturbed() -> None:
    async def work() -> int:
        await pass_time(0.5)
        await pass_time(0.5)
        return 7

    async def main() -> tuple[int, float]:
        found = await Within(now_s() + 2.0, work())
        await pass_time(5.0)
        return found, now_s()

    assert SimLoop(start_s=0.0).run(main()) == (7, 6.0)


def test_what_is_ready_at_once_makes_no_timer() -> None:
    class Loop(SimLoop):
        num_timers = 0

        def call_at(self, *args: object, **more: object) -> asyncio.TimerHandle:
            self.num_timers += 1
            raise AssertionError("nothing is waited for")

    async def ready() -> int:
        return 7

    async def main() -> int:
        return await Within(now_s() - 1.0, ready())

    assert Loop(start_s=0.0).run(main()) == 7


def test_a_wait_that_begins_late_still_has_its_least_time_and_raises_what_was_asked_for() -> None:
    async def main() -> float:
        limit = now_s() - 1.0
        await Within(limit, pass_time(2.0), at_least_s=3.0, late=ConnectionError)
        with pytest.raises(ConnectionError):
            await Within(limit, pass_time(10.0), at_least_s=3.0, late=ConnectionError)
        return now_s()

    assert SimLoop(start_s=0.0).run(main()) == 5.0


def test_what_is_late_is_a_timeout_and_no_cancellation() -> None:
    async def main() -> tuple[float, int]:
        with pytest.raises(TimeoutError):
            await Within(now_s() + 2.0, pass_time(10.0))
        task = asyncio.current_task()
        assert task is not None
        late_s, left = now_s(), task.cancelling()
        await pass_time(1.0)
        return late_s, left

    assert SimLoop(start_s=0.0).run(main()) == (2.0, 0)


def test_a_limit_in_the_past_ends_the_first_wait() -> None:
    async def main() -> float:
        await pass_time(3.0)
        with pytest.raises(TimeoutError):
            await Within(1.0, pass_time(10.0))
        return now_s()

    assert SimLoop(start_s=0.0).run(main()) == 3.0


def test_what_is_late_may_clean_up() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await pass_time(10.0)
        finally:
            await pass_time(1.0)
            seen.append("cleaned up")

    async def main() -> float:
        with pytest.raises(TimeoutError):
            await Within(now_s() + 2.0, work())
        return now_s()

    assert SimLoop(start_s=0.0).run(main()) == 3.0
    assert seen == ["cleaned up"]


def test_who_ignores_the_limit_gives_what_he_has() -> None:
    """As with asyncio.timeout: a block that swallows its cancellation ends well."""

    async def work() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await pass_time(10.0)
        return 7

    async def main() -> tuple[int, int]:
        found = await Within(now_s() + 2.0, work())
        task = asyncio.current_task()
        assert task is not None
        return found, task.cancelling()

    assert SimLoop(start_s=0.0).run(main()) == (7, 0)


def test_somebody_elses_cancellation_passes() -> None:
    async def main() -> tuple[bool, float]:
        task = asyncio.ensure_future(waiting())
        await pass_time(1.0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), now_s()

    assert SimLoop(start_s=0.0).run(main()) == (True, 1.0)


async def waiting() -> None:
    await Within(now_s() + 5.0, pass_time(10.0))


def test_cancelled_and_late_in_one_turn_is_a_cancellation() -> None:
    async def main() -> bool:
        task = asyncio.ensure_future(waiting())
        await pass_time(0.0)
        asyncio.get_running_loop().call_at(5.0, task.cancel)
        await asyncio.wait([task])
        return task.cancelled()

    assert SimLoop(start_s=0.0).run(main())


def test_an_error_passes_at_once_and_after_a_wait() -> None:
    async def fail(after_s: float) -> None:
        if after_s:
            await pass_time(after_s)
        raise ZeroDivisionError

    async def main() -> float:
        for after_s in (0.0, 1.0):
            with pytest.raises(ZeroDivisionError):
                await Within(now_s() + 5.0, fail(after_s))
        await pass_time(10.0)
        return now_s()

    assert SimLoop(start_s=0.0).run(main()) == 11.0


def test_who_gives_up_closes_what_he_waited_for() -> None:
    closed: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed.append("closed")

    async def main() -> None:
        coroutine = limited(work())
        task = asyncio.ensure_future(pass_time(0.0))
        assert coroutine.send(None) is not None
        coroutine.close()
        await task

    async def limited(awaited: Coroutine[object, object, None]) -> None:
        await Within(now_s() + 5.0, awaited)

    SimLoop(start_s=0.0).run(main())
    assert closed == ["closed"]


def test_it_needs_a_task_where_it_has_to_wait() -> None:
    async def main() -> str:
        said: list[str] = []

        def call() -> None:
            try:
                next(Within(1.0, pass_time(1.0)).__await__())
            except RuntimeError as error:
                said.append(str(error))

        asyncio.get_running_loop().call_soon(call)
        await pass_time(0.1)
        return said[0]

    assert "needs a task" in SimLoop(start_s=0.0).run(main())


def test_the_real_loop_does_the_same() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await Within(now_s(), asyncio.Event().wait())
        await Within(now_s() + 60.0, asyncio.sleep(0))

    asyncio.run(main())


def test_who_fails_when_it_is_late_fails_so_and_is_not_cancelled_any_more() -> None:
    async def work() -> None:
        try:
            await pass_time(10.0)
        except asyncio.CancelledError:
            raise ZeroDivisionError from None

    async def main() -> int:
        with pytest.raises(ZeroDivisionError):
            await Within(now_s() + 2.0, work())
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert SimLoop(start_s=0.0).run(main()) == 0
