"""A leader port inside one process: requests and results through thread-safe queues.

For servers that run the worker loop in a thread of their own, and for tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pdcore.control.messages import LeaderMessage, WorkerMessage


class LocalPort:
    """``put`` from any thread; ``on_message`` is called in the worker's thread."""

    def __init__(self, on_message: Callable[[WorkerMessage], None]) -> None:
        self._inbox: deque[LeaderMessage] = deque()
        self._on_message = on_message
        #: Set by whoever runs the worker: wakes its loop (``Background.wake``).
        self.wake: Callable[[], None] = _nothing

    def put(self, message: LeaderMessage) -> None:
        """Hand a Submit, Abort or Stop to the worker."""
        self._inbox.append(message)
        self.wake()

    def receive(self, limit: int = 256) -> list[LeaderMessage]:
        taken: list[LeaderMessage] = []
        while self._inbox and len(taken) < limit:
            taken.append(self._inbox.popleft())
        if self._inbox:
            # The wake-ups of what is left here may be spent already.
            self.wake()
        return taken

    def send(self, message: WorkerMessage) -> None:
        self._on_message(message)


def _nothing() -> None:
    """Nobody sleeps yet."""
