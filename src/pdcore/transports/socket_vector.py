"""Buffers that are sent or filled front to back by calls that may stop anywhere."""

from __future__ import annotations

from typing import Final

#: Buffers of one call; the kernel refuses more than 1024 (IOV_MAX).
MAX_BUFFERS: Final = 1024


class Vector:
    """A list of one-byte-per-item memoryviews and how far a socket got in it.

    ``left``: bytes that are still to go.
    """

    __slots__ = ("_at", "_views", "left")

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._at = 0
        self.left = sum(len(view) for view in views)

    def window(self) -> list[memoryview]:
        """What the next call may take, in order; empty when nothing is left."""
        return self._views[self._at : self._at + MAX_BUFFERS]

    def advance(self, count: int) -> None:
        """A call took ``count`` bytes (at most ``left``)."""
        self.left -= count
        views, at = self._views, self._at
        while count:
            size = len(views[at])
            if count < size:
                views[at] = views[at][count:]
                break
            count -= size
            at += 1
        self._at = at
