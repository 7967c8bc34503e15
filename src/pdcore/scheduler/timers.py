"""Deadlines of a core: named, per room, in the order they fall due."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

#: Disarmed timers that may lie about before they are swept out.
SLACK: Final = 256


class Timers:
    """Named deadlines per room; re-arming replaces, disarming is lazy (a heap).

    Keys of any type; what is due at the same moment comes in the order of arming, so that
    a run replays exactly."""

    __slots__ = ("_armed", "_count", "_heap")

    def __init__(self) -> None:
        self._armed: dict[tuple[str, object], float] = {}
        self._heap: list[tuple[float, int, str, object]] = []
        self._count = 0

    def arm(self, kind: str, key: object, at_s: float) -> None:
        self._armed[(kind, key)] = at_s
        self._count += 1
        if len(self._heap) > 2 * len(self._armed) + SLACK:
            # Mostly disarmed: a far deadline would keep each of them until its time.
            self._heap = [e for e in self._heap if self._armed.get((e[2], e[3])) == e[0]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (at_s, self._count, kind, key))

    def is_armed(self, kind: str, key: object) -> bool:
        return (kind, key) in self._armed

    def disarm(self, kind: str, key: object) -> None:
        self._armed.pop((kind, key), None)

    @property
    def next_s(self) -> float | None:
        heap = self._heap
        while heap and self._armed.get((heap[0][2], heap[0][3])) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> Iterator[tuple[str, object]]:
        """Every timer due at ``now``, in order; timers armed meanwhile for later stay."""
        while (at_s := self.next_s) is not None and at_s <= now:
            _, _, kind, key = heapq.heappop(self._heap)
            del self._armed[(kind, key)]
            yield kind, key

    def __len__(self) -> int:
        return len(self._armed)
