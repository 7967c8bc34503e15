"""A time limit around an await that happens for every token.

``asyncio.timeout_at`` does the same with two coroutines and an object of fifteen attributes,
which is a good part of what sending one event of a stream costs.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Within:
    """``with Within(when_s):`` raises TimeoutError inside the current task at that moment of
    the running loop's clock, unless the block has ended or the task is cancelled by somebody
    else; that cancellation passes."""

    __slots__ = ("_cancelling", "_handle", "_is_late", "_task", "_when_s")

    _cancelling: int
    _handle: asyncio.TimerHandle
    _task: asyncio.Task[object]

    def __init__(self, when_s: float) -> None:
        self._when_s = when_s
        self._is_late = False

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a time limit needs a task that it can cancel")
        self._task = task
        self._cancelling = task.cancelling()
        self._handle = loop.call_at(self._when_s, self._expire)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.cancel()
        # The same rule as asyncio.Timeout: only a cancellation that is ours alone is a timeout.
        if (
            self._is_late
            and self._task.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error

    def _expire(self) -> None:
        self._is_late = True
        self._task.cancel()
