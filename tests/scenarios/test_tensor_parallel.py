"""Prefill on one number of ranks, decode on another: the real model's KV through the planner.

The model is computed by threads, the bytes are moved as plans say: what must hold of a plan
is that decode cannot tell where its KV was computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import attrs
import pytest

from pdcore.engine.weights import LlamaConfig
from pdcore.kv.plan import plan_blocks
from pdcore.kv.spec import KVCacheSpec
from pdcore.testing.runner_rig import Rig, RigSequence
from pdcore.topology import InstanceProfile, RankCoordinates, map_target_ranks
from tests.unit.engine.files import TINY
from tests.unit.engine.ranks import Array, MakeRunner, Model, assert_close, on_ranks, one_rank

#: SmolLM2's heads: 9 of queries, 3 of keys and values.
NINE = attrs.evolve(
    TINY, hidden_size=72, intermediate_size=180, num_heads=9, num_kv_heads=3, head_dim=8
)
PROMPTS = [[random.Random(n).randrange(512) for _ in range(n)] for n in (5, 16, 33)]
NUM_TOKENS = 8

Prefilled = tuple[Rig, list[RigSequence]]


def prefill(make: MakeRunner, seed: int = 1) -> Prefilled:
    rig = Rig(make(), 32, random.Random(seed))
    seqs = rig.sequences(PROMPTS, NUM_TOKENS)
    rig.prefill(seqs, chunk=16)
    return rig, seqs


def receive(sources: Sequence[Prefilled], rig: Rig) -> list[RigSequence]:
    """The prompts' KV into other blocks of this rank, each prefill rank that this one would
    ask (R58) writing what its plan says."""
    spec = rig.runner.kv_cache_spec
    mapping = map_target_ranks(
        InstanceProfile(tp_size=spec.tp_size),
        InstanceProfile(tp_size=len(sources)),
        RankCoordinates(0, 0, spec.tp_rank),
    )
    twins = rig.sequences([seq.token_ids for seq in sources[0][1]], NUM_TOKENS)
    for source, seqs in (sources[tp_rank] for tp_rank in mapping.target_tp_ranks):
        for seq, twin in zip(seqs, twins, strict=True):
            count = len(seq.blocks["full"])
            batches = plan_blocks(
                source.runner.kv_cache_spec,
                source.placement,
                seq.blocks,
                spec,
                rig.placement,
                {key: blocks[:count] for key, blocks in twin.blocks.items()},
            )
            for batch in batches:
                for local, remote, size in batch.pieces():
                    rig.memory[remote : remote + size] = source.memory[local : local + size]
    return twins


@attrs.frozen(eq=False)
class Decoded:
    tokens: list[list[int]]
    kv: Mapping[tuple[int, int], Array]
    spec: KVCacheSpec


def decode(make: MakeRunner, sources: Sequence[Prefilled]) -> Decoded:
    rig = Rig(make(), 40, random.Random(2))
    seqs = receive(sources, rig)
    kv = {
        (i, entry): values
        for i, (seq, prompt) in enumerate(zip(seqs, PROMPTS, strict=True))
        for entry, (_, values) in enumerate(rig.values(seq, len(prompt)))
    }
    rig.decode(seqs, NUM_TOKENS - 1)
    spec = rig.runner.kv_cache_spec
    rig.runner.shutdown()
    return Decoded([s.token_ids[len(p) :] for s, p in zip(seqs, PROMPTS, strict=True)], kv, spec)


@pytest.mark.parametrize(
    ("config", "prefill_tp", "decode_tp"),
    [
        (NINE, 3, 1),
        (NINE, 1, 3),
        (NINE, 9, 3),
        (TINY, 4, 2),
        (TINY, 2, 4),
        (TINY, 4, 1),
        (TINY, 8, 2),
        (TINY, 2, 8),
        (TINY, 4, 8),
        (TINY, 8, 8),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value.num_heads} heads",
)
def test_decode_cannot_tell_where_prefill_ran(
    config: LlamaConfig, prefill_tp: int, decode_tp: int
) -> None:
    """R58, R79, R80: equal, fewer, more ranks than KV heads, on either side: greedy tokens of
    one rank that does both, and on every decode rank its heads of one rank's KV."""
    check_handover(config, prefill_tp, decode_tp)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 2), (2, 4), (4, 4)])
def test_heads_of_another_rank_are_noticed(prefill_tp: int, decode_tp: int) -> None:
    """The mutant asks the ranks in the wrong order: other heads, as many bytes."""
    with pytest.raises(AssertionError):
        check_handover(TINY, prefill_tp, decode_tp, lambda sources: sources[::-1])


def check_handover(
    config: LlamaConfig,
    prefill_tp: int,
    decode_tp: int,
    arrange: Callable[[list[Prefilled]], list[Prefilled]] = lambda sources: sources,
) -> None:
    model = Model.drawn(config)
    alone, seqs = prefill(lambda: one_rank(model), seed=3)
    expected_kv = {
        (i, entry): values
        for i, (seq, prompt) in enumerate(zip(seqs, PROMPTS, strict=True))
        for entry, (_, values) in enumerate(alone.values(seq, len(prompt)))
    }
    alone.decode(seqs, NUM_TOKENS - 1)
    expected = [s.token_ids[len(p) :] for s, p in zip(seqs, PROMPTS, strict=True)]

    sources = arrange(on_ranks(model, prefill_tp, prefill))
    ranks = on_ranks(model, decode_tp, lambda make: decode(make, sources))
    for source, _ in sources:
        source.runner.shutdown()
    for tp_rank, rank in enumerate(ranks):
        assert rank.tokens == expected
        held = rank.spec.entries[0].num_heads
        first = tp_rank * config.num_kv_heads // decode_tp
        for key, values in rank.kv.items():
            heads = expected_kv[key].reshape(-1, config.num_kv_heads, config.head_dim)
            cut = heads[:, first : first + held].reshape(-1)
            assert_close(values, cut, f"tp_rank {tp_rank}, {key}")
