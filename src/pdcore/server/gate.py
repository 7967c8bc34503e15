"""How many requests may be inside at once, from their first byte on (D60).

The tables of requests in flight have their own bounds, but a request is in none of them while
its body is read, its prompt encoded or an instance looked for: those are bounded here.
"""

from __future__ import annotations

from collections import Counter

from pdcore.errors import Overloaded


class Gate:
    """``with gate:`` is inside; raises Overloaded (429) when ``limit`` are, and counts that as
    ``overloaded`` in ``counters``."""

    __slots__ = ("_counters", "_limit", "num_inside")

    def __init__(self, limit: int, counters: Counter[str]) -> None:
        self._limit = limit
        self._counters = counters
        self.num_inside = 0

    def __enter__(self) -> None:
        if self.num_inside >= self._limit:
            self._counters["overloaded"] += 1
            raise Overloaded(
                f"{self.num_inside} requests are in flight, the limit is {self._limit}; "
                "try again later"
            )
        self.num_inside += 1

    def __exit__(self, *error: object) -> None:
        self.num_inside -= 1
