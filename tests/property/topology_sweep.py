"""Every pair of arrangements up to 16 ranks a side, and every byte of every plan.

    python -m tests.property.topology_sweep [--every N] [--block-sizes 2,2]

A *configuration* is (prefill TP, CP, DP, PP) x (decode TP, DP, PP) x KV heads (1 to 16, or
MLA) x all CP ranks send or only the first. MHA is GQA with as many KV heads as query heads,
so both are here under their KV heads, replicated where there are more ranks than heads.

One *case* is an arrangement of ranks with every number of heads that divides over it: each
is an entry of its own in one model, so that one plan checks all of them. Each case is
checked in two parts, as what a plan contains does not depend on DP, nor on CP ranks that
do not send:

- ranks: for every decode rank and every prefill DP rank, the ranks that are named exist,
  lie in that DP group and are distinct, and both sides count the same legs (R58);
- bytes: for every decode rank, the legs of all its targets together write every byte of its
  leased blocks exactly once and no other byte, and each byte is the one that belongs there.

What belongs where is said here from the definition alone: token t, layer l, head h. The
production code is asked only for targets and for descriptors.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcore.kv.layout import place_entries, resharded, staged
from pdcore.kv.plan import KVPlanner, WriteBatch
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.topology import (
    InstanceProfile,
    ParallelLayout,
    RankCoordinates,
    TargetRankMapping,
    map_target_ranks,
)

MAX_RANKS = 16
#: Runs of two on both sides, and single blocks; the null block 0 never.
SRC_BLOCKS, DST_BLOCKS = (3, 4, 1, 2, 6, 9), (5, 6, 2, 3, 8, 1)
NUM_BLOCKS = 10
HEADS = range(1, 17)

Int64Array = NDArray[np.int64]


class Shape(NamedTuple):
    tp: int
    cp: int
    dp: int
    pp: int

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


class Case(NamedTuple):
    prefill: Shape
    decode: Shape
    #: KV heads, an entry a layer for each; none for MLA: the same rows on every rank.
    heads: tuple[int, ...]
    all_cp: bool

    @property
    def is_mla(self) -> bool:
        return not self.heads

    @property
    def num_configurations(self) -> int:
        return max(1, len(self.heads))

    @property
    def num_layers(self) -> int:
        """One more than the stages, so that they are uneven."""
        return max(self.prefill.pp, self.decode.pp) + 1

    def core(self) -> Case:
        """Without what changes no byte of a plan."""
        prefill, decode = (s._replace(dp=1) for s in (self.prefill, self.decode))
        if not self.all_cp:
            prefill = prefill._replace(cp=1)
        return self._replace(prefill=prefill, decode=decode)


def shapes(*, with_cp: bool) -> list[Shape]:
    sizes = range(1, MAX_RANKS + 1)
    found = (
        Shape(tp, cp, dp, pp)
        for tp, cp, dp, pp in itertools.product(sizes, sizes if with_cp else (1,), sizes, sizes)
        if tp * cp * dp * pp <= MAX_RANKS
    )
    return list(found)


def divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def fitting(prefill: Shape, decode: Shape) -> tuple[int, ...]:
    """The numbers of KV heads that divide over both."""
    return tuple(h for h in HEADS if divides(h, prefill.tp) and divides(h, decode.tp))


def cases() -> Iterator[Case]:
    """Every configuration whose sizes and heads divide, MLA and the rest apart."""
    decodes = shapes(with_cp=False)
    for prefill, decode in itertools.product(shapes(with_cp=True), decodes):
        if divides(prefill.tp, decode.tp) and divides(prefill.pp, decode.pp):
            for heads in ((), fitting(prefill, decode)):
                for all_cp in (False, True)[: 2 if prefill.cp > 1 else 1]:
                    yield Case(prefill, decode, heads, all_cp)


# --- who holds what, from the definition ------------------------------------------------------


def heads_of(total: int, tp: int, rank: int) -> list[int]:
    """The KV heads of one rank: an even share, or one that neighbours also hold."""
    if total >= tp:
        share = total // tp
        return list(range(rank * share, (rank + 1) * share))
    return [rank // (tp // total)]


def layers_of(num_layers: int, pp: int, stage: int) -> list[int]:
    """Dealt one by one from the first stage: the first ones take the remainder."""
    counts = Counter(layer % pp for layer in range(num_layers))
    first = sum(counts[s] for s in range(stage))
    return list(range(first, first + counts[stage]))


class Memory(NamedTuple):
    """One rank: its cache description, and for every byte of its pool a number that says
    which byte of the model's KV it holds (layer, part, token, head, byte), -1 for none."""

    spec: KVCacheSpec
    place: KVPlacement
    content: Int64Array


@functools.lru_cache(maxsize=512)
def memory(
    heads: tuple[int, ...],
    num_layers: int,
    block_size: int,
    side: int,
    tp: int,
    pp: int,
    at: tuple[int, int],
) -> Memory:
    """Of the rank (tp, pp) = ``at``; ``side`` 0 is prefill, 1 decode."""
    spec = resharded(staged(whole(heads, num_layers, block_size), pp, at[1]), tp, at[0])
    assert sorted({e.layer for e in spec.entries}) == layers_of(num_layers, pp, at[1])
    place, size = place_entries(spec, NUM_BLOCKS, alignment=8)
    content = np.full(size, -1, np.int64)
    table = np.array((SRC_BLOCKS, DST_BLOCKS)[side])
    tokens = np.arange(len(table) * block_size).reshape(len(table), block_size, 1, 1)
    for i, entry in enumerate(spec.entries):
        mine = [0] if entry.is_mla else heads_of(entry.total_num_heads, tp, at[0])
        part = (entry.layer * 17 + entry.total_num_heads) * 4 + entry.head_dim
        number = (part * 1000 + tokens) * 16 + np.array(mine)[:, None]
        number = (number * 8 + np.arange(entry.head_dim)).reshape(len(table), -1)
        starts = place.offsets[i] + table * place.block_strides[i]
        content[starts[:, None] + np.arange(entry.item_len)] = number
    return Memory(spec, place, content)


@functools.lru_cache(maxsize=256)
def whole(heads: tuple[int, ...], num_layers: int, block_size: int) -> KVCacheSpec:
    """Per layer two entries of 1 and 3 bytes a token for MLA, or one of 2 bytes a head for
    each number of heads."""
    kinds = [(h, 2) for h in heads] or [(1, 1), (1, 3)]
    return KVCacheSpec(
        tuple(
            KVCacheEntry(
                f"layers.{layer}.{total}.{width}",
                "kv",
                "uint8",
                block_size,
                total,
                total,
                width,
                is_mla=not heads,
                layer=layer,
            )
            for layer in range(num_layers)
            for total, width in kinds
        )
    )


# --- bytes --------------------------------------------------------------------------------


def moved(batches: tuple[WriteBatch, ...]) -> tuple[Int64Array, Int64Array]:
    """(source byte, destination byte) of every byte that is copied, in any order."""
    if not batches:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    local, remote, size, rows, src_step, dst_step = np.concatenate(
        [batch.descriptors for batch in batches]
    ).T
    of_row = np.repeat(np.arange(len(rows)), rows)
    row = np.arange(len(of_row)) - np.repeat(np.cumsum(rows) - rows, rows)
    of_byte = np.repeat(np.arange(len(of_row)), size[of_row])
    ends = np.cumsum(size[of_row])
    byte = np.arange(len(of_byte)) - np.repeat(ends - size[of_row], size[of_row])
    src = local[of_row] + row * src_step[of_row]
    dst = remote[of_row] + row * dst_step[of_row]
    return src[of_byte] + byte, dst[of_byte] + byte


#: (TP size, PP size, tp, pp) of a rank.
Place = tuple[int, int, int, int]
#: See :func:`leg`.
LegOf = Callable[
    [tuple[int, ...], int, tuple[int, int], Place, Place, tuple[int, int]],
    tuple[Int64Array, Int64Array],
]


@functools.lru_cache(maxsize=512)
def planner(
    heads: tuple[int, ...], num_layers: int, sizes: tuple[int, int], prefill: Place, decode: Place
) -> tuple[KVPlanner, Int64Array]:
    """And what the prefill rank's memory holds."""
    src = memory(heads, num_layers, sizes[0], 0, prefill[0], prefill[1], prefill[2:])
    dst = memory(heads, num_layers, sizes[1], 1, decode[0], decode[1], decode[2:])
    return KVPlanner(src.spec, src.place, dst.spec, dst.place), src.content


def leg(
    heads: tuple[int, ...],
    num_layers: int,
    sizes: tuple[int, int],
    prefill: Place,
    decode: Place,
    share: tuple[int, int],
) -> tuple[Int64Array, Int64Array]:
    """What one prefill rank writes into one decode rank: destination bytes, and the number
    of what is written there."""
    plans, content = planner(heads, num_layers, sizes, prefill, decode)
    src, dst = tables_for(sizes)
    batches = plans.plan({"kv": src}, {"kv": dst}, (0, num_tokens(sizes)), share)
    here, there = moved(batches)
    return there, content[here]


def num_tokens(block_sizes: tuple[int, int]) -> int:
    """Both tables are full of them: the smaller is used whole."""
    return min(len(SRC_BLOCKS) * block_sizes[0], len(DST_BLOCKS) * block_sizes[1])


@functools.cache
def tables_for(block_sizes: tuple[int, int]) -> tuple[list[int], list[int]]:
    here, there = (-(-num_tokens(block_sizes) // size) for size in block_sizes)
    return list(SRC_BLOCKS[:here]), list(DST_BLOCKS[:there])


def targets_of(case: Case, tp: int, pp: int, dp: int = 0) -> TargetRankMapping:
    decode, prefill = (
        InstanceProfile(tp_size=s.tp, cp_size=s.cp, dp_size=s.dp, pp_size=s.pp)
        for s in (case.decode, case.prefill)
    )
    return map_target_ranks(
        decode,
        prefill,
        RankCoordinates(dp, 0, tp, pp),
        is_mla=case.is_mla,
        all_cp_ranks=case.all_cp,
        num_layers=case.num_layers,
    )


def check_bytes(case: Case, block_sizes: tuple[int, int], leg_of: LegOf | None = None) -> int:
    """Of all ranks of one decode DP group; returns how many legs were planned."""
    legs = 0
    tokens = num_tokens(block_sizes)
    for tp, pp in itertools.product(range(case.decode.tp), range(case.decode.pp)):
        at = (case.decode.tp, case.decode.pp, tp, pp)
        found = []
        for rank, is_dummy in targets_of(case, tp, pp).targets(0):
            if is_dummy:
                continue
            share = (rank.cp, case.prefill.cp) if case.all_cp else (0, 1)
            source = (case.prefill.tp, case.prefill.pp, rank.tp, rank.pp)
            found.append(
                (leg_of or leg)(case.heads, case.num_layers, block_sizes, source, at, share)
            )
            legs += 1
        dst = memory(case.heads, case.num_layers, block_sizes[1], 1, at[0], at[1], at[2:])
        expected = np.where(dst.content // 128 % 1000 < tokens, dst.content, -1)
        check_rank(expected, np.concatenate([f[0] for f in found]),
                   np.concatenate([f[1] for f in found]), case)  # fmt: skip
    return legs


def check_rank(expected: Int64Array, there: Int64Array, what: Int64Array, case: Case) -> None:
    """``expected`` by destination byte; ``what`` is written to ``there``, once each."""
    assert len(there) == 0 or (there.min() >= 0 and there.max() < len(expected)), case
    writers = np.bincount(there, minlength=len(expected))
    is_leased = expected >= 0
    assert not writers[~is_leased].any(), f"{case}: a byte outside the lease is written"
    assert (writers[is_leased] > 0).all(), f"{case}: a byte has no writer"
    assert (writers[is_leased] == 1).all(), f"{case}: a byte is written twice"
    assert (expected[there] == what).all(), f"{case}: a byte of something else"


# --- ranks ----------------------------------------------------------------------------------


def check_ranks(case: Case) -> None:
    """Of all pairs of a decode and a prefill DP group."""
    here = ParallelLayout(case.prefill.size, case.prefill.tp, case.prefill.cp, case.prefill.pp)
    maps = {
        (tp, pp): targets_of(case, tp, pp, dp=case.decode.dp - 1)
        for tp in range(case.decode.tp)
        for pp in range(case.decode.pp)
    }
    for dp in range(case.prefill.dp):
        arriving: Counter[RankCoordinates] = Counter()
        told: dict[RankCoordinates, set[int]] = {}
        for mapping in maps.values():
            targets = mapping.targets(dp)
            ranks = [here.rank(at) for at, _ in targets]
            assert len(set(ranks)) == len(ranks), f"{case}: a rank is asked twice"
            assert all(here.coordinates(r) == at for r, (at, _) in zip(ranks, targets, strict=True))
            assert all(at.dp == dp and 0 <= r < here.world_size for r, (at, _) in
                       zip(ranks, targets, strict=True)), case  # fmt: skip
            real = [at for at, is_dummy in targets if not is_dummy]
            assert len(real) == mapping.required_prefill_response_num, f"{case}: responses"
            arriving.update(at for at, _ in targets)
            for at in real:
                told.setdefault(at, set()).add(mapping.info_num(at))
        for at, numbers in told.items():
            assert numbers == {arriving[at]}, f"{case}: {at} waits for {numbers}"


# --- the sweep ------------------------------------------------------------------------------


class Tally(NamedTuple):
    configurations: int
    plans: int
    legs: int


def chosen(every: int = 1, part: tuple[int, int] = (0, 1)) -> list[Case]:
    """Each ``every``-th case, and of these the part (index, count). What shares memories and
    plans comes together."""
    found = _every(every)
    index, count = part
    return found[len(found) * index // count : len(found) * (index + 1) // count]


@functools.lru_cache(maxsize=4)
def _every(every: int) -> list[Case]:
    found = [case for number, case in enumerate(cases()) if number % every == 0]
    return sorted(found, key=lambda c: (c.heads, c.num_layers, c.decode, c.prefill))


def sweep(
    of: Sequence[Case], block_sizes: tuple[int, int] = (2, 2), progress: bool = False
) -> Tally:
    """Check these cases; raises AssertionError naming the first bad one."""
    ranks_done: set[tuple[Shape, Shape, bool, bool]] = set()
    bytes_done: set[Case] = set()
    count = legs = 0
    started = time.monotonic()
    for case in of:
        count += case.num_configurations
        arrangement = (case.prefill, case.decode, case.is_mla, case.all_cp)
        if arrangement not in ranks_done:
            ranks_done.add(arrangement)
            check_ranks(case)
        core = case.core()
        if core not in bytes_done:
            bytes_done.add(core)
            legs += check_bytes(core, block_sizes)
        if progress and len(ranks_done) % 5000 == 0:
            print(f"{count} configurations, {time.monotonic() - started:.0f} s", flush=True)
    return Tally(count, len(bytes_done), legs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="check every pair of arrangements")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--block-sizes", default="2,2", help="prefill's and decode's")
    given = parser.parse_args(arguments)
    sizes = tuple(int(size) for size in given.block_sizes.split(","))
    started = time.monotonic()
    tally = sweep(chosen(given.every), (sizes[0], sizes[1]), progress=True)
    print(
        f"{tally.configurations} configurations, {tally.plans} cases with plans of their own, "
        f"{tally.legs} legs: every byte has one writer ({time.monotonic() - started:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
