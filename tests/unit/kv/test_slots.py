"""Metadata slots: R81, R82, D3, D12, D13."""

from __future__ import annotations

import pytest

from pdcore.errors import OwnershipError
from pdcore.kv.metadata import METADATA_BYTES
from pdcore.kv.slots import MetadataSlot, MetadataSlots


def test_alloc_free_available() -> None:
    """R81, R82: alloc fails when exhausted, free is idempotent."""
    slots = MetadataSlots(2)
    a, b = slots.alloc(), slots.alloc()
    assert slots.available == 0
    with pytest.raises(OwnershipError, match="all 2 are taken"):
        slots.alloc()
    assert slots.free(a)
    assert not slots.free(a)
    assert slots.available == 1
    again = slots.alloc()
    assert again.index == a.index
    assert again.generation != a.generation
    assert not slots.free(a), "an old ticket must not free the new owner's slot"
    slots.free(b)
    slots.free(again)
    slots.audit()


def test_capacity_and_index_are_checked() -> None:
    with pytest.raises(OwnershipError, match="capacity"):
        MetadataSlots(0)
    slots = MetadataSlots(1)
    for index in (-1, 1):
        with pytest.raises(OwnershipError, match="outside"):
            slots.read(MetadataSlot(index, 1))


def check_zero_is_a_value(slots: MetadataSlots) -> None:
    slot = slots.alloc()
    assert slots.read(slot) is None
    slots.write(slot, bytes(METADATA_BYTES))
    assert slots.read(slot) == bytes(METADATA_BYTES), "a written slot reads as absent"


class ZeroMeansAbsent(MetadataSlots):
    """The seed's rule: all zero is 'not there yet' (R81, D12)."""

    def read(self, slot: MetadataSlot) -> bytes | None:
        record = super().read(slot)
        return record if record is not None and any(record) else None


def test_an_all_zero_record_is_a_record() -> None:
    """D12: written or not is an explicit mark; the seed waited for ever here."""
    check_zero_is_a_value(MetadataSlots(1))
    with pytest.raises(AssertionError, match="reads as absent"):
        check_zero_is_a_value(ZeroMeansAbsent(1))


def check_late_write(slots: MetadataSlots) -> None:
    old = slots.alloc()
    slots.free(old)
    new = slots.alloc()
    assert new.index == old.index
    slots.write(new, b"mine")
    slots.write(old, b"late")
    assert slots.read(new) == b"mine", "a late write reached the new owner"
    assert slots.num_stale == 1
    assert slots.read(old) is None


class NoGenerations(MetadataSlots):
    """The seed's rule: whoever knows the index writes (D13)."""

    def write(self, slot: MetadataSlot, record: bytes) -> bool:
        return super().write(MetadataSlot(slot.index, self._generations[slot.index]), record)


def test_a_late_write_is_ignored_and_counted() -> None:
    """D13, invariant 4, SGLang PR24226: a stale write never fails the new, innocent request."""
    check_late_write(MetadataSlots(1))
    with pytest.raises(AssertionError, match="reached the new owner"):
        check_late_write(NoGenerations(1))


def test_a_quarantined_slot_takes_no_write_and_is_not_handed_out() -> None:
    """D3: its request is over, its writer perhaps not."""
    slots = MetadataSlots(1)
    slot = slots.alloc()
    slots.write(slot, b"x")
    assert slots.quarantine(slot)
    assert slots.num_quarantined == 1
    assert not slots.write(slot, b"y")
    assert slots.read(slot) is None
    assert slots.available == 0
    slots.audit()
    assert slots.free(slot)
    assert slots.num_quarantined == 0
    assert not slots.quarantine(slot)
    assert slots.alloc().generation == slot.generation + 1
    slots.audit()


def test_audit_finds_a_slot_in_two_places() -> None:
    slots = MetadataSlots(2)
    slot = slots.alloc()
    slots._free.append(slot.index)
    with pytest.raises(OwnershipError, match="overlap"):
        slots.audit()
    slots = MetadataSlots(2)
    slots._records[0] = b""
    with pytest.raises(OwnershipError, match="free slot keeps"):
        slots.audit()


def test_repr_counts() -> None:
    assert repr(MetadataSlots(2)) == "MetadataSlots(free=2/2, quarantined=0, stale=0)"
