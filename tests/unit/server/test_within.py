"""A time limit: what asyncio.timeout_at does, in every case that a handler can meet."""

from __future__ import annotations

import asyncio

import pytest

from pdcore.server.within import Within
from pdcore.sim.loop import SimLoop, pass_time


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_what_is_done_in_time_is_not_disturbed() -> None:
    async def main() -> float:
        with Within(now_s() + 2.0):
            await pass_time(1.0)
        await pass_time(5.0)
        return now_s()

    assert SimLoop(start_s=0.0).run(main()) == 6.0


def test_what_is_late_is_a_timeout_and_no_cancellation() -> None:
    async def main() -> tuple[float, int]:
        with pytest.raises(TimeoutError), Within(now_s() + 2.0):
            await pass_time(10.0)
        task = asyncio.current_task()
        assert task is not None
        late_s, left = now_s(), task.cancelling()
        await pass_time(1.0)
        return late_s, left

    assert SimLoop(start_s=0.0).run(main()) == (2.0, 0)


def test_a_limit_in_the_past_ends_the_first_wait() -> None:
    async def main() -> float:
        await pass_time(3.0)
        with pytest.raises(TimeoutError), Within(1.0):
            await pass_time(10.0)
        return now_s()

    assert SimLoop(start_s=0.0).run(main()) == 3.0


def test_a_block_that_never_waits_is_not_late() -> None:
    async def main() -> None:
        with Within(now_s() - 1.0):
            pass
        await pass_time(1.0)

    SimLoop(start_s=0.0).run(main())


def test_somebody_elses_cancellation_passes() -> None:
    async def wait() -> None:
        with Within(now_s() + 5.0):
            await pass_time(10.0)

    async def main() -> tuple[bool, float]:
        task = asyncio.ensure_future(wait())
        await pass_time(1.0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), now_s()

    assert SimLoop(start_s=0.0).run(main()) == (True, 1.0)


def test_cancelled_and_late_in_one_turn_is_a_cancellation() -> None:
    async def wait() -> None:
        with Within(now_s() + 5.0):
            await pass_time(10.0)

    async def main() -> bool:
        task = asyncio.ensure_future(wait())
        await pass_time(0.0)
        asyncio.get_running_loop().call_at(5.0, task.cancel)
        await asyncio.wait([task])
        return task.cancelled()

    assert SimLoop(start_s=0.0).run(main())


def test_an_error_of_the_block_passes() -> None:
    async def main() -> None:
        with Within(now_s() + 5.0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        SimLoop(start_s=0.0).run(main())


def test_it_needs_a_task() -> None:
    async def main() -> str:
        said: list[str] = []

        def call() -> None:
            try:
                with Within(1.0):
                    said.append("ran")
            except RuntimeError as error:
                said.append(str(error))

        asyncio.get_running_loop().call_soon(call)
        await pass_time(0.1)
        return said[0]

    assert "needs a task" in SimLoop(start_s=0.0).run(main())


def test_the_real_loop_does_the_same() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError), Within(now_s()):
            await asyncio.Event().wait()
        with Within(now_s() + 60.0):
            await asyncio.sleep(0)

    asyncio.run(main())
