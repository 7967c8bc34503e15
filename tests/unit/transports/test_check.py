from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import RemoteLease
from pdcore.transports.check import (
    MAX_REGION_BYTES,
    CopyPlan,
    check_lease,
    expand_rows,
    plan_copies,
)
from pdcore.transports.descriptor import MAX_REGIONS
from pdcore.types import Incarnation, LeaseId

BIG = (1 << 63) - 1
SIZES = {1: 256, 2: 96}
Piece = tuple[int, int, int, int, int, int]
Range = tuple[int, int]


def lease_of(ranges: dict[int, list[Range]]) -> RemoteLease:
    arrays = {r: np.array(rows, np.int64).reshape(-1, 2) for r, rows in ranges.items()}
    return RemoteLease(LeaseId(Incarnation(b"d" * 16), 1), arrays)


def batch_of(local: int, remote: int, pieces: Sequence[Piece]) -> WriteBatch:
    return WriteBatch(local, remote, np.array(pieces, np.int64).reshape(-1, 6))


WHOLE = lease_of({1: [(0, 256)], 2: [(0, 96)]})


def oracle(
    batches: Sequence[WriteBatch], lease: RemoteLease
) -> dict[tuple[int, int], tuple[int, int]]:
    """Byte by byte: remote (region, offset) -> local (region, offset); raises ValueError
    for whatever must be refused."""
    allowed = {
        (region, at)
        for region, rows in lease.ranges.items()
        for start, end in rows.tolist()
        for at in range(start, end)
    }
    moves: dict[tuple[int, int], tuple[int, int]] = {}
    for batch in batches:
        for lo, ro, width, rows, ls, rs in batch.descriptors.tolist():
            if min(lo, ro, width, rows) < 0:
                raise ValueError("negative")
            if rows > 1 and width > 0 and min(ls, rs) < width:
                raise ValueError("stride")
            if lo > SIZES[batch.local_region] or ro > SIZES[batch.remote_region]:
                raise ValueError("bounds")
            for row in range(rows):
                for i in range(width):
                    to = batch.remote_region, ro + row * rs * (rows > 1) + i
                    come = batch.local_region, lo + row * ls * (rows > 1) + i
                    if to[1] >= SIZES[to[0]] or come[1] >= SIZES[come[0]]:
                        raise ValueError("bounds")
                    if to in moves or to not in allowed:
                        raise ValueError("overlap or lease")
                    moves[to] = come
    return moves


def moves_of(plan: CopyPlan) -> dict[tuple[int, int], tuple[int, int]]:
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for pair in plan.pairs:
        for lo, ro, width, rows, ls, rs in pair.pieces.tolist():
            assert width > 0
            assert rows > 0
            for row in range(rows):
                for i in range(width):
                    to = pair.remote_region, ro + row * rs * (rows > 1) + i
                    assert to not in found
                    found[to] = pair.local_region, lo + row * ls * (rows > 1) + i
    return found


small = st.integers(0, 40)
strides = st.integers(0, 48)
pieces_of = st.lists(
    st.tuples(
        st.integers(-1, 100), st.integers(-1, 100), st.integers(-1, 24), st.integers(-1, 4),
        strides, strides,
    ),
    max_size=6,
)  # fmt: skip
batches_of = st.lists(
    st.builds(batch_of, st.sampled_from([1, 2]), st.sampled_from([1, 2]), pieces_of), max_size=3
)
cuts = st.lists(st.integers(0, 96), min_size=2, max_size=8, unique=True).map(sorted)
leases = st.one_of(
    st.just(WHOLE),
    st.builds(
        lambda a, b: lease_of(
            {1: list(zip(a[::2], a[1::2], strict=False)), 2: list(itertools.pairwise(b))}
        ),
        cuts,
        cuts,
    ),
)


@given(batches_of, leases)
def test_the_plan_moves_exactly_the_bytes_of_the_oracle(
    batches: list[WriteBatch], lease: RemoteLease
) -> None:
    """G3: accepted and refused as a byte-by-byte reading of the rules says."""
    try:
        wanted = oracle(batches, lease)
    except ValueError:
        with pytest.raises(TransportError):
            plan_copies(batches, SIZES, SIZES, lease)
        return
    plan = plan_copies(batches, SIZES, SIZES, lease)
    assert moves_of(plan) == wanted
    assert plan.num_bytes == len(wanted)


@given(
    st.lists(
        st.tuples(*[st.sampled_from([-1, 0, 1, 8, 255, 256, 1 << 31, BIG // 3, BIG - 1, BIG])] * 6),
        min_size=1,
        max_size=4,
    )
)
def test_extreme_numbers_never_pass_and_never_overflow(pieces: list[Piece]) -> None:
    """D58: 64-bit extremes are refused or harmless; Python integers are the oracle."""

    def inside(piece: Piece) -> bool:
        lo, ro, width, rows, ls, rs = piece
        if min(lo, ro, width, rows) < 0 or max(lo, ro) > 256:
            return False
        if rows == 0 or width == 0:
            return rows <= MAX_REGION_BYTES and (rows == 0 or width <= 256)
        last = rows - 1
        return (rows == 1 or min(ls, rs) >= width) and all(
            at + last * stride * (rows > 1) + width <= 256 for at, stride in ((lo, ls), (ro, rs))
        )

    try:
        plan = plan_copies([batch_of(1, 1, pieces)], SIZES, SIZES, WHOLE)
    except TransportError:
        return
    assert all(inside(piece) for piece in pieces if piece[2] > 0 and piece[3] > 0), pieces
    assert plan.num_bytes <= 256


def test_neighbours_become_one_copy() -> None:
    pieces: list[Piece] = [(16, 32, 16, 1, 0, 0), (0, 16, 16, 1, 0, 0), (32, 48, 8, 1, 0, 0)]
    (pair,) = plan_copies([batch_of(1, 1, pieces)], SIZES, SIZES, WHOLE).pairs
    assert pair.pieces[:, :4].tolist() == [[0, 16, 40, 1]]


def test_contiguous_rows_become_one_row() -> None:
    (pair,) = plan_copies([batch_of(1, 1, [(0, 0, 8, 4, 8, 8)])], SIZES, SIZES, WHOLE).pairs
    assert pair.pieces[:, :4].tolist() == [[0, 0, 32, 1]]


def test_regions_never_join_or_overlap_each_other() -> None:
    """Region 1 ends where region 2 begins only in the virtual space of the check."""
    batches = [batch_of(1, 1, [(248, 248, 8, 1, 0, 0)]), batch_of(2, 2, [(0, 0, 8, 1, 0, 0)])]
    pairs = plan_copies(batches, SIZES, SIZES, WHOLE).pairs
    assert [(p.local_region, p.remote_region, len(p.pieces)) for p in pairs] == [
        (1, 1, 1),
        (2, 2, 1),
    ]


def test_all_regions_of_a_peer_may_be_of_the_largest_size() -> None:
    """G3: 128 regions as large as one may be did not fit one address space together, and
    what came was an OverflowError: the end of the worker's loop, on a peer's word."""
    regions = range(1, MAX_REGIONS + 1)
    batches = [batch_of(1, region, [(0, MAX_REGION_BYTES - 8, 8, 1, 0, 0)]) for region in regions]
    sizes = dict.fromkeys(regions, MAX_REGION_BYTES)
    lease = lease_of({region: [(0, MAX_REGION_BYTES)] for region in regions})
    assert plan_copies(batches, {1: 8}, sizes, lease).num_bytes == 8 * MAX_REGIONS
    outside = batch_of(1, MAX_REGIONS, [(0, MAX_REGION_BYTES - 7, 8, 1, 0, 0)])
    with pytest.raises(TransportError, match="leaves the region"):
        plan_copies([*batches[:-1], outside], {1: 8}, sizes, lease)


def test_the_message_names_descriptor_and_sizes() -> None:
    with pytest.raises(TransportError, match=r"remote_offset=250.*leaves.*remote region 1 has 256"):
        plan_copies([batch_of(1, 1, [(0, 250, 8, 1, 0, 0)])], SIZES, SIZES, WHOLE)


def test_unknown_regions_and_wrong_arrays_are_refused() -> None:
    for batch in (
        batch_of(9, 1, []),
        batch_of(1, 9, []),
        WriteBatch(1, 1, np.zeros((2, 5), np.int64)),
        WriteBatch(1, 1, np.zeros((2, 6), np.int32)),  # type: ignore[arg-type]
    ):
        with pytest.raises(TransportError):
            plan_copies([batch], SIZES, SIZES, WHOLE)


def test_expand_rows() -> None:
    pieces = np.array([[0, 100, 4, 3, 8, 16], [50, 60, 7, 1, 0, 0]], np.int64)
    assert expand_rows(pieces)[:, :4].tolist() == [
        [0, 100, 4, 1],
        [8, 116, 4, 1],
        [16, 132, 4, 1],
        [50, 60, 7, 1],
    ]


@pytest.mark.parametrize(
    "ranges",
    [
        {1: [(4, 4)]},
        {1: [(8, 4)]},
        {1: [(-1, 4)]},
        {1: [(0, 257)]},
        {1: [(0, 8), (7, 9)]},
        {1: [(8, 9), (0, 4)]},
        {2: [(0, BIG)]},
        {3: [(0, 1)]},
    ],
)
def test_malformed_leases(ranges: dict[int, list[Range]]) -> None:
    with pytest.raises(TransportError):
        check_lease(lease_of(ranges), SIZES)


def refuses_overflow(plan: Callable[..., object]) -> None:
    """D58: a sum that does not fit 64 bits must not come out as a small number."""
    bad = batch_of(1, 1, [(0, BIG - 7, 16, 1, 0, 0)])
    try:
        plan([bad], SIZES, SIZES, WHOLE)
    except TransportError:
        return
    raise AssertionError("a write far outside was accepted")


def refuses_outside_lease(plan: Callable[..., object]) -> None:
    try:
        plan([batch_of(1, 1, [(0, 64, 8, 1, 0, 0)])], SIZES, SIZES, lease_of({1: [(0, 64)]}))
    except TransportError:
        return
    raise AssertionError("a write outside the lease was accepted")


def seeds_rule(
    batches: list[WriteBatch], local: object, remote: dict[int, int], lease: object
) -> None:
    """The seed trusts raw pointers; this mutant compares end offsets as int64 sums and
    knows no leases (D58)."""
    for batch in batches:
        d = batch.descriptors
        with np.errstate(over="ignore"):
            if (d[:, 1] + d[:, 2] > remote[batch.remote_region]).any():
                raise TransportError("outside")


def test_d58_checks_find_the_seeds_rule() -> None:
    """D58: the mutant fails both checks, the real planner passes both."""
    refuses_overflow(plan_copies)
    refuses_outside_lease(plan_copies)
    for check in (refuses_overflow, refuses_outside_lease):
        with pytest.raises(AssertionError):
            check(seeds_rule)
