"""Both sides of every leg sum the same bytes, and a single wrong one is found.

On the worlds of :mod:`tests.property.test_resharding`: TP x CP x PP, several managers, windows,
compressed rows, block sizes of each side, shuffled tables.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pdcore.kv.checksums import ByteArray, SumPlan, first_difference, leg_sums, sum_blocks
from pdcore.kv.layout import held_by, seen_from
from pdcore.kv.plan import plan_blocks
from pdcore.kv.spec import KVCacheSpec
from pdcore.topology import RankCoordinates, check_shapes, map_target_ranks, stage_layers
from tests.property.test_resharding import (
    EXAMPLES,
    Rank,
    Scene,
    decode_rank,
    gqa_scene,
    parts,
    prefill_rank,
    published,
    scenes,
    send,
)

#: ``sums(plan, memory)``: the product's, or a mutant.
Sums = Callable[[SumPlan, Mapping[int, ByteArray]], bytes]


@attrs.frozen
class Leg:
    """One prefill rank and one decode rank, after the transfer."""

    src: Rank
    at: RankCoordinates
    dst: Rank
    tp: int
    sent: bytes


def seen_by_decode(scene: Scene, dst: Rank, at: RankCoordinates) -> KVCacheSpec:
    """What decode makes of a prefill rank by its route: names of its layers, its sizes."""
    layers = stage_layers(scene.model.num_layers, scene.prefill.pp_size, at.pp)
    sizes = scene.model.block_sizes
    return held_by(dst.spec, layers, scene.prefill.tp_size, at.tp, sizes)


def share_of(scene: Scene, at: RankCoordinates) -> tuple[int, int]:
    return (at.cp, scene.prefill.cp_size) if scene.all_cp else (0, 1)


def sent_sums(scene: Scene, src: Rank, at: RankCoordinates, dst: Rank, tp: int) -> bytes:
    """At the source, as each part is sent; it knows decode by its endpoint."""
    names = [e.name for e in dst.spec.entries]
    sizes = {k: s for k, s in scene.dst_sizes.items() if k in dst.spec.block_sizes}
    spec, _ = seen_from(src.spec, names, dst.place, scene.decode.tp_size, tp, sizes)
    sums = leg_sums(src.spec, src.place, spec, True)
    there, share = published(scene, dst), share_of(scene, at)
    plans = [sums.plan(src.tables(), there, part, share) for part in parts(scene)]
    return b"".join(sum_blocks(plan, src.memory) for plan in plans)


def problem_at(scene: Scene, leg: Leg, sums: Sums = sum_blocks) -> str:
    """What decode says about a leg."""
    here = leg_sums(leg.dst.spec, leg.dst.place, seen_by_decode(scene, leg.dst, leg.at), False)
    there, share = published(scene, leg.dst), share_of(scene, leg.at)
    plans = [here.plan(there, there, part, share) for part in parts(scene)]
    ours = b"".join(sums(plan, leg.dst.memory) for plan in plans)
    return first_difference(plans, ours, leg.sent)


def legs(scene: Scene) -> Iterator[list[Leg]]:
    """For each decode rank, after everything has arrived there."""
    rng = random.Random(scene.seed)
    check_shapes(scene.decode, scene.prefill, scene.model.num_layers)
    sources: dict[RankCoordinates, Rank] = {}
    for tp, pp in itertools.product(range(scene.decode.tp_size), range(scene.decode.pp_size)):
        dst = decode_rank(scene, tp, pp, rng)
        mapping = map_target_ranks(
            scene.decode,
            scene.prefill,
            RankCoordinates(0, 0, tp, pp),
            is_mla=scene.is_mla,
            all_cp_ranks=scene.all_cp,
            num_layers=scene.model.num_layers,
        )
        found = []
        for at, is_dummy in mapping.targets(0):
            if is_dummy:
                continue
            if at not in sources:
                sources[at] = prefill_rank(scene, at, rng)
            sent = sent_sums(scene, sources[at], at, dst, tp)
            send(scene, sources[at], at, dst, tp, plan_blocks)
            found.append(Leg(sources[at], at, dst, tp, sent))
        yield found


def written(scene: Scene, leg: Leg) -> list[tuple[int, int, int]]:
    """(region, offset, bytes) of everything that the leg's plan writes at decode."""
    names = [e.name for e in leg.dst.spec.entries]
    sizes = {k: s for k, s in scene.dst_sizes.items() if k in leg.dst.spec.block_sizes}
    seen = seen_from(leg.src.spec, names, leg.dst.place, scene.decode.tp_size, leg.tp, sizes)
    return [
        (batch.remote_region, remote, size)
        for part in parts(scene)
        for batch in plan_blocks(
            leg.src.spec, leg.src.place, leg.src.tables(), *seen, published(scene, leg.dst),
            part, share_of(scene, leg.at),
        )
        for _, remote, size in batch.pieces()
    ]  # fmt: skip


def is_read(scene: Scene, leg: Leg, region: int, at: int) -> bool:
    """Whether a query can read this byte. Blocks of other sizes bring rows before a window."""
    for i, entry in enumerate(leg.dst.spec.entries):
        start, stride = leg.dst.place.offsets[i], leg.dst.place.block_strides[i]
        if leg.dst.place.regions[i] != region:
            continue
        block, inside = divmod(at - start, stride)
        if at < start or inside >= entry.item_len or not 0 <= block < leg.dst.place.num_blocks:
            continue
        table = published(scene, leg.dst)[entry.manager_key]
        if entry.sliding_window is None or block not in table:
            return True
        last = (table.index(block) + 1) * entry.block_size
        return last - entry.block_size > scene.num_tokens - entry.sliding_window
    return True


def check_scene(scene: Scene, sums: Sums = sum_blocks) -> None:
    rng = random.Random(scene.seed)
    for found in legs(scene):
        for leg in found:
            assert problem_at(scene, leg, sums) == ""
            spans = written(scene, leg)
            if not spans:
                continue
            for region, offset, size in rng.sample(spans, min(4, len(spans))):
                at = offset + rng.randrange(size)
                if not is_read(scene, leg, region, at):
                    continue
                memory, mask = leg.dst.memory[region], np.uint8(1 << rng.randrange(8))
                memory[at] ^= mask
                # Another leg may write the same byte of copies, but it is this one's too.
                assert "did not arrive as it was sent" in problem_at(scene, leg, sums), (
                    f"byte {at} of region {region} is wrong, and nothing was noticed"
                )
                memory[at] ^= mask
        for leg in found:
            assert problem_at(scene, leg, sums) == "", "the check itself changed a byte"


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(scenes())
def test_both_sides_sum_the_same_and_any_wrong_byte_is_found(scene: Scene) -> None:
    """Issue 4.7 over everything that two instances may have different (R58, R80, R94-R96)."""
    check_scene(scene)


# --- what the check notices -----------------------------------------------------------------


def mutants() -> dict[str, Sums]:
    """Each overlooks something."""

    def only_first_entry(plan: SumPlan, memory: Mapping[int, ByteArray]) -> bytes:
        groups = [g._replace(regions=g.regions[:1], pieces=g.pieces[:, :1]) for g in plan.groups]
        return sum_blocks(SumPlan(tuple(groups)), memory)

    def only_first_row(plan: SumPlan, memory: Mapping[int, ByteArray]) -> bytes:
        groups = []
        for group in plan.groups:
            pieces = group.pieces.copy()
            pieces[:, :, 2] = 1
            groups.append(group._replace(pieces=pieces))
        return sum_blocks(SumPlan(tuple(groups)), memory)

    def nothing(plan: SumPlan, memory: Mapping[int, ByteArray]) -> bytes:
        return b""

    return {
        "one entry of several": only_first_entry,
        "one row of several": only_first_row,
        "nothing": nothing,
    }


def two_entries() -> Scene:
    """TP 2 -> 1: rows are cut; two entries; another block size at decode."""
    scene = gqa_scene()
    entry = scene.model.entries[0]
    spec = attrs.evolve(scene.model, entries=(entry, attrs.evolve(entry, name="layers.0.v")))
    return attrs.evolve(scene, model=spec, dst_sizes={"a": 8})


@pytest.mark.parametrize("name", mutants())
def test_a_sum_that_overlooks_something_is_caught(name: str) -> None:
    sums = mutants()[name]
    with pytest.raises(AssertionError):
        check_scene(two_entries(), sums)


@pytest.mark.parametrize("dst_size", [4, 8, 3])
def test_every_written_byte_is_covered(dst_size: int) -> None:
    """One after the other, with equal blocks (whole ones travel) and others (rows do)."""
    scene = attrs.evolve(two_entries(), dst_sizes={"a": dst_size})
    for found in legs(scene):
        for leg in found:
            for region, offset, size in written(scene, leg):
                for at in range(offset, offset + size):
                    leg.dst.memory[region][at] ^= 1
                    assert problem_at(scene, leg), f"byte {at} of region {region}"
                    leg.dst.memory[region][at] ^= 1
