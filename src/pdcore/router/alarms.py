"""When the router has to look at a request again: deadlines and ends of back-offs."""

from __future__ import annotations

import heapq
from collections.abc import Container, Sized
from typing import Protocol


class Tickets(Container[int], Sized, Protocol):
    """The requests in flight."""


class Alarms:
    """A heap of (when, ticket). A request that is over leaves its alarms behind, half an hour
    each with the usual deadline: they are dropped when they come up, and all of them as soon as
    they are the greater part, so that the heap is bounded by what is in flight (D60)."""

    __slots__ = ("_heap", "_live")

    def __init__(self, live: Tickets) -> None:
        self._live = live
        self._heap: list[tuple[float, int]] = []

    def add(self, when_s: float, ticket: int) -> None:
        if len(self._heap) > 3 * len(self._live) + 64:
            self._heap = [alarm for alarm in self._heap if alarm[1] in self._live]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (when_s, ticket))

    def pop_due(self, now_s: float) -> int | None:
        """A ticket in flight whose alarm is due; None: there is none."""
        when_s = self.next_s()
        if when_s is None or when_s > now_s:
            return None
        return heapq.heappop(self._heap)[1]

    def next_s(self) -> float | None:
        heap = self._heap
        while heap and heap[0][1] not in self._live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def __len__(self) -> int:
        return len(self._heap)
