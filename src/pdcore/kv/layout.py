"""Where things lie: slots inside blocks, entries inside a region, blocks inside memory."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

import attrs

from pdcore.errors import ConfigError, IncompatibleError
from pdcore.kv.slices import is_even
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.kv.tables import kv_groups
from pdcore.topology import stage_layers
from pdcore.types import NULL_BLOCK

#: Registered bases must be aligned to this for some devices' inter-process memory (R122).
REGION_ALIGNMENT: Final = 2 << 20
#: Where a peer's blocks must end, in bytes from the start of their region: whatever is
#: computed of such places fits an int64. Whether they end inside it the transport knows.
MAX_REACH: Final = 1 << 62


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
    are whole on every rank, and what is kept once per rank is one on each. Raises
    ConfigError when heads and ranks do not divide.
    """
    entries = tuple(_share_of(entry, tp_size) for entry in spec.entries)
    return attrs.evolve(spec, entries=entries, tp_size=tp_size, tp_rank=tp_rank)


def _share_of(entry: KVCacheEntry, tp_size: int) -> KVCacheEntry:
    if entry.is_mla or entry.is_per_rank:
        return entry
    total = entry.total_num_heads
    if not is_even(total, tp_size):
        raise ConfigError(f"entry {entry.name}: {total} heads do not divide over tp_size {tp_size}")
    return attrs.evolve(entry, num_heads=max(1, total // tp_size))


def staged(spec: KVCacheSpec, pp_size: int, pp_rank: int) -> KVCacheSpec:
    """What one stage of a pipeline holds of a whole model's spec: the entries of its layers
    (R4). The digest stays that of the whole model.

    Raises ConfigError for a stage that does not exist, or fewer layers than stages.
    """
    num_layers = spec.num_layers
    layers = stage_layers(num_layers, pp_size, pp_rank)
    return attrs.evolve(
        spec,
        entries=tuple(entry for entry in spec.entries if entry.layer in layers),
        model_digest=spec.digest(),
        model_layers=num_layers,
    )


def seen_from(
    spec: KVCacheSpec,
    names: Sequence[str],
    placement: KVPlacement,
    tp_size: int,
    tp_rank: int,
    block_sizes: Mapping[str, int] | None = None,
) -> tuple[KVCacheSpec, KVPlacement]:
    """Spec and placement of another rank of the same model, from what it says of itself.

    ``spec`` is our own; the other lists its entries by name and, by manager key, its block
    sizes (None: ours). Entries of layers that we do not hold are left out: another stage of a
    pipeline fills them. Raises IncompatibleError when nothing is left, when a layer that both
    hold is incomplete on one side, for a block size that cannot be, or for blocks that
    overlap or lie nowhere (D58).
    """
    ours = {entry.name: entry for entry in spec.entries}
    kept = [i for i, name in enumerate(names) if name in ours]
    layers = {ours[names[i]].layer for i in kept}
    missing = {e.name for e in spec.entries if e.layer in layers} - set(names)
    strangers = set() if spec.model_digest else set(names) - ours.keys()
    if not kept or missing or strangers:
        raise IncompatibleError(
            f"entry names: only one side has {sorted(missing | strangers) or sorted(ours)}"
        )
    try:
        entries = tuple(
            _resized(_share_of(ours[names[i]], tp_size), block_sizes or {}) for i in kept
        )
    except ConfigError as error:
        raise IncompatibleError(f"decode's layout: {error}") from error
    for i, entry in zip(kept, entries, strict=True):
        _check_reach(entry, placement, i)
    is_part = bool(spec.model_digest) or len(kept) < len(ours)
    model = (spec.digest(), spec.num_layers) if is_part else ("", 0)
    return (
        KVCacheSpec(entries, tp_size, tp_rank, *model),
        KVPlacement(
            placement.num_blocks,
            tuple(placement.regions[i] for i in kept),
            tuple(placement.offsets[i] for i in kept),
            tuple(placement.block_strides[i] for i in kept),
        ),
    )


def held_by(
    spec: KVCacheSpec,
    layers: Container[int],
    tp_size: int,
    tp_rank: int,
    block_sizes: Mapping[str, int],
) -> KVCacheSpec:
    """What another rank of the same model holds of our entries: those of its layers, in its share
    of the heads and its blocks. Raises IncompatibleError for sizes that cannot be."""
    try:
        entries = tuple(
            _resized(_share_of(entry, tp_size), block_sizes)
            for entry in spec.entries
            if entry.layer in layers
        )
    except ConfigError as error:
        raise IncompatibleError(f"prefill's layout: {error}") from error
    return KVCacheSpec(entries, tp_size, tp_rank)


def _check_reach(entry: KVCacheEntry, placement: KVPlacement, i: int) -> None:
    """Raises IncompatibleError unless the blocks of this entry can be what the peer says."""
    offset, stride = placement.offsets[i], placement.block_strides[i]
    if stride < entry.item_len or offset + max(1, placement.num_blocks) * stride > MAX_REACH:
        raise IncompatibleError(
            f"entry {entry.name}: decode has {placement.num_blocks} blocks of {entry.item_len} "
            f"bytes from offset {offset}, {stride} bytes apart, which cannot be"
        )


def _resized(entry: KVCacheEntry, block_sizes: Mapping[str, int]) -> KVCacheEntry:
    size = block_sizes.get(entry.manager_key, entry.block_size)
    if size < 1:
        raise ConfigError(f"entry {entry.name}: block_size {size} must be >= 1")
    return entry if size == entry.block_size else attrs.evolve(entry, block_size=size)


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
