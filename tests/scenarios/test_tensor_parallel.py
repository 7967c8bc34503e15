"""Prefill on one number of ranks, decode on another: the real model's KV through the planner.

The model is computed by threads, the bytes are moved as plans say: what must hold of a plan
is that decode cannot tell where its KV was computed.

Three comparisons, and each is as strict as it can be. What decode has is what prefill's ranks
computed, bit by bit, on every layer. What those computed is what one rank computes, bit by bit,
on the first layer, and up to rounding on the others: their input went through sums over ranks,
which add the same float32 products in another order. The tokens are those of one rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import pytest
import torch

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
    one rank that does both, and on every decode rank its heads of one rank's KV; to the bit
    those of the prefill ranks."""
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
    expected_kv = all_heads([(alone, seqs)], config)
    alone.decode(seqs, NUM_TOKENS - 1)
    expected = [s.token_ids[len(p) :] for s, p in zip(seqs, PROMPTS, strict=True)]

    computed = on_ranks(model, prefill_tp, prefill)
    sent = all_heads(computed, config)
    sources = arrange(computed)
    ranks = on_ranks(model, decode_tp, lambda make: decode(make, sources))
    for source, _ in sources:
        source.runner.shutdown()
    for tp_rank, rank in enumerate(ranks):
        assert rank.tokens == expected
        held = rank.spec.entries[0].num_heads
        first = tp_rank * config.num_kv_heads // decode_tp
        for key, values in rank.kv.items():
            what = f"tp_rank {tp_rank}, {key}"
            assert np.array_equal(values, sent[key][:, first : first + held].reshape(-1)), what
            assert_close(values, expected_kv[key][:, first : first + held].reshape(-1), what)


def all_heads(sources: Sequence[Prefilled], config: LlamaConfig) -> dict[tuple[int, int], Array]:
    """By prompt and entry, shape (positions, all KV heads, head_dim): of the ranks that hold a
    head, the first one's."""
    found: dict[tuple[int, int], Array] = {}
    for tp_rank, (rig, seqs) in reversed(list(enumerate(sources))):
        held = rig.runner.kv_cache_spec.entries[0].num_heads
        first = tp_rank * config.num_kv_heads // len(sources)
        for i, (seq, prompt) in enumerate(zip(seqs, PROMPTS, strict=True)):
            for entry, (_, values) in enumerate(rig.values(seq, len(prompt))):
                own = values.reshape(-1, held, config.head_dim)
                empty = np.zeros((len(own), config.num_kv_heads, config.head_dim))
                heads = found.setdefault((i, entry), empty)
                heads[:, first : first + held] = own
    return found


@pytest.mark.parametrize(
    ("config", "prefill_tp"), [(NINE, 3), (TINY, 2), (TINY, 4), (TINY, 8)], ids=str
)
def test_the_first_layer_is_that_of_one_rank_to_the_bit(
    config: LlamaConfig, prefill_tp: int
) -> None:
    """R79: before the first sum over ranks nothing is added in another order. What a library
    makes of a product with fewer columns is its own affair, so it is asked first."""
    model = Model.drawn(config)
    if not are_columns_exact(config, prefill_tp):
        pytest.skip("this machine's matrix products depend on how many columns there are")
    alone = all_heads([prefill(lambda: one_rank(model), seed=3)], config)
    ranks = all_heads(on_ranks(model, prefill_tp, prefill), config)
    for (prompt, entry), values in ranks.items():
        if entry < 2:  # k and v
            assert np.array_equal(values, alone[prompt, entry]), f"prompt {prompt}, entry {entry}"


def are_columns_exact(config: LlamaConfig, tp_size: int) -> bool:
    """Whether a part of the columns comes out as in the product with all of them."""
    torch.manual_seed(1)
    rows = torch.randn(sum(map(len, PROMPTS)), config.hidden_size)
    weights = torch.randn(config.num_kv_heads * config.head_dim, config.hidden_size)
    count = len(weights) // min(tp_size, config.num_kv_heads)
    return all(
        torch.equal(rows[:n] @ weights[i : i + count].T, (rows[:n] @ weights.T)[:, i : i + count])
        for n in (5, 17, 37, len(rows))
        for i in range(0, len(weights), count)
    )
