"""What every paged runner must check and compute before a step, in numpy.

A *slot* is the row of one token in a pool of shape (num_blocks, entries, block_size):
``block * entries * block_size + offset`` for entry 0; entry e adds ``e * block_size``.
One slot number therefore serves all entries of a layout in which the entries of a block
lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs
import numpy as np
from numpy.typing import NDArray

from pdcore.errors import EngineError
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.types import Batch

#: The manager key of full attention: every position keeps its KV.
FULL_ATTENTION = "full"

Int64Array = NDArray[np.int64]


@attrs.frozen
class PagedLimits:
    """What a batch is checked against. ``block_stride`` in slots."""

    block_size: int
    block_stride: int
    num_blocks: int
    max_model_len: int
    vocab_size: int


@lru_cache(maxsize=64)
def full_attention_spec(
    *,
    num_layers: int,
    dtype: str,
    block_size: int,
    num_heads: int,
    head_dim: int,
    tp_size: int = 1,
    tp_rank: int = 0,
) -> KVCacheSpec:
    """Entries ``layers.<i>.k`` and ``layers.<i>.v``; ``num_heads`` KV heads over the group,
    of which a rank holds its share, or a copy of one when there are more ranks. Ranks of one
    process that are alike share it: planners are found by spec."""
    return KVCacheSpec(
        tuple(
            KVCacheEntry(
                name=f"layers.{layer}.{part}",
                layer=layer,
                manager_key=FULL_ATTENTION,
                dtype=dtype,
                block_size=block_size,
                num_heads=max(1, num_heads // tp_size),
                total_num_heads=num_heads,
                head_dim=head_dim,
            )
            for layer in range(num_layers)
            for part in ("k", "v")
        ),
        tp_size,
        tp_rank,
    )


def side_by_side(spec: KVCacheSpec, num_blocks: int, region: int) -> KVPlacement:
    """Placement in which the entries of a block lie side by side, in spec order."""
    offsets: list[int] = []
    total = 0
    for entry in spec.entries:
        offsets.append(total)
        total += entry.item_len
    count = len(offsets)
    return KVPlacement(num_blocks, (region,) * count, tuple(offsets), (total,) * count)


def batch_slots(batch: Batch, limits: PagedLimits) -> list[Int64Array]:
    """Per sequence the slots of positions 0 .. computed + new - 1, entry 0.

    Raises EngineError, naming the sequence, for whatever would make a runner read or
    write outside its pool: a position beyond max_model_len, a short block table, a block
    id out of range or the null block (R93), a token id outside the vocabulary.
    """
    vocab, size = limits.vocab_size, limits.block_size
    if batch.input_ids and (min(batch.input_ids) < 0 or max(batch.input_ids) >= vocab):
        for i, start, end in batch.spans():
            for token in batch.input_ids[start:end]:
                if not 0 <= token < vocab:
                    raise EngineError(
                        f"sequence {batch.seq_ids[i]}: token id {token} is outside the "
                        f"vocabulary of {vocab}"
                    )
    ids: list[int] = []
    ends: list[int] = []
    lengths = zip(batch.query_lens, batch.num_computed_tokens, strict=True)
    for i, (num_new, computed) in enumerate(lengths):
        if num_new < 1 or computed < 0:
            raise EngineError(
                f"sequence {batch.seq_ids[i]}: {num_new} new tokens after {computed} computed "
                "ones; a step needs at least one new token"
            )
        ends.append(computed + num_new)
        ids += _table(batch, i, ends[-1], limits)
    if not ends:
        return []
    # One check and one conversion for all sequences: a step of many costs what one costs.
    if min(ids) < 1 or max(ids) >= limits.num_blocks:
        _refuse_ids(batch, ends, limits)
    blocks = np.array(ids, np.int64)
    rows = (blocks[:, None] * limits.block_stride + np.arange(size, dtype=np.int64)).reshape(-1)
    slots: list[Int64Array] = []
    at = 0
    for end in ends:
        slots.append(rows[at : at + end])
        at += -(-end // size) * size
    return slots


def _table(batch: Batch, i: int, end: int, limits: PagedLimits) -> Sequence[int]:
    """The ids of the blocks of positions 0 .. end - 1."""
    seq = batch.seq_ids[i]
    if end > limits.max_model_len:
        raise EngineError(
            f"sequence {seq}: position {end - 1} is beyond max_model_len {limits.max_model_len}"
        )
    num_blocks = -(-end // limits.block_size)
    table = batch.block_tables[i].get(FULL_ATTENTION, ())[:num_blocks]
    if len(table) < num_blocks:
        raise EngineError(
            f"sequence {seq}: {len(table)} blocks in its table for manager key "
            f"{FULL_ATTENTION!r}, {num_blocks} needed"
        )
    return table


def _refuse_ids(batch: Batch, ends: Sequence[int], limits: PagedLimits) -> None:
    """Raises EngineError naming the sequence whose table has an id out of range."""
    for i, end in enumerate(ends):
        table = _table(batch, i, end, limits)
        if min(table) < 1 or max(table) >= limits.num_blocks:
            raise EngineError(
                f"sequence {batch.seq_ids[i]}: block ids must be within "
                f"1..{limits.num_blocks - 1}, got {min(table)}..{max(table)}"
            )
