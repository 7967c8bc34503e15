"""Which heads a rank holds, and which bytes of a row go from one rank to another.

``tp_size`` ranks share ``total`` KV heads evenly. With fewer heads than ranks, neighbours
hold copies of one head; of the prefill ranks that could write it, the first does. Sizes
that do not divide are refused when the topology is loaded (:func:`check_reshard`), never
rounded (D30).
"""

from __future__ import annotations

from typing import NamedTuple

from pdcore.errors import IncompatibleError
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec


def is_even(total: int, tp_size: int) -> bool:
    """Can ``tp_size`` ranks hold ``total`` heads with equally many on each?"""
    return total % tp_size == 0 or tp_size % total == 0


class TokenSlice(NamedTuple):
    """The bytes of one token row that a prefill rank writes into a decode rank (R80).

    ``is_first``: of all ranks that hold these same heads, this one writes.
    """

    src_offset: int
    dst_offset: int
    length: int
    is_first: bool


def slice_token(
    src_bytes: int, dst_bytes: int, prefill_tp: int, decode_tp: int, src_rank: int, dst_rank: int
) -> TokenSlice:
    """R80. ``src_bytes`` and ``dst_bytes`` are bytes per token on each side's rank.

    Raises IncompatibleError when rows do not divide into each other.
    """
    if src_bytes == dst_bytes:
        span = max(1, prefill_tp // decode_tp)
        return TokenSlice(0, 0, src_bytes, src_rank % span == 0)
    small, large = sorted((src_bytes, dst_bytes))
    if large % small or (src_bytes < dst_bytes) != (prefill_tp > decode_tp):
        raise IncompatibleError(
            f"bytes per token: prefill has {src_bytes} at tp {prefill_tp}, decode has "
            f"{dst_bytes} at tp {decode_tp}; the rows do not divide into each other"
        )
    if prefill_tp > decode_tp:
        rep = max(1, prefill_tp * src_bytes // (decode_tp * dst_bytes))
        return TokenSlice(
            0, src_rank // rep * src_bytes % dst_bytes, src_bytes, src_rank % rep == 0
        )
    rep = max(1, decode_tp * dst_bytes // (prefill_tp * src_bytes))
    return TokenSlice(dst_rank // rep * dst_bytes % src_bytes, 0, dst_bytes, True)


def check_kept_per_rank(entry: KVCacheEntry, prefill_tp: int, decode_tp: int) -> None:
    """D36: what exists once per rank has no counterpart on ranks of another TP size; the
    seed let the last of several prefill ranks win."""
    if entry.is_per_rank and prefill_tp != decode_tp:
        raise IncompatibleError(
            f"entry {entry.name}: prefill has tp_size {prefill_tp}, decode has {decode_tp}; it "
            f"holds one value per token and rank, so both must be equal, or keep one value per "
            f"head (is_per_rank False)"
        )


def check_reshard(spec: KVCacheSpec, prefill_tp: int, decode_tp: int) -> None:
    """Can a prefill of one TP size fill a decode of the other? For topology load: both sides
    have these entries (their digests agree), each in its own share.

    Raises IncompatibleError naming the entry and both sizes: heads that do not divide over a
    TP size (D30), or what is kept once per rank at unequal sizes (D36).
    """
    for entry in spec.entries:
        check_kept_per_rank(entry, prefill_tp, decode_tp)
        total = entry.total_num_heads
        if not (entry.is_mla or entry.is_per_rank) and not (
            is_even(total, prefill_tp) and is_even(total, decode_tp)
        ):
            raise IncompatibleError(
                f"entry {entry.name}: prefill has tp_size {prefill_tp}, decode has {decode_tp}; "
                f"its {total} heads do not divide over both: use sizes that divide {total} or "
                f"are multiples of it"
            )
