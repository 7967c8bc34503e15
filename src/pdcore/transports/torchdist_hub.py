"""What the threads of a torchdist transport share: the bell, the queue of what happened,
and the lock under which regions are used.

Link threads end handles and see peers go; only the owner's ``poll`` hands that on.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, OrderedDict, deque
from typing import Final

import attrs

from pdcore.transports.base import HandleStatus, Notification, PeerDied
from pdcore.transports.torchdist_channel import End
from pdcore.types import Incarnation

#: Incarnations remembered as over; the oldest go first.
_MAX_REMEMBERED: Final = 4096


@attrs.frozen
class Ended:
    """The end of a handle, as its link's thread saw it; with ``quiesced`` False a second
    one follows, or the handle is named among what ``close`` left."""

    handle: int
    status: HandleStatus
    quiesced: bool
    detail: str


Happening = Ended | Notification | PeerDied


class Hub:
    """``lock`` guards the region table and is held while a chunk is put in place, so that
    whoever revokes a lease knows that nothing of it lands afterwards."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._happened: deque[Happening] = deque()
        self._is_closed = False
        self._links: Counter[Incarnation] = Counter()
        #: Over, but a link of it is still there.
        self._going: dict[Incarnation, str] = {}
        self._over: OrderedDict[Incarnation, None] = OrderedDict()

    def fileno(self) -> int:
        return self._bell

    def put(self, item: Happening) -> None:
        self._happened.append(item)
        os.eventfd_write(self._bell, 1)

    def drain(self) -> list[Happening]:
        if not self._is_closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        found = []
        while self._happened:
            found.append(self._happened.popleft())
        return found

    def opened(self, incarnation: Incarnation) -> bool:
        """Count a link to or from this incarnation; False when that is over already."""
        with self.lock:
            if incarnation in self._over or incarnation in self._going:
                return False
            self._links[incarnation] += 1
            return True

    def ended(self, incarnation: Incarnation, end: End, detail: str) -> None:
        """A counted link's thread touches nothing any more. PeerDied comes with the last
        link of an incarnation, and only then: it says that nothing lands."""
        with self.lock:
            if end in (End.CLOSED, End.DIED):
                self._going[incarnation] = detail
            self._links[incarnation] -= 1
            if self._links[incarnation]:
                return
            del self._links[incarnation]
            why = self._going.pop(incarnation, None)
            if why is None:
                return
            self._over[incarnation] = None
            if len(self._over) > _MAX_REMEMBERED:
                self._over.popitem(last=False)
            self.put(PeerDied(incarnation, fenced=True, detail=why))

    def close(self, *, keep_bell: bool) -> None:
        """``keep_bell``: a thread is left that may still ring it."""
        with self.lock:
            self._is_closed = True
            if not keep_bell:
                os.close(self._bell)
