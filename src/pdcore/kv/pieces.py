"""What of one entry goes from one rank to another, and its descriptors.

Two forms. A :class:`BlockPiece` is for equal block sizes: the same bytes of every block, or
of every row of it. A :class:`RowPiece` is for different ones: some rows of a block.

Descriptors of all pieces are made at once: each of their columns is linear in the blocks,
the first rows and the length of a run, so the factors are put into tables once per pair of
ranks (:func:`block_tables`, :func:`row_tables`) and a request is a few array operations
(D29: the seed took 0.3 s of Python for one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcore.kv.reblock import Cuts
from pdcore.kv.slices import TokenSlice
from pdcore.kv.spec import HEAD_MAJOR, KVCacheEntry

Int64Array = NDArray[np.int64]


class BlockPiece(NamedTuple):
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


class RowPiece(NamedTuple):
    """What of one entry is copied per cut, all in bytes but ``num_heads``.

    ``src_offset`` and ``dst_offset`` include the slice; ``*_stride`` is from block to block,
    ``*_row`` from row to row, ``width`` what is copied of a row. Head-major entries have
    ``num_heads`` > 0 and ``*_head`` from head to head: rows of one head lie side by side.
    """

    src_offset: int
    dst_offset: int
    src_stride: int
    dst_stride: int
    src_row: int
    dst_row: int
    width: int
    num_heads: int = 0
    src_head: int = 0
    dst_head: int = 0
    #: Tokens per row.
    ratio: int = 1


def block_piece(
    src: KVCacheEntry, dst: KVCacheEntry, cut: TokenSlice,
    src_at: int, dst_at: int, src_stride: int, dst_stride: int,
) -> BlockPiece:  # fmt: skip
    rows = src.storage_block_size
    if src.item_len == dst.item_len:
        return BlockPiece(src_at, dst_at, src.item_len, src_stride, dst_stride)
    if src.layout == HEAD_MAJOR:
        # The rows of one head lie together, and those of neighbouring heads: one piece.
        return BlockPiece(
            src_at + cut.src_offset * rows,
            dst_at + cut.dst_offset * rows,
            cut.length * rows,
            src_stride,
            dst_stride,
        )
    return BlockPiece(
        src_at + cut.src_offset,
        dst_at + cut.dst_offset,
        cut.length,
        src_stride,
        dst_stride,
        rows,
        src.token_bytes,
        dst.token_bytes,
    )


def row_piece(
    src: KVCacheEntry, dst: KVCacheEntry, cut: TokenSlice,
    src_at: int, dst_at: int, src_stride: int, dst_stride: int,
) -> RowPiece:  # fmt: skip
    if src.layout == HEAD_MAJOR:
        src_rows, dst_rows, head = src.storage_block_size, dst.storage_block_size, src.head_bytes
        return RowPiece(
            src_at + cut.src_offset * src_rows,
            dst_at + cut.dst_offset * dst_rows,
            src_stride,
            dst_stride,
            head,
            head,
            head,
            cut.length // head,
            head * src_rows,
            head * dst_rows,
            src.compress_ratio,
        )
    return RowPiece(
        src_at + cut.src_offset,
        dst_at + cut.dst_offset,
        src_stride,
        dst_stride,
        src.token_bytes,
        dst.token_bytes,
        cut.length,
        ratio=src.compress_ratio,
    )


def join_neighbours(pieces: list[BlockPiece]) -> list[BlockPiece]:
    """Whole blocks of entries that lie side by side on both sides are one wider block."""
    joined: list[BlockPiece] = []
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


class Table(NamedTuple):
    """Factors of many pieces, each of shape (pieces, 1). For a run of ``n`` blocks or rows:
    offset + block * stride + row * step to its first row, ``width + n * width_each`` bytes
    per row, ``rows + n * rows_each`` rows at ``*_step``."""

    src_offset: Int64Array
    dst_offset: Int64Array
    src_stride: Int64Array
    dst_stride: Int64Array
    src_row: Int64Array
    dst_row: Int64Array
    width: Int64Array
    width_each: Int64Array
    rows: Int64Array
    rows_each: Int64Array
    src_step: Int64Array
    dst_step: Int64Array


def _table(lines: Sequence[tuple[int, ...]]) -> Table | None:
    return Table(*np.array(lines, np.int64).T[:, :, None]) if lines else None


class BlockTables(NamedTuple):
    """Pieces whose consecutive blocks are one descriptor, and those that need one each."""

    by_run: Table | None
    by_block: Table | None


class RowTables(NamedTuple):
    """By tokens per row: pieces that are plain copies, which may join, and the others."""

    plain: tuple[tuple[int, Table], ...]
    cut: tuple[tuple[int, Table], ...]


def block_tables(pieces: Sequence[BlockPiece]) -> BlockTables:
    by_run: list[tuple[int, ...]] = []
    by_block: list[tuple[int, ...]] = []
    for p in pieces:
        at = p.src_offset, p.dst_offset, p.src_stride, p.dst_stride, 0, 0
        if p.rows:
            # Where token rows do not go on into the next block, each block is a descriptor.
            goes_on = p.src_stride == p.rows * p.src_row and p.dst_stride == p.rows * p.dst_row
            lines = by_run if goes_on else by_block
            lines.append((*at, p.width, 0, 0, p.rows, p.src_row, p.dst_row))
        elif p.width == p.src_stride == p.dst_stride:
            by_run.append((*at, 0, p.width, 1, 0, 0, 0))
        else:
            by_run.append((*at, p.width, 0, 0, 1, p.src_stride, p.dst_stride))
    return BlockTables(_table(by_run), _table(by_block))


def row_tables(pieces: Sequence[RowPiece]) -> RowTables:
    plain: dict[int, list[tuple[int, ...]]] = {}
    cut: dict[int, list[tuple[int, ...]]] = {}
    for p in pieces:
        at = p.src_offset, p.dst_offset, p.src_stride, p.dst_stride, p.src_row, p.dst_row
        if p.num_heads:
            line = (*at, 0, p.width, p.num_heads, 0, p.src_head, p.dst_head)
            cut.setdefault(p.ratio, []).append(line)
        elif p.width == p.src_row == p.dst_row:
            plain.setdefault(p.ratio, []).append((*at, 0, p.width, 1, 0, 0, 0))
        else:
            line = (*at, p.width, 0, 0, 1, p.src_row, p.dst_row)
            cut.setdefault(p.ratio, []).append(line)
    return RowTables(_by_ratio(plain), _by_ratio(cut))


def _by_ratio(lines: dict[int, list[tuple[int, ...]]]) -> tuple[tuple[int, Table], ...]:
    return tuple(
        (ratio, Table(*np.array(some, np.int64).T[:, :, None])) for ratio, some in lines.items()
    )


def expand_blocks(
    tables: BlockTables, src: Int64Array, dst: Int64Array, runs: tuple[Int64Array, ...]
) -> Int64Array:
    """Descriptors of all pieces for all their blocks, shape (n, 6), columns as in
    :class:`pdcore.kv.plan.WriteBatch`. ``runs``: first source and destination block and
    length of every run of blocks that are consecutive on both sides."""
    found = []
    if tables.by_run is not None:
        found.append(_expand(tables.by_run, *runs))
    if tables.by_block is not None:
        found.append(_expand(tables.by_block, src, dst, np.ones(len(src), np.int64)))
    return found[0] if len(found) == 1 else np.concatenate(found)


def expand_rows(tables: RowTables, cuts: Cuts) -> Int64Array:
    """Descriptors of all pieces for all cuts, shape (n, 6), as in :func:`expand_blocks`."""
    found = []
    for tables_of, is_plain in ((tables.plain, True), (tables.cut, False)):
        for ratio, table in tables_of:
            src_row, dst_row, num_rows = cuts.rows(ratio)
            rows = _expand(table, cuts.src, cuts.dst, num_rows, src_row, dst_row)
            found.append(_join(rows) if is_plain else rows)
    return found[0] if len(found) == 1 else np.concatenate(found)


def _expand(
    t: Table,
    src: Int64Array,
    dst: Int64Array,
    count: Int64Array,
    src_row: Int64Array | int = 0,
    dst_row: Int64Array | int = 0,
) -> Int64Array:
    out = np.empty((len(t.width), len(src), 6), np.int64)
    out[..., 0] = t.src_offset + src * t.src_stride + src_row * t.src_row
    out[..., 1] = t.dst_offset + dst * t.dst_stride + dst_row * t.dst_row
    out[..., 2] = t.width + count * t.width_each
    out[..., 3] = t.rows + count * t.rows_each
    out[..., 4] = t.src_step
    out[..., 5] = t.dst_step
    return out.reshape(-1, 6)


def _join(rows: Int64Array) -> Int64Array:
    """Plain copies; those that go on where the last one ended on both sides are one (R79)."""
    ends = rows[:-1, :2] + rows[:-1, 2:3]
    starts = np.concatenate(([0], (rows[1:, :2] != ends).any(axis=1).nonzero()[0] + 1))
    joined = rows[starts]
    joined[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return joined
