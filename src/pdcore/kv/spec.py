"""What a KV cache consists of: entries by name, their sizes, and the layout digest.

An entry is one cache tensor of one layer (R110). Prefill and decode match entries by
name and compare digests instead of trusting list positions (R112 CHANGE, D35).
"""

from __future__ import annotations

import hashlib
from typing import Final

import attrs

DTYPE_SIZE_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
}


@attrs.frozen
class KVCacheEntry:
    """One cache tensor. ``num_heads`` is per rank, ``total_num_heads`` over the TP group.

    ``layout`` is ``BnBsND`` (blocks, tokens, heads, dim) or ``BnNBsD`` (blocks, heads,
    tokens, dim); only the first can be sliced by head per token (D36).
    ``is_mla`` is explicit, never inferred from one head (R110).
    """

    name: str
    manager_key: str
    dtype: str
    block_size: int
    num_heads: int
    total_num_heads: int
    head_dim: int
    layout: str = "BnBsND"
    sliding_window: int | None = None
    is_mla: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of this entry on this rank."""
        return self.num_heads * self.head_dim * DTYPE_SIZE_BYTES[self.dtype]

    @property
    def item_len(self) -> int:
        """Bytes of one block of this entry on this rank (R111)."""
        return self.block_size * self.token_bytes


@attrs.frozen
class KVCacheSpec:
    """All entries of one rank, layers ascending (R112), and the TP position they belong to."""

    entries: tuple[KVCacheEntry, ...]
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def block_bytes(self) -> dict[str, int]:
        """manager key -> bytes of one block summed over its entries."""
        total: dict[str, int] = {}
        for entry in self.entries:
            total[entry.manager_key] = total.get(entry.manager_key, 0) + entry.item_len
        return total

    @property
    def block_sizes(self) -> dict[str, int]:
        """manager key -> tokens per block."""
        return {entry.manager_key: entry.block_size for entry in self.entries}

    def digest(self) -> str:
        """Hex digest of everything two instances must agree on, independent of the rank.

        Per-rank head counts are left out: unequal TP is legal. Names, manager keys,
        dtypes, total heads, dims, block sizes, layouts and windows are in (D35).
        """
        h = hashlib.sha256()
        for e in self.entries:
            h.update(
                f"{e.name}|{e.manager_key}|{e.dtype}|{e.block_size}|{e.total_num_heads}|"
                f"{e.head_dim}|{e.layout}|{e.sliding_window}|{e.is_mla}\n".encode()
            )
        return h.hexdigest()[:32]


@attrs.frozen
class KVPlacement:
    """Where the blocks of each entry of a spec lie inside registered regions (D58).

    Block ``b`` of entry i starts at ``offsets[i] + b * block_strides[i]`` in region
    ``regions[i]``. Never a pointer.
    """

    num_blocks: int
    regions: tuple[int, ...]
    offsets: tuple[int, ...]
    block_strides: tuple[int, ...]
