"""Where things lie: slots inside blocks, entries inside a region, blocks inside memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from pdcore.errors import ConfigError
from pdcore.kv.spec import KVCacheSpec, KVPlacement
from pdcore.kv.tables import kv_groups
from pdcore.types import NULL_BLOCK

#: Registered bases must be aligned to this for some devices' inter-process memory (R122).
REGION_ALIGNMENT: Final = 2 << 20


def slot_mapping(table: Sequence[int], positions: Iterable[int], block_size: int) -> list[int]:
    """R99: ``table[pos // block_size] * block_size + pos % block_size`` for each position.

    Raises ConfigError for a position without a block of its own: outside the table, or
    behind a sliding window.
    """
    slots = []
    for position in positions:
        index, inside = divmod(position, block_size)
        if not 0 <= index < len(table) or table[index] == NULL_BLOCK:
            raise ConfigError(f"position {position} has no block: {len(table)} blocks in the table")
        slots.append(table[index] * block_size + inside)
    return slots


def table_width(max_model_len: int, block_size: int) -> int:
    """Blocks in the longest table (R98)."""
    return -(-max_model_len // block_size)


def place_entries(
    spec: KVCacheSpec, num_blocks: int, region: int = 0, alignment: int = 1
) -> tuple[KVPlacement, int]:
    """All entries one after the other in one region, each entry's blocks side by side.

    Returns the placement and the region's size in bytes; every entry starts at a multiple
    of ``alignment`` (R111, R122).
    """
    offsets: list[int] = []
    size = 0
    for entry in spec.entries:
        size = -(-size // alignment) * alignment
        offsets.append(size)
        size += num_blocks * entry.item_len
    count = len(spec.entries)
    strides = tuple(entry.item_len for entry in spec.entries)
    return KVPlacement(num_blocks, (region,) * count, tuple(offsets), strides), size


def resharded(spec: KVCacheSpec, tp_size: int, tp_rank: int) -> KVCacheSpec:
    """The spec of another rank of another TP size for the same model.

    Heads are split evenly, or replicated when there are fewer heads than ranks; MLA rows
    are whole on every rank. Raises ConfigError when heads and ranks do not divide.
    """
    entries = []
    for entry in spec.entries:
        total = entry.total_num_heads
        if not entry.is_mla and total % tp_size and tp_size % total:
            raise ConfigError(
                f"entry {entry.name}: {total} heads do not divide over tp_size {tp_size}"
            )
        heads = entry.num_heads if entry.is_mla else max(1, total // tp_size)
        entries.append(attrs.evolve(entry, num_heads=heads))
    return KVCacheSpec(tuple(entries), tp_size, tp_rank)


def num_blocks_for(spec: KVCacheSpec, available_bytes: int, max_prefill_tokens: int = 0) -> int:
    """R100 online: blocks per manager key, the null block included, that fit memory.

    Raises ConfigError, which names the settings, when a prompt of ``max_prefill_tokens``
    and its first output token would not fit them.
    """
    per_block = sum(spec.block_bytes.values())
    num_blocks = max(0, available_bytes) // per_block
    smallest = min(group.block_size for group in kv_groups(spec))
    room = (num_blocks - 1) * smallest - 1
    if num_blocks < 2 or room < max_prefill_tokens:
        needed = -(-(max_prefill_tokens + 1) // smallest) + 1
        raise ConfigError(
            f"the KV pool holds {max(0, room)} tokens ({num_blocks} blocks of {smallest}), but "
            f"max_prefill_tokens is {max_prefill_tokens}: set scheduler_config.kv_cache_bytes to "
            f"at least {needed * per_block} (num_blocks: {needed}), or lower "
            "scheduler_config.max_prefill_tokens"
        )
    return num_blocks


def num_blocks_for_concurrency(
    spec: KVCacheSpec, max_model_len: int, concurrency: int, next_n: int = 0
) -> dict[str, int]:
    """R100 offline: blocks by manager key so that ``concurrency`` sequences never wait."""
    sizes: dict[str, int] = {}
    for group in kv_groups(spec):
        tokens, extra = max_model_len, 0
        if group.sliding_window is not None:
            tokens, extra = group.sliding_window + 2 * next_n, 1
        sizes[group.key] = concurrency * (-(-tokens // group.block_size) + extra) + 1
    return sizes
