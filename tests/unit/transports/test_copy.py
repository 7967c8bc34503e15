from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import RemoteLease
from pdcore.transports.check import plan_copies
from pdcore.transports.copy import copy_steps, written_byte
from pdcore.types import Incarnation, LeaseId

SIZE = 1 << 16


def steps_of(pieces: np.ndarray, src: np.ndarray, dst: np.ndarray, chunk: int) -> list[int]:
    lease = RemoteLease(
        LeaseId(Incarnation(b"d" * 16), 1), {1: np.array([[0, len(dst)]], np.int64)}
    )
    sizes = {1: len(src)}
    plan = plan_copies([WriteBatch(1, 1, pieces)], sizes, {1: len(dst)}, lease)
    return list(copy_steps(plan, {1: src}, {1: dst}, chunk))


@given(
    unit=st.sampled_from([1, 7, 64, 300]),
    count=st.integers(1, 200),
    phase=st.integers(0, 9),
    chunk=st.sampled_from([64, 1000, 4096, 1 << 20]),
    seed=st.integers(0, 2**31),
)
def test_scattered_blocks(unit: int, count: int, phase: int, chunk: int, seed: int) -> None:
    """Same size or not, few or many, aligned or not: the right bytes, bounded steps."""
    rng = np.random.default_rng(seed)
    slots = (SIZE - 2 * phase) // unit
    count = min(count, slots)
    pieces = np.zeros((count, 6), np.int64)
    pieces[:, 0] = rng.choice(slots, count, replace=False) * unit + phase
    pieces[:, 1] = rng.choice(slots, count, replace=False) * unit + 2 * phase
    pieces[:, 2] = np.where(rng.random(count) < 0.2, max(1, unit // 2), unit)
    pieces[:, 3] = 1
    src = rng.integers(0, 256, SIZE, np.uint8)
    dst, wanted = np.zeros(SIZE + 9, np.uint8), np.zeros(SIZE + 9, np.uint8)
    for lo, ro, width, _, _, _ in pieces.tolist():
        wanted[ro : ro + width] = src[lo : lo + width]
    steps = steps_of(pieces, src, dst, chunk)
    assert (dst == wanted).all()
    assert sum(steps) == pieces[:, 2].sum()
    assert max(steps) < 2 * chunk


@given(
    width=st.integers(1, 40),
    rows=st.integers(2, 60),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    chunk=st.sampled_from([16, 100, 4096]),
)
def test_strided_rows(width: int, rows: int, gaps: tuple[int, int], chunk: int) -> None:
    src = np.random.default_rng(width).integers(0, 256, SIZE, np.uint8)
    dst, wanted = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    ls, rs = width + gaps[0], width + gaps[1]
    for row in range(rows):
        wanted[11 + row * rs : 11 + row * rs + width] = src[5 + row * ls : 5 + row * ls + width]
    steps = steps_of(np.array([[5, 11, width, rows, ls, rs]], np.int64), src, dst, chunk)
    assert (dst == wanted).all()
    assert sum(steps) == width * rows


@pytest.mark.parametrize("extra", [0, 1, 100])
def test_a_long_run_is_cut_into_chunks(extra: int) -> None:
    """Cancel looks at its flag between chunks, so no step may copy a whole run."""
    src = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)
    dst = np.zeros(SIZE, np.uint8)
    pieces = np.array([[0, 0, 40_000 + extra, 1, 0, 0]], np.int64)
    steps = steps_of(pieces, src, dst, 4096)
    assert max(steps) <= 4096
    assert (dst[: 40_000 + extra] == src[: 40_000 + extra]).all()
    assert not dst[40_000 + extra :].any()


def test_a_step_copies_only_when_it_is_asked_for() -> None:
    src, dst = np.ones(300, np.uint8), np.zeros(300, np.uint8)
    lease = RemoteLease(LeaseId(Incarnation(b"d" * 16), 1), {1: np.array([[0, 300]], np.int64)})
    batch = WriteBatch(1, 1, np.array([[0, 0, 300, 1, 0, 0]], np.int64))
    plan = plan_copies([batch], {1: 300}, {1: 300}, lease)
    steps = copy_steps(plan, {1: src}, {1: dst}, 100)
    assert not dst.any()
    assert next(steps) == 100
    assert dst.sum() == 100


def test_every_written_byte_has_a_number() -> None:
    """Over all pairs, pieces and rows; numbers wrap around."""
    rows = np.array([[0, 10, 3, 2, 8, 5], [20, 40, 4, 1, 0, 0]], np.int64)
    other = np.array([[0, 7, 2, 1, 0, 0]], np.int64)
    lease = RemoteLease(
        LeaseId(Incarnation(b"d" * 16), 1),
        {1: np.array([[0, 64]], np.int64), 2: np.array([[0, 64]], np.int64)},
    )
    batches = [WriteBatch(1, 1, rows), WriteBatch(1, 2, other)]
    plan = plan_copies(batches, {1: 64}, {1: 64, 2: 64}, lease)
    places = [10, 11, 12, 15, 16, 17, 40, 41, 42, 43]
    expected = [*((1, at) for at in places), (2, 7), (2, 8)]
    found = [written_byte(plan, index) for index in range(12)]
    assert sorted(found) == sorted(expected)
    assert written_byte(plan, -1) == found[-1]
    assert written_byte(plan, 12) == found[0]
