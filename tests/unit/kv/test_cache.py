"""KVBlocks: R95, R97, R98, leases over all manager keys."""

from __future__ import annotations

import pytest

from pdcore.errors import ConfigError, OwnershipError
from pdcore.kv.blocks import Ledger
from pdcore.kv.cache import Budget, KVBlocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec


def entry(name: str, key: str, block_size: int = 4, window: int | None = None) -> KVCacheEntry:
    return KVCacheEntry(name, key, "float32", block_size, 1, 1, 8, sliding_window=window)


FULL = KVCacheSpec((entry("k", "full"),))
MIXED = KVCacheSpec((entry("k", "full"), entry("w", "win", 4, 8)))


def test_allocate_slots_is_all_or_nothing_over_the_keys() -> None:
    """R97: any failure means that nothing was allocated."""
    kv = KVBlocks(MIXED, {"full": 10, "win": 3}, 100)
    assert kv.allocate_slots(1, 0, 8)
    assert not kv.allocate_slots(2, 0, 4)
    assert 2 not in kv
    assert kv.get_block_ids(2) == {}
    assert kv.audit()["full"] == Ledger(7, 2, 0, 0)


def test_the_end_is_clamped_to_max_model_len() -> None:
    """R97, D45: near the maximum length look-ahead asks for no block beyond the table."""
    kv = KVBlocks(FULL, 20, 10)
    assert kv.allocate_slots(1, 9, 3, lookahead=4)
    assert len(kv.get_block_ids(1)["full"]) == 3


@pytest.mark.parametrize("counts", [(-1, 1, 0), (0, -1, 0), (0, 1, -1)])
def test_negative_counts_are_refused(counts: tuple[int, int, int]) -> None:
    """R97."""
    kv = KVBlocks(FULL, 10, 100)
    with pytest.raises(OwnershipError, match=">= 0"):
        kv.allocate_slots(1, *counts)


def test_tables_are_the_same_objects_for_the_life_of_a_sequence() -> None:
    """R98: a batch built once sees later blocks."""
    kv = KVBlocks(FULL, 10, 100)
    kv.allocate_slots(1, 0, 4)
    ids = kv.get_block_ids(1)
    table = ids["full"]
    kv.allocate_slots(1, 4, 1)
    assert kv.get_block_ids(1) is ids
    assert ids["full"] is table == [1, 2]


def test_reserve_counts_holders_of_full_attention_only() -> None:
    """R95: need <= free - ceil(reserved / block_size) * holders; windows owe nothing."""
    kv = KVBlocks(MIXED, 10, 100)
    assert kv.allocate_slots(1, 0, 8, reserved=6)
    # 7 free, 2 blocks owed to one holder: 5 left.
    assert kv.can_allocate(2, 0, 20, reserved=6)
    assert not kv.can_allocate(2, 0, 21, reserved=6)
    assert not kv.allocate_slots(2, 0, 21, reserved=6)
    assert kv.allocate_slots(2, 0, 20, reserved=6)


def test_a_budget_votes_like_the_allocations_that_follow() -> None:
    """R95, invariant 8: what a tick offers is what it can allocate."""
    kv = KVBlocks(MIXED, 12, 100)
    kv.allocate_slots(1, 0, 4)
    budget = kv.budget(reserved=4)
    wants = {2: 12, 3: 24, 4: 8, 5: 4}
    granted = [s for s, n in wants.items() if budget.try_take(kv.need(s, n - 1, 1))]
    taken = [s for s, n in wants.items() if kv.allocate_slots(s, n - 1, 1, reserved=4)]
    assert granted == taken == [2, 4, 5]
    assert budget.free == kv.num_free
    assert budget.holders == kv.num_holders


def test_an_earmark_counts_against_everybody_else() -> None:
    budget = Budget({"a": 5, "b": 5}, {"a": 0, "b": 0}, 0)
    budget.earmark({"a": 7, "b": 0})
    assert not budget.try_take({"a": 1, "b": 1})
    assert budget.try_take({"a": 0, "b": 5})
    assert budget.available("a") == -2
    assert budget.available("b") == 0


def test_recycling_makes_room_in_the_same_call() -> None:
    """R97 phase 1: blocks behind the window count as free for the step that drops them."""
    kv = KVBlocks(KVCacheSpec((entry("w", "win", 4, 4),)), 4, 100)
    assert kv.allocate_slots(1, 0, 12)
    assert kv.num_free == {"win": 0}
    assert kv.can_allocate(1, 12, 1)
    assert kv.num_free == {"win": 0}
    assert kv.allocate_slots(1, 12, 1)
    assert kv.get_block_ids(1)["win"][:2] == [0, 0]


def test_a_leased_window_is_not_recycled() -> None:
    """D4: a transfer may still read the blocks that the window has left behind."""
    kv = KVBlocks(KVCacheSpec((entry("w", "win", 4, 4),)), 8, 100)
    kv.allocate_slots(1, 0, 12)
    kv.lease(1)
    assert kv.allocate_slots(1, 12, 1)
    assert kv.get_block_ids(1)["win"] == [1, 2, 3, 4]
    assert not kv.can_allocate(1, 13, 19)
    kv.lease(1)
    assert kv.ledger()["win"] == Ledger(3, 0, 4, 0)
    kv.unlease(1)
    assert kv.allocate_slots(1, 13, 1)
    assert kv.get_block_ids(1)["win"][:2] == [0, 0]


def test_lease_quarantine_release() -> None:
    """Invariant 3: the client hears at once, the blocks come back on proof only."""
    kv = KVBlocks(MIXED, 10, 100)
    kv.allocate_slots(1, 0, 8)
    kv.lease(1)
    with pytest.raises(OwnershipError, match="leased"):
        kv.free(1)
    assert kv.quarantine(1) == 4
    assert kv.quarantine(1) == 0
    assert kv.num_holders == 0
    with pytest.raises(OwnershipError, match="quarantined"):
        kv.free(1)
    with pytest.raises(OwnershipError, match="quarantined"):
        kv.allocate_slots(1, 8, 1)
    with pytest.raises(OwnershipError, match="no blocks to lease"):
        kv.lease(1)
    assert kv.ledger()["full"] == Ledger(7, 0, 0, 2)
    kv.audit()
    assert kv.release(1) == 4
    assert kv.release(1) == 0
    assert kv.free(1) == 0
    assert kv.audit()["win"] == Ledger(9, 0, 0, 0)


def test_release_takes_back_held_and_leased_blocks_too() -> None:
    kv = KVBlocks(FULL, 10, 100)
    kv.allocate_slots(1, 0, 8)
    assert kv.release(1) == 2
    kv.allocate_slots(2, 0, 8)
    kv.lease(2)
    kv.allocate_slots(2, 8, 1)
    assert kv.release(2) == 3
    assert kv.audit()["full"].free == 9


def test_quarantine_of_the_unknown_and_unlease_of_the_unleased() -> None:
    kv = KVBlocks(FULL, 10, 100)
    assert kv.quarantine(7) == 0
    with pytest.raises(OwnershipError, match="not leased"):
        kv.unlease(7)


def test_usage_counts_the_null_block() -> None:
    """R98: key:used/total."""
    kv = KVBlocks(MIXED, 10, 100)
    kv.allocate_slots(1, 0, 5)
    assert kv.format_usage() == "full:3/10,win:3/10"
    assert "leased=0" in repr(kv)


def test_can_ever_fit_looks_at_an_empty_pool() -> None:
    kv = KVBlocks(FULL, 4, 100)
    kv.allocate_slots(1, 0, 12)
    assert kv.can_ever_fit(0, 12)
    assert not kv.can_ever_fit(0, 13)


def test_grow_each_is_for_one_full_attention_key() -> None:
    kv = KVBlocks(FULL, 4, 100)
    kv.allocate_slots(1, 0, 4)
    kv.allocate_slots(2, 0, 4)
    tables = [kv.get_block_ids(s)["full"] for s in (1, 2)]
    assert kv.uniform_block_size == 4
    assert not kv.grow_each(tables)
    assert kv.grow_each(tables[:1])
    assert tables == [[1, 3], [2]]
    kv.audit()
    mixed = KVBlocks(MIXED, 4, 100)
    assert mixed.uniform_block_size is None
    with pytest.raises(OwnershipError, match="one full-attention"):
        mixed.grow_each([])


def test_next_change_is_the_earliest_of_all_keys() -> None:
    kv = KVBlocks(MIXED, 10, 100)
    kv.allocate_slots(1, 10, 1)
    assert kv.next_change(1, 11, 1) == 11  # the window drops block 0
    kv.allocate_slots(1, 11, 1)
    assert kv.next_change(1, 12, 1) == 12  # block 3 starts


def test_a_cache_needs_entries_and_a_length() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        KVBlocks(FULL, 4, 0)
    with pytest.raises(ConfigError, match="at least one entry"):
        KVBlocks(KVCacheSpec(()), 4, 10)


def test_audit_finds_a_lost_block() -> None:
    kv = KVBlocks(FULL, 10, 100)
    kv.allocate_slots(1, 0, 8)
    kv.get_block_ids(1)["full"].pop()
    with pytest.raises(OwnershipError, match="tables hold 1 blocks"):
        kv.audit()
