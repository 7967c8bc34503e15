"""Real bytes from every rank of a prefill instance into every rank of a decode instance.

A model of several managers (full attention, windows, compressed rows, MLA, head-major blocks,
quantised values with scales), TP x CP x PP on one side and TP x PP on the other, block sizes
of each side, tables as :class:`pdcore.kv.cache.KVBlocks` makes them with their ids shuffled.
What must arrive is written down from the definition: token t, layer l, head h.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdcore.kv.cache import KVBlocks
from pdcore.kv.layout import place_entries, resharded, seen_from, staged
from pdcore.kv.plan import WriteBatch, lease_ranges, plan_blocks
from pdcore.kv.slices import check_reshard
from pdcore.kv.spec import HEAD_MAJOR, TOKEN_MAJOR, KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.topology import InstanceProfile, RankCoordinates, check_shapes, map_target_ranks
from tests.property.topology_sweep import divides, heads_of

Bytes = NDArray[np.uint8]
Plan = Callable[..., tuple[WriteBatch, ...]]

NUM_BLOCKS, MAX_LEN = 64, 64
#: At length too: an example takes a tenth of a second, and a test that takes two minutes
#: counts as hanging.
EXAMPLES = min(500, settings.default.max_examples if settings.default else 100)


@attrs.frozen
class Scene:
    """One transfer. ``dst_sizes`` are decode's block sizes by manager key."""

    model: KVCacheSpec
    dst_sizes: Mapping[str, int]
    prefill: InstanceProfile
    decode: InstanceProfile
    all_cp: bool
    num_tokens: int
    #: Where prefill's chunks end, the last one at ``num_tokens``.
    chunks: tuple[int, ...]
    seed: int

    @property
    def decode_model(self) -> KVCacheSpec:
        entries = tuple(
            attrs.evolve(e, block_size=self.dst_sizes[e.manager_key]) for e in self.model.entries
        )
        return attrs.evolve(self.model, entries=entries)

    @property
    def is_mla(self) -> bool:
        return all(e.is_mla for e in self.model.entries)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    sizes = [n for n in (1, 2, 3, 4, 6, 8) if divides(heads, n)]
    prefill_tp = draw(st.sampled_from(sizes))
    decode_tp = draw(st.sampled_from([n for n in sizes if divides(n, prefill_tp)]))
    num_layers = draw(st.integers(1, 5))
    stages = range(1, num_layers + 1)
    prefill_pp = draw(st.sampled_from(stages))
    decode_pp = draw(st.sampled_from([n for n in stages if divides(n, prefill_pp)]))
    cp = draw(st.sampled_from([1, 1, 2, 3]))
    entries: list[KVCacheEntry] = []
    dst_sizes: dict[str, int] = {}
    for key in draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]])):
        kinds = entries_of(draw, key, heads, equal_tp=prefill_tp == decode_tp)
        ratio = kinds[0].compress_ratio
        dst_sizes[key] = ratio * draw(st.sampled_from([kinds[0].storage_block_size, 1, 2, 3, 4, 6]))
        entries.extend(
            attrs.evolve(e, name=f"layers.{layer}.{e.name}", layer=layer)
            for layer in range(num_layers)
            for e in kinds
            # A manager may serve only some layers, as alternating windows do.
            if key == "a" or layer % 2 == (key == "b")
        )
    model = KVCacheSpec(tuple(sorted(entries, key=lambda e: e.layer)))
    num_tokens = draw(st.integers(1, MAX_LEN - 8))
    align = math.lcm(*model.block_sizes.values())
    ends = sorted(
        {n // align * align for n in draw(st.lists(st.integers(1, num_tokens), max_size=3))}
    )
    return Scene(
        model,
        dst_sizes,
        InstanceProfile(tp_size=prefill_tp, cp_size=cp, pp_size=prefill_pp),
        InstanceProfile(tp_size=decode_tp, pp_size=decode_pp),
        draw(st.booleans()),
        num_tokens,
        (*(n for n in ends if 0 < n < num_tokens), num_tokens),
        draw(st.integers(0, 2**32 - 1)),
    )


def entries_of(draw: st.DrawFn, key: str, heads: int, *, equal_tp: bool) -> list[KVCacheEntry]:
    """Of one manager key and layer."""
    ratio = draw(st.sampled_from([1, 1, 1, 2]))
    base = KVCacheEntry(
        name=f"{key}.k",
        manager_key=key,
        dtype=draw(st.sampled_from(["uint8", "bfloat16", "int8"])),
        block_size=ratio * draw(st.sampled_from([1, 2, 3, 4, 6])),
        num_heads=heads,
        total_num_heads=heads,
        head_dim=draw(st.integers(1, 3)),
        layout=draw(st.sampled_from([TOKEN_MAJOR, TOKEN_MAJOR, HEAD_MAJOR])),
        sliding_window=draw(st.sampled_from([None, None, 1, 3, 8, 17])),
        compress_ratio=ratio,
    )
    kind = draw(st.sampled_from(["gqa", "mla", "int8"]))
    if kind == "mla":
        nope = attrs.evolve(base, num_heads=1, total_num_heads=1, is_mla=True)
        return [nope, attrs.evolve(nope, name=f"{key}.rope", head_dim=1)]
    if kind == "gqa":
        # The other entry of a key may have a row per token where this one has fewer.
        return [base, attrs.evolve(base, name=f"{key}.v", head_dim=2, compress_ratio=1)]
    scale = attrs.evolve(base, name=f"{key}.scale", dtype="float32", head_dim=1)
    if equal_tp and draw(st.booleans()):
        scale = attrs.evolve(scale, num_heads=1, is_per_rank=True)
    return [attrs.evolve(base, dtype="int8"), scale]


# --- memory -------------------------------------------------------------------------------


class Rank:
    """One rank: noise everywhere, in two regions, and its block tables with shuffled ids."""

    def __init__(self, spec: KVCacheSpec, rng: random.Random) -> None:
        self.spec = spec
        place, size = place_entries(spec, NUM_BLOCKS, alignment=rng.choice([1, 8, 64]))
        regions = tuple(rng.choice([3, 5]) for _ in spec.entries)
        if rng.random() < 0.3:  # entries of a block side by side
            starts = list(itertools.accumulate((e.item_len for e in spec.entries), initial=0))
            total, count = starts[-1], len(spec.entries)
            place = KVPlacement(NUM_BLOCKS, place.regions, tuple(starts[:-1]), (total,) * count)
            size = NUM_BLOCKS * total
        self.place = attrs.evolve(place, regions=regions)
        noise = np.random.default_rng(rng.randrange(1 << 32))
        self.memory = {r: noise.integers(0, 256, size, dtype=np.uint8) for r in (3, 5)}
        self.blocks = KVBlocks(spec, NUM_BLOCKS, MAX_LEN)
        self._ids = {
            key: [0, *rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)] for key in spec.block_sizes
        }

    def table(self, key: str) -> list[int]:
        return [self._ids[key][b] for b in self.blocks.get_block_ids(1)[key]]

    def tables(self) -> dict[str, list[int]]:
        return {key: self.table(key) for key in self.spec.block_sizes}

    def row(self, i: int, row: int) -> Bytes | None:
        """Row number ``row`` of entry i as (heads, bytes), a view; None without a block."""
        entry = self.spec.entries[i]
        index, inside = divmod(row, entry.storage_block_size)
        block = self.table(entry.manager_key)[index]
        if not block:
            return None
        start = self.place.offsets[i] + block * self.place.block_strides[i]
        data = self.memory[self.place.regions[i]][start : start + entry.item_len]
        if entry.layout == HEAD_MAJOR:
            return data.reshape(entry.num_heads, entry.storage_block_size, -1)[:, inside]
        return data.reshape(entry.storage_block_size, entry.num_heads, -1)[inside]


def content(scene: Scene, entry: KVCacheEntry, row: int, tp: int, rank: int) -> Bytes:
    """What that row of that entry must hold on that rank, from a number generator that knows
    only entry, row and head."""
    if entry.is_mla:
        heads = [0]
    elif entry.is_per_rank:
        heads = [1000 + rank]
    else:
        heads = heads_of(entry.total_num_heads, tp, rank)
    return np.array(
        [
            list(random.Random(f"{scene.seed} {entry.name} {row} {h}").randbytes(entry.head_bytes))
            for h in heads
        ],
        np.uint8,
    )


def prefill_rank(scene: Scene, at: RankCoordinates, rng: random.Random) -> Rank:
    """Has computed the whole prompt, chunk by chunk."""
    part = resharded(
        staged(scene.model, scene.prefill.pp_size, at.pp), scene.prefill.tp_size, at.tp
    )
    rank = Rank(part, rng)
    for start, end in itertools.pairwise((0, *scene.chunks)):
        assert rank.blocks.allocate_slots(1, start, end - start)
    for i, entry in enumerate(part.entries):
        for row in range(-(-scene.num_tokens // entry.compress_ratio)):
            view = rank.row(i, row)
            if view is not None:
                view[:] = content(scene, entry, row, scene.prefill.tp_size, at.tp)
    return rank


def decode_rank(scene: Scene, tp: int, pp: int, rng: random.Random) -> Rank:
    """Has leased blocks for the prompt; it takes one more for what it generates."""
    model = staged(scene.decode_model, scene.decode.pp_size, pp)
    rank = Rank(resharded(model, scene.decode.tp_size, tp), rng)
    assert rank.blocks.allocate_slots(1, scene.num_tokens, 1)
    return rank


def published(scene: Scene, rank: Rank) -> dict[str, list[int]]:
    return {
        key: rank.table(key)[: -(-scene.num_tokens // size)]
        for key, size in rank.spec.block_sizes.items()
    }


# --- the transfer -------------------------------------------------------------------------


def parts(scene: Scene) -> Iterator[tuple[int, int]]:
    """Early sends per chunk; with windows one send at the end, as the prefill core does."""
    if any(e.sliding_window is not None for e in scene.model.entries):
        return iter([(0, scene.num_tokens)])
    return itertools.pairwise((0, *scene.chunks))


def send(scene: Scene, src: Rank, at: RankCoordinates, dst: Rank, tp: int, plan: Plan) -> None:
    """Everything that one prefill rank writes into one decode rank, which it sees only by
    what an endpoint says."""
    names = [e.name for e in dst.spec.entries]
    sizes = {k: s for k, s in scene.dst_sizes.items() if k in dst.spec.block_sizes}
    seen = seen_from(src.spec, names, dst.place, scene.decode.tp_size, tp, sizes)
    share = (at.cp, scene.prefill.cp_size) if scene.all_cp else (0, 1)
    there = published(scene, dst)
    for part in parts(scene):
        batches = plan(src.spec, src.place, src.tables(), *seen, there, part, share)
        for batch in batches:
            source, target = src.memory[batch.local_region], dst.memory[batch.remote_region]
            for local, remote, size in batch.pieces():
                assert 0 <= local <= len(source) - size
                assert 0 <= remote <= len(target) - size
                target[remote : remote + size] = source[local : local + size]


def check_arrived(scene: Scene, rank: Rank, tp: int, before: Mapping[int, Bytes]) -> None:
    for i, entry in enumerate(rank.spec.entries):
        window = entry.sliding_window
        first = 0 if window is None else max(0, scene.num_tokens - window + 1)
        ratio = entry.compress_ratio
        for row in range(first // ratio, -(-scene.num_tokens // ratio)):
            view = rank.row(i, row)
            assert view is not None, f"{entry.name} row {row}: a window without its block"
            expected = content(scene, entry, row, scene.decode.tp_size, tp)
            assert (view == expected).all(), f"{entry.name} row {row}: other bytes"
    leased = {r: np.zeros(len(data), bool) for r, data in rank.memory.items()}
    for i, entry in enumerate(rank.spec.entries):
        for block in published(scene, rank)[entry.manager_key]:
            start = rank.place.offsets[i] + block * rank.place.block_strides[i]
            if block:
                leased[rank.place.regions[i]][start : start + entry.item_len] = True
    for region, mask in leased.items():
        same = rank.memory[region] == before[region]
        assert same[~mask].all(), "a byte outside the lease has changed"
    for region, ranges in lease_ranges(rank.place, rank.spec, published(scene, rank)).items():
        told = np.zeros(len(leased[region]), bool)
        for start, end in ranges.tolist():
            told[start:end] = True
        assert (told == leased[region]).all()


def check_scene(scene: Scene, plan: Plan = plan_blocks) -> None:
    rng = random.Random(scene.seed)
    check_shapes(scene.decode, scene.prefill, scene.model.num_layers)
    check_reshard(scene.model, scene.prefill.tp_size, scene.decode.tp_size)
    assert scene.model.digest() == scene.decode_model.digest()
    sources: dict[RankCoordinates, Rank] = {}
    for tp, pp in itertools.product(range(scene.decode.tp_size), range(scene.decode.pp_size)):
        dst = decode_rank(scene, tp, pp, rng)
        before = {region: data.copy() for region, data in dst.memory.items()}
        mapping = map_target_ranks(
            scene.decode,
            scene.prefill,
            RankCoordinates(0, 0, tp, pp),
            is_mla=scene.is_mla,
            all_cp_ranks=scene.all_cp,
            num_layers=scene.model.num_layers,
        )
        for at, is_dummy in mapping.targets(0):
            if is_dummy:
                continue
            if at not in sources:
                sources[at] = prefill_rank(scene, at, rng)
            send(scene, sources[at], at, dst, tp, plan)
        check_arrived(scene, dst, tp, before)


@settings(max_examples=EXAMPLES)
@given(scenes())
def test_bytes_arrive_where_they_belong_and_nowhere_else(scene: Scene) -> None:
    """R58, R80, R94-R96, R110-R113, D29, D36, D37: invariant 5 over everything that two
    instances may have different."""
    check_scene(scene)


# --- what the check notices -----------------------------------------------------------------


def gqa_scene(**changes: object) -> Scene:
    entry = KVCacheEntry("layers.0.k", "a", "uint8", 4, 4, 4, 2)
    scene = Scene(
        KVCacheSpec((entry,)),
        {"a": 4},
        InstanceProfile(tp_size=2),
        InstanceProfile(tp_size=1),
        False,
        13,
        (13,),
        5,
    )
    return attrs.evolve(scene, **changes)


def with_nulls(plan: Plan) -> Plan:
    """Mutant: null placeholders are transferred as if they were blocks, as the seed does."""

    def planned(
        src: KVCacheSpec, a: KVPlacement, s: Mapping[str, Sequence[int]],
        dst: KVCacheSpec, b: KVPlacement, d: Mapping[str, Sequence[int]],
        tokens: tuple[int, int], share: tuple[int, int],
    ) -> tuple[WriteBatch, ...]:  # fmt: skip
        out = list(plan(src, a, s, dst, b, d, tokens, share))
        for i, entry in enumerate(src.entries):
            if 0 in d[entry.manager_key]:
                row = [[a.offsets[i], b.offsets[i], entry.item_len, 1, 0, 0]]
                out.append(WriteBatch(a.regions[i], b.regions[i], np.array(row, np.int64)))
        return tuple(out)

    return planned


def test_d37_mutant_that_sends_null_blocks_is_caught() -> None:
    """D37: the null block of decode is nobody's lease."""
    (entry,) = gqa_scene().model.entries
    scene = gqa_scene(
        model=KVCacheSpec((attrs.evolve(entry, sliding_window=3),)), prefill=InstanceProfile()
    )
    check_scene(scene)
    with pytest.raises(AssertionError, match="outside the lease"):
        check_scene(scene, with_nulls(plan_blocks))


def test_d36_mutant_that_cuts_head_major_blocks_in_every_row_is_caught() -> None:
    """D36: the seed's rule for unequal TP, whatever the layout."""

    def token_major(src: KVCacheSpec, a: KVPlacement, s: object, dst: KVCacheSpec,
                    *rest: object) -> tuple[WriteBatch, ...]:  # fmt: skip
        turned = [
            attrs.evolve(x, entries=tuple(attrs.evolve(e, layout=TOKEN_MAJOR) for e in x.entries))
            for x in (src, dst)
        ]
        return plan_blocks(turned[0], a, s, turned[1], *rest)

    (entry,) = gqa_scene().model.entries
    scene = gqa_scene(model=KVCacheSpec((attrs.evolve(entry, layout=HEAD_MAJOR),)))
    check_scene(scene)
    with pytest.raises(AssertionError, match="other bytes"):
        check_scene(scene, token_major)


def test_a_mutant_that_pairs_blocks_by_index_whatever_their_size_is_caught() -> None:
    """R94: with block sizes of each side, block n is not block n."""

    def by_index(src: KVCacheSpec, a: KVPlacement, s: object, dst: KVCacheSpec,
                 *rest: object) -> tuple[WriteBatch, ...]:  # fmt: skip
        same = tuple(
            attrs.evolve(e, block_size=o.block_size)
            for e, o in zip(dst.entries, src.entries, strict=True)
        )
        place, tables, _, share = rest
        count = min(len(next(iter(t.values()))) for t in (s, tables))
        tokens = (0, count * src.entries[0].block_size)
        return plan_blocks(src, a, s, attrs.evolve(dst, entries=same), place, tables, tokens, share)

    scene = gqa_scene(dst_sizes={"a": 6}, prefill=InstanceProfile())
    check_scene(scene)
    with pytest.raises(AssertionError, match=r"other bytes|outside the lease"):
        check_scene(scene, by_index)
