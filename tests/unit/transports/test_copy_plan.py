from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import RemoteLease
from pdcore.transports.check import plan_copies
from pdcore.transports.copy_plan import CopyPlan, PairCopy, plan_one
from pdcore.types import Incarnation, LeaseId

SIZES = {1: 64, 2: 32}
LEASE = LeaseId(Incarnation(b"d" * 16), 1)
BIG = (1 << 63) - 1
PlanOne = Callable[[WriteBatch, dict[int, int], dict[int, int], RemoteLease], CopyPlan | None]

numbers = st.one_of(st.integers(-1, 65), st.sampled_from([-BIG, BIG // 2, BIG]))
batches = st.builds(
    lambda local, remote, piece: WriteBatch(local, remote, np.array([piece], np.int64)),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.tuples(numbers, numbers, numbers, st.sampled_from([0, 1, 1, 1, 2]), numbers, numbers),
)
leases = st.builds(
    lambda region, first, end: RemoteLease(LEASE, {region: np.array([[first, end]], np.int64)}),
    st.sampled_from([1, 2]),
    numbers,
    numbers,
)


def told_by_arrays(batch: WriteBatch, lease: RemoteLease) -> CopyPlan | None:
    """What all the checks say: a second batch without pieces keeps them from the short way."""
    empty = WriteBatch(batch.local_region, batch.remote_region, np.empty((0, 6), np.int64))
    try:
        return plan_copies([batch, empty], SIZES, SIZES, lease)
    except TransportError:
        return None


def same(one: CopyPlan, other: CopyPlan) -> bool:
    return one.num_bytes == other.num_bytes and [
        (pair.local_region, pair.remote_region, pair.pieces.tolist()) for pair in one.pairs
    ] == [(pair.local_region, pair.remote_region, pair.pieces.tolist()) for pair in other.pairs]


def check(short_way: PlanOne, batch: WriteBatch, lease: RemoteLease) -> None:
    plan = short_way(batch, SIZES, SIZES, lease)
    if plan is not None:
        wanted = told_by_arrays(batch, lease)
        assert wanted is not None
        assert same(plan, wanted)


@given(batches, leases)
def test_d58_the_short_way_says_what_all_the_checks_say(
    batch: WriteBatch, lease: RemoteLease
) -> None:
    """D58: nothing that they refuse passes, and what passes is the same plan."""
    check(plan_one, batch, lease)


def one_piece(*piece: int) -> WriteBatch:
    return WriteBatch(1, 2, np.array([piece], np.int64))


def whole(first: int = 0, end: int = 32) -> RemoteLease:
    return RemoteLease(LEASE, {2: np.array([[first, end]], np.int64)})


def test_the_usual_submit_is_told_without_arrays_and_shares_no_memory() -> None:
    batch = one_piece(8, 16, 16, 1, 0, 0)
    plan = plan_one(batch, SIZES, SIZES, whole(16, 32))
    assert plan is not None
    batch.descriptors[0, 0] = 99
    assert same(plan, CopyPlan((PairCopy(1, 2, np.array([[8, 16, 16, 1, 0, 0]])),), 16))


@pytest.mark.parametrize(
    ("batch", "lease"),
    [
        (one_piece(8, 16, 16, 2, 16, 16), whole()),
        (one_piece(8, 16, 0, 1, 0, 0), whole()),
        (one_piece(-1, 16, 16, 1, 0, 0), whole()),
        (one_piece(49, 16, 16, 1, 0, 0), whole()),
        (one_piece(8, 17, 16, 1, 0, 0), whole(0, 40)),
        (one_piece(8, 15, 16, 1, 0, 0), whole(16)),
        (one_piece(8, 0, 16, 1, 0, 0), whole(-1)),
        (one_piece(8, 16, 16, 1, 0, 0), RemoteLease(LEASE, {})),
        (WriteBatch(3, 2, one_piece(8, 16, 16, 1, 0, 0).descriptors), whole()),
        (WriteBatch(1, 3, one_piece(8, 16, 16, 1, 0, 0).descriptors), whole()),
        (WriteBatch(1, 2, np.zeros((0, 6), np.int64)), whole()),
        (WriteBatch(1, 2, np.array([[8, 16, 16, 1, 0, 0]], np.int32).astype(object)), whole()),
        (
            one_piece(8, 16, 16, 1, 0, 0),
            RemoteLease(LEASE, {2: np.array([[0, 4], [8, 32]], np.int64)}),
        ),
    ],
)
def test_anything_else_is_left_to_the_checks(batch: WriteBatch, lease: RemoteLease) -> None:
    assert plan_one(batch, SIZES, SIZES, lease) is None


def test_d58_mutant_that_looks_at_no_lease_is_caught() -> None:
    def unleased(
        batch: WriteBatch, ours: dict[int, int], theirs: dict[int, int], lease: RemoteLease
    ) -> CopyPlan | None:
        return plan_one(batch, ours, theirs, whole())

    with pytest.raises(AssertionError):
        check(unleased, one_piece(8, 15, 16, 1, 0, 0), whole(16))
