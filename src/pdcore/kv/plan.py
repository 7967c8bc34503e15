"""Plans: who writes what where. The lifecycle only counts legs; this module fills them.

A :class:`WriteBatch` is the one form in which bytes are addressed: 2-D descriptors of
(registered region, offset), validated before byte 0, never raw pointers (D58).

Theory. Entries of both sides are matched by name, never by list position (D35); a rank of a
pipeline stage fills what both stages hold. Equal bytes per token means that both ranks hold
the same heads (equal TP, MLA, or heads replicated on both sides): whole blocks are copied,
whatever the TP sizes (D29; the seed went token by token: 999,424 pieces where 122 are
enough). Otherwise each side's share of the heads is cut out: in token-major blocks a fixed
part of every row (R80), one 2-D descriptor per run of blocks and entry; in head-major
blocks one piece of the block (D36: the seed cut these as if they were token-major). Blocks
that are consecutive on both sides merge (R79), and so do entries that lie side by side on
both. Different block sizes are cut where a block of either side ends (:mod:`pdcore.kv.reblock`).
Ranks that hold copies of the same heads: the first one of them writes, the others have
an empty plan and still report Done.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray

from pdcore.errors import IncompatibleError
from pdcore.kv.pieces import (
    BlockPiece,
    BlockTables,
    RowPiece,
    RowTables,
    block_piece,
    block_tables,
    expand_blocks,
    expand_rows,
    join_neighbours,
    row_piece,
    row_tables,
)
from pdcore.kv.reblock import BlockShape, Share, cut_tokens, shared_blocks, token_range
from pdcore.kv.slices import TokenSlice, check_kept_per_rank, slice_token
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.types import NULL_BLOCK

#: Columns of :attr:`WriteBatch.descriptors`.
LOCAL_OFFSET, REMOTE_OFFSET, ROW_BYTES, ROWS, LOCAL_STRIDE, REMOTE_STRIDE = range(6)

Int64Array = NDArray[np.int64]

#: Manager key, and of blocks without a gap between them offsets and strides, shape (n, 1).
_Extents = tuple[str, Int64Array, Int64Array]

#: The share of who writes alone.
WHOLE: Final[Share] = (0, 1)


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


class _Group:
    """The entries of one manager key, by (local region, remote region)."""

    __slots__ = ("blocks", "rows", "shape")

    def __init__(self, shape: BlockShape) -> None:
        self.shape = shape
        self.blocks: dict[tuple[int, int], BlockTables] = {}
        #: Only with different block sizes; then ``blocks`` is empty.
        self.rows: dict[tuple[int, int], RowTables] = {}


class KVPlanner:
    """Everything about a pair of ranks that does not change from request to request.

    Raises IncompatibleError naming the entry when the two sides cannot be paired: other
    entries, other shapes or layouts, what is kept once per rank at another TP size (D36),
    rows that do not divide.
    """

    __slots__ = ("_groups", "_sizes")

    def __init__(
        self, src_spec: KVCacheSpec, src: KVPlacement, dst_spec: KVCacheSpec, dst: KVPlacement
    ) -> None:
        self._sizes = src.num_blocks, dst.num_blocks
        self._groups: dict[str, _Group] = {}
        src_sizes, dst_sizes = src_spec.block_sizes, dst_spec.block_sizes
        blocks: dict[tuple[str, tuple[int, int]], list[BlockPiece]] = {}
        rows: dict[tuple[str, tuple[int, int]], list[RowPiece]] = {}
        for i, j in _paired(src_spec, dst_spec):
            ours, theirs = src_spec.entries[i], dst_spec.entries[j]
            key = ours.manager_key
            cut = _match(ours, theirs, src_spec, dst_spec)
            for entry, sizes in ((ours, src_sizes), (theirs, dst_sizes)):
                if entry.block_size != sizes[key]:
                    raise IncompatibleError(
                        f"entry {entry.name}: block_size {entry.block_size}, but other entries of "
                        f"manager key {key!r} have {sizes[key]}; use another manager key"
                    )
            if key not in self._groups:
                shape = BlockShape(src_sizes[key], dst_sizes[key], ours.sliding_window)
                self._groups[key] = _Group(shape)
            if not cut.is_first:
                continue
            regions = src.regions[i], dst.regions[j]
            at = src.offsets[i], dst.offsets[j], src.block_strides[i], dst.block_strides[j]
            if ours.block_size == theirs.block_size:
                blocks.setdefault((key, regions), []).append(block_piece(ours, theirs, cut, *at))
            else:
                rows.setdefault((key, regions), []).append(row_piece(ours, theirs, cut, *at))
        for (key, regions), pieces in blocks.items():
            self._groups[key].blocks[regions] = block_tables(join_neighbours(pieces))
        for (key, regions), cuts in rows.items():
            self._groups[key].rows[regions] = row_tables(cuts)

    def plan(
        self,
        src_blocks: Mapping[str, Sequence[int]],
        dst_blocks: Mapping[str, Sequence[int]],
        tokens: tuple[int, int] | None = None,
        share: Share = WHOLE,
    ) -> tuple[WriteBatch, ...]:
        """Descriptors for position-aligned block ids by manager key.

        ``tokens`` (first, one past the last) is the part to write; with equal block sizes a
        block that it touches is written whole. None: all that the source has. ``share``: of
        the destination's blocks in that part, only those of one context parallel rank; the
        shares of all ranks are disjoint and complete.

        Null blocks are skipped (D37). Without ``tokens`` the destination may have more blocks
        than the source: documented look-ahead blocks at the end, not written. Raises
        IncompatibleError for a missing key, an id outside its pool, one block twice, a
        shorter destination, or a destination block whose source block is null (D19).
        """
        batches: list[WriteBatch] = []
        for key, group in self._groups.items():
            if key not in src_blocks or key not in dst_blocks:
                side = "prefill" if key not in src_blocks else "decode"
                raise IncompatibleError(f"block ids: {side} has none for manager key {key!r}")
            src = _real_ids(key, src_blocks[key], self._sizes[0])
            dst = _real_ids(key, dst_blocks[key], self._sizes[1])
            part = token_range(key, group.shape, len(src), len(dst), tokens)
            if part[0] >= part[1]:
                continue
            size = group.shape.dst_size
            _check_once(key, dst_blocks[key][part[0] // size : -(-part[1] // size)])
            first, last = shared_blocks(part, size, share)
            if group.shape.src_size != size:
                mine = max(part[0], first * size), min(part[1], last * size)
                batches.extend(_write_rows(key, group, src, dst, mine, part[1]))
            else:
                batches.extend(_write_blocks(key, group, src[first:last], dst[first:last]))
        return tuple(batches)


def plan_blocks(
    src_spec: KVCacheSpec,
    src_placement: KVPlacement,
    src_blocks: Mapping[str, Sequence[int]],
    dst_spec: KVCacheSpec,
    dst_placement: KVPlacement,
    dst_blocks: Mapping[str, Sequence[int]],
    tokens: tuple[int, int] | None = None,
    share: Share = WHOLE,
) -> tuple[WriteBatch, ...]:
    """:meth:`KVPlanner.plan`; planners of recent pairs are remembered."""
    planner = _planner(src_spec, src_placement, dst_spec, dst_placement)
    return planner.plan(src_blocks, dst_blocks, tokens, share)


_planner = lru_cache(maxsize=256)(KVPlanner)


@lru_cache(maxsize=256)
def _extents(placement: KVPlacement, spec: KVCacheSpec) -> dict[int, list[_Extents]] | None:
    """By region. Entries side by side in a block are one. None where there are gaps, or one
    entry's blocks lie among another's."""
    lines: dict[int, dict[str, list[list[int]]]] = {}
    for i in sorted(range(len(spec.entries)), key=lambda i: placement.offsets[i]):
        entry, offset, stride = spec.entries[i], placement.offsets[i], placement.block_strides[i]
        same = lines.setdefault(placement.regions[i], {}).setdefault(entry.manager_key, [])
        if same and same[-1][1] == stride and sum(same[-1][::2]) == offset:
            same[-1][2] += entry.item_len
        else:
            same.append([offset, stride, entry.item_len])
    for by_key in lines.values():
        end = 0
        for offset, stride, width in sorted(itertools.chain(*by_key.values())):
            if offset < end or width != stride:
                return None
            end = offset + placement.num_blocks * stride
    return {
        region: [(key, *np.array(same, np.int64).T[:2, :, None]) for key, same in by_key.items()]
        for region, by_key in lines.items()
    }


def lease_ranges(
    placement: KVPlacement, spec: KVCacheSpec, block_ids: Mapping[str, Sequence[int]]
) -> dict[int, Int64Array]:
    """Byte ranges [start, end) of these blocks per region, shape (n, 2), int64, sorted,
    disjoint, touching ones merged: what a lease on them allows. Null blocks are left out.

    Raises IncompatibleError for a missing manager key or an id outside the pool.
    """
    keys = spec.block_sizes.keys()
    for key in keys:
        if key not in block_ids:
            raise IncompatibleError(f"block ids: none for manager key {key!r}")
    extents = _extents(placement, spec)
    if extents is None:
        return _merge(placement, spec, block_ids)
    # Once per key: a run of blocks is a run of bytes in each entry. It never touches one of the
    # next entry, which begins with the null block.
    runs = {key: _runs(key, block_ids[key], placement.num_blocks) for key in keys}
    ranges: dict[int, Int64Array] = {}
    for region, by_key in extents.items():
        parts = [(first + runs[key] * stride).reshape(-1, 2) for key, first, stride in by_key]
        every = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(every):
            ranges[region] = every if len(parts) == 1 else every[every[:, 0].argsort()]
    return ranges


def _runs(key: str, ids: Sequence[int], num_blocks: int) -> Int64Array:
    """First and one past the last of each run of consecutive blocks, 2 x runs numbers, null
    blocks left out."""
    ordered = sorted(ids)
    edges: list[int] = []
    if ordered:
        first, last = ordered[0], ordered[-1]
        _check_ids(key, first, last, num_blocks)
        is_one = first != NULL_BLOCK and last - first == len(ordered) - 1
        if is_one and ordered == list(range(first, last + 1)):
            return np.array((first, last + 1), np.int64)
    end = NULL_BLOCK + 1
    for block in ordered:
        if block == end and edges:
            edges[-1] = end = block + 1
        elif block >= end:
            end = block + 1
            edges += (block, end)
    return np.array(edges, np.int64)


def _merge(
    placement: KVPlacement, spec: KVCacheSpec, block_ids: Mapping[str, Sequence[int]]
) -> dict[int, Int64Array]:
    """See :func:`lease_ranges`."""
    found: dict[int, list[Int64Array]] = {}
    real: dict[str, Int64Array] = {}
    for key in spec.block_sizes:
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


def _paired(src: KVCacheSpec, dst: KVCacheSpec) -> list[tuple[int, int]]:
    """Indices of the entries that both hold, by name (D35). Of a layer that both hold, both
    hold everything."""
    index = {e.name: i for i, e in enumerate(dst.entries)}
    names = {e.name for e in src.entries}
    if len(names) == len(src.entries) and len(index) == len(dst.entries):
        only = names ^ index.keys()
        if src.model_digest or dst.model_digest:
            both = {e.layer for e in src.entries} & {e.layer for e in dst.entries}
            only = {e.name for e in (*src.entries, *dst.entries) if e.layer in both} & only
        if not only:
            return [(i, index[e.name]) for i, e in enumerate(src.entries) if e.name in index]
    raise IncompatibleError(
        f"cache entries: prefill has {len(src.entries)}, decode has {len(dst.entries)}; only "
        f"one side has {sorted(names ^ index.keys())}"
    )


def _match(
    src: KVCacheEntry, dst: KVCacheEntry, src_spec: KVCacheSpec, dst_spec: KVCacheSpec
) -> TokenSlice:
    if src.kind != dst.kind:
        ours, theirs = attrs.asdict(src), attrs.asdict(dst)
        free = ("num_heads", "block_size")
        differ = [name for name in ours if ours[name] != theirs[name] and name not in free]
        raise IncompatibleError(
            f"entry {src.name}: "
            + "; ".join(f"{n}: prefill has {ours[n]}, decode has {theirs[n]}" for n in differ)
        )
    if src_spec.tp_size == dst_spec.tp_size and src.token_bytes != dst.token_bytes:
        raise IncompatibleError(
            f"entry {src.name}: bytes per token: prefill has {src.token_bytes}, decode has "
            f"{dst.token_bytes} at the same tp_size {src_spec.tp_size}"
        )
    check_kept_per_rank(src, src_spec.tp_size, dst_spec.tp_size)
    return slice_token(
        src.token_bytes,
        dst.token_bytes,
        src_spec.tp_size,
        dst_spec.tp_size,
        src_spec.tp_rank,
        dst_spec.tp_rank,
    )


def _real_ids(key: str, ids: Sequence[int], num_blocks: int) -> Int64Array:
    array = np.asarray(ids, np.int64)
    if len(array):
        low, high = np.minimum.reduce(array), np.maximum.reduce(array)
        _check_ids(key, int(low), int(high), num_blocks)
    return array


def _check_ids(key: str, low: int, high: int, num_blocks: int) -> None:
    if low < 0 or high >= num_blocks:
        raise IncompatibleError(
            f"{key}: block ids {low}..{high} are outside a pool of {num_blocks}"
        )


def _check_once(key: str, dst: Sequence[int]) -> None:
    real = [block for block in dst if block != NULL_BLOCK]
    if len(set(real)) != len(real):
        raise IncompatibleError(f"{key}: decode lists one block twice")


def _write_blocks(key: str, group: _Group, src: Int64Array, dst: Int64Array) -> list[WriteBatch]:
    real = dst != NULL_BLOCK
    missing = real & (src == NULL_BLOCK)
    if np.count_nonzero(missing):
        raise IncompatibleError(
            f"{key}: decode needs the block at position {int(np.argmax(missing))}, prefill has "
            "dropped it"
        )
    if np.count_nonzero(real) < len(real):
        src, dst = src[real], dst[real]
    if not len(src):
        return []
    breaks = (src[1:] - src[:-1] != 1) | (dst[1:] - dst[:-1] != 1)
    starts = np.concatenate(([0], breaks.nonzero()[0] + 1, [len(src)]))
    runs = src[starts[:-1]], dst[starts[:-1]], starts[1:] - starts[:-1]
    return [
        WriteBatch(*regions, expand_blocks(tables, src, dst, runs))
        for regions, tables in group.blocks.items()
    ]


def _write_rows(
    key: str,
    group: _Group,
    src: Int64Array,
    dst: Int64Array,
    part: tuple[int, int],
    next_query: int,
) -> list[WriteBatch]:
    cuts = cut_tokens(key, src, dst, group.shape, part, next_query)
    if not len(cuts.src):
        return []
    return [
        WriteBatch(*regions, expand_rows(tables, cuts)) for regions, tables in group.rows.items()
    ]
