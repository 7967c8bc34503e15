"""Virtual time, and processes that are stopped and killed on one loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from pdcore.sim.loop import Deadlock, Process, SimLoop, pass_time

T = TypeVar("T")


def run(main: Coroutine[object, object, T], loop: SimLoop | None = None) -> T:
    return (loop or SimLoop(start_s=0.0)).run(main)


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        await pass_time(3600.0)
        first_s = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await pass_time(20.0)
        return first_s, loop.time()

    assert run(main()) == (3600.0, 3610.0)


def test_timers_run_in_the_order_of_time_and_then_of_creation() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        order: list[str] = []
        loop.call_later(2.0, order.append, "c")
        loop.call_later(1.0, order.append, "a")
        loop.call_later(1.0, order.append, "b")
        loop.call_later(1.5, order.append, "never").cancel()
        await pass_time(3.0)
        return order

    assert run(main()) == ["a", "b", "c"]


def test_a_cancelled_timer_does_not_move_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(5.0, print).cancel()
        await pass_time(1.0)
        return loop.time()

    assert run(main()) == 1.0


def test_an_executor_call_is_made_inline() -> None:
    async def main() -> tuple[int, float]:
        return await asyncio.to_thread(lambda: 7), asyncio.get_running_loop().time()

    assert run(main()) == (7, 0.0)


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="nothing is ready"):
        run(main())


def test_a_loop_that_never_sleeps_is_found() -> None:
    async def main() -> None:
        while True:
            await pass_time(0)

    with pytest.raises(Deadlock, match="time stands still"):
        run(main())


def test_what_main_raises_is_raised() -> None:
    async def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(main())


def test_a_stopped_process_goes_on_where_it_was() -> None:
    loop = SimLoop(start_s=0.0)
    process = Process("p")
    seen: list[float] = []

    async def tick() -> None:
        while True:
            seen.append(loop.time())
            await pass_time(1.0)

    async def main() -> None:
        loop.create_task(tick(), context=process.context)
        await pass_time(1.5)
        loop.stop_process(process)
        await pass_time(5.0)
        loop.resume_process(process)
        await pass_time(0.1)
        await loop.bury(process)

    run(main(), loop)
    assert seen == [0.0, 1.0, 6.5]


def test_a_killed_process_runs_nothing_not_even_what_cleans_up() -> None:
    loop = SimLoop(start_s=0.0)
    process = Process("p")
    seen: list[str] = []

    async def serve() -> None:
        try:
            await pass_time(10.0)
            seen.append("slept")
        finally:
            seen.append("cleaned up")

    async def main() -> list[str]:
        loop.create_task(serve(), context=process.context)
        await pass_time(1.0)
        loop.kill_process(process)
        await pass_time(20.0)
        before = list(seen)
        await loop.bury(process)
        return before

    assert run(main(), loop) == []
    assert seen == ["cleaned up"]
    assert not process.tasks


def test_a_task_belongs_to_the_process_that_created_it() -> None:
    loop = SimLoop(start_s=0.0)
    process = Process("p")

    async def child() -> None:
        await pass_time(1.0)

    async def parent() -> None:
        await asyncio.gather(child(), child())

    async def main() -> int:
        loop.create_task(parent(), context=process.context)
        await pass_time(0.5)
        count = len(process.tasks)
        await pass_time(1.0)
        assert not process.tasks
        return count

    assert run(main(), loop) == 3


def test_a_shuffle_keeps_the_order_inside_a_process() -> None:
    def order(seed: int) -> list[str]:
        loop = SimLoop(random.Random(seed), start_s=0.0)
        seen: list[str] = []
        processes = [Process(name) for name in "abc"]

        async def main() -> None:
            for n in range(3):
                for process in processes:
                    loop.call_later(1.0, seen.append, f"{process.name}{n}")
                    loop.call_at(2.0, seen.append, f"{process.name}{n}", context=process.context)
            await pass_time(3.0)

        loop.run(main())
        return seen[9:]

    orders = {tuple(order(seed)) for seed in range(20)}
    assert len(orders) > 1
    for found in orders:
        for name in "abc":
            assert [one for one in found if one[0] == name] == [f"{name}{n}" for n in range(3)]
    assert order(3) == order(3)


def test_an_exception_that_nobody_takes_is_told() -> None:
    loop = SimLoop(start_s=0.0)

    async def broken() -> None:
        raise ZeroDivisionError("x")

    async def main() -> None:
        loop.create_task(broken())
        await pass_time(1.0)

    loop.run(main())
    assert len(loop.errors) == 1
    assert "ZeroDivisionError" in loop.errors[0]


def test_an_exception_of_a_task_that_is_kept_is_told_too() -> None:
    """asyncio tells when a task is forgotten; a server keeps its background tasks for good."""
    loop = SimLoop(start_s=0.0)
    kept: list[asyncio.Task[None]] = []

    async def broken() -> None:
        raise ZeroDivisionError("x")

    async def main() -> None:
        process = Process("p")
        kept.append(loop.create_task(broken(), context=process.context))
        taken = loop.create_task(broken(), context=process.context)
        with pytest.raises(ZeroDivisionError):
            await taken

    loop.run(main())
    assert loop.errors == ["p: a task that nobody awaits: ZeroDivisionError('x')"]


def test_what_main_raises_is_not_told_twice() -> None:
    loop = SimLoop(start_s=0.0)

    async def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        await fail()

    with pytest.raises(ZeroDivisionError):
        loop.run(main())
    assert loop.errors == []


def test_what_nobody_asked_for_is_told_once() -> None:
    loop = SimLoop(start_s=0.0)

    async def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        task = loop.create_task(fail())
        await pass_time(1.0)
        assert task.done()

    loop.run(main())
    assert loop.errors == ["world: a task that nobody awaits: ZeroDivisionError()"]
    loop.run(pass_time(1.0))
    assert len(loop.errors) == 1


def test_a_callback_that_raises_leaves_the_others_of_its_turn() -> None:
    loop = SimLoop(start_s=0.0)
    seen: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        loop.call_soon(seen.append, "a")
        loop.call_soon(fail)
        loop.call_soon(seen.append, "b")
        await pass_time(1.0)

    with pytest.raises(ZeroDivisionError):
        loop.run(main())
    assert seen == ["a"]
    loop.run(pass_time(0.1))
    assert seen == ["a", "b"]
