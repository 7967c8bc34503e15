"""Metadata slots of a decode rank (R81): where one request's metadata record arrives.

A slot is taken at admission and bounds how many transfers are on their way. Completion is
STATUS Done (decision 2), so nobody writes a slot on today's transports; its contents are
for a vendor path that needs one, which names the slot and its generation. The generation
grows whenever the slot changes hands, so a late write for a former owner is ignored and
counted and never fails the new, innocent one (D13). Whether a slot has been written is an
explicit mark, never "all zero means absent" (D12): a record of room 0, token 0 and one
prompt token is as valid as any.
"""

from __future__ import annotations

from collections import deque

import attrs

from pdcore.errors import OwnershipError


@attrs.frozen
class MetadataSlot:
    """A taken slot: what a handshake names."""

    index: int
    generation: int


class MetadataSlots:
    """``capacity`` slots; ``alloc`` when none is left raises OwnershipError (callers
    look at ``available`` first, as part of admission)."""

    __slots__ = ("_free", "_generations", "_quarantined", "_records", "_taken", "num_stale")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise OwnershipError(f"capacity must be >= 1, got {capacity}")
        self._free: deque[int] = deque(range(capacity))
        #: Current generation per index; 0 was never handed out.
        self._generations = [0] * capacity
        self._taken = bytearray(capacity)
        self._records: dict[int, bytes] = {}
        self._quarantined: set[int] = set()
        #: Writes and reads with a generation that is not current (D13).
        self.num_stale = 0

    @property
    def capacity(self) -> int:
        return len(self._generations)

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def alloc(self) -> MetadataSlot:
        if not self._free:
            raise OwnershipError(f"no metadata slot: all {self.capacity} are taken")
        index = self._free.popleft()
        self._generations[index] += 1
        self._taken[index] = 1
        return MetadataSlot(index, self._generations[index])

    def free(self, slot: MetadataSlot) -> bool:
        """Give the slot back and wipe its record. Idempotent: a second free, or one with
        an old generation, changes nothing and returns False."""
        if not self._is_current(slot):
            return False
        index = slot.index
        self._taken[index] = 0
        self._records.pop(index, None)
        self._quarantined.discard(index)
        self._free.append(index)
        return True

    def quarantine(self, slot: MetadataSlot) -> bool:
        """Its request is over but a writer may be alive: stays out until freed (D3)."""
        if not self._is_current(slot):
            return False
        self._quarantined.add(slot.index)
        self._records.pop(slot.index, None)
        return True

    def write(self, slot: MetadataSlot, record: bytes) -> bool:
        """Store a packed record. False, counted, for a stale generation or a
        quarantined slot: such a write never reaches a live request."""
        if not self._is_current(slot) or slot.index in self._quarantined:
            self.num_stale += 1
            return False
        self._records[slot.index] = bytes(record)
        return True

    def read(self, slot: MetadataSlot) -> bytes | None:
        """The record, or None when nothing was written for this generation yet."""
        if not self._is_current(slot):
            self.num_stale += 1
            return None
        return self._records.get(slot.index)

    def audit(self) -> None:
        """Free and taken slots add up and no free one keeps a record or a quarantine."""
        free = set(self._free)
        taken = {i for i in range(self.capacity) if self._taken[i]}
        if len(free) != len(self._free) or free & taken or len(free) + len(taken) != self.capacity:
            raise OwnershipError(f"slot lists overlap or leak: free {free}, taken {taken}")
        if not (self._records.keys() <= taken and self._quarantined <= taken):
            raise OwnershipError("a free slot keeps a record or a quarantine mark")

    def _is_current(self, slot: MetadataSlot) -> bool:
        index = slot.index
        if not 0 <= index < self.capacity:
            raise OwnershipError(f"slot {index} is outside 0..{self.capacity - 1}")
        return bool(self._taken[index]) and self._generations[index] == slot.generation

    def __repr__(self) -> str:
        return (
            f"MetadataSlots(free={self.available}/{self.capacity}, "
            f"quarantined={self.num_quarantined}, stale={self.num_stale})"
        )
