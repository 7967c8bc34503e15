"""Slots and the checks that keep a runner inside its pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.engine.paging import PagedLimits, batch_slots, full_attention_spec, side_by_side
from pdcore.errors import EngineError
from pdcore.kv.layout import resharded
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec
from pdcore.types import Batch, Phase, SamplingParams

LIMITS = PagedLimits(block_size=4, block_stride=24, num_blocks=10, max_model_len=12, vocab_size=100)


def batch_of(token_ids: list[int], computed: int, blocks: list[int], key: str = "full") -> Batch:
    batch = Batch(1, Phase.PREFILL)
    batch.add(77, token_ids, computed, {key: blocks}, SamplingParams())
    return batch


def test_slots_follow_the_table() -> None:
    (slots,) = batch_slots(batch_of([1, 2], 4, [9, 2, 5]), LIMITS)
    assert slots.tolist() == [9 * 24, 9 * 24 + 1, 9 * 24 + 2, 9 * 24 + 3, 2 * 24, 2 * 24 + 1]


@given(st.permutations(range(1, 10)), st.integers(0, 11), st.integers(1, 12))
def test_slots_are_distinct_and_inside(blocks: list[int], computed: int, new: int) -> None:
    if computed + new > LIMITS.max_model_len:
        return
    (slots,) = batch_slots(batch_of([0] * new, computed, list(blocks)), LIMITS)
    assert len(set(slots.tolist())) == len(slots) == computed + new
    assert (slots // LIMITS.block_stride >= 1).all()
    assert (slots % LIMITS.block_stride < LIMITS.block_size).all()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_of([1], 12, [1, 2, 3, 4]), "sequence 77: position 12 is beyond max_model_len 12"),
        (batch_of([1] * 13, 0, [1, 2, 3, 4]), "position 12 is beyond max_model_len 12"),
        (batch_of([], 3, [1]), "sequence 77: 0 new tokens after 3 computed"),
        (batch_of([1], -1, [1]), "1 new tokens after -1 computed"),
        (batch_of([1] * 5, 0, [1]), "1 blocks in its table for manager key 'full', 2 needed"),
        (batch_of([1], 0, [1], "window"), "0 blocks in its table"),
        (batch_of([1], 0, [0]), r"block ids must be within 1\.\.9, got 0\.\.0"),
        (batch_of([1] * 5, 0, [3, 10]), r"within 1\.\.9, got 3\.\.10"),
        (batch_of([1, 100], 0, [1]), "sequence 77: token id 100 is outside the vocabulary of 100"),
        (batch_of([-1], 0, [1]), "token id -1 is outside"),
    ],
)
def test_what_cannot_run_names_the_sequence(batch: Batch, message: str) -> None:
    """R93: the null block is nobody's; positions beyond the limit never reach memory."""
    with pytest.raises(EngineError, match=message):
        batch_slots(batch, LIMITS)


def test_entries_lie_side_by_side() -> None:
    entries = tuple(
        KVCacheEntry(f"layers.{i}.k", "full", "float32", 4, heads, heads, 2)
        for i, heads in enumerate((1, 3))
    )
    placement = side_by_side(KVCacheSpec(entries), 5, region=9)
    assert placement.offsets == (0, 32)
    assert placement.block_strides == (128, 128)
    assert placement.regions == (9, 9)
    covered = np.zeros(5 * 128, int)
    for entry, offset in zip(entries, placement.offsets, strict=True):
        for block in range(5):
            start = offset + block * 128
            covered[start : start + entry.item_len] += 1
    assert (covered == 1).all()


def test_spec_counts_heads_per_rank_and_in_total() -> None:
    """R110, R112: layers ascending, K before V; unequal TP leaves the digest alone."""
    whole = full_attention_spec(
        num_layers=2, dtype="float32", block_size=4, num_heads=6, head_dim=8
    )
    part = full_attention_spec(
        num_layers=2,
        dtype="float32",
        block_size=4,
        num_heads=6,
        head_dim=8,
        tp_size=3,
        tp_rank=1,
    )
    names = ["layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"]
    assert [entry.name for entry in whole.entries] == names
    assert [entry.layer for entry in whole.entries] == [0, 0, 1, 1]
    assert whole.num_layers == 2
    assert part.entries[0].item_len * 3 == whole.entries[0].item_len
    assert (part.entries[0].num_heads, part.entries[0].total_num_heads) == (2, 6)
    assert part.digest() == whole.digest()


def test_more_ranks_than_heads_hold_copies() -> None:
    """R80: the same spec that the layout's own rule gives; the total stays the model's."""
    for tp_size in (1, 2, 4, 8):
        specs = [
            full_attention_spec(
                num_layers=1,
                dtype="float32",
                block_size=4,
                num_heads=4,
                head_dim=8,
                tp_size=size,
                tp_rank=size - 1,
            )
            for size in (1, tp_size)
        ]
        assert resharded(specs[0], tp_size, tp_size - 1) == specs[1]
        assert specs[1].entries[0].num_heads == max(1, 4 // tp_size)
