"""A time limit around what is awaited for every token and nearly never has to wait.

``async with asyncio.timeout_at`` makes two coroutines, an object and a timer each time, which
is a good part of what sending one event of a stream costs. Here the timer is made when there
is something to wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Within(Generic[T]):
    """``await Within(when_s, awaitable)``: what it gives, or ``late()`` raised at that moment of
    the running loop's clock, but ``at_least_s`` after the wait began. A cancellation by somebody
    else passes. What is ready at once is not late, whatever the clock says."""

    __slots__ = ("_at_least_s", "_awaitable", "_is_late", "_late", "_when_s")

    def __init__(
        self,
        when_s: float,
        awaitable: Awaitable[T],
        *,
        at_least_s: float = 0.0,
        late: Callable[[], Exception] = TimeoutError,
    ) -> None:
        self._when_s = when_s
        self._awaitable = awaitable
        self._at_least_s = at_least_s
        self._late = late
        self._is_late = False

    def __await__(self) -> Generator[object, object, T]:
        inner = self._awaitable.__await__()
        try:
            waits_for: object = next(inner)
        except StopIteration as done:
            value: T = done.value
            return value
        return (yield from self._wait(inner, waits_for))

    def _wait(
        self, inner: Generator[object, object, T], waits_for: object
    ) -> Generator[object, object, T]:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            inner.close()
            raise RuntimeError("a time limit needs a task that it can cancel")
        cancelling = task.cancelling()
        when_s = max(self._when_s, loop.time() + self._at_least_s)
        timer = loop.call_at(when_s, self._expire, task)
        try:
            return (yield from _Begun(waits_for, inner))
        except asyncio.CancelledError as error:
            # The same rule as asyncio.Timeout: only a cancellation that is ours alone counts.
            if self._settle(task, cancelling):
                raise self._late() from error
            raise
        finally:
            timer.cancel()
            self._settle(task, cancelling)

    def _settle(self, task: asyncio.Task[object], cancelling: int) -> bool:
        """Take our own request to cancel back, once; whether there was no other."""
        if not self._is_late:
            return False
        self._is_late = False
        return task.uncancel() <= cancelling

    def _expire(self, task: asyncio.Task[object]) -> None:
        self._is_late = True
        task.cancel()


class _Begun(Generator[object, object, T]):
    """A generator that has begun already and waits for ``first``, to be delegated to from here."""

    def __init__(self, first: object, inner: Generator[object, object, T]) -> None:
        self._first: list[object] = [first]
        self._inner = inner

    def send(self, value: object) -> object:
        return self._first.pop() if self._first else self._inner.send(value)

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: object = None,
        tb: TracebackType | None = None,
    ) -> object:
        if isinstance(typ, BaseException):
            return self._inner.throw(typ)
        return self._inner.throw(typ, val, tb)

    def close(self) -> None:
        self._inner.close()
