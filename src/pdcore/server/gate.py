"""How many requests may be inside at once, from their first byte on (D60).

The tables of requests in flight have their own bounds, but a request is in none of them while
its body is read, its prompt encoded or an instance looked for: those are bounded here.
"""

from __future__ import annotations

from pdcore.errors import Overloaded


class Gate:
    """``with gate:`` is inside; raises Overloaded (429) when ``limit`` are. ``num_refused``
    counts those that were turned away."""

    __slots__ = ("_limit", "num_inside", "num_refused")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_inside = 0
        self.num_refused = 0

    def __enter__(self) -> None:
        if self.num_inside >= self._limit:
            self.num_refused += 1
            raise Overloaded(
                f"{self.num_inside} requests are in flight, the limit is {self._limit}; "
                "try again later"
            )
        self.num_inside += 1

    def __exit__(self, *error: object) -> None:
        self.num_inside -= 1
