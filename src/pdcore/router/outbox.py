"""Cancels on their way to legs, resent until they are answered (protocol models, Q5 RES).

A cancel may overtake its request, so "never heard of it" is no answer: it is asked again, with
back-off, until the leg knows the dispatch, its deadline has ended it anyway, or its instance
stays unreachable. Bounded: past the cap the oldest is given up and counted, for its leg ends by
its own deadline. The next due time is a heap's top, whatever the number of cancels.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from pdcore.fsm.routed import Leg
from pdcore.router.policies import Target


class CancelKey(NamedTuple):
    room: int
    attempt: int
    leg: Leg


class SendCancel(NamedTuple):
    """Effect: POST /cancel to ``target``; answered by :meth:`Outbox.answer`."""

    key: CancelKey
    target: Target
    unless_received: bool


class _Entry:
    __slots__ = ("cancel", "delay_s", "due_s", "unknown_since_s", "until_s")

    def __init__(self, cancel: SendCancel, delay_s: float, until_s: float) -> None:
        self.cancel = cancel
        self.delay_s = delay_s
        self.until_s = until_s
        #: None while an answer is awaited.
        self.due_s: float | None = None
        #: When the leg first said that it never heard of it.
        self.unknown_since_s: float | None = None


class Outbox:
    """``unknown_s`` after a leg first said that it never heard of a request, and says so
    still, its cancel is given up: the router dropped that connection when it cancelled, so
    the request was refused there before it had a name or never arrived (D11). What was on its
    way meets the tombstone that each cancel renews."""

    def __init__(self, *, initial_s: float, max_s: float, unknown_s: float, cap: int) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._unknown_s = unknown_s
        self._cap = cap
        self._entries: OrderedDict[CancelKey, _Entry] = OrderedDict()
        #: (due, running number, key) of every entry that is not awaiting an answer, and of
        #: some that have left or changed since: those are skipped when they come up.
        self._queue: list[tuple[float, int, CancelKey]] = []
        self._count = itertools.count()  # orders what is due at the same time
        self.num_given_up = 0

    def add(self, cancel: SendCancel, until_s: float) -> SendCancel | None:
        """What to send now; None if the same or a stronger cancel is on its way."""
        former = self._entries.get(cancel.key)
        if former is not None and (cancel.unless_received or not former.cancel.unless_received):
            return None
        self._entries[cancel.key] = _Entry(cancel, self._initial_s, until_s)
        while len(self._entries) > self._cap:
            self._entries.popitem(last=False)
            self.num_given_up += 1
        return cancel

    def answer(
        self,
        key: CancelKey,
        is_known: bool | None,
        unless_received: bool = False,
        *,
        now_s: float,
    ) -> None:
        """The leg answered; ``is_known`` None: no answer came, it is asked again. The answer
        to one ``unless_received`` is none to the stronger one that took its place."""
        entry = self._entries.get(key)
        if entry is None or (unless_received and not entry.cancel.unless_received):
            return
        if is_known:
            del self._entries[key]
            return
        if is_known is False:
            if entry.unknown_since_s is None:
                entry.unknown_since_s = now_s
            if now_s - entry.unknown_since_s >= self._unknown_s:
                del self._entries[key]
                self.num_given_up += 1
                return
        entry.due_s = now_s + entry.delay_s
        entry.delay_s = min(entry.delay_s * 2, self._max_s)
        heapq.heappush(self._queue, (entry.due_s, next(self._count), key))
        if len(self._queue) > 2 * self._cap + 64:  # mostly of entries that have left
            self._queue = [
                (e.due_s, next(self._count), key)
                for key, e in self._entries.items()
                if e.due_s is not None
            ]
            heapq.heapify(self._queue)

    def due(self, now_s: float, gone: Collection[Target] = ()) -> list[SendCancel]:
        """Cancels to send again now. Those whose leg has ended by its deadline are dropped,
        and those to the targets in ``gone``, where nobody answers."""
        again: list[SendCancel] = []
        while (due_s := self.next_due_s()) is not None and due_s <= now_s:
            key = heapq.heappop(self._queue)[2]
            entry = self._entries[key]
            if now_s >= entry.until_s or entry.cancel.target in gone:
                del self._entries[key]
                self.num_given_up += 1
                continue
            entry.due_s = None
            again.append(entry.cancel)
        return again

    def next_due_s(self) -> float | None:
        queue = self._queue
        while queue:
            due_s, _, key = queue[0]
            entry = self._entries.get(key)
            if entry is not None and entry.due_s == due_s:
                return due_s
            heapq.heappop(queue)
        return None

    def __len__(self) -> int:
        return len(self._entries)
