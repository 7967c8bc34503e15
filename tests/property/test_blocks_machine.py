"""Invariant 3 as a state machine: no block is free and in a lease, and nothing is lost."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from pdcore.errors import OwnershipError
from pdcore.kv.blocks import FREE, BlockPool
from pdcore.kv.cache import KVBlocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec

SPEC = KVCacheSpec(
    (
        KVCacheEntry("k", "full", "float32", 4, 1, 1, 8),
        KVCacheEntry("w", "win", "float32", 2, 1, 1, 8, sliding_window=5),
    )
)


class KVMachine(RuleBasedStateMachine):
    """Sequences grow, are leased, end well or badly; a model says what each may touch."""

    seqs = Bundle("seqs")
    cache: type[KVBlocks] = KVBlocks

    def __init__(self) -> None:
        super().__init__()
        self.kv = self.cache(SPEC, {"full": 14, "win": 12}, 60)
        self.next_id = 0
        self.tokens: dict[int, int] = {}
        #: What a writer may touch: snapshot of real block ids per leased sequence.
        self.leases: dict[int, dict[str, set[int]]] = {}
        self.ended: set[int] = set()

    @rule(target=seqs, computed=st.integers(0, 30), new=st.integers(1, 12))
    def arrive(self, computed: int, new: int) -> object:
        seq_id, self.next_id = self.next_id, self.next_id + 1
        could = self.kv.can_allocate(seq_id, computed, new)
        before = self.kv.num_free
        assert self.kv.allocate_slots(seq_id, computed, new) == could
        if not could:
            assert self.kv.num_free == before
            return multiple()
        self.tokens[seq_id] = computed + new
        return seq_id

    @rule(seq_id=seqs, new=st.integers(1, 6), reserved=st.sampled_from([0, 0, 4]))
    def grow(self, seq_id: int, new: int, reserved: int) -> None:
        if seq_id in self.ended or seq_id not in self.tokens:
            return
        have = self.tokens[seq_id]
        could = self.kv.can_allocate(seq_id, have, new, reserved=reserved)
        assert self.kv.allocate_slots(seq_id, have, new, reserved=reserved) == could
        if could:
            self.tokens[seq_id] = min(have + new, 60)

    @rule(seq_id=seqs)
    def lease(self, seq_id: int) -> None:
        if seq_id in self.tokens and seq_id not in self.ended:
            self.kv.lease(seq_id)
            self.leases[seq_id] = {
                key: {b for b in ids if b} for key, ids in self.kv.get_block_ids(seq_id).items()
            }

    @rule(seq_id=seqs)
    def done(self, seq_id: int) -> None:
        if seq_id in self.leases and seq_id not in self.ended:
            self.kv.unlease(seq_id)
            del self.leases[seq_id]

    @rule(seq_id=seqs)
    def fail(self, seq_id: int) -> None:
        """The client hears of it; a leased sequence goes to quarantine."""
        if seq_id in self.leases:
            self.kv.quarantine(seq_id)
            self.ended.add(seq_id)

    @rule(seq_id=consumes(seqs))
    def finish(self, seq_id: int) -> None:
        """Everybody who might write is proved quiet."""
        if seq_id in self.leases:
            try:
                self.kv.free(seq_id)
            except OwnershipError:
                pass
            else:
                raise AssertionError("blocks came back while a writer may be alive")
            self.kv.release(seq_id)
            del self.leases[seq_id]
        else:
            self.kv.free(seq_id)
        self.ended.discard(seq_id)
        self.tokens.pop(seq_id, None)

    @invariant()
    def nothing_is_lost(self) -> None:
        ledgers = self.kv.audit()
        assert ledgers["full"].total == 13
        assert ledgers["win"].total == 11

    @invariant()
    def no_block_is_free_and_leased(self) -> None:
        for seq_id, blocks in self.leases.items():
            tables = self.kv.get_block_ids(seq_id)
            for key, ids in blocks.items():
                assert ids <= set(tables[key]), "a leased block left its table"
                pool = self.kv._by_key[key].pool
                assert all(pool.state_of(b) != FREE for b in ids), "free under a lease"

    @invariant()
    def positions_to_read_and_write_have_blocks(self) -> None:
        for seq_id, tokens in self.tokens.items():
            tables = self.kv.get_block_ids(seq_id)
            assert len(tables["full"]) * 4 >= tokens
            assert all(tables["full"])
            assert len(tables["win"]) * 2 >= tokens
            assert tables["win"][(tokens - 1) // 2]

    def teardown(self) -> None:
        for seq_id in list(self.tokens):
            self.kv.release(seq_id)
        for ledger in self.kv.audit().values():
            assert ledger.free == ledger.total


STEPS = settings(max_examples=60, stateful_step_count=30)
#: A mutant must be found, not explained.
HUNT = settings(
    STEPS, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False, database=None
)


def test_blocks_and_leases() -> None:
    """Invariant 3, D3, D4."""
    run_state_machine_as_test(KVMachine, settings=STEPS)  # type: ignore[no-untyped-call]


class RecyclesUnderLeases(KVBlocks):
    """Recycles behind the window although a transfer may still read there (D4)."""

    def allocate_slots(
        self, seq_id: int, computed: int, new: int, lookahead: int = 0, reserved: int = 0
    ) -> bool:
        if seq_id in self._leased:
            for tables in self._by_key.values():
                pool: BlockPool = tables.pool
                ids = [b for b in tables.tables[seq_id] if b]
                pool.unlease([b for b in ids if pool.state_of(b) == 2])
                tables.recycle(seq_id, computed)
        return super().allocate_slots(seq_id, computed, new, lookahead, reserved)


def test_the_machine_finds_a_recycled_lease() -> None:
    """D4: the mutant fails."""

    class Mutant(KVMachine):
        cache = RecyclesUnderLeases

    with pytest.raises((AssertionError, OwnershipError)):
        run_state_machine_as_test(Mutant, settings=HUNT)  # type: ignore[no-untyped-call]
