"""Block tables by manager key: R94-R96, D37."""

from __future__ import annotations

from itertools import product

import pytest

from pdcore.errors import ConfigError
from pdcore.kv.blocks import BlockPool
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec
from pdcore.kv.tables import (
    NEVER,
    FullAttentionBlocks,
    KVGroup,
    SlidingWindowBlocks,
    kv_groups,
    make_tables,
)
from pdcore.types import NULL_BLOCK


def entry(name: str, key: str, block_size: int = 4, window: int | None = None) -> KVCacheEntry:
    return KVCacheEntry(name, key, "float32", block_size, 1, 1, 8, sliding_window=window)


def test_groups_follow_the_entries() -> None:
    spec = KVCacheSpec((entry("a", "full"), entry("b", "win", 8, 16), entry("c", "full")))
    assert kv_groups(spec) == (KVGroup("full", 4), KVGroup("win", 8, 16))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (entry("a", "k", 4), entry("b", "k", 8)),
        (entry("a", "k", 4), entry("b", "k", 4, 16)),
        (entry("a", "k", 0), entry("b", "l", 4)),
        (entry("a", "k", 4, 0), entry("b", "l", 4)),
    ],
)
def test_one_key_has_one_block_size_and_window(first: KVCacheEntry, second: KVCacheEntry) -> None:
    """R94."""
    with pytest.raises(ConfigError, match="entry"):
        kv_groups(KVCacheSpec((first, second)))


def test_full_attention_takes_only_what_is_missing() -> None:
    """R95: need = max(0, ceil(tokens / block_size) - held), without side effects."""
    tables = FullAttentionBlocks(KVGroup("f", 4), BlockPool(10))
    assert tables.need(1, 0, 9) == 3
    assert tables.pool.num_free == 9
    tables.grow(1, 0, 9)
    assert tables.tables[1] == [1, 2, 3]
    assert tables.need(1, 9, 12) == 0
    assert tables.need(1, 9, 13) == 1
    assert tables.recycle(1, 9) == tables.recyclable(1, 9) == 0
    assert tables.reserve(64) == 16
    assert tables.forget(1) == [1, 2, 3]
    assert tables.forget(1) == []


def test_a_window_recycles_behind_itself_and_stays_aligned() -> None:
    """R96: skipped tokens = max(0, computed - window + 1); nulls keep the places."""
    tables = SlidingWindowBlocks(KVGroup("w", 4, 8), BlockPool(10))
    tables.grow(1, 0, 12)
    table = tables.tables[1]
    assert table == [1, 2, 3]
    assert tables.recycle(1, 10) == 0  # positions 3..10 are read: block 0 still is
    assert tables.recyclable(1, 11) == 1
    assert tables.recycle(1, 11) == 1
    assert tables.recycle(1, 11) == 0
    assert table == [NULL_BLOCK, 2, 3]
    assert table is tables.tables[1]
    tables.grow(1, 12, 13)
    assert table == [NULL_BLOCK, 2, 3, 4]
    assert tables.reserve(64) == 0
    assert tables.recycle(2, 100) == tables.recyclable(2, 100) == 0


def test_a_window_that_jumps_past_its_table_takes_no_useless_block() -> None:
    tables = SlidingWindowBlocks(KVGroup("w", 4, 4), BlockPool(10))
    tables.grow(1, 0, 4)
    assert tables.recycle(1, 20) == 1
    assert tables.need(1, 20, 21) == 2
    tables.grow(1, 20, 21)
    assert tables.tables[1] == [0, 0, 0, 0, 1, 2]
    assert tables.recycle(1, 23) == 1
    assert tables.tables[1] == [0, 0, 0, 0, 0, 2]


def test_a_window_that_kept_leased_blocks_recycles_them_later() -> None:
    """While a lease pins a sequence nothing is recycled; afterwards nulls in the gap do
    not count."""
    tables = SlidingWindowBlocks(KVGroup("w", 4, 4), BlockPool(10))
    tables.grow(1, 0, 4)
    tables.grow(1, 20, 21)
    assert tables.tables[1] == [1, 0, 0, 0, 2, 3]
    assert tables.recyclable(1, 20) == 1
    assert tables.recycle(1, 20) == 1
    assert tables.pool.audit().held == 2


def test_r96_what_is_in_no_block_is_in_no_group() -> None:
    """R96, R112: refused, and not left out: decode would go on without that state."""
    state = KVCacheEntry("ssm.0", "f", "float32", 4, 1, 1, 8, needs_block=False)
    with pytest.raises(ConfigError, match=r"entry ssm\.0: needs_block False"):
        kv_groups(KVCacheSpec((state,)))


def test_a_window_group_needs_a_window() -> None:
    assert type(make_tables(KVGroup("f", 4), BlockPool(2))) is FullAttentionBlocks
    assert type(make_tables(KVGroup("w", 4, 8), BlockPool(2))) is SlidingWindowBlocks
    with pytest.raises(ConfigError, match="no sliding window"):
        SlidingWindowBlocks(KVGroup("f", 4), BlockPool(2))


@pytest.mark.parametrize("window", [None, 1, 3, 4, 6, 9])
@pytest.mark.parametrize("ahead", [1, 4])
def test_next_change_is_exact(window: int | None, ahead: int) -> None:
    """Between two changes a step alters nothing, at the change it does."""
    tables = make_tables(KVGroup("k", 4, window), BlockPool(60))
    limit = 50
    tables.grow(1, 5, min(5 + ahead, limit))
    due = tables.next_change(1, 6, ahead, limit)
    for computed in range(6, limit):
        before = list(tables.tables[1])
        tables.recycle(1, computed)
        tables.grow(1, computed, min(computed + ahead, limit))
        if tables.tables[1] != before:
            assert due == computed
            due = tables.next_change(1, computed + 1, ahead, limit)
        else:
            assert due > computed
    if window is None:
        assert due == NEVER


class SeedWindow(SlidingWindowBlocks):
    """The seed counts the window back from the last slot it allocates (D37)."""

    def need(self, seq_id: int, computed: int, total: int) -> int:
        first = max(0, total - self.window) // self.block_size
        return max(0, -(-total // self.block_size) - first)

    def grow(self, seq_id: int, computed: int, total: int) -> None:
        first = max(0, total - self.window) // self.block_size
        blocks = -(-total // self.block_size)
        self.tables[seq_id] = [NULL_BLOCK] * first + self.pool.allocate(blocks - first)


def uncovered(tables: type[SlidingWindowBlocks]) -> tuple[int, int]:
    """Over the grid: (combinations whose next query reads a position without a real
    block or whose new slots lie in the null block, all combinations)."""
    bad = count = 0
    grid = product((1, 2, 4, 6, 8, 16, 32), (1, 2, 4, 8, 16), range(4), range(1, 41))
    for window, block_size, next_n, prompt in grid:
        count += 1
        total = prompt + 1 + next_n + max(next_n - 1, 0)
        made = tables(KVGroup("w", block_size, window), BlockPool(200))
        assert made.need(1, prompt, total) <= made.pool.num_free
        made.grow(1, prompt, total)
        table = made.tables[1]
        reads = range(max(0, prompt - window + 1), total)
        bad += any(table[p // block_size] == NULL_BLOCK for p in reads)
        assert len(table) * block_size >= total
    return bad, count


def check_window_grid(tables: type[SlidingWindowBlocks]) -> None:
    bad, count = uncovered(tables)
    assert bad == 0, f"{bad} of {count} combinations lack a block the next query reads"


def test_the_window_follows_the_next_query_over_the_whole_grid() -> None:
    """D37: window x block x next_n x prompt; the seed's rule fails on part of it."""
    check_window_grid(SlidingWindowBlocks)
    with pytest.raises(AssertionError, match="lack a block"):
        check_window_grid(SeedWindow)


def test_the_combination_named_in_the_defect() -> None:
    """D37: window 8, block 4, next_n 2, prompt 9: needed from position 2, block 0."""
    for tables, first in ((SlidingWindowBlocks, 0), (SeedWindow, 1)):
        made = tables(KVGroup("w", 4, 8), BlockPool(10))
        made.grow(1, 9, 9 + 1 + 2 + 1)
        assert next(i for i, block in enumerate(made.tables[1]) if block) == first


def test_a_window_takes_no_block_that_nobody_reads() -> None:
    for window, block_size, prompt in product((1, 4, 8), (1, 4), range(1, 40)):
        made = SlidingWindowBlocks(KVGroup("w", block_size, window), BlockPool(100))
        made.grow(1, prompt, prompt + 1)
        first = next(i for i, block in enumerate(made.tables[1]) if block)
        assert first == max(0, prompt - window + 1) // block_size
