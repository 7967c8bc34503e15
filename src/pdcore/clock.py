"""Time as a value: cores take ``now`` as an argument, shells read a Clock.

``monotonic`` drives every timer; ``unix`` exists only for the absolute expiry a
request carries between hosts (rule 8).
"""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds, never going back; origin arbitrary."""
        ...

    def unix(self) -> float:
        """Seconds since the epoch; may jump."""
        ...


class ManualClock:
    """A clock that moves only when told to: tests and simulation."""

    def __init__(self, start_s: float = 0.0, unix_offset_s: float = 1_800_000_000.0) -> None:
        self._now_s = start_s
        self._offset_s = unix_offset_s

    def monotonic(self) -> float:
        return self._now_s

    def unix(self) -> float:
        return self._now_s + self._offset_s

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError(f"seconds must be >= 0, got {seconds}: time does not go back")
        self._now_s += seconds
        return self._now_s
