"""Cache entries and the layout digest: R110-R113, D35."""

from __future__ import annotations

import attrs
import pytest

from pdcore.errors import ConfigError
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
        {"layer": 1},
        {"total_num_heads": 8},
        {"head_dim": 64},
        {"layout": "BnNBsD"},
        {"sliding_window": 128},
        {"is_mla": True},
        {"is_per_rank": True},
        {"compress_ratio": 4},
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


def test_the_digest_leaves_block_sizes_to_their_own_comparison() -> None:
    """Blocks of other sizes are re-cut; which are allowed is said by name (R57)."""
    other = attrs.evolve(BASE, block_size=64)
    assert KVCacheSpec((BASE,)).digest() == KVCacheSpec((other,)).digest()


def test_entries_of_models_with_several_managers() -> None:
    """R110, R113: compressed keys have fewer rows than tokens; scales are entries of their
    own; item_len = rows x heads x dim x element size."""
    compressed = KVCacheEntry("c4a.0", "c4a", "bfloat16", 512, 1, 1, 512, compress_ratio=4)
    assert (compressed.storage_block_size, compressed.item_len) == (128, 131072)
    scale = KVCacheEntry("k.0.scale", "full", "float32", 128, 1, 8, 1)
    values = attrs.evolve(BASE, dtype="int8")
    assert (scale.item_len, values.item_len) == (512, 16384)
    spec = KVCacheSpec((values, scale, attrs.evolve(compressed, layer=3)))
    assert spec.block_sizes == {"full": 128, "c4a": 512}
    assert (spec.num_layers, KVCacheSpec(()).num_layers) == (4, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int3"}, "entry k.0: dtype int3; use one of float32"),
        ({"layout": "NBD"}, "layout NBD; use one of BnBsND, BnNBsD"),
        ({"num_heads": 0}, "num_heads 0, total_num_heads 4 and head_dim 128 must be >= 1"),
        ({"compress_ratio": 3}, "compress_ratio 3; it must divide block_size 128"),
        ({"is_mla": True, "is_per_rank": True}, "is_per_rank True; what is_mla keeps"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    """R110: when it is made, by field, value and remedy."""
    with pytest.raises(ConfigError, match=message):
        attrs.evolve(BASE, **change)
