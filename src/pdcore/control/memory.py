"""The control channel in memory: a network that loses, repeats, delays and reorders by plan.

A real implementation of :class:`pdcore.control.base.ControlChannel`, not a mock: bounded
queues, refused sends, addresses that nobody listens on yet. Everything random comes from one
seed and every delay from one clock, so that a run replays exactly; ``manual`` hands each
delivery to the test instead (hypothesis chooses what arrives, twice, or never).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from typing import NamedTuple

import attrs

from pdcore.clock import Clock
from pdcore.errors import ConfigError


@attrs.frozen
class FaultPlan:
    """Chances in [0, 1] per frame; delays in seconds. With ``reorder`` 0 each pair of
    addresses is first in, first out, as TCP is. Raises ConfigError."""

    drop: float = 0.0
    duplicate: float = 0.0
    #: Chance of ignoring the order of its pair.
    reorder: float = 0.0
    min_delay_s: float = 0.0
    max_delay_s: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name, value in (
            ("drop", self.drop),
            ("duplicate", self.duplicate),
            ("reorder", self.reorder),
        ):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} is a chance between 0 and 1, got {value}")
        if not 0.0 <= self.min_delay_s <= self.max_delay_s:
            raise ConfigError(
                f"need 0 <= min_delay_s <= max_delay_s, got {self.min_delay_s}, {self.max_delay_s}"
            )


class Flight(NamedTuple):
    """A frame on its way. Sorts by time of arrival, then by order of sending."""

    due_s: float
    sequence: int
    sender: str
    to: str
    frame: bytes


@attrs.define
class NetworkCounters:
    num_sent: int = 0
    num_refused: int = 0
    num_dropped: int = 0
    num_duplicated: int = 0
    num_delivered: int = 0


class _Air:
    """Frames on their way: by number, by time of arrival, and counted per pair."""

    def __init__(self) -> None:
        self.flights: dict[int, Flight] = {}
        self.queued: Counter[tuple[str, str]] = Counter()
        self._heap: list[Flight] = []
        self._unclaimed: dict[str, list[Flight]] = {}
        self._sequence = 0

    def add(self, due_s: float, sender: str, to: str, frame: bytes) -> int:
        self._sequence += 1
        flight = Flight(due_s, self._sequence, sender, to, frame)
        self.flights[flight.sequence] = flight
        self.queued[sender, to] += 1
        heapq.heappush(self._heap, flight)
        return flight.sequence

    def remove(self, sequence: int) -> Flight:
        """Raises KeyError. The heap forgets it when its time comes."""
        flight = self.flights.pop(sequence)
        self.queued[flight.sender, flight.to] -= 1
        return flight

    def next(self) -> Flight | None:
        heap = self._heap
        while heap:
            if heap[0].sequence in self.flights:
                return heap[0]
            heapq.heappop(heap)
        return None

    def set_aside(self) -> None:
        """The next one's time has come and nobody listens there."""
        flight = heapq.heappop(self._heap)
        self._unclaimed.setdefault(flight.to, []).append(flight)

    def claim(self, to: str) -> None:
        """Somebody listens there now."""
        for flight in self._unclaimed.pop(to, ()):
            heapq.heappush(self._heap, flight)


class MemoryNetwork:
    """All channels of one world. Single-threaded; time passes when ``clock`` says so."""

    def __init__(
        self,
        clock: Clock,
        faults: FaultPlan | None = None,
        *,
        seed: int = 0,
        manual: bool = False,
        high_water_mark: int = 1024,
    ) -> None:
        self.faults = faults or FaultPlan()
        self.counters = NetworkCounters()
        self._clock = clock
        self._random = random.Random(seed)
        self._manual = manual
        self._high_water_mark = high_water_mark
        self._channels: dict[str, MemoryChannel] = {}
        self._air = _Air()
        self._cut: set[tuple[str, str]] = set()
        self._last_due_s: dict[tuple[str, str], float] = {}

    def channel(self, name: str) -> MemoryChannel:
        """A channel at ``mem://name``. Frames sent there before it existed may still arrive.
        Raises ConfigError when the address is taken."""
        address = f"mem://{name}"
        if address in self._channels:
            raise ConfigError(f"{address} is taken: close its channel first")
        channel = MemoryChannel(self, address)
        self._channels[address] = channel
        self._air.claim(address)
        return channel

    def partition(self, one: str, other: str, *, one_way: bool = False) -> None:
        """Frames that would arrive between the two addresses from now on are lost.
        ``one_way``: only those from ``one`` to ``other``."""
        self._cut.add((one, other))
        if not one_way:
            self._cut.add((other, one))

    def heal(self, one: str = "", other: str = "") -> None:
        """Frames arrive again, everywhere; with two addresses: those from ``one`` to
        ``other``."""
        if one:
            self._cut.discard((one, other))
        else:
            self._cut.clear()

    def pending(self) -> list[Flight]:
        """Frames on their way, next to arrive first."""
        return sorted(self._air.flights.values())

    def next_due_s(self) -> float | None:
        """When the next frame arrives: how far a simulation may advance its clock."""
        flight = self._air.next()
        return None if flight is None else flight.due_s

    def deliver(self, sequence: int) -> bool:
        """Let one frame arrive now. False: nobody listens there, it stays on its way.
        Raises KeyError for a frame that is not on its way."""
        flight = self._air.flights[sequence]
        channel = self._channels.get(flight.to)
        if channel is None:
            return False
        self._air.remove(sequence)
        if (flight.sender, flight.to) in self._cut:
            self.counters.num_dropped += 1
        else:
            self.counters.num_delivered += 1
            channel.inbox.append(flight.frame)
        return True

    def drop(self, sequence: int) -> None:
        """Lose one frame. Raises KeyError for a frame that is not on its way."""
        self._air.remove(sequence)
        self.counters.num_dropped += 1

    def duplicate(self, sequence: int) -> int:
        """Put a copy of one frame on its way; returns the copy's sequence number."""
        flight = self._air.flights[sequence]
        self.counters.num_duplicated += 1
        return self._launch(flight.sender, flight.to, flight.frame)

    def deliver_due(self) -> None:
        """Every frame whose time has come arrives. Channels do this before they receive,
        except in a manual network."""
        now = self._clock.monotonic()
        while (flight := self._air.next()) is not None and flight.due_s <= now:
            if not self.deliver(flight.sequence):
                self._air.set_aside()

    def _send(self, sender: str, to: str, frame: bytes) -> bool:
        queued = self._air.queued[sender, to]
        listener = self._channels.get(to)
        if listener is not None:
            queued += len(listener.inbox)
        if not to.startswith("mem://") or queued >= self._high_water_mark:
            self.counters.num_refused += 1
            return False
        self.counters.num_sent += 1
        chance, faults = self._random.random, self.faults
        if chance() < faults.drop:
            self.counters.num_dropped += 1
            return True
        self._launch(sender, to, frame)
        if chance() < faults.duplicate:
            self.counters.num_duplicated += 1
            self._launch(sender, to, frame)
        return True

    def _launch(self, sender: str, to: str, frame: bytes) -> int:
        faults, chance = self.faults, self._random.random
        # As random.uniform draws it.
        delay_s = faults.min_delay_s + (faults.max_delay_s - faults.min_delay_s) * chance()
        due_s = self._clock.monotonic() + delay_s
        pair = (sender, to)
        if chance() >= faults.reorder:
            last_s = self._last_due_s.get(pair)
            if last_s is not None and last_s > due_s:
                due_s = last_s
            self._last_due_s[pair] = due_s
        return self._air.add(due_s, sender, to, frame)

    def _forget(self, sender: str, to: str) -> None:
        for flight in list(self._air.flights.values()):
            if flight.sender == sender and flight.to == to:
                self.drop(flight.sequence)

    def _close(self, channel: MemoryChannel) -> None:
        if self._channels.get(channel.address) is channel:
            del self._channels[channel.address]

    def __repr__(self) -> str:
        return (
            f"MemoryNetwork({len(self._channels)} channels, {len(self._air.flights)} on their way)"
        )


class MemoryChannel:
    """One address of a :class:`MemoryNetwork`; made by :meth:`MemoryNetwork.channel`."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._is_closed = False
        #: Frames that arrived and were not received yet.
        self.inbox: deque[bytes] = deque()

    @property
    def address(self) -> str:
        return self._address

    def send(self, to: str, frame: bytes) -> bool:
        return not self._is_closed and self._network._send(self._address, to, bytes(frame))

    def receive(self, limit: int = 256) -> list[bytes]:
        if self._is_closed:
            return []
        if not self._network._manual:
            self._network.deliver_due()
        inbox = self.inbox
        if not inbox:
            return []
        if len(inbox) > limit:
            return [inbox.popleft() for _ in range(limit)]
        frames = list(inbox)
        inbox.clear()
        return frames

    def fileno(self) -> int | None:
        """None: ask ``MemoryNetwork.next_due_s`` instead."""
        return None

    def forget(self, to: str) -> None:
        """What is still on its way to that address is lost, as with a closed socket."""
        self._network._forget(self._address, to)

    def close(self) -> None:
        """Idempotent. What it sent may still arrive: the worst case of a dead process."""
        self._is_closed = True
        self.inbox.clear()
        self._network._close(self)

    def __repr__(self) -> str:
        return f"MemoryChannel({self._address}, unread={len(self.inbox)})"
