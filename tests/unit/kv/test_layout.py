"""Slots, placements and sizes: R98-R100, R111, R122."""

from __future__ import annotations

import attrs
import pytest

from pdcore.errors import ConfigError, IncompatibleError
from pdcore.kv.layout import (
    MAX_REACH,
    REGION_ALIGNMENT,
    num_blocks_for,
    num_blocks_for_concurrency,
    place_entries,
    resharded,
    seen_from,
    slot_mapping,
    staged,
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


def layered(count: int, heads: int = 4) -> KVCacheSpec:
    return KVCacheSpec(
        tuple(
            KVCacheEntry(f"layers.{i}.{part}", "f", "bfloat16", 16, heads, 4, 8, layer=i)
            for i in range(count)
            for part in ("k", "v")
        )
    )


def test_stages_hold_the_entries_of_their_layers() -> None:
    """R4: seven layers on three stages: 3, 2, 2; the digest is the model's."""
    spec = layered(7)
    stages = [staged(spec, 3, stage) for stage in range(3)]
    assert [sorted({e.layer for e in s.entries}) for s in stages] == [[0, 1, 2], [3, 4], [5, 6]]
    assert {s.digest() for s in stages} == {spec.digest()}
    assert staged(stages[0], 1, 0).digest() == spec.digest()
    assert {s.num_layers for s in (spec, *stages)} == {7}
    with pytest.raises(ConfigError, match="cannot hold"):
        staged(spec, 8, 0)


def test_another_rank_is_seen_from_what_it_lists() -> None:
    """D35: by name, in its own order, with its own heads and block size."""
    spec = layered(2)
    names = [e.name for e in spec.entries][::-1]
    place, _ = place_entries(spec, 10)
    seen, at = seen_from(spec, names, place, 2, 1, {"f": 32})
    assert [e.name for e in seen.entries] == names
    assert {(e.num_heads, e.block_size) for e in seen.entries} == {(2, 32)}
    assert (seen.tp_size, seen.tp_rank, seen.digest()) == (2, 1, spec.digest())
    assert at == place
    assert seen_from(spec, [e.name for e in spec.entries], place, 1, 0) == (spec, place)


def test_of_another_stage_only_the_common_layers_are_seen() -> None:
    """R4: whichever side is the pipeline."""
    spec = layered(4)
    middle = staged(spec, 2, 1)
    whole, _ = place_entries(spec, 10)
    part, _ = place_entries(middle, 10)
    seen, at = seen_from(middle, [e.name for e in spec.entries], whole, 1, 0)
    assert [e.name for e in seen.entries] == [e.name for e in middle.entries]
    assert at.offsets == whole.offsets[4:]
    seen, at = seen_from(spec, [e.name for e in middle.entries], part, 1, 0)
    assert [e.name for e in seen.entries] == [e.name for e in middle.entries]
    assert at == part
    assert seen.digest() == spec.digest()


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (["layers.0.k"], {}, r"only one side has \['layers.0.v'\]"),
        (["layers.0.k", "layers.0.v", "x"], {}, r"only one side has \['x'\]"),
        (["x"], {}, "only one side has"),
        (["layers.0.k", "layers.0.v"], {"f": 0}, "block_size 0 must be >= 1"),
    ],
)
def test_what_a_peer_lists_is_checked(
    names: list[str], sizes: dict[str, int], message: str
) -> None:
    """D58."""
    spec = layered(2)
    place, _ = place_entries(KVCacheSpec(spec.entries[: len(names)]), 10)
    with pytest.raises(IncompatibleError, match=message):
        seen_from(spec, names, place, 1, 0, sizes)
    with pytest.raises(IncompatibleError, match="4 heads do not divide over tp_size 3"):
        seen_from(spec, ["layers.0.k", "layers.0.v"], place, 3, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": (0, MAX_REACH)},
        {"offsets": (0, (1 << 63) - 1)},
        {"block_strides": (1024, (1 << 63) - 1)},
        {"block_strides": (1024, 1023)},
        {"num_blocks": 0, "block_strides": (1024, (1 << 63) - 1)},
    ],
)
def test_blocks_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    """D58: such numbers ended prefill's loop with an OverflowError, or wrapped around."""
    spec = layered(1)
    place = attrs.evolve(place_entries(spec, 10)[0], **changes)
    with pytest.raises(IncompatibleError, match=r"entry layers.0.v: decode has .* cannot be"):
        seen_from(spec, ["layers.0.k", "layers.0.v"], place, 1, 0)


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
