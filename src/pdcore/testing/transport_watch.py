"""Recording what a transport reports, and asserting the rules that hold at any time.

:class:`Watched` is used by every conformance check, so each check also tests that a
handle ends once and is quiesced once (G2) and that nothing follows the end.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

import attrs
import numpy as np

from pdcore.transports.base import (
    Completion,
    HandleStatus,
    Notification,
    PeerDied,
    Transport,
    TransportEvent,
)


@attrs.define
class Record:
    """Everything one transport reported, with the rules of G2 asserted on the way in."""

    ended: dict[int, HandleStatus] = attrs.field(factory=dict)
    quiesced: set[int] = attrs.field(factory=set)
    notes: list[Notification] = attrs.field(factory=list)
    deaths: list[PeerDied] = attrs.field(factory=list)

    def add(self, event: TransportEvent) -> None:
        """Raises AssertionError for a second end or a second quiesced mark."""
        if isinstance(event, Notification):
            self.notes.append(event)
        elif isinstance(event, PeerDied):
            self.deaths.append(event)
        else:
            self._complete(event)

    def _complete(self, event: Completion) -> None:
        known = self.ended.get(event.handle)
        if known is None:
            self.ended[event.handle] = event.status
        else:
            assert known is event.status, f"{event} after {known}: a handle ends once (G2)"
            assert event.quiesced, f"{event} came twice: a handle ends once (G2)"
        if event.quiesced:
            assert event.handle not in self.quiesced, f"{event}: quiesced twice (G2)"
            self.quiesced.add(event.handle)

    @property
    def payloads(self) -> list[bytes]:
        return [note.payload for note in self.notes]


class Watched:
    """A transport and its record; :meth:`poll` is the only way events are taken."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.record = Record()

    def poll(self) -> int:
        events = self.transport.poll()
        for event in events:
            self.record.add(event)
        return len(events)

    def __repr__(self) -> str:
        return f"Watched({self.transport.name}, {self.record})"


def pump(
    *watched: Watched,
    until: Callable[[], bool],
    timeout_s: float = 10.0,
    what: str = "the expected events",
) -> None:
    """Poll all of them, waiting on their descriptors, until the condition holds.
    Raises AssertionError when it does not within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        for one in watched:
            one.poll()
        if until():
            return
        left = deadline - time.monotonic()
        assert left > 0, f"{what} did not come within {timeout_s:g} s: {watched}"
        wait_readable(watched, min(left, 0.25))


def settle(*watched: Watched, quiet_s: float) -> None:
    """Poll until nothing was reported for ``quiet_s`` seconds."""
    deadline = time.monotonic() + quiet_s
    while True:
        if sum(one.poll() for one in watched):
            deadline = time.monotonic() + quiet_s
        left = deadline - time.monotonic()
        if left <= 0:
            return
        wait_readable(watched, left)


def wait_readable(watched: tuple[Watched, ...], timeout_s: float) -> None:
    """Until one of them has something to poll, or the time is over. A transport without
    a descriptor is polled every millisecond."""
    poller = select.poll()
    for one in watched:
        fd = one.transport.fileno()
        if fd is None:
            timeout_s = min(timeout_s, 0.001)
        else:
            poller.register(fd, select.POLLIN)
    poller.poll(max(1, int(timeout_s * 1000)))


def is_zero(buffer: bytes | memoryview) -> bool:
    return not np.frombuffer(buffer, np.uint8).any()


def same(one: bytes | memoryview, other: bytes | memoryview) -> bool:
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
