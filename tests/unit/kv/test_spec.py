"""Cache entries and the layout digest: R110-R113, D35."""

from __future__ import annotations

import attrs
import pytest

from pdcore.kv.spec import KVCacheEntry, KVCacheSpec


def test_item_len_of_typical_entries() -> None:
    """R111, R113: block 128, bf16."""
    nope = KVCacheEntry("nope.0", "mla", "bfloat16", 128, 1, 1, 512, is_mla=True)
    rope = KVCacheEntry("rope.0", "mla", "bfloat16", 128, 1, 1, 64, is_mla=True)
    key = KVCacheEntry("k.0", "full", "bfloat16", 128, 1, 4, 128)
    assert [e.item_len for e in (nope, rope, key)] == [131072, 16384, 32768]
    assert attrs.evolve(nope, dtype="int8").item_len == 65536
    spec = KVCacheSpec((nope, rope, key))
    assert spec.block_bytes == {"mla": 147456, "full": 32768}
    assert spec.block_sizes == {"mla": 128, "full": 128}


BASE = KVCacheEntry("k.0", "full", "bfloat16", 128, 1, 4, 128)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "k.1"},
        {"manager_key": "win"},
        {"dtype": "int8"},
        {"block_size": 64},
        {"total_num_heads": 8},
        {"head_dim": 64},
        {"layout": "BnNBsD"},
        {"sliding_window": 128},
        {"is_mla": True},
    ],
)
def test_the_digest_tells_every_shape_apart(change: dict[str, object]) -> None:
    """D35: the cache dtype and every other part of the layout are in it."""
    other = attrs.evolve(BASE, **change)
    assert KVCacheSpec((BASE,)).digest() != KVCacheSpec((other,)).digest()


def test_the_digest_is_the_same_for_every_rank() -> None:
    spec = KVCacheSpec((BASE,), 4, 1)
    other = KVCacheSpec((attrs.evolve(BASE, num_heads=4),), 1, 0)
    assert spec.digest() == other.digest()
