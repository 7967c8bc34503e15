"""Slots, placements and sizes: R98-R100, R111, R122."""

from __future__ import annotations

import pytest

from pdcore.errors import ConfigError
from pdcore.kv.layout import (
    REGION_ALIGNMENT,
    num_blocks_for,
    num_blocks_for_concurrency,
    place_entries,
    resharded,
    slot_mapping,
    table_width,
)
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec


def test_the_slot_vector_of_the_requirement() -> None:
    """R99: block size 4, table [2, 7], positions 0..4."""
    assert slot_mapping([2, 7], range(5), 4) == [8, 9, 10, 11, 28]


@pytest.mark.parametrize(("table", "position"), [([2, 7], 8), ([0, 7], 3), ([2], -1)])
def test_a_position_without_a_block_has_no_slot(table: list[int], position: int) -> None:
    """D45: beyond the table, or in the null block behind a window."""
    with pytest.raises(ConfigError, match="has no block"):
        slot_mapping(table, [position], 4)


def test_table_width() -> None:
    """R98."""
    assert [table_width(n, 128) for n in (1, 128, 129)] == [1, 1, 2]


def entry(name: str, heads: int, total: int, *, is_mla: bool = False) -> KVCacheEntry:
    return KVCacheEntry(name, "f", "bfloat16", 128, heads, total, 64, is_mla=is_mla)


def test_entries_follow_each_other_aligned() -> None:
    """R111, R122: block stride = item_len, bases aligned."""
    spec = KVCacheSpec((entry("a", 1, 1), entry("b", 2, 2)))
    place, size = place_entries(spec, 10, region=7, alignment=REGION_ALIGNMENT)
    assert place.regions == (7, 7)
    assert place.block_strides == (16384, 32768)
    assert place.offsets == (0, REGION_ALIGNMENT)
    assert size == REGION_ALIGNMENT + 10 * 32768


def test_resharding_splits_or_replicates_heads_and_keeps_mla_whole() -> None:
    spec = KVCacheSpec((entry("k", 4, 4), entry("c", 1, 1, is_mla=True)))
    for tp_size, heads in ((1, 4), (2, 2), (4, 1), (16, 1)):
        other = resharded(spec, tp_size, tp_size - 1)
        assert [e.num_heads for e in other.entries] == [heads, 1]
        assert (other.tp_size, other.tp_rank) == (tp_size, tp_size - 1)
        assert other.digest() == spec.digest()
    with pytest.raises(ConfigError, match="4 heads do not divide over tp_size 3"):
        resharded(spec, 3, 0)


def test_blocks_from_bytes() -> None:
    """R100: bytes // bytes per block over all entries; a whole prompt must fit."""
    spec = KVCacheSpec((entry("k", 1, 1), entry("v", 1, 1)))
    block = 2 * 16384
    assert num_blocks_for(spec, 10 * block + 1) == 10
    assert num_blocks_for(spec, 10 * block, max_prefill_tokens=9 * 128 - 1) == 10
    with pytest.raises(ConfigError, match=rf"at least {11 * block} \(num_blocks: 11\)"):
        num_blocks_for(spec, 10 * block, max_prefill_tokens=9 * 128)
    for available in (-5, 0, block):
        with pytest.raises(ConfigError, match="the KV pool holds 0 tokens"):
            num_blocks_for(spec, available)


def test_blocks_from_concurrency() -> None:
    """R100 offline, and the sliding window's share."""
    window = KVCacheEntry("w", "w", "bfloat16", 16, 1, 1, 64, sliding_window=100)
    spec = KVCacheSpec((entry("k", 1, 1), window))
    sizes = num_blocks_for_concurrency(spec, 1000, 4, next_n=2)
    assert sizes == {"f": 4 * 8 + 1, "w": 4 * (7 + 1) + 1}
