"""Cutting token ranges where a block of either side ends: D37 for windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import IncompatibleError
from pdcore.kv.reblock import BlockShape, Cuts, cut_tokens


def cut(
    src: list[int], dst: list[int], shape: BlockShape, tokens: tuple[int, int]
) -> list[tuple[int, int, int, int, int]]:
    """(source block, destination block, first rows inside them, rows) of every cut."""
    cuts = cut_tokens("full", np.array(src, np.int64), np.array(dst, np.int64), shape, tokens)
    return list(zip(*(column.tolist() for column in cuts), strict=True))


def test_four_into_six() -> None:
    assert cut([5, 3, 9], [7, 2], BlockShape(4, 6), (0, 12)) == [
        (5, 7, 0, 0, 4),
        (3, 7, 0, 4, 2),
        (3, 2, 2, 0, 2),
        (9, 2, 0, 2, 4),
    ]


def test_a_part_begins_and_ends_inside_blocks() -> None:
    assert cut([5, 3, 9], [7, 2], BlockShape(4, 6), (5, 9)) == [
        (3, 7, 1, 5, 1),
        (3, 2, 2, 0, 2),
        (9, 2, 0, 2, 1),
    ]
    assert cut([5], [7], BlockShape(4, 6), (3, 3)) == []


def test_rows_of_several_tokens() -> None:
    """R110: four tokens share a row; one that is begun counts. Entries of one manager key
    may have rows of different length."""
    shape = BlockShape(8, 16)
    cuts = cut_tokens("c", np.array([5, 3]), np.array([7]), shape, (0, 13))
    assert [column.tolist() for column in cuts.rows(4)] == [[0, 0], [0, 2], [2, 2]]
    assert [column.tolist() for column in cuts.rows(1)] == [[0, 0], [0, 8], [8, 5]]
    inside = cut_tokens("c", np.array([5, 3]), np.array([7]), shape, (6, 10))
    assert [column.tolist() for column in inside.rows(4)] == [[1, 0], [1, 2], [1, 1]]


def test_null_blocks_are_skipped_and_lost_ones_are_an_error() -> None:
    """D37: window 4, 12 tokens: position 9 is the first that is read. What is before it in a
    real destination block has no source and no reader."""
    shape = BlockShape(2, 8, window=4)
    assert cut([0, 0, 0, 0, 4, 5], [0, 3], shape, (0, 12)) == [(4, 3, 0, 0, 2), (5, 3, 0, 2, 2)]
    with pytest.raises(IncompatibleError, match="position 9 tokens, prefill has dropped it"):
        cut([0, 0, 0, 0, 0, 5], [0, 3], shape, (0, 12))
    with pytest.raises(IncompatibleError, match="position 2 tokens, prefill has dropped it"):
        cut([1, 0, 2, 3], [3], BlockShape(2, 8), (0, 8))


def test_a_share_of_the_tokens_counts_the_window_from_the_end_of_all() -> None:
    """D37, R58: the first of two context parallel ranks writes positions 0 to 7 of 12; with a
    window of 4 none of them is read any more."""
    shape = BlockShape(2, 8, window=4)
    src, dst = np.array([0, 0, 0, 0, 4, 5]), np.array([2, 3])
    cuts = cut_tokens("w", src, dst, shape, (0, 8), next_query=12)
    assert len(cuts.src) == 0
    with pytest.raises(IncompatibleError, match="position 5 tokens"):
        cut_tokens("w", src, dst, shape, (0, 8))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 40), st.integers(0, 40))
def test_every_position_is_in_exactly_one_cut(
    src_size: int, dst_size: int, start: int, length: int
) -> None:
    stop = start + length
    src = np.arange(1, -(-stop // src_size) + 1, dtype=np.int64)
    dst = np.arange(1, -(-stop // dst_size) + 1, dtype=np.int64)
    cuts: Cuts = cut_tokens("k", src, dst, BlockShape(src_size, dst_size), (start, stop))
    found = []
    for a, b, row, other, count in zip(*(c.tolist() for c in cuts), strict=True):
        for i in range(count):
            position = (a - 1) * src_size + row + i
            assert position == (b - 1) * dst_size + other + i
            assert row + i < src_size
            assert other + i < dst_size
            found.append(position)
    assert found == list(range(start, stop))
