"""Aborts on their way to workers, resent until answered, and dispatches that are over.

A cancel may overtake its request or get lost (protocol models, Q5): so an Abort is repeated
with back-off until its worker answers or dies, and a dispatch that was cancelled before it
came leaves a tombstone. Both tables are bounded: tombstones by number and age, aborts because
they count as requests in flight (D60). Safety depends on neither.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from pdcore.control.messages import Abort, LeaderMessage
from pdcore.types import RoomKey


class Link(Protocol):
    """The leader's end of the link (:class:`pdcore.control.link.LeaderLink`). ``send`` never
    blocks; False means refused: the rank is not connected or its queue is full (D42)."""

    def send(self, rank: int, message: LeaderMessage) -> bool: ...


class Timers(Protocol):
    """The part of an event loop that arms timers; tests pass a manual one."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle: ...


class History:
    """Dispatches that are over: bounded, expiring; safety does not depend on it."""

    __slots__ = ("_cap", "_ends", "_ttl_s")

    def __init__(self, cap: int, ttl_s: float) -> None:
        self._cap = cap
        self._ttl_s = ttl_s
        self._ends: OrderedDict[RoomKey, tuple[float, bool]] = OrderedDict()

    def add(self, key: RoomKey, now_s: float, *, was_here: bool) -> None:
        self._ends.pop(key, None)
        self._ends[key] = (now_s + self._ttl_s, was_here)
        while len(self._ends) > self._cap:
            self._ends.popitem(last=False)

    def get(self, key: RoomKey, now_s: float) -> bool | None:
        """None: not remembered. True: it ran here. False: cancelled before it came."""
        entry = self._ends.get(key)
        if entry is None:
            return None
        if entry[0] <= now_s:
            del self._ends[key]
            return None
        return entry[1]

    def __len__(self) -> int:
        return len(self._ends)


class _Aborting:
    """One Abort until the worker answers; resent with back-off."""

    __slots__ = ("delay_s", "message", "timer", "to_rank", "waiters")

    def __init__(self, message: Abort, to_rank: int, delay_s: float) -> None:
        self.message = message
        self.to_rank = to_rank
        self.delay_s = delay_s
        self.timer: asyncio.TimerHandle | None = None
        self.waiters: list[asyncio.Future[bool]] = []

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def resolve(self, applied: bool) -> None:
        self.stop()
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(applied)


class AbortTable:
    """Aborts that no worker has answered yet."""

    def __init__(
        self, link: Link, timers: Timers | None, *, initial_s: float, max_s: float
    ) -> None:
        self._link = link
        self._timers = timers
        self._initial_s = initial_s
        self._max_s = max_s
        self._entries: dict[RoomKey, _Aborting] = {}

    def send(self, key: RoomKey, to_rank: int, reason: str, *, unless_received: bool) -> None:
        """Start, or strengthen, the abort of one dispatch."""
        former = self._entries.get(key)
        if former is not None and (unless_received or not former.message.unless_received):
            return  # the same or a stronger one is on its way
        entry = _Aborting(Abort(key, reason, unless_received), to_rank, self._initial_s)
        if former is not None:
            entry.waiters = former.waiters
            former.stop()
        self._entries[key] = entry
        self._resend(entry)

    async def answer(self, key: RoomKey) -> bool:
        """Wait for the worker's answer to an abort that was sent: applied or not."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiters = self._entries[key].waiters
        waiters.append(waiter)
        try:
            return await waiter
        finally:
            waiters.remove(waiter)  # who has given up must not pile up at a worker that hangs

    def resolve(self, key: RoomKey, applied: bool) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.resolve(applied)

    def unanswered(self) -> Iterable[RoomKey]:
        """Dispatches whose abort no worker has answered."""
        return self._entries.keys()

    def lose(self, rank: int) -> None:
        """The worker is dead: what it had has ended."""
        for key in [k for k, e in self._entries.items() if e.to_rank == rank]:
            self.resolve(key, True)

    def clear(self) -> None:
        for key in list(self._entries):
            self.resolve(key, False)

    def _resend(self, entry: _Aborting) -> None:
        self._link.send(entry.to_rank, entry.message)
        entry.timer = call_later(self._timers, entry.delay_s, lambda: self._resend(entry))
        entry.delay_s = min(entry.delay_s * 2, self._max_s)

    def __len__(self) -> int:
        return len(self._entries)


def call_later(
    timers: Timers | None, delay_s: float, callback: Callable[[], None]
) -> asyncio.TimerHandle:
    """Arm a timer on ``timers``, or on the running event loop."""
    source = timers if timers is not None else asyncio.get_running_loop()
    return source.call_later(delay_s, callback)
