"""kv_reshard: a request's KV from one TP size to another, against a descriptor per token.

8,192 tokens in 61 layers, prefill TP 16 -> decode TP 1 and 4 -> 2, GQA and MLA; the blocks of
both sides scattered, which is the worst case. Counted is what one decode rank receives from
all its prefill ranks. Planned and copied is one *leg*: what the last of the writing prefill
ranks sends to it, since each of them is a process of its own.

The peer is the rule of the product that pdcore replaces (D29, R80): at unequal TP sizes every
token of every entry is a descriptor, rows that are whole on every rank included. It is written
here from its description and copies the cheapest way there is in Python, one numpy copy a
descriptor, nothing checked and nobody told. Ours is measured from submit to what the sender
must wait for, through shared memory to another process.

Before anything is timed the receiver's memory is compared with what must be there by
definition (block, token, head), and the rule's result with the same.
"""

from __future__ import annotations

import functools
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from benchmarks.common import (
    RUNS,
    Result,
    check,
    cpu_seconds,
    interleave,
    result_of,
    row,
)
from benchmarks.kv_copy import route
from pdcore.kv.layout import place_entries, resharded
from pdcore.kv.plan import KVPlanner, WriteBatch, lease_ranges, plan_blocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.topology import InstanceProfile, RankCoordinates, map_target_ranks
from pdcore.transports.shm import why_unavailable

NUM_TOKENS = 8192
NUM_LAYERS = 61
#: Layers that are copied in a quick run; planned is always all of it.
QUICK_LAYERS = 6
BLOCK_SIZE = 128
NUM_BLOCKS = NUM_TOKENS // BLOCK_SIZE
#: One more: the null block.
POOL = NUM_BLOCKS + 1
KEY = "kv"
SEED = 17
#: A plan takes less than a tick of some clocks.
PLANS = 20
TP_SIZES = ((16, 1), (4, 2))
MODELS = ("MLA", "GQA")
#: What the definition of this benchmark asks for.
MAX_DESCRIPTORS, MAX_PLAN_MS, MIN_FASTER = 2 * NUM_LAYERS * NUM_BLOCKS, 5.0, 10.0

Piece = tuple[int, int, int]


def model(kind: str, num_layers: int) -> KVCacheSpec:
    """As one rank alone would hold it. MLA: 512 + 64 values a token, the same on every rank;
    GQA: 8 KV heads of 128, K and V, so that two of 16 ranks hold each head."""
    entries: list[KVCacheEntry] = []
    for layer in range(num_layers):
        for name, dim in (
            (("nope", 512), ("rope", 64)) if kind == "MLA" else (("k", 128), ("v", 128))
        ):
            heads = 1 if kind == "MLA" else 8
            entries.append(
                KVCacheEntry(
                    name=f"layers.{layer}.{name}",
                    manager_key=KEY,
                    dtype="bfloat16",
                    block_size=BLOCK_SIZE,
                    num_heads=heads,
                    total_num_heads=heads,
                    head_dim=dim,
                    is_mla=kind == "MLA",
                    layer=layer,
                )
            )
    return KVCacheSpec(tuple(entries))


class Tables(NamedTuple):
    """Block ids of the request on both sides."""

    src: list[int]
    dst: list[int]


def scattered() -> Tables:
    rng = np.random.default_rng(SEED)
    return Tables(*((1 + rng.permutation(NUM_BLOCKS)).tolist() for _ in range(2)))


def in_one_run() -> Tables:
    return Tables(*(list(range(1, POOL)) for _ in range(2)))


@attrs.frozen
class Leg:
    """One prefill rank's part of what one decode rank receives."""

    src: KVCacheSpec
    dst: KVCacheSpec
    src_place: KVPlacement
    dst_place: KVPlacement
    src_bytes: int
    dst_bytes: int

    @classmethod
    def between(cls, whole: KVCacheSpec, src: tuple[int, int], dst: tuple[int, int]) -> Leg:
        """``src`` and ``dst`` are (tp_size, tp_rank)."""
        ours, theirs = resharded(whole, *src), resharded(whole, *dst)
        src_place, src_bytes = place_entries(ours, POOL)
        dst_place, dst_bytes = place_entries(theirs, POOL)
        return cls(ours, theirs, src_place, dst_place, src_bytes, dst_bytes)

    def plan(self, tables: Tables) -> tuple[WriteBatch, ...]:
        """What prefill's core does for every request."""
        return plan_blocks(
            self.src, self.src_place, {KEY: tables.src},
            self.dst, self.dst_place, {KEY: tables.dst},
        )  # fmt: skip

    def first_plan(self, tables: Tables) -> tuple[WriteBatch, ...]:
        """The first request between two ranks that have not met."""
        planner = KVPlanner(self.src, self.src_place, self.dst, self.dst_place)
        return planner.plan({KEY: tables.src}, {KEY: tables.dst})

    def columns(self) -> Iterator[tuple[KVCacheEntry, int, int, KVCacheEntry, int, int]]:
        """Each entry with its offset and block stride, on both sides."""
        a, b = self.src_place, self.dst_place
        yield from zip(
            self.src.entries, a.offsets, a.block_strides,
            self.dst.entries, b.offsets, b.block_strides, strict=True,
        )  # fmt: skip


def legs(kind: str, num_layers: int, tp_sizes: tuple[int, int]) -> list[Leg]:
    """All that the last decode rank receives, from those that are not told to be dummies."""
    prefill, decode = (InstanceProfile(tp_size=size) for size in tp_sizes)
    at = RankCoordinates(0, 0, decode.tp_size - 1)
    targets = map_target_ranks(decode, prefill, at, is_mla=kind == "MLA")
    whole = model(kind, num_layers)
    return [
        Leg.between(whole, (prefill.tp_size, rank), (decode.tp_size, at.tp))
        for rank in targets.target_tp_ranks
        if rank not in targets.dummy_tp_ranks
    ]


def writing(found: Sequence[Leg]) -> Leg:
    """The last leg that is not empty: ranks that hold copies of a head write it once."""
    return [leg for leg in found if leg.plan(in_one_run())][-1]


# --- the peer ---------------------------------------------------------------------------


def per_token(leg: Leg, tables: Tables) -> list[Piece]:
    """The seed's rule: (source offset, destination offset, bytes) of each token's slice, entry
    by entry, for all ranks that hold the heads (copies of a head are sent by each of them)."""
    prefill_tp, decode_tp = leg.src.tp_size, leg.dst.tp_size
    pieces: list[Piece] = []
    for ours, src_at, src_stride, theirs, dst_at, dst_stride in leg.columns():
        s, d = ours.token_bytes, theirs.token_bytes
        if prefill_tp > decode_tp:
            rep = max(1, prefill_tp * s // (decode_tp * d))
            src_slice, dst_slice, length = 0, leg.src.tp_rank // rep * s % d, s
        else:
            rep = max(1, decode_tp * d // (prefill_tp * s))
            src_slice, dst_slice, length = leg.dst.tp_rank // rep * d % s, 0, d
        for token in range(NUM_TOKENS):
            block, inside = divmod(token, BLOCK_SIZE)
            pieces.append(
                (
                    src_at + tables.src[block] * src_stride + inside * s + src_slice,
                    dst_at + tables.dst[block] * dst_stride + inside * d + dst_slice,
                    length,
                )
            )
    return pieces


def one_by_one(source: memoryview, target: memoryview, pieces: Sequence[Piece]) -> None:
    src, dst = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    for from_, to, size in pieces:
        dst[to : to + size] = src[from_ : from_ + size]


# --- the definition ---------------------------------------------------------------------


def heads_of(total: int, tp_size: int, tp_rank: int) -> list[int]:
    """The KV heads of one rank: an even share, or one that neighbours also hold."""
    if total < tp_size:
        return [tp_rank // (tp_size // total)]
    share = total // tp_size
    return list(range(tp_rank * share, (tp_rank + 1) * share))


def write_expected(leg: Leg, tables: Tables, source: memoryview, target: memoryview) -> None:
    """What must be in the receiver's memory, in ``target`` (zeros before)."""
    src, dst = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    for ours, src_at, _, theirs, dst_at, _ in leg.columns():
        shape = POOL, BLOCK_SIZE
        size = ours.head_bytes
        there = src[src_at : src_at + POOL * ours.item_len].reshape(*shape, -1, size)
        here = dst[dst_at : dst_at + POOL * theirs.item_len].reshape(*shape, -1, size)
        if ours.is_mla:
            have = want = [0]
        else:
            have = heads_of(ours.total_num_heads, leg.src.tp_size, leg.src.tp_rank)
            want = heads_of(theirs.total_num_heads, leg.dst.tp_size, leg.dst.tp_rank)
        for head in set(have) & set(want):
            here[tables.dst, :, want.index(head)] = there[tables.src, :, have.index(head)]


# --- the benchmark ----------------------------------------------------------------------


def rows_of_count(label: str, found: Sequence[Leg]) -> Iterator[Result]:
    """Descriptors for one decode rank, blocks scattered and in one run."""
    peers = len(found) * 2 * NUM_LAYERS * NUM_TOKENS
    most = sum(MAX_DESCRIPTORS for leg in found if leg.plan(in_one_run()))
    for how, tables in (("scattered", scattered()), ("in one run", in_one_run())):
        value = sum(len(batch.descriptors) for leg in found for batch in leg.plan(tables))
        counted = row(
            label,
            f"descriptors, {how}",
            "",
            [value],
            "per token",
            [peers],
            better="lower",
            target=f"<= {most}: one per block, entry and writing rank",
            meets=at_most(most / peers),
        )
        yield {**counted, "value": value, "peer_value": peers}


def rows_of_plan(label: str, leg: Leg, runs: int) -> Iterator[Result]:
    """CPU milliseconds to plan one leg."""
    tables = scattered()
    lease = functools.partial(lease_ranges, leg.dst_place, leg.dst, {KEY: tables.dst})
    timed = interleave(
        {
            "planning a leg": cpu_ms(functools.partial(leg.plan, tables)),
            "the first of a pair": cpu_ms(functools.partial(leg.first_plan, tables)),
            "decode's lease": cpu_ms(lease),
            "peer": cpu_ms(functools.partial(per_token, leg, tables), 1),
        },
        runs,
        warmup=False,
    )
    theirs = timed.pop("peer")
    for metric, ours in timed.items():
        found = row(
            label,
            metric,
            "ms",
            ours,
            "per token",
            theirs,
            better="lower",
            target=f"<= {MAX_PLAN_MS} ms",
        )
        found["meets"] = statistics.median(ours) <= MAX_PLAN_MS
        yield found


def cpu_ms(work: Callable[[], object], times: int = PLANS) -> Callable[[], float]:
    def repeat() -> None:
        for _ in range(times):
            work()

    return lambda: 1000 * cpu_seconds(repeat) / times


def rows_of_copy(label: str, leg: Leg, runs: int) -> Iterator[Result]:
    """CPU milliseconds to copy one leg: descriptors at hand, and planned anew each time. All of
    it is done by this process; the receiver of shared memory only looks on."""
    tables = scattered()
    pieces = per_token(leg, tables)
    (batch,) = leg.plan(tables)  # all entries of a side lie in one region
    name = "loopback" if why_unavailable() else "shm"
    with route(name, leg.src_bytes, leg.dst_bytes) as one:
        here = one.source.buffer, one.scratch.buffer
        write_expected(leg, tables, *here)
        expected = zlib.crc32(one.scratch.buffer)
        lease = one.lease(lease_ranges(leg.dst_place, leg.dst, {KEY: tables.dst})[0])
        one.send(batch.descriptors, lease)
        check(one.peer.checksum(one.target) == expected, f"{label}: other bytes arrived")
        np.frombuffer(one.scratch.buffer, np.uint8)[:] = 0
        one_by_one(*here, pieces)
        check(zlib.crc32(one.scratch.buffer) == expected, f"{label}: the rule has other bytes")
        plain = np.array([(*piece, 1, 0, 0) for piece in pieces], np.int64)
        timed = interleave(
            {
                "copy": cpu_ms(lambda: one.send(batch.descriptors, lease), 1),
                "copy, numpy": cpu_ms(lambda: one_by_one(*here, pieces), 1),
                f"copy, {name}": cpu_ms(lambda: one.send(plain, lease), 1),
                "both": cpu_ms(lambda: one.send(leg.plan(tables)[0].descriptors, lease), 1),
                "both, numpy": cpu_ms(lambda: one_by_one(*here, per_token(leg, tables)), 1),
            },
            runs,
        )
    size = f"a leg of {batch.num_bytes >> 20} MiB"
    for ours, theirs, metric, is_judged in (
        ("copy", "numpy", f"copying {size}", True),
        ("copy", name, f"copying {size}", False),
        ("both", "numpy", f"planning and copying {size}", False),
    ):
        yield row(
            f"{label}/{name}",
            metric,
            "ms",
            timed[ours],
            f"per token, {theirs}",
            timed[f"{ours}, {theirs}"],
            better="lower",
            target=f"ratio <= {1 / MIN_FASTER}" if is_judged else "",
            meets=at_most(1 / MIN_FASTER) if is_judged else None,
        )


def at_most(most: float) -> Callable[[float], bool]:
    return lambda ratio: ratio <= most


def run(quick: bool) -> Result:
    num_layers = QUICK_LAYERS if quick else NUM_LAYERS
    rows: list[Result] = []
    for kind in MODELS:
        for tp_sizes in TP_SIZES:
            label = f"kv_reshard/{kind} {tp_sizes[0]}->{tp_sizes[1]}"
            found = legs(kind, NUM_LAYERS, tp_sizes)
            rows += rows_of_count(label, found)
            rows += rows_of_plan(label, writing(found), RUNS)
            rows += rows_of_copy(label, writing(legs(kind, num_layers, tp_sizes)), RUNS)
    return result_of(
        "kv_reshard", rows, tokens=NUM_TOKENS, layers=NUM_LAYERS, copied_layers=num_layers
    )
