"""Descriptors of one entry: R79, R80, R111, D29, D36."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from pdcore.kv.pieces import (
    BlockPiece,
    block_piece,
    block_tables,
    expand_blocks,
    expand_rows,
    join_neighbours,
    row_piece,
    row_tables,
)
from pdcore.kv.reblock import BlockShape, cut_tokens
from pdcore.kv.slices import TokenSlice
from pdcore.kv.spec import HEAD_MAJOR, KVCacheEntry

#: Two of four heads of 8 bytes: 16 of 32 bytes of a row.
WHOLE = KVCacheEntry("k", "full", "uint8", 4, 4, 4, 8)
HALF = attrs.evolve(WHOLE, num_heads=2)
UPPER = TokenSlice(0, 16, 16, True)
SAME = TokenSlice(0, 0, 32, True)


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def test_equal_bytes_are_whole_blocks() -> None:
    """D29: no rows at all."""
    assert block_piece(WHOLE, WHOLE, SAME, 0, 7, 128, 256) == BlockPiece(0, 7, 128, 128, 256)


def test_token_major_blocks_are_cut_in_every_row() -> None:
    """R80."""
    piece = block_piece(HALF, WHOLE, UPPER, 0, 1000, 64, 128)
    assert piece == BlockPiece(0, 1016, 16, 64, 128, 4, 16, 32)


def test_head_major_blocks_are_cut_once() -> None:
    """D36: heads 2 and 3 of four begin after half of the block."""
    src, dst = (attrs.evolve(e, layout=HEAD_MAJOR) for e in (HALF, WHOLE))
    assert block_piece(src, dst, UPPER, 0, 1000, 64, 128) == BlockPiece(0, 1064, 64, 64, 128)


def test_runs_become_rows_or_one_piece() -> None:
    """R79: consecutive blocks on both sides."""
    runs = ids(3), ids(5), ids(2)
    blocks = ids(3, 4), ids(5, 6)
    dense = expand_blocks(block_tables([BlockPiece(0, 0, 128, 128, 128)]), *blocks, runs)
    assert dense.tolist() == [[384, 640, 256, 1, 0, 0]]
    apart = expand_blocks(block_tables([BlockPiece(0, 0, 128, 128, 256)]), *blocks, runs)
    assert apart.tolist() == [[384, 1280, 128, 2, 128, 256]]
    rows = expand_blocks(block_tables([BlockPiece(0, 16, 16, 64, 128, 4, 16, 32)]), *blocks, runs)
    assert rows.tolist() == [[192, 656, 16, 8, 16, 32]]


def test_rows_that_do_not_go_on_are_one_descriptor_per_block() -> None:
    """D29: one per block and entry, never one per token."""
    piece = BlockPiece(0, 16, 16, 192, 128, 4, 16, 32)
    out = expand_blocks(block_tables([piece]), ids(3, 4), ids(5, 6), (ids(3), ids(5), ids(2)))
    assert out[:, 3].tolist() == [4, 4]


def test_entries_side_by_side_are_one() -> None:
    pieces = [BlockPiece(64, 64, 64, 128, 128), BlockPiece(0, 0, 64, 128, 128)]
    assert join_neighbours(pieces) == [BlockPiece(0, 0, 128, 128, 128)]
    cut = BlockPiece(0, 0, 16, 128, 128, 4, 16, 32)
    assert join_neighbours([cut, pieces[0]]) == [cut, pieces[0]]


@pytest.mark.parametrize("layout", ["BnBsND", HEAD_MAJOR])
def test_re_blocked_rows_are_one_descriptor_per_cut(layout: str) -> None:
    """Blocks of 4 tokens into blocks of 8, the upper half of the heads."""
    src = attrs.evolve(HALF, layout=layout)
    dst = attrs.evolve(WHOLE, layout=layout, block_size=8)
    piece = row_piece(src, dst, UPPER, 0, 1000, 64, 256)
    cuts = cut_tokens("full", ids(2, 1), ids(3), BlockShape(4, 8), (0, 7))
    if layout == HEAD_MAJOR:
        # Heads begin 32 bytes apart here, 64 there: two heads of 4, then of 3 rows.
        assert expand_rows(row_tables([piece]), cuts).tolist() == [
            [128, 1000 + 768 + 128, 32, 2, 32, 64],
            [64, 1000 + 768 + 128 + 32, 24, 2, 32, 64],
        ]
    else:
        assert expand_rows(row_tables([piece]), cuts).tolist() == [
            [128, 1000 + 768 + 16, 16, 4, 16, 32],
            [64, 1000 + 768 + 16 + 128, 16, 3, 16, 32],
        ]


def test_re_blocked_rows_of_equal_length_are_plain_copies_and_merge() -> None:
    """R79: two small blocks in a row fill one large block in one piece."""
    dst = attrs.evolve(WHOLE, block_size=8)
    piece = row_piece(WHOLE, dst, SAME, 0, 0, 128, 256)
    cuts = cut_tokens("full", ids(2, 3, 1), ids(4, 6), BlockShape(4, 8), (0, 12))
    assert expand_rows(row_tables([piece]), cuts).tolist() == [
        [256, 1024, 256, 1, 0, 0],
        [128, 1536, 128, 1, 0, 0],
    ]


def test_many_pieces_at_once_are_the_same_as_one_by_one() -> None:
    """D29: one array operation for all of them, whatever their kinds."""
    pieces = [
        BlockPiece(0, 0, 128, 128, 128),
        BlockPiece(4096, 0, 128, 128, 256),
        BlockPiece(0, 16, 16, 64, 128, 4, 16, 32),
        BlockPiece(0, 16, 16, 192, 128, 4, 16, 32),
    ]
    blocks = ids(3, 4, 7), ids(5, 6, 2)
    runs = ids(3, 7), ids(5, 2), ids(2, 1)
    together = expand_blocks(block_tables(pieces), *blocks, runs).tolist()
    apart = [
        row for p in pieces for row in expand_blocks(block_tables([p]), *blocks, runs).tolist()
    ]
    assert together == apart
    dst = attrs.evolve(WHOLE, block_size=8)
    cuts = cut_tokens("full", ids(2, 3, 1), ids(4, 6), BlockShape(4, 8), (0, 11))
    rows = [
        row_piece(WHOLE, dst, SAME, 0, 0, 128, 256),
        row_piece(HALF, dst, UPPER, 0, 0, 64, 256),
        row_piece(*(attrs.evolve(e, layout=HEAD_MAJOR) for e in (HALF, dst)), UPPER, 0, 0, 64, 256),
    ]
    together = expand_rows(row_tables(rows), cuts).tolist()
    assert together == [r for p in rows for r in expand_rows(row_tables([p]), cuts).tolist()]
