"""Every arrangement of ranks, every byte: R4, R58-R60, R80, D29, D30, D36, D38.

The whole sweep (``python -m tests.property.topology_sweep``) takes minutes; it is part of
``nox -s property``. The default run takes every pair of TP sizes with every number of heads,
and a sample of the rest.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from pdcore.errors import IncompatibleError
from pdcore.kv.slices import check_reshard
from pdcore.topology import InstanceProfile, check_shapes
from tests.property import topology_sweep as sweep
from tests.property.topology_sweep import Case, Int64Array, Place, Shape

#: Primes: strides that keep no step with the order of the cases.
SAMPLE, MIXED_SAMPLE = 401, 997
NUM_CONFIGURATIONS = 248_861


def plain(tp: int, *, cp: int = 1, dp: int = 1, pp: int = 1) -> Shape:
    return Shape(tp, cp, dp, pp)


def test_every_pair_of_tp_sizes_with_every_number_of_heads() -> None:
    """D29, R80: MHA, GQA with heads split and replicated on either side, MLA."""
    sizes = range(1, sweep.MAX_RANKS + 1)
    count = 0
    for prefill, decode in itertools.product(map(plain, sizes), map(plain, sizes)):
        if sweep.divides(prefill.tp, decode.tp):
            for heads in ((), sweep.fitting(prefill, decode)):
                case = Case(prefill, decode, heads, False)
                sweep.check_ranks(case)
                sweep.check_bytes(case, (2, 2))
                count += case.num_configurations
    assert count == 460


def test_a_sample_of_all_arrangements() -> None:
    """Context, data and pipeline parallel too."""
    tally = sweep.sweep(sweep.chosen(SAMPLE))
    assert tally.configurations > NUM_CONFIGURATIONS / SAMPLE / 2
    assert tally.legs > tally.plans


@pytest.mark.parametrize("block_sizes", [(2, 3), (4, 2), (1, 4)])
def test_a_sample_with_blocks_of_other_sizes(block_sizes: tuple[int, int]) -> None:
    assert sweep.sweep(sweep.chosen(MIXED_SAMPLE), block_sizes).plans > 40


@pytest.mark.parametrize(
    "case",
    [
        # Ten layers: 5, 5 and 3, 3, 2, 2; one stage gets from both.
        Case(plain(1, pp=9), plain(1, pp=3), (2,), False),
        Case(plain(2, pp=2), plain(1, pp=8), (2,), False),
        Case(plain(1, cp=16), plain(2), (1,), True),
        Case(plain(1, cp=2, pp=8), plain(4, dp=2, pp=2), (), True),
        Case(plain(16), plain(2, dp=8), (4,), False),
        Case(plain(2, dp=8), plain(16), (4,), False),
    ],
)
def test_corners(case: Case) -> None:
    sweep.check_ranks(case)
    sweep.check_bytes(case.core(), (2, 2))
    sweep.check_bytes(case.core(), (2, 3))


#: Each is far below the time at which a test counts as hanging.
PARTS = 32


def test_the_parts_are_the_whole() -> None:
    parts = [sweep.chosen(part=(index, PARTS)) for index in range(PARTS)]
    together = [case for part in parts for case in part]
    assert together == sweep.chosen()
    assert sum(case.num_configurations for case in together) == NUM_CONFIGURATIONS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "block_sizes"), [(1, (2, 2)), (3, (2, 3)), (5, (4, 2)), (7, (1, 4))]
)
@pytest.mark.parametrize("index", range(PARTS))
def test_every_configuration(index: int, every: int, block_sizes: tuple[int, int]) -> None:
    """All of them with equal block sizes, and many with others: every byte has one writer."""
    of = sweep.chosen(every, part=(index, PARTS))
    tally = sweep.sweep(of, block_sizes)
    assert tally.configurations == sum(case.num_configurations for case in of)


# --- what does not divide ---------------------------------------------------------------------


def test_every_pair_that_does_not_divide_is_refused_with_both_shapes() -> None:
    """D30: all shapes up to 16 ranks, decode's context parallelism included."""
    counts = Counter[bool]()
    decodes = sweep.shapes(with_cp=True)
    for prefill, decode in itertools.product(sweep.shapes(with_cp=True), decodes):
        ours, theirs = (
            InstanceProfile(tp_size=s.tp, cp_size=s.cp, dp_size=s.dp, pp_size=s.pp)
            for s in (decode, prefill)
        )
        fits = (
            sweep.divides(prefill.tp, decode.tp)
            and sweep.divides(prefill.pp, decode.pp)
            and decode.cp == 1
        )
        try:
            check_shapes(ours, theirs)
            problem = None
        except IncompatibleError as error:
            problem = str(error)
        assert (problem is None) == fits, (prefill, decode)
        if problem is not None:
            assert "prefill is tp {} x cp {} x dp {} x pp {}, ".format(*prefill) in problem
            assert "decode is tp {} x cp {} x dp {} x pp {})".format(*decode) in problem
        counts[fits] += 1
    assert counts == {True: 16_570, False: 25_046}


def test_heads_that_do_not_divide_are_refused() -> None:
    """D30: 16 x 16 TP sizes with 1 to 16 heads."""
    sizes = range(1, sweep.MAX_RANKS + 1)
    for prefill, decode, heads in itertools.product(sizes, sizes, sizes):
        spec = sweep.whole((heads,), 1, 2)
        if sweep.divides(heads, prefill) and sweep.divides(heads, decode):
            check_reshard(spec, prefill, decode)
        else:
            with pytest.raises(IncompatibleError, match=f"tp_size {prefill}, decode has {decode}"):
                check_reshard(spec, prefill, decode)


# --- what the sweep notices --------------------------------------------------------------------

REPLICATED = Case(plain(4), plain(1), (2,), False)
SHARED = Case(plain(1, cp=2), plain(1), (2,), True)
Leg = tuple[Int64Array, Int64Array]


def every_copy_writes(
    heads: tuple[int, ...], layers: int, sizes: tuple[int, int], prefill: Place, decode: Place,
    share: tuple[int, int],
) -> Leg:  # fmt: skip
    """Mutant: each holder of a replicated head writes it, as the seed does."""
    copies = max(1, prefill[0] // heads[0])
    first = (*prefill[:2], prefill[2] // copies * copies, prefill[3])
    return sweep.leg(heads, layers, sizes, first, decode, share)


def every_cp_rank_writes_all(
    heads: tuple[int, ...], layers: int, sizes: tuple[int, int], prefill: Place, decode: Place,
    share: tuple[int, int],
) -> Leg:  # fmt: skip
    """Mutant: no shares."""
    return sweep.leg(heads, layers, sizes, prefill, decode, (0, 1))


def first_rank_only(
    heads: tuple[int, ...], layers: int, sizes: tuple[int, int], prefill: Place, decode: Place,
    share: tuple[int, int],
) -> Leg:  # fmt: skip
    """Mutant: one writer whatever the heads, right for MLA only."""
    found = sweep.leg(heads, layers, sizes, prefill, decode, share)
    none = np.empty(0, np.int64)
    return found if prefill[2] == 0 else (none, none)


def next_head(
    heads: tuple[int, ...], layers: int, sizes: tuple[int, int], prefill: Place, decode: Place,
    share: tuple[int, int],
) -> Leg:  # fmt: skip
    """Mutant: the right places, another rank's heads."""
    there, _ = sweep.leg(heads, layers, sizes, prefill, decode, share)
    other = (*prefill[:2], (prefill[2] + 2) % prefill[0], prefill[3])
    return there, sweep.leg(heads, layers, sizes, other, decode, share)[1]


@pytest.mark.parametrize(
    ("case", "mutant", "notice"),
    [
        (REPLICATED, every_copy_writes, "a byte is written twice"),
        (SHARED, every_cp_rank_writes_all, "a byte is written twice"),
        (REPLICATED, first_rank_only, "a byte has no writer"),
        (REPLICATED, next_head, "a byte of something else"),
    ],
)
def test_plans_of_mutants_are_caught(case: Case, mutant: sweep.LegOf, notice: str) -> None:
    sweep.check_bytes(case, (2, 2))
    with pytest.raises(AssertionError, match=notice):
        sweep.check_bytes(case, (2, 2), mutant)


def test_a_byte_outside_the_lease_is_noticed() -> None:
    expected = np.array([-1, 7, 8, -1])
    sweep.check_rank(expected, np.array([1, 2]), np.array([7, 8]), REPLICATED)
    with pytest.raises(AssertionError, match="outside the lease"):
        sweep.check_rank(expected, np.array([1, 2, 3]), np.array([7, 8, 0]), REPLICATED)
