"""The block pool: R93 and invariant 3."""

from __future__ import annotations

import contextlib

import pytest

from pdcore.errors import OwnershipError
from pdcore.kv.blocks import FREE, HELD, LEASED, QUARANTINED, BlockPool, Ledger


def test_block_zero_is_never_allocated_and_freeing_it_is_ignored() -> None:
    """R93: the null block."""
    pool = BlockPool(4)
    assert pool.num_usable == 3
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.free([0, 0]) == 0
    assert pool.ledger() == Ledger(free=0, held=3, leased=0, quarantined=0)


def test_blocks_of_one_request_lie_together() -> None:
    """R93 departed from, for issue 4.4: not what has been free longest, but neighbours."""
    pool = BlockPool(10)
    pool.allocate(9)
    pool.free([8])
    pool.free([4, 3, 5])
    assert pool.allocate(3) == [3, 4, 5]
    pool.free([5, 6])
    assert pool.allocate(1, 4) == [5]
    assert pool.allocate(1, 5) == [6]


def test_one_block_for_each_of_many_fills_gaps() -> None:
    pool = BlockPool(10)
    pool.allocate(9)
    pool.free([2, 3, 4, 8])
    assert pool.allocate(2, is_scattered=True) == [8, 2]
    assert pool.audit() == Ledger(free=2, held=7, leased=0, quarantined=0)
    with pytest.raises(OwnershipError, match="cannot allocate 3 blocks: 2 of 9 are free"):
        pool.allocate(3, is_scattered=True)


@pytest.mark.parametrize("count", [-1, 4])
def test_asking_for_too_many_or_a_negative_number_is_an_error(count: int) -> None:
    pool = BlockPool(4)
    with pytest.raises(OwnershipError, match="cannot allocate"):
        pool.allocate(count)
    assert pool.audit().free == 3


@pytest.mark.parametrize("ids", [[1, 1], [1, 4], [1, -1], [1, 2, 99]])
def test_a_refused_free_changes_nothing(ids: list[int]) -> None:
    """R93: double free and out of range; all or nothing."""
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(OwnershipError, match="cannot free block"):
        pool.free(ids)
    assert pool.audit() == Ledger(2, 1, 0, 0)
    assert pool.state_of(1) == HELD


def test_a_pool_needs_at_least_one_block() -> None:
    with pytest.raises(OwnershipError, match="num_blocks"):
        BlockPool(0)


def test_every_legal_move_and_no_other() -> None:
    """Invariant 3, D3, D4: a leased or quarantined block is never free."""
    legal = {
        ("lease", HELD): LEASED,
        ("unlease", LEASED): HELD,
        ("quarantine", HELD): QUARANTINED,
        ("quarantine", LEASED): QUARANTINED,
        ("free", HELD): FREE,
        ("release", LEASED): FREE,
        ("release", QUARANTINED): FREE,
    }
    ways = {FREE: ("free",), HELD: (), LEASED: ("lease",), QUARANTINED: ("quarantine",)}
    for state, way in ways.items():
        for verb in ("lease", "unlease", "quarantine", "free", "release"):
            pool = BlockPool(2)
            pool.allocate(1)
            for step in way:
                getattr(pool, step)([1])
            assert pool.state_of(1) == state
            target = legal.get((verb, state))
            if target is None:
                with pytest.raises(OwnershipError, match=f"cannot {verb} block 1"):
                    getattr(pool, verb)([1])
                assert pool.state_of(1) == state
            else:
                assert getattr(pool, verb)([1]) == 1
                assert pool.state_of(1) == target
            assert pool.audit().total == 1


def test_state_of_refuses_the_null_block_and_strangers() -> None:
    pool = BlockPool(2)
    for block in (0, 2, -1):
        with pytest.raises(OwnershipError, match="outside"):
            pool.state_of(block)


def test_audit_finds_a_block_that_is_free_twice() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    pool._free.give([1])
    with pytest.raises(OwnershipError, match="is not free"):
        pool.audit()


def test_audit_finds_a_free_block_that_nobody_can_get() -> None:
    pool = BlockPool(4)
    pool._free.take(1)
    with pytest.raises(OwnershipError, match="free runs hold 2, states say 3"):
        pool.audit()


def test_audit_finds_a_wrong_count_and_a_wrong_state() -> None:
    pool = BlockPool(4)
    pool._counts[FREE] -= 1
    with pytest.raises(OwnershipError, match="recount"):
        pool.audit()
    pool = BlockPool(4)
    pool._state[1], pool._counts[:2] = HELD, [2, 1]
    with pytest.raises(OwnershipError, match="not free"):
        pool.audit()


def test_repr_names_the_ledger() -> None:
    assert "free=3" in repr(BlockPool(4))


class FreesLeased(BlockPool):
    """The seed's rule: whoever gives up frees, leased or not (D3)."""

    def free(self, ids: object) -> int:
        assert isinstance(ids, list)
        return self._move(ids, (HELD, LEASED), FREE, "free")


def check_no_free_under_a_lease(pool: BlockPool) -> None:
    ids = pool.allocate(2)
    pool.lease(ids)
    with contextlib.suppress(OwnershipError):
        pool.free(ids)
    assert all(pool.state_of(b) == LEASED for b in ids), "blocks freed under a writer"


def test_a_timeout_cannot_free_leased_blocks() -> None:
    """D3: with the mutant that frees them the check fails."""
    check_no_free_under_a_lease(BlockPool(4))
    with pytest.raises(AssertionError, match="under a writer"):
        check_no_free_under_a_lease(FreesLeased(4))
