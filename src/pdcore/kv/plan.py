"""Plans: who writes what where. The lifecycle only counts legs; this module fills them.

A :class:`WriteBatch` is the one form in which bytes are addressed: 2-D descriptors of
(registered region, offset), validated before byte 0, never raw pointers (D58).

Theory. Entries of both sides are matched by name, never by list position (D35). Equal
bytes per token means that both ranks hold the same heads (equal TP, MLA, or heads
replicated on both sides): whole blocks are copied, whatever the TP sizes (D29; the seed
went token by token: 999,424 pieces where 122 are enough). Otherwise every token row is cut
at a fixed offset (R80): one 2-D descriptor per run of blocks and entry. Blocks that are
consecutive on both sides merge (R79), and so do entries that lie side by side on both.
Ranks that hold copies of the same heads: the first one of them writes, the others have
an empty plan and still report Done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from pdcore.errors import IncompatibleError
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.types import NULL_BLOCK

#: Columns of :attr:`WriteBatch.descriptors`.
LOCAL_OFFSET, REMOTE_OFFSET, ROW_BYTES, ROWS, LOCAL_STRIDE, REMOTE_STRIDE = range(6)

Int64Array = NDArray[np.int64]


@attrs.frozen(eq=False)
class WriteBatch:
    """Copies from one local region into one remote region.

    ``descriptors`` has shape (n, 6), int64, columns as named above: n pieces of
    ``rows`` rows of ``row_bytes`` bytes; ``rows`` = 1 is the plain case (strides unused).
    """

    local_region: int
    remote_region: int
    descriptors: Int64Array

    @property
    def num_bytes(self) -> int:
        d = self.descriptors
        return int((d[:, ROW_BYTES] * d[:, ROWS]).sum())

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(local offset, remote offset, bytes) of every contiguous piece, in order: for who
        copies in Python; transports work on whole arrays."""
        for local, remote, size, rows, local_step, remote_step in self.descriptors.tolist():
            for row in range(rows):
                yield local + row * local_step, remote + row * remote_step, size


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


class _Piece(NamedTuple):
    """What is copied per block: ``rows`` rows of ``width`` bytes. ``rows`` 0 means whole
    blocks: then consecutive blocks are the rows, at the block strides."""

    src_offset: int
    dst_offset: int
    width: int
    src_stride: int
    dst_stride: int
    rows: int = 0
    src_row: int = 0
    dst_row: int = 0


class KVPlanner:
    """Everything about a pair of ranks that does not change from request to request.

    Raises IncompatibleError naming the entry when the two sides cannot be paired: other
    entries, other shapes, head-major blocks that would have to be cut (D36), rows that do
    not divide.
    """

    __slots__ = ("_pieces", "_sizes")

    def __init__(
        self, src_spec: KVCacheSpec, src: KVPlacement, dst_spec: KVCacheSpec, dst: KVPlacement
    ) -> None:
        self._sizes = src.num_blocks, dst.num_blocks
        dst_index = {e.name: i for i, e in enumerate(dst_spec.entries)}
        names = {e.name for e in src_spec.entries}
        if names != dst_index.keys() or len(names) != len(src_spec.entries):
            raise IncompatibleError(
                f"cache entries: prefill has {len(src_spec.entries)}, decode has "
                f"{len(dst_spec.entries)}; only one side has {sorted(names ^ dst_index.keys())}"
            )
        #: manager key -> (local region, remote region) -> pieces.
        self._pieces: dict[str, dict[tuple[int, int], list[_Piece]]] = {}
        for i, entry in enumerate(src_spec.entries):
            j = dst_index[entry.name]
            cut = _match(entry, dst_spec.entries[j], src_spec, dst_spec)
            by_region = self._pieces.setdefault(entry.manager_key, {})
            if not cut.is_first:
                continue
            piece = _Piece(
                src.offsets[i],
                dst.offsets[j],
                entry.item_len,
                src.block_strides[i],
                dst.block_strides[j],
            )
            if entry.item_len != dst_spec.entries[j].item_len:
                piece = piece._replace(
                    src_offset=piece.src_offset + cut.src_offset,
                    dst_offset=piece.dst_offset + cut.dst_offset,
                    width=cut.length,
                    rows=entry.block_size,
                    src_row=entry.token_bytes,
                    dst_row=dst_spec.entries[j].token_bytes,
                )
            by_region.setdefault((src.regions[i], dst.regions[j]), []).append(piece)
        for by_region in self._pieces.values():
            for regions, pieces in by_region.items():
                by_region[regions] = _join_neighbours(pieces)

    def plan(
        self, src_blocks: Mapping[str, Sequence[int]], dst_blocks: Mapping[str, Sequence[int]]
    ) -> tuple[WriteBatch, ...]:
        """Descriptors for position-aligned block ids by manager key.

        Null blocks are skipped (D37). The destination may have more blocks than the
        source: documented look-ahead blocks at the end, not written. Raises
        IncompatibleError for a missing key, an id outside its pool, one block twice, a
        shorter destination, or a destination block whose source block is null (D19).
        """
        batches: list[WriteBatch] = []
        for key, by_region in self._pieces.items():
            if key not in src_blocks or key not in dst_blocks:
                side = "prefill" if key not in src_blocks else "decode"
                raise IncompatibleError(f"block ids: {side} has none for manager key {key!r}")
            src, dst = _pair_blocks(key, src_blocks[key], dst_blocks[key], self._sizes)
            if not len(src):
                continue
            breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
            starts = np.concatenate((np.zeros(1, np.int64), breaks))
            lengths = np.diff(np.append(starts, len(src)))
            runs = src[starts], dst[starts], lengths
            for (local, remote), pieces in by_region.items():
                rows = [_expand(piece, src, dst, runs) for piece in pieces]
                batches.append(WriteBatch(local, remote, np.concatenate(rows)))
        return tuple(batches)


def plan_blocks(
    src_spec: KVCacheSpec,
    src_placement: KVPlacement,
    src_blocks: Mapping[str, Sequence[int]],
    dst_spec: KVCacheSpec,
    dst_placement: KVPlacement,
    dst_blocks: Mapping[str, Sequence[int]],
) -> tuple[WriteBatch, ...]:
    """:meth:`KVPlanner.plan`; planners of recent pairs are remembered."""
    return _planner(src_spec, src_placement, dst_spec, dst_placement).plan(src_blocks, dst_blocks)


_planner = lru_cache(maxsize=256)(KVPlanner)


def lease_ranges(
    placement: KVPlacement, spec: KVCacheSpec, block_ids: Mapping[str, Sequence[int]]
) -> dict[int, Int64Array]:
    """Byte ranges [start, end) of these blocks per region, shape (n, 2), int64, sorted,
    disjoint, touching ones merged: what a lease on them allows. Null blocks are left out.

    Raises IncompatibleError for a missing manager key or an id outside the pool.
    """
    found: dict[int, list[Int64Array]] = {}
    real: dict[str, Int64Array] = {}
    for key in spec.block_sizes:
        if key not in block_ids:
            raise IncompatibleError(f"block ids: none for manager key {key!r}")
        ids = _real_ids(key, block_ids[key], placement.num_blocks)
        real[key] = ids[ids != NULL_BLOCK]
    for i, entry in enumerate(spec.entries):
        start = placement.offsets[i] + real[entry.manager_key] * placement.block_strides[i]
        found.setdefault(placement.regions[i], []).append(
            np.stack((start, start + entry.item_len), axis=1)
        )
    ranges: dict[int, Int64Array] = {}
    for region, parts in found.items():
        both = np.concatenate(parts)
        if not len(both):
            continue
        both = both[np.argsort(both[:, 0])]
        ends = np.maximum.accumulate(both[:, 1])
        first = np.concatenate((np.ones(1, bool), both[1:, 0] > ends[:-1]))
        last = np.append(first[1:], True)
        ranges[region] = np.stack((both[first, 0], ends[last]), axis=1)
    return ranges


def _match(
    src: KVCacheEntry, dst: KVCacheEntry, src_spec: KVCacheSpec, dst_spec: KVCacheSpec
) -> TokenSlice:
    if attrs.evolve(src, num_heads=dst.num_heads) != dst:
        ours, theirs = attrs.asdict(src), attrs.asdict(dst)
        differ = [name for name in ours if ours[name] != theirs[name] and name != "num_heads"]
        raise IncompatibleError(
            f"entry {src.name}: "
            + "; ".join(f"{n}: prefill has {ours[n]}, decode has {theirs[n]}" for n in differ)
        )
    if src_spec.tp_size == dst_spec.tp_size and src.item_len != dst.item_len:
        raise IncompatibleError(
            f"entry {src.name}: bytes per block: prefill has {src.item_len}, decode has "
            f"{dst.item_len} at the same tp_size {src_spec.tp_size}"
        )
    if src.item_len != dst.item_len and src.layout != "BnBsND":
        raise IncompatibleError(
            f"entry {src.name}: layout {src.layout} keeps heads apart inside a block, so "
            f"prefill tp_size {src_spec.tp_size} and decode tp_size {dst_spec.tp_size} must be "
            f"equal, or the layout BnBsND"
        )
    return slice_token(
        src.token_bytes,
        dst.token_bytes,
        src_spec.tp_size,
        dst_spec.tp_size,
        src_spec.tp_rank,
        dst_spec.tp_rank,
    )


def _join_neighbours(pieces: list[_Piece]) -> list[_Piece]:
    """Whole blocks of entries that lie side by side on both sides are one wider block."""
    joined: list[_Piece] = []
    for piece in sorted(pieces):
        last = joined[-1] if joined else None
        if (
            last is not None
            and not (piece.rows or last.rows)
            and (last.src_stride, last.dst_stride) == (piece.src_stride, piece.dst_stride)
            and last.src_offset + last.width == piece.src_offset
            and last.dst_offset + last.width == piece.dst_offset
        ):
            joined[-1] = last._replace(width=last.width + piece.width)
        else:
            joined.append(piece)
    return joined


def _expand(
    piece: _Piece, src: Int64Array, dst: Int64Array, runs: tuple[Int64Array, ...]
) -> Int64Array:
    """Descriptors of one piece for all its blocks, shape (n, 6)."""
    run_src, run_dst, lengths = runs
    whole = piece.rows == 0
    if not whole and not (
        piece.src_stride == piece.rows * piece.src_row
        and piece.dst_stride == piece.rows * piece.dst_row
    ):
        # Token rows do not go on into the next block: one descriptor per block.
        run_src, run_dst, lengths = src, dst, np.ones(len(src), np.int64)
    out = np.empty((len(run_src), 6), np.int64)
    out[:, LOCAL_OFFSET] = piece.src_offset + run_src * piece.src_stride
    out[:, REMOTE_OFFSET] = piece.dst_offset + run_dst * piece.dst_stride
    if whole and piece.width == piece.src_stride == piece.dst_stride:
        out[:, ROW_BYTES] = piece.width * lengths
        out[:, ROWS] = 1
        out[:, LOCAL_STRIDE] = out[:, REMOTE_STRIDE] = 0
        return out
    out[:, ROW_BYTES] = piece.width
    out[:, ROWS] = lengths if whole else piece.rows * lengths
    out[:, LOCAL_STRIDE] = piece.src_stride if whole else piece.src_row
    out[:, REMOTE_STRIDE] = piece.dst_stride if whole else piece.dst_row
    return out


def _real_ids(key: str, ids: Sequence[int], num_blocks: int) -> Int64Array:
    array = np.asarray(ids, np.int64)
    if len(array) and (array.min() < 0 or array.max() >= num_blocks):
        raise IncompatibleError(
            f"{key}: block ids {array.min()}..{array.max()} are outside a pool of {num_blocks}"
        )
    return array


def _pair_blocks(
    key: str, src_ids: Sequence[int], dst_ids: Sequence[int], sizes: tuple[int, int]
) -> tuple[Int64Array, Int64Array]:
    """The real (source, destination) pairs; see :meth:`KVPlanner.plan`."""
    src, dst = _real_ids(key, src_ids, sizes[0]), _real_ids(key, dst_ids, sizes[1])
    if len(dst) < len(src):
        raise IncompatibleError(f"{key}: prefill has {len(src)} blocks, decode only {len(dst)}")
    dst = dst[: len(src)]
    missing = np.flatnonzero((dst != NULL_BLOCK) & (src == NULL_BLOCK))
    if len(missing):
        raise IncompatibleError(
            f"{key}: decode needs the block at position {missing[0]}, prefill has dropped it"
        )
    real = dst != NULL_BLOCK
    src, dst = src[real], dst[real]
    if len(np.unique(dst)) != len(dst):
        raise IncompatibleError(f"{key}: decode lists one block twice")
    return src, dst
