"""Block tables of one manager key: full attention and sliding window (R94-R96).

A table is a list of block ids aligned with positions: entry i holds positions
``i * block_size .. (i + 1) * block_size - 1``. A sliding window keeps the list aligned
and puts the null block where no real block is needed any more. A table is one list
object for the life of its sequence, changed in place, so that batches share it.

Which positions a window needs follows from the NEXT query position, ``computed``: it
reads ``computed - window + 1 .. computed``. The seed counted back from the last slot it
allocated (prompt + 1 + next_n + look-ahead), so with speculative tokens the first real
block could lie after positions that the next query still reads (D37).
"""

from __future__ import annotations

from typing import Final

import attrs

from pdcore.errors import ConfigError
from pdcore.kv.blocks import BlockPool
from pdcore.kv.spec import KVCacheSpec
from pdcore.types import NULL_BLOCK

#: "Never": larger than any token count.
NEVER: Final = 1 << 62


@attrs.frozen
class KVGroup:
    """What all entries of one manager key share (R94): one block size, one window."""

    key: str
    block_size: int
    sliding_window: int | None = None


def kv_groups(spec: KVCacheSpec) -> tuple[KVGroup, ...]:
    """The groups of a spec in order of first appearance.

    Raises ConfigError when entries of one manager key disagree, a size is not positive, or
    what a layer keeps is in no block (R96, R112: decode would go on without it).
    """
    groups: dict[str, KVGroup] = {}
    for entry in spec.entries:
        if not entry.needs_block:
            raise ConfigError(
                f"entry {entry.name}: needs_block False; a state that a sequence has once "
                "(Mamba, convolutions) is not transferred, so prefill and decode cannot share "
                "this model: serve it with an engine that does both"
            )
        group = KVGroup(entry.manager_key, entry.block_size, entry.sliding_window)
        known = groups.setdefault(entry.manager_key, group)
        if known != group:
            raise ConfigError(
                f"entry {entry.name}: manager key {entry.manager_key!r} has block size and "
                f"window {known.block_size}, {known.sliding_window} elsewhere and "
                f"{group.block_size}, {group.sliding_window} here; use another manager key"
            )
        window = entry.sliding_window
        if entry.block_size < 1 or (window is not None and window < 1):
            raise ConfigError(
                f"entry {entry.name}: block_size {entry.block_size} and sliding_window "
                f"{window} must be positive"
            )
    return tuple(groups.values())


class FullAttentionBlocks:
    """Tables that only grow. One pool, one block size."""

    __slots__ = ("block_size", "key", "pool", "tables")

    def __init__(self, group: KVGroup, pool: BlockPool) -> None:
        self.key = group.key
        self.block_size = group.block_size
        self.pool = pool
        self.tables: dict[int, list[int]] = {}

    def reserve(self, reserved_tokens: int) -> int:
        """Blocks of head-room each request that holds blocks is owed (R95)."""
        return -(-reserved_tokens // self.block_size)

    def first_needed(self, computed: int) -> int:
        """Index of the first block that the query at position ``computed`` reads."""
        return 0

    def need(self, seq_id: int, computed: int, total: int) -> int:
        """Blocks to take so that positions below ``total`` have slots. No side effect."""
        table = self.tables.get(seq_id)
        blocks = -(-total // self.block_size)
        if table is None:
            return max(0, blocks - self.first_needed(computed))
        return max(0, blocks - max(len(table), self.first_needed(computed)))

    def recyclable(self, seq_id: int, computed: int) -> int:
        """Blocks that ``recycle`` would give back."""
        return 0

    def recycle(self, seq_id: int, computed: int) -> int:
        """Give back blocks no later query reads; returns how many."""
        return 0

    def grow(self, seq_id: int, computed: int, total: int) -> None:
        """Take what ``need`` said. The caller checked that the pool has it."""
        table = self.tables.setdefault(seq_id, [])
        blocks = -(-total // self.block_size)
        first = min(self.first_needed(computed), blocks)
        if len(table) < first:
            table.extend([NULL_BLOCK] * (first - len(table)))
        if len(table) < blocks:
            last = table[-1] if table else NULL_BLOCK
            table.extend(self.pool.allocate(blocks - len(table), last))

    def next_change(self, seq_id: int, computed: int, ahead: int, max_model_len: int) -> int:
        """Smallest ``computed`` at which a step of ``ahead`` slots changes this table."""
        covered = len(self.tables.get(seq_id, ())) * self.block_size
        return NEVER if covered >= max_model_len else max(computed, covered - ahead + 1)

    def forget(self, seq_id: int) -> list[int]:
        """Drop the table and return its ids, nulls included; the caller settles them."""
        return self.tables.pop(seq_id, [])


class SlidingWindowBlocks(FullAttentionBlocks):
    """Tables that drop blocks behind the window and stay position-aligned (R96)."""

    __slots__ = ("_first_real", "window")

    def __init__(self, group: KVGroup, pool: BlockPool) -> None:
        if group.sliding_window is None:
            raise ConfigError(f"manager key {group.key!r} has no sliding window")
        super().__init__(group, pool)
        self.window = group.sliding_window
        self._first_real: dict[int, int] = {}

    def reserve(self, reserved_tokens: int) -> int:
        """A window does not grow with the sequence: nothing is owed (R95)."""
        return 0

    def first_needed(self, computed: int) -> int:
        return max(0, computed - self.window + 1) // self.block_size

    def recyclable(self, seq_id: int, computed: int) -> int:
        table = self.tables.get(seq_id)
        if table is None:
            return 0
        passed = table[self._first_real[seq_id] : self.first_needed(computed)]
        return len(passed) - passed.count(NULL_BLOCK)

    def recycle(self, seq_id: int, computed: int) -> int:
        table = self.tables.get(seq_id)
        if table is None:
            return 0
        start = self._first_real[seq_id]
        end = min(self.first_needed(computed), len(table))
        if end <= start:
            return 0
        freed = self.pool.free(table[start:end])
        table[start:end] = [NULL_BLOCK] * (end - start)
        self._first_real[seq_id] = end
        return freed

    def grow(self, seq_id: int, computed: int, total: int) -> None:
        if seq_id not in self._first_real:
            blocks = -(-total // self.block_size)
            self._first_real[seq_id] = min(self.first_needed(computed), blocks)
        super().grow(seq_id, computed, total)

    def next_change(self, seq_id: int, computed: int, ahead: int, max_model_len: int) -> int:
        grow_at = super().next_change(seq_id, computed, ahead, max_model_len)
        first = self._first_real.get(seq_id, 0)
        return min(grow_at, max(computed, (first + 1) * self.block_size + self.window - 1))

    def forget(self, seq_id: int) -> list[int]:
        self._first_real.pop(seq_id, None)
        return super().forget(seq_id)


def make_tables(group: KVGroup, pool: BlockPool) -> FullAttentionBlocks:
    """The tables class a group asks for."""
    if group.sliding_window is None:
        return FullAttentionBlocks(group, pool)
    return SlidingWindowBlocks(group, pool)
