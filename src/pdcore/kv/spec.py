"""What a KV cache consists of: entries by name, their sizes, and the layout digest.

An entry is one cache tensor of one layer (R110). Prefill and decode match entries by
name and compare digests instead of trusting list positions (R112 CHANGE, D35).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

import attrs

from pdcore.errors import ConfigError

DTYPE_SIZE_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
}

#: Token-major (blocks, tokens, heads, dim) and head-major (blocks, heads, tokens, dim).
TOKEN_MAJOR: Final = "BnBsND"
HEAD_MAJOR: Final = "BnNBsD"
LAYOUTS: Final = (TOKEN_MAJOR, HEAD_MAJOR)


@attrs.frozen(cache_hash=True)
class KVCacheEntry:
    """One cache tensor of one layer (R110). ``num_heads`` is per rank, ``total_num_heads``
    over the TP group.

    ``layout`` is one of :data:`LAYOUTS`. What the ranks of a TP group hold is said, never
    inferred from one head: by default each rank holds its share of the heads, or a copy of
    one when there are fewer heads than ranks. ``is_mla``: the same bytes on every rank.
    ``is_per_rank``: one value for all heads of a rank (a quantisation scale per token and
    rank), which no rank of another TP size has (D36).

    Quantised KV with a scale per token is two entries: the values, and the scales with
    ``head_dim`` 1 (R113); several dimensions are one, their product. ``compress_ratio`` tokens
    share one row (R110). ``needs_block`` False: state that a sequence has once, and not per
    token (Mamba's); it is in no block, so it cannot be handed over, and
    :func:`pdcore.kv.tables.kv_groups` refuses it.

    Raises ConfigError for a size below 1, an unknown dtype or layout, or a block size that
    is no multiple of ``compress_ratio``.
    """

    name: str
    manager_key: str
    dtype: str
    block_size: int
    num_heads: int
    total_num_heads: int
    head_dim: int
    layout: str = TOKEN_MAJOR
    sliding_window: int | None = None
    is_mla: bool = False
    is_per_rank: bool = False
    compress_ratio: int = 1
    layer: int = 0
    needs_block: bool = True

    def __attrs_post_init__(self) -> None:
        if self.dtype not in DTYPE_SIZE_BYTES:
            raise self._wrong("dtype", f"use one of {', '.join(DTYPE_SIZE_BYTES)}")
        if self.layout not in LAYOUTS:
            raise self._wrong("layout", f"use one of {', '.join(LAYOUTS)}")
        if self.num_heads < 1 or self.total_num_heads < 1 or self.head_dim < 1:
            raise ConfigError(
                f"entry {self.name}: num_heads {self.num_heads}, total_num_heads "
                f"{self.total_num_heads} and head_dim {self.head_dim} must be >= 1"
            )
        if self.compress_ratio < 1 or self.block_size % self.compress_ratio:
            raise self._wrong("compress_ratio", f"it must divide block_size {self.block_size}")
        if self.is_mla and self.is_per_rank:
            raise self._wrong("is_per_rank", "what is_mla keeps is the same on every rank")

    def _wrong(self, field: str, remedy: str) -> ConfigError:
        return ConfigError(f"entry {self.name}: {field} {attrs.asdict(self)[field]}; {remedy}")

    @property
    def kind(self) -> tuple[object, ...]:
        """What both sides of a transfer must have equal: all but heads per rank, which follow
        from the TP size, and the block size (:mod:`pdcore.kv.reblock`)."""
        return (
            self.name, self.layer, self.manager_key, self.dtype, self.total_num_heads,
            self.head_dim, self.layout, self.sliding_window, self.is_mla, self.is_per_rank,
            self.compress_ratio,
        )  # fmt: skip

    @property
    def storage_block_size(self) -> int:
        """Rows of one block (R110)."""
        return self.block_size // self.compress_ratio

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one row."""
        return self.head_dim * DTYPE_SIZE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one row of this entry on this rank: one token, or ``compress_ratio``."""
        return self.num_heads * self.head_bytes

    @property
    def item_len(self) -> int:
        """Bytes of one block of this entry on this rank (R111)."""
        return self.storage_block_size * self.token_bytes


@attrs.frozen(cache_hash=True)
class KVCacheSpec:
    """All entries of one rank, layers ascending (R112), and the TP position they belong to.

    A rank of a pipeline holds the entries of its stage only; ``model_digest`` and
    ``model_layers`` then say what the whole model has (:func:`pdcore.kv.layout.staged`).
    """

    entries: tuple[KVCacheEntry, ...]
    tp_size: int = 1
    tp_rank: int = 0
    model_digest: str = ""
    model_layers: int = 0

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

    @property
    def num_layers(self) -> int:
        """Of the whole model: one more than the highest layer."""
        return self.model_layers or 1 + max((entry.layer for entry in self.entries), default=-1)

    def digest(self) -> str:
        """Hex digest of everything two instances must agree on, independent of the rank.

        What the two may have different is left out: the order, heads per rank (unequal TP)
        and block sizes (:mod:`pdcore.kv.reblock`). Names, layers, manager keys, dtypes, total
        heads, dims, layouts, windows and kinds are in (D35).
        """
        return self.model_digest or _digest_of(self)


@lru_cache(maxsize=64)
def _digest_of(spec: KVCacheSpec) -> str:
    # Asked for with every request, and always of the same few specs.
    h = hashlib.sha256()
    for e in sorted(spec.entries, key=lambda entry: entry.name):
        h.update("|".join(map(str, e.kind)).encode() + b"\n")
    return h.hexdigest()[:32]


@attrs.frozen(cache_hash=True)
class KVPlacement:
    """Where the blocks of each entry of a spec lie inside registered regions (D58).

    Block ``b`` of entry i starts at ``offsets[i] + b * block_strides[i]`` in region
    ``regions[i]``. Never a pointer.
    """

    num_blocks: int
    regions: tuple[int, ...]
    offsets: tuple[int, ...]
    block_strides: tuple[int, ...]
