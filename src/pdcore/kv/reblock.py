"""From blocks of one size into blocks of another.

Both tables are position-aligned, so a token range is known on both sides by position. It is
cut wherever a block of either side ends; a cut lies in one block of each and becomes one
2-D descriptor per entry. Equal block sizes never come here: they copy whole blocks
(:mod:`pdcore.kv.plan`).

A destination block may begin before the first position that a sliding window still reads,
in the middle of what was a block of its own on the source's side and is dropped there: such
rows have no source and no reader, and are skipped (D37). A row that a query can still read
must have a source.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcore.errors import IncompatibleError
from pdcore.types import NULL_BLOCK

Int64Array = NDArray[np.int64]


#: (rank, size): which part of the blocks one of ``size`` context parallel ranks writes; a rank
#: that is not below ``size`` writes nothing.
Share = tuple[int, int]


def share_of(cp_rank: int, cp_size: int, all_cp_ranks: bool) -> Share:
    """R21: of one rank; the first writes everything unless all send."""
    return (cp_rank, cp_size) if all_cp_ranks else (cp_rank, 1)


class BlockShape(NamedTuple):
    """Tokens per block on each side and the window of one manager key."""

    src_size: int
    dst_size: int
    window: int | None = None


class Cuts(NamedTuple):
    """Runs of tokens, each inside one block of either side: block ids, first tokens inside
    them and numbers of tokens, five int64 arrays of one length."""

    src: Int64Array
    dst: Int64Array
    src_token: Int64Array
    dst_token: Int64Array
    num_tokens: Int64Array

    def rows(self, ratio: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """First rows inside the blocks and numbers of rows where ``ratio`` tokens share a
        row (it divides both block sizes); a row that is begun counts."""
        if ratio == 1:
            return self.src_token, self.dst_token, self.num_tokens
        first = self.src_token // ratio
        return (
            first,
            self.dst_token // ratio,
            -(-(self.src_token + self.num_tokens) // ratio) - first,
        )


def token_range(
    key: str, shape: BlockShape, num_src: int, num_dst: int, tokens: tuple[int, int] | None
) -> tuple[int, int]:
    """The positions to write; see :meth:`KVPlanner.plan`."""
    if tokens is None:
        if shape.src_size == shape.dst_size and num_dst < num_src:
            raise IncompatibleError(f"{key}: prefill has {num_src} blocks, decode only {num_dst}")
        return 0, min(num_src * shape.src_size, num_dst * shape.dst_size)
    start, stop = tokens
    for side, num, size in (("prefill has", num_src, shape.src_size),
                            ("decode leased", num_dst, shape.dst_size)):  # fmt: skip
        first, last = start // size, -(-stop // size)
        if num < last:
            raise IncompatibleError(
                f"{key}: tokens {start}..{stop} need {last - first} blocks, {side} "
                f"{max(0, num - first)}"
            )
    return tokens


def shared_blocks(part: tuple[int, int], size: int, share: Share) -> tuple[int, int]:
    """First and one past the last block of a share of the blocks that ``part`` touches: by
    position, so that ranks agree without asking."""
    rank, ranks = share
    first, last = part[0] // size, -(-part[1] // size)
    count = last - first
    return first + count * min(rank, ranks) // ranks, first + count * min(rank + 1, ranks) // ranks


def cut_tokens(
    key: str,
    src: Int64Array,
    dst: Int64Array,
    shape: BlockShape,
    tokens: tuple[int, int],
    next_query: int | None = None,
) -> Cuts:
    """The cuts of positions ``tokens`` (first, one past the last), null blocks left out.

    ``src`` and ``dst`` are whole tables from position 0 that reach the last position.
    ``next_query``: the position that a window counts back from, where ``tokens`` are only a
    part (None: one past the last).

    Raises IncompatibleError for a position that the next query reads in a block that the
    source has dropped.
    """
    start, stop = tokens
    if stop <= start:
        none = np.empty(0, np.int64)
        return Cuts(none, none, none, none, none)
    ends = [
        np.arange((start // size + 1) * size, stop, size, dtype=np.int64)
        for size in (shape.src_size, shape.dst_size)
    ]
    edges = np.unique(np.concatenate((*ends, np.array((start, stop), np.int64))))
    first, last = edges[:-1], edges[1:]
    src_ids, dst_ids = src[first // shape.src_size], dst[first // shape.dst_size]
    is_wanted = dst_ids != NULL_BLOCK
    is_there = src_ids != NULL_BLOCK
    query = stop if next_query is None else next_query
    needed_from = 0 if shape.window is None else max(0, query - shape.window + 1)
    lost = np.flatnonzero(is_wanted & ~is_there & (last > needed_from))
    if len(lost):
        raise IncompatibleError(
            f"{key}: decode needs the block at position {max(int(first[lost[0]]), needed_from)} "
            f"tokens, prefill has dropped it"
        )
    keep = is_wanted & is_there
    first, last = first[keep], last[keep]
    return Cuts(
        src_ids[keep], dst_ids[keep], first % shape.src_size, first % shape.dst_size, last - first
    )
