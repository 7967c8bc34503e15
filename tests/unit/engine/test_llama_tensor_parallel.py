"""A Llama cut over ranks is the same Llama: logits, tokens and KV of one rank, and one answer."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch

from pdcore.engine.base import GroupLost
from pdcore.engine.collective import InProcessGroup
from pdcore.engine.llama import LlamaRunner
from pdcore.engine.llama_model import LlamaModel, shard_weights
from pdcore.engine.shard import TPRank, local_config
from pdcore.engine.weights import LlamaConfig
from pdcore.errors import EngineError
from pdcore.kv.layout import resharded
from pdcore.testing.runner import CHECKS, check_model_runner
from pdcore.testing.runner_rig import Rig
from pdcore.types import Batch, Phase, SamplingParams, StepOutput
from tests.unit.engine.files import TINY
from tests.unit.engine.ranks import (
    MakeRunner,
    Model,
    assert_close,
    assert_equals_one_rank,
    on_ranks,
    one_rank,
    trace,
)

#: SmolLM2's proportions: 9 heads, 3 KV heads, an MLP that 3 divides, and untied.
NINE = attrs.evolve(
    TINY,
    hidden_size=72,
    intermediate_size=180,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
    tie_embeddings=False,
)
PROMPTS = [[random.Random(n).randrange(512) for _ in range(n)] for n in (1, 5, 16, 33, 50)]


@pytest.fixture(scope="module", params=[(TINY, 2), (TINY, 4), (TINY, 8), (NINE, 3), (NINE, 9)])
def group(request: pytest.FixtureRequest) -> tuple[Model, int]:
    config, tp_size = request.param
    return Model.drawn(config), tp_size


@pytest.mark.parametrize("chunk", [None, 7])
def test_ranks_together_are_one_rank(group: tuple[Model, int], chunk: int | None) -> None:
    """The seeded 8-head, 4-KV-head model on 2, 4 and (KV heads copied) 8 ranks, SmolLM2's
    9 heads on 3 and 9: logits and KV within rounding, greedy tokens equal."""
    model, tp_size = group
    whole = trace(lambda: one_rank(model), PROMPTS, 10, chunk=chunk)
    parts = on_ranks(model, tp_size, lambda make: trace(make, PROMPTS, 10, chunk=chunk))
    assert len({tuple(tokens) for tokens in whole.tokens}) == len(PROMPTS)
    assert parts[0].tokens == whole.tokens
    assert_equals_one_rank(model.config, whole, parts)


@pytest.mark.parametrize("tp_size", [2, 8])
def test_bfloat16(tp_size: int) -> None:
    """Partial sums round to 8 bits before they are added: near, not equal. 0.1 is what the
    contract suite allows two ways to compute in bfloat16 (KV_TOLERANCE)."""
    model = Model.drawn(TINY, dtype="bfloat16")
    whole = trace(lambda: one_rank(model), PROMPTS, 6)
    parts = on_ranks(model, tp_size, lambda make: trace(make, PROMPTS, 6, forced=whole.tokens))
    assert_equals_one_rank(TINY, whole, parts, tolerance=0.1)


SAMPLED = SamplingParams(temperature=2.0, top_p=0.9, top_k=50, logprobs=True)


@pytest.mark.parametrize("seed", [None, 1234])
def test_drawn_tokens_and_logprobs_are_the_same_on_every_rank(seed: int | None) -> None:
    """D18: a draw depends on (seed, position); without a seed on rank 0's entropy alone."""
    params = attrs.evolve(SAMPLED, seed=seed)
    model = Model.drawn(TINY)
    parts = on_ranks(model, 4, lambda make: trace(make, PROMPTS, 8, params))
    whole = trace(lambda: one_rank(model), PROMPTS, 8, params)
    assert parts[0].tokens == whole.tokens
    assert_equals_one_rank(TINY, whole, [attrs.evolve(p, logprobs=whole.logprobs) for p in parts])
    found = [row for step in parts[0].logprobs for row in step]
    assert all(part.logprobs == parts[0].logprobs for part in parts)
    expected = [row for step in whole.logprobs for row in step]
    assert np.array(found) == pytest.approx(np.array(expected), abs=1e-3)


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "placement"])
def test_contract(name: str) -> None:
    """The whole suite of runners, on every rank of a group of two."""
    model = Model.drawn(TINY)
    passed = on_ranks(model, 2, lambda make: check_model_runner(make, checks=[name]))
    assert passed == [[name]] * 2


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_what_a_rank_says_and_holds(tp_size: int) -> None:
    """The planner reads the spec: one model (digest, fingerprint), this rank's heads; and the
    weights of a rank are its share, the embedding aside."""
    model = Model.drawn(TINY)
    whole = one_rank(model)
    matrices = sum(t.numel() for name, t in model.weights.items() if "." in name and t.dim() > 1)

    def look(make: MakeRunner) -> None:
        runner = make()
        tp_rank = runner.kv_cache_spec.tp_rank
        assert runner.kv_cache_spec == resharded(whole.kv_cache_spec, tp_size, tp_rank)
        assert runner.kv_cache_spec.digest() == whole.kv_cache_spec.digest()
        assert runner.fingerprint == whole.fingerprint
        assert runner.caps.collectives
        assert (runner.vocab_size, runner.max_model_len) == (512, 256)
        shard = shard_weights(TINY, model.weights, TPRank(tp_size, tp_rank))
        held = sum(t.numel() for name, t in shard.items() if "." in name and t.dim() > 1)
        copies = max(1, tp_size // TINY.num_kv_heads)
        kv_rows = TINY.num_layers * 2 * TINY.num_kv_heads * TINY.head_dim * TINY.hidden_size
        assert held * tp_size == matrices + (copies - 1) * kv_rows
        assert shard["embed"].data_ptr() == model.weights["embed"].data_ptr()
        runner.shutdown()

    on_ranks(model, tp_size, look)
    assert not whole.caps.collectives


def test_only_rank_0_holds_the_output_matrix() -> None:
    model = Model.drawn(NINE)
    shards = [shard_weights(NINE, model.weights, TPRank(3, rank)) for rank in range(3)]
    assert ["head" in shard for shard in shards] == [True, False, False]


@attrs.define
class Seen:
    """What one rank made of one step."""

    output: StepOutput | None = None
    error: str = ""


def attempt(rig: Rig, batch: Batch) -> Seen:
    try:
        return Seen(rig.runner.execute_model(batch))
    except GroupLost:
        raise
    except EngineError as error:
        return Seen(error=str(error))


def batch_for(rig: Rig, *, token: int = 3, block: int = 1, length: int = 4) -> Batch:
    batch = Batch(1, Phase.PREFILL)
    batch.add(1, [token] * length, 0, {"full": [block]}, SamplingParams())
    return batch


def refusing_rank(make: MakeRunner) -> tuple[Seen, Seen]:
    """Rank 1 alone has a block id that it cannot use, then nobody has."""
    rig = Rig(make(), 8, random.Random(0))
    tp_rank = rig.runner.kv_cache_spec.tp_rank
    refused = attempt(rig, batch_for(rig, block=99 if tp_rank == 1 else 1))
    fine = attempt(rig, batch_for(rig))
    rig.runner.shutdown()
    return refused, fine


def check_a_refusal_is_everybodys(
    run: Callable[[Model, Callable[[MakeRunner], tuple[Seen, Seen]]], list[tuple[Seen, Seen]]],
) -> None:
    model = Model.drawn(TINY)
    one = Rig(one_rank(model), 8, random.Random(0))
    expected = one.runner.execute_model(batch_for(one)).token_ids
    try:
        seen = run(model, refusing_rank)
    except GroupLost as error:
        raise AssertionError(f"one rank's refusal broke the group: {error}") from error
    for tp_rank, (refused, fine) in enumerate(seen):
        own = "sequence 1: block ids must be within 1..7, got 99..99"
        assert refused.error == (own if tp_rank == 1 else f"tp_rank 1: {own}")
        assert fine.output is not None
        assert list(fine.output.token_ids) == list(expected)


def test_a_batch_that_one_rank_refuses_fails_on_all_and_the_group_goes_on() -> None:
    """D16: no rank decides alone whether it joins the sums of a step."""
    check_a_refusal_is_everybodys(lambda model, work: on_ranks(model, 2, work))


def test_d16_mutant_a_rank_that_decides_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the vote the others wait in their first sum for a rank that is elsewhere, and
    its next step's sums meet theirs."""
    monkeypatch.setattr(
        "pdcore.engine.step_group.StepGroup.agree", lambda self, batch, prepare: prepare()
    )
    with pytest.raises(AssertionError, match=r"broke the group|differs|assert"):
        check_a_refusal_is_everybodys(lambda model, work: on_ranks(model, 2, work, timeout_s=0.2))


def test_different_batches_are_noticed_before_anything_is_added_up() -> None:
    def differ(make: MakeRunner) -> tuple[Seen, Seen]:
        rig = Rig(make(), 8, random.Random(0))
        tp_rank = rig.runner.kv_cache_spec.tp_rank
        before = bytes(rig.memory)
        other = attempt(rig, batch_for(rig, token=5 if tp_rank == 2 else 3))
        assert bytes(rig.memory) == before
        longer = attempt(rig, batch_for(rig, length=6 if tp_rank == 2 else 4))
        rig.runner.shutdown()
        return other, longer

    config = attrs.evolve(TINY, num_heads=6, num_kv_heads=3, intermediate_size=96)
    for other, longer in on_ranks(Model.drawn(config), 3, differ):
        for seen in (other, longer):
            assert "different batches: tp_rank 2 with another one than tp_rank 0" in seen.error


def test_a_step_without_finite_logits_fails_on_every_rank() -> None:
    """Only rank 0 looks at logits; what it finds is everybody's failure, in the same step."""
    model = Model.drawn(TINY)
    weights = dict(model.weights)
    weights["norm"] = torch.full_like(weights["norm"], torch.nan)

    def run(make: MakeRunner) -> str:
        rig = Rig(make(), 8, random.Random(0))
        errors = [attempt(rig, batch_for(rig)).error for _ in range(2)]
        rig.runner.shutdown()
        assert errors[0] == errors[1]
        return errors[0]

    zero, one = on_ranks(Model(TINY, weights), 2, run)
    assert "no finite logits" in zero
    assert one == f"tp_rank 0: {zero}"


def test_a_rank_that_fails_in_the_middle_of_a_step_ends_the_group_at_once() -> None:
    """The others do not wait for their timeout, and no later step runs on old sums."""

    def run(make: MakeRunner) -> list[str]:
        rig = Rig(make(), 8, random.Random(0))
        if rig.runner.kv_cache_spec.tp_rank == 1:
            rig.runner._pool.pop()
            with pytest.raises(ValueError, match="zip"):
                rig.runner.execute_model(batch_for(rig))
            return []
        lost = []
        for _ in range(2):
            with pytest.raises(GroupLost, match="tp_rank 1 closed it") as caught:
                rig.runner.execute_model(batch_for(rig))
            lost.append(str(caught.value))
        return lost

    lost, _ = on_ranks(Model.drawn(TINY), 2, run, timeout_s=3600.0)
    assert len(lost) == 2


def test_warm_up_and_a_step_do_not_mix() -> None:
    def run(make: MakeRunner) -> str:
        rig = Rig(make(), 8, random.Random(0))
        if rig.runner.kv_cache_spec.tp_rank == 0:
            return attempt(rig, batch_for(rig)).error
        with pytest.raises(EngineError, match="different batches"):
            rig.runner.warm_up()
        return ""

    assert "different batches" in on_ranks(Model.drawn(TINY), 2, run)[0]


def test_an_empty_batch_needs_nobody() -> None:
    model = Model.drawn(TINY)
    end = InProcessGroup(2).join(1)
    weights = shard_weights(TINY, model.weights, end.rank)
    rig = Rig(LlamaRunner(TINY, weights, fingerprint="x", collective=end), 4, random.Random(0))
    assert rig.runner.execute_model(Batch(1, Phase.DECODE)).token_ids == []


# What the comparison above is worth: each of these is a mistake that a split can have.


def doubled_residual(config: LlamaConfig, shard: dict[str, torch.Tensor]) -> None:
    """Every rank adds a whole bias-like term that only one may add: here its columns of o
    hold the other ranks' share too."""
    shard["0.o"] = shard["0.o"] * 2


def neighbours_heads(config: LlamaConfig, shard: dict[str, torch.Tensor]) -> None:
    """K and V rows of another rank."""
    dim = config.head_dim
    q = config.num_heads // 2 * dim
    shard["1.qkv"] = torch.cat([shard["1.qkv"][:q], shard["1.qkv"][q:].roll(dim, 0)])


def swapped_mlp(config: LlamaConfig, shard: dict[str, torch.Tensor]) -> None:
    """gate and up in the wrong order."""
    shard["2.gate_up"] = torch.cat(shard["2.gate_up"].chunk(2)[::-1])


@pytest.mark.parametrize("mutant", [doubled_residual, neighbours_heads, swapped_mlp])
def test_a_wrong_cut_is_caught(
    mutant: Callable[[LlamaConfig, dict[str, torch.Tensor]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model.drawn(TINY)
    whole = trace(lambda: one_rank(model), PROMPTS, 3)

    def cut(
        config: LlamaConfig, weights: dict[str, torch.Tensor], rank: TPRank
    ) -> dict[str, torch.Tensor]:
        shard = shard_weights(config, weights, rank)
        if rank.tp_rank == 1:
            mutant(config, shard)
        return shard

    monkeypatch.setattr("tests.unit.engine.ranks.shard_weights", cut)
    parts = on_ranks(model, 2, lambda make: trace(make, PROMPTS, 3, forced=whole.tokens))
    with pytest.raises(AssertionError, match="differs"):
        assert_equals_one_rank(TINY, whole, parts)


def test_a_sum_that_is_left_out_is_caught() -> None:
    """Megatron's second sum, after down, forgotten: the tolerance is no blanket."""
    model = Model.drawn(TINY)
    rank = TPRank(2, 0)
    alone = LlamaModel(local_config(TINY, rank), shard_weights(TINY, model.weights, rank), None)
    whole = LlamaModel(TINY, model.weights)
    hidden = torch.randn(3, TINY.hidden_size, generator=torch.Generator().manual_seed(1))
    assert_close(alone.logits(hidden).numpy(), whole.logits(hidden).numpy(), "the same head")
    partial = alone._summed(hidden[:, :64], alone._layers[0].o)
    complete = whole._summed(hidden, whole._layers[0].o)
    with pytest.raises(AssertionError, match="differs"):
        assert_close(partial.numpy(), complete.numpy(), "one rank's part of o")


def test_weights_of_another_rank_count_are_refused() -> None:
    """Both shapes are named, as for any other wrong file."""
    model = Model.drawn(TINY)
    end = InProcessGroup(4).join(0)
    halves = shard_weights(TINY, model.weights, TPRank(2, 0))
    with pytest.raises(EngineError, match=r"0\.qkv has shape \(128, 128\), .* \(64, 128\)"):
        LlamaRunner(TINY, halves, fingerprint="x", collective=end)
