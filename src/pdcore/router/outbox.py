"""Cancels on their way to legs, resent until they are answered (protocol models, Q5 RES).

A cancel may overtake its request, so "never heard of it" is no answer: it is asked again, with
back-off, until the leg knows the dispatch or its deadline has ended it anyway. Bounded: past
the cap the oldest is given up and counted, for its leg ends by its own deadline.
"""

from __future__ import annotations

from collections import OrderedDict
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
    __slots__ = ("cancel", "delay_s", "due_s", "until_s")

    def __init__(self, cancel: SendCancel, delay_s: float, until_s: float) -> None:
        self.cancel = cancel
        self.delay_s = delay_s
        self.until_s = until_s
        #: None while an answer is awaited.
        self.due_s: float | None = None


class Outbox:
    def __init__(self, *, initial_s: float, max_s: float, cap: int) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._cap = cap
        self._entries: OrderedDict[CancelKey, _Entry] = OrderedDict()
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

    def answer(self, key: CancelKey, *, is_known: bool, now_s: float) -> None:
        """The leg answered; ``is_known`` False also stands for "no answer came"."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if is_known:
            del self._entries[key]
            return
        entry.due_s = now_s + entry.delay_s
        entry.delay_s = min(entry.delay_s * 2, self._max_s)

    def due(self, now_s: float) -> list[SendCancel]:
        """Cancels to send again now. Those whose leg has ended by its deadline are dropped."""
        again: list[SendCancel] = []
        for key, entry in list(self._entries.items()):
            if entry.due_s is None or entry.due_s > now_s:
                continue
            if now_s >= entry.until_s:
                del self._entries[key]
                self.num_given_up += 1
                continue
            entry.due_s = None
            again.append(entry.cancel)
        return again

    def next_due_s(self) -> float | None:
        return min((e.due_s for e in self._entries.values() if e.due_s is not None), default=None)

    def __len__(self) -> int:
        return len(self._entries)
