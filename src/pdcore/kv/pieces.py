"""What of one entry goes from one rank to another, and its descriptors.

Two forms. A :class:`BlockPiece` is for equal block sizes: the same bytes of every block, or
of every row of it. A :class:`RowPiece` is for different ones: some rows of a block.
"""

from __future__ import annotations

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


def expand_blocks(
    piece: BlockPiece, src: Int64Array, dst: Int64Array, runs: tuple[Int64Array, ...]
) -> Int64Array:
    """Descriptors of one piece for all its blocks, shape (n, 6), columns as in
    :class:`pdcore.kv.plan.WriteBatch`. ``runs``: first source and destination block and
    length of every run of blocks that are consecutive on both sides."""
    run_src, run_dst, lengths = runs
    whole = piece.rows == 0
    if not whole and not (
        piece.src_stride == piece.rows * piece.src_row
        and piece.dst_stride == piece.rows * piece.dst_row
    ):
        # Token rows do not go on into the next block: one descriptor per block.
        run_src, run_dst, lengths = src, dst, np.ones(len(src), np.int64)
    local = piece.src_offset + run_src * piece.src_stride
    remote = piece.dst_offset + run_dst * piece.dst_stride
    if not whole:
        rows = piece.rows * lengths
        return _columns(local, remote, piece.width, rows, piece.src_row, piece.dst_row)
    if piece.width == piece.src_stride == piece.dst_stride:
        return _columns(local, remote, piece.width * lengths, 1, 0, 0)
    return _columns(local, remote, piece.width, lengths, piece.src_stride, piece.dst_stride)


def expand_rows(piece: RowPiece, cuts: Cuts) -> Int64Array:
    """Descriptors of one entry, shape (n, 6), columns as in :class:`pdcore.kv.plan.WriteBatch`."""
    src_row, dst_row, num_rows = cuts.rows(piece.ratio)
    local = piece.src_offset + cuts.src * piece.src_stride + src_row * piece.src_row
    remote = piece.dst_offset + cuts.dst * piece.dst_stride + dst_row * piece.dst_row
    if piece.num_heads:
        return _columns(
            local,
            remote,
            num_rows * piece.width,
            piece.num_heads,
            piece.src_head,
            piece.dst_head,
        )
    if piece.width != piece.src_row or piece.width != piece.dst_row:
        return _columns(local, remote, piece.width, num_rows, piece.src_row, piece.dst_row)
    return _join(local, remote, num_rows * piece.width)


def _join(local: Int64Array, remote: Int64Array, sizes: Int64Array) -> Int64Array:
    """Plain copies; those that go on where the last one ended on both sides are one (R79)."""
    if not len(local):
        return np.empty((0, 6), np.int64)
    goes_on = (local[1:] == local[:-1] + sizes[:-1]) & (remote[1:] == remote[:-1] + sizes[:-1])
    starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~goes_on) + 1))
    return _columns(local[starts], remote[starts], np.add.reduceat(sizes, starts), 1, 0, 0)


def _columns(local: Int64Array, *rest: Int64Array | int) -> Int64Array:
    out = np.empty((len(local), 6), np.int64)
    out[:, 0] = local
    for i, column in enumerate(rest, 1):
        out[:, i] = column
    return out
