"""Invariants 3 and 4 as a state machine: a slot never shows another owner's record."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from pdcore.errors import OwnershipError
from pdcore.kv.slots import MetadataSlot, MetadataSlots


class SlotMachine(RuleBasedStateMachine):
    """Owners come and go; writers keep their tickets for ever and write at any time."""

    tickets = Bundle("tickets")
    slots_type: type[MetadataSlots] = MetadataSlots

    def __init__(self) -> None:
        super().__init__()
        self.slots = self.slots_type(3)
        self.live: dict[MetadataSlot, bytes | None] = {}
        self.quarantined: set[MetadataSlot] = set()
        self.num_stale = 0

    @rule(target=tickets)
    def alloc(self) -> object:
        if not self.slots.available:
            with pytest.raises(OwnershipError):
                self.slots.alloc()
            return multiple()
        slot = self.slots.alloc()
        assert slot not in self.live
        assert slot.index not in {other.index for other in self.live}, "handed out twice"
        self.live[slot] = None
        return slot

    @rule(slot=tickets, byte=st.integers(0, 255))
    def write(self, slot: MetadataSlot, byte: int) -> None:
        record = bytes([byte]) * 4
        accepted = slot in self.live and slot not in self.quarantined
        assert self.slots.write(slot, record) == accepted
        if accepted:
            self.live[slot] = record
        else:
            self.num_stale += 1

    @rule(slot=tickets)
    def free(self, slot: MetadataSlot) -> None:
        assert self.slots.free(slot) == (slot in self.live)
        self.live.pop(slot, None)
        self.quarantined.discard(slot)

    @rule(slot=tickets)
    def quarantine(self, slot: MetadataSlot) -> None:
        assert self.slots.quarantine(slot) == (slot in self.live)
        if slot in self.live:
            self.quarantined.add(slot)
            self.live[slot] = None

    @invariant()
    def every_owner_reads_its_own_record(self) -> None:
        for slot, record in self.live.items():
            assert self.slots.read(slot) == record, "a slot shows another owner's record"

    @invariant()
    def slots_add_up(self) -> None:
        self.slots.audit()
        assert self.slots.available == 3 - len(self.live)
        assert self.slots.num_quarantined == len(self.quarantined)
        assert self.slots.num_stale == self.num_stale


STEPS = settings(max_examples=60, stateful_step_count=30)
#: A mutant must be found, not explained.
HUNT = settings(
    STEPS, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False, database=None
)


def test_slots() -> None:
    """Invariants 3 and 4, D12, D13."""
    run_state_machine_as_test(SlotMachine, settings=STEPS)  # type: ignore[no-untyped-call]


class NoGenerations(MetadataSlots):
    """The seed addresses a slot by its index alone (D13)."""

    def write(self, slot: MetadataSlot, record: bytes) -> bool:
        self._records[slot.index] = record
        return True


def test_the_machine_finds_a_write_into_a_reused_slot() -> None:
    """D13: the mutant fails."""

    class Mutant(SlotMachine):
        slots_type = NoGenerations

    with pytest.raises((AssertionError, OwnershipError)):
        run_state_machine_as_test(Mutant, settings=HUNT)  # type: ignore[no-untyped-call]
