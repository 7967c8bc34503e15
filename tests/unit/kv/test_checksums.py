"""What a leg's checksums run over; the two sides against each other: tests/property."""

from __future__ import annotations

import zlib

import attrs
import numpy as np
import pytest

from pdcore.kv.checksums import LegPart, LegSums, SumPlan, first_difference, leg_sums, sum_blocks
from pdcore.kv.layout import place_entries, resharded
from pdcore.kv.spec import HEAD_MAJOR, KVCacheEntry, KVCacheSpec

ENTRY = KVCacheEntry("k", "full", "uint8", 4, 2, 2, 3)
SPEC = KVCacheSpec((ENTRY, attrs.evolve(ENTRY, name="v")))
#: Bytes of one block of one entry.
ITEM = ENTRY.item_len
PLACE, SIZE = place_entries(SPEC, 8, region=5)
MEMORY = {5: np.arange(SIZE, dtype=np.int64).astype(np.uint8)}


def crc(*parts: bytes) -> int:
    return zlib.crc32(b"".join(parts))


def block(spec: KVCacheSpec, entry: int, index: int) -> bytes:
    place, _ = place_entries(spec, 8, region=5)
    start = place.offsets[entry] + index * place.block_strides[entry]
    return bytes(MEMORY[5][start : start + spec.entries[entry].item_len])


def sums_of(plan: SumPlan) -> list[int]:
    return list(np.frombuffer(sum_blocks(plan, MEMORY), "<u4"))


def plan(legs: LegSums, blocks: list[int], tokens: tuple[int, int]) -> SumPlan:
    return legs.plan({"full": blocks}, {"full": blocks}, tokens, (0, 1))


def test_equal_blocks_are_summed_whole_entries_by_name() -> None:
    """They travel whole, whatever of the last one is the prompt's."""
    legs = leg_sums(SPEC, PLACE, SPEC, False)
    found = plan(legs, [3, 6], (0, 5))
    expected = [crc(block(SPEC, 0, b), block(SPEC, 1, b)) for b in (3, 6)]
    assert sums_of(found) == expected
    assert found.num_sums == 2
    assert [found.place_of(i) for i in range(2)] == [("full", 0), ("full", 4)]
    with pytest.raises(IndexError, match="no such checksum"):
        found.place_of(2)


def test_null_blocks_have_no_sum() -> None:
    legs = leg_sums(SPEC, PLACE, SPEC, False)
    assert plan(legs, [0, 6], (0, 8)).groups[0].tokens == [4]
    assert plan(legs, [0, 0], (0, 8)).num_sums == 0


def test_a_share_is_the_same_blocks_as_of_the_plan() -> None:
    """R21, R58: of one context parallel rank."""
    legs = leg_sums(SPEC, PLACE, SPEC, True)
    table = {"full": [1, 2, 3, 4, 5]}
    shares = [legs.plan(table, table, (0, 20), (rank, 2)).groups[0].tokens for rank in (0, 1)]
    assert shares == [[0, 4], [8, 12, 16]]


def test_heads_are_cut_out_of_rows() -> None:
    """Decode at TP 2 gets one of two heads; token-major rows are strided at prefill."""
    half = resharded(SPEC, 2, 1)
    legs = leg_sums(SPEC, PLACE, half, True)
    rows = [np.frombuffer(block(SPEC, i, 2), np.uint8).reshape(4, 2, 3) for i in (0, 1)]
    assert sums_of(plan(legs, [2], (0, 4))) == [crc(*(r[:, 1].tobytes() for r in rows))]


def test_head_major_blocks_are_cut_by_heads() -> None:
    spec = attrs.evolve(
        SPEC, entries=tuple(attrs.evolve(e, layout=HEAD_MAJOR) for e in SPEC.entries)
    )
    legs = leg_sums(spec, PLACE, resharded(spec, 2, 1), True)
    heads = [np.frombuffer(block(spec, i, 2), np.uint8).reshape(2, 4, 3) for i in (0, 1)]
    assert sums_of(plan(legs, [2], (0, 4))) == [crc(*(h[1].tobytes() for h in heads))]


def test_other_blocks_are_summed_by_rows_of_the_prompt() -> None:
    """Source blocks of 4 tokens, destination blocks of 6: cuts end where either does."""
    six = attrs.evolve(SPEC, entries=tuple(attrs.evolve(e, block_size=6) for e in SPEC.entries))
    there = {"full": [1, 2]}
    cuts = leg_sums(SPEC, PLACE, six, True).plan({"full": [3, 6, 1]}, there, (0, 9), (0, 1))
    assert cuts.groups[0].tokens == [0, 4, 6, 8]
    rows = [block(SPEC, i, 6) for i in (0, 1)]
    width = ENTRY.token_bytes
    assert sums_of(cuts)[1] == crc(*(r[: 2 * width] for r in rows))
    assert sums_of(cuts)[2] == crc(*(r[2 * width :] for r in rows))
    # At decode the same cuts, in its own blocks.
    here = leg_sums(six, place_entries(six, 8, 5)[0], SPEC, False).plan(
        there, there, (0, 9), (0, 1)
    )
    assert here.groups[0].tokens == cuts.groups[0].tokens
    assert plan(leg_sums(SPEC, PLACE, six, True), [1, 2], (4, 4)).num_sums == 0


def test_transfers_of_a_leg_are_summed_one_after_the_other() -> None:
    """Also in steps: a long one makes Python's integers of few cuts at a time."""
    legs = leg_sums(SPEC, PLACE, SPEC, False)
    tables = {"full": [1 + i % 7 for i in range(200)]}
    part = LegPart(legs, tables, tables, ((0, 8), (8, 800)), (0, 1))
    plans = list(part.plans())
    assert [p.num_sums for p in plans] == [2, 198]
    expected = [crc(block(SPEC, 0, b), block(SPEC, 1, b)) for b in tables["full"]]
    assert list(np.frombuffer(part.sums(MEMORY), "<u4")) == expected


def test_of_ranks_that_hold_copies_only_the_one_that_writes_sums() -> None:
    one = resharded(KVCacheSpec((attrs.evolve(ENTRY, total_num_heads=1, num_heads=1),)), 2, 1)
    assert plan(leg_sums(one, PLACE, resharded(one, 1, 0), True), [1], (0, 4)).groups == ()


def test_a_difference_names_the_place() -> None:
    legs = leg_sums(SPEC, PLACE, SPEC, False)
    plans = [plan(legs, [1, 2], (0, 8)), plan(legs, [1, 2, 3], (8, 12))]
    ours = b"".join(sum_blocks(p, MEMORY) for p in plans)
    assert first_difference(plans, ours, ours) == ""
    wrong = bytearray(ours)
    wrong[-1] ^= 1
    assert first_difference(plans, ours, bytes(wrong)) == (
        "the KV of 1 of 3 checked parts did not arrive as it was sent; the first begins at token 8 "
        "of manager key 'full'"
    )
    assert first_difference(plans, ours, ours[:-4]) == (
        "prefill sent 2 checksums, decode expects 3"
    )
