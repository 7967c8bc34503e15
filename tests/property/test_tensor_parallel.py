"""Any Llama that divides, on any number of ranks that divide it, is the Llama of one rank.

Shapes, weights, prompts, chunks, phases and sampling are drawn. Ranks must agree to the bit
on what they say; with one rank they agree up to rounding: logits and KV within a tolerance
(tests/unit/engine/ranks.py), greedy tokens wherever the best token leads by more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.engine.step_group import Choice, StepGroup
from pdcore.engine.weights import LlamaConfig
from pdcore.types import SamplingParams
from tests.unit.engine.ranks import (
    TOLERANCE,
    Model,
    Trace,
    assert_equals_one_rank,
    on_ranks,
    one_rank,
    trace,
)

VOCAB = 67
MAX_PROMPT = 40
#: One is up to seven runners: at length three hundred of them are a minute already.
EXAMPLES = min(300, max(10, settings.default.max_examples // 2))


@attrs.frozen
class Case:
    config: LlamaConfig
    tp_size: int
    seed: int
    prompts: list[list[int]]
    num_tokens: int
    chunk: int | None
    block_size: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """KV heads divide over the ranks, or the ranks over the KV heads; MLP units odd or even."""
    tp_size = draw(st.sampled_from([2, 3, 4, 6]))
    copies = draw(st.sampled_from([n for n in (1, 2, 3) if tp_size % n == 0]))
    kv_heads = tp_size // copies * (1 if copies > 1 else draw(st.integers(1, 2)))
    heads_per_rank = draw(st.integers(1, 3))
    # A rank's query heads read one KV head where heads are copied, else a whole group each.
    heads = tp_size * heads_per_rank if copies > 1 else kv_heads * heads_per_rank
    config = LlamaConfig(
        num_layers=draw(st.integers(1, 3)),
        hidden_size=draw(st.sampled_from([24, 40, 64])),
        intermediate_size=tp_size * draw(st.integers(3, 12)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 8, 10])),
        vocab_size=VOCAB,
        max_model_len=64,
        tie_embeddings=draw(st.booleans()),
    )
    prompt = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_PROMPT)
    return Case(
        config=config,
        tp_size=tp_size,
        seed=draw(st.integers(0, 1 << 32)),
        prompts=draw(st.lists(prompt, min_size=1, max_size=4)),
        num_tokens=draw(st.integers(1, 5)),
        chunk=draw(st.sampled_from([None, 1, 7, 16])),
        block_size=draw(st.sampled_from([4, 16])),
    )


def run(case: Case, params: SamplingParams, forced: Trace | None) -> list[Trace]:
    model = Model.drawn(case.config, case.seed)
    follow = None if forced is None else forced.tokens
    return on_ranks(
        model,
        case.tp_size,
        lambda make: trace(
            make, case.prompts, case.num_tokens, params, chunk=case.chunk, forced=follow
        ),
        block_size=case.block_size,
    )


def run_whole(case: Case, params: SamplingParams) -> Trace:
    model = Model.drawn(case.config, case.seed)
    return trace(
        lambda: one_rank(model, block_size=case.block_size),
        case.prompts,
        case.num_tokens,
        params,
        chunk=case.chunk,
    )


def check_greedy_tokens(found: Sequence[Sequence[int]], whole: Trace) -> None:
    for said, expected, rows in zip(found, whole.tokens, whole.logits, strict=True):
        for token, best, row in zip(said, expected, rows, strict=True):
            lead = row[best] - np.delete(row, best).max()
            # Twice the tolerance: both tokens may have moved.
            assert token == best or lead <= 2 * TOLERANCE * np.abs(row).max()


@settings(max_examples=EXAMPLES)
@given(case=cases())
def test_greedy(case: Case) -> None:
    whole = run_whole(case, SamplingParams())
    parts = run(case, SamplingParams(), whole)
    assert_equals_one_rank(case.config, whole, parts)
    check_greedy_tokens(parts[0].tokens, whole)


@settings(max_examples=EXAMPLES)
@given(
    case=cases(),
    temperature=st.sampled_from([0.0, 0.5, 3.0]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    seed=st.none() | st.integers(0, (1 << 63) - 1),
    logprobs=st.booleans(),
)
def test_ranks_say_the_same(
    case: Case, temperature: float, top_p: float, top_k: int, seed: int | None, logprobs: bool
) -> None:
    """D18: tokens and logprobs equal to the bit, whatever is drawn; nobody is forced here, so
    that a first difference between ranks would refuse the next batch."""
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, logprobs=logprobs
    )
    parts = run(case, params, None)
    assert all(part.tokens == parts[0].tokens for part in parts)
    assert all(part.logprobs == parts[0].logprobs for part in parts)


def test_a_rank_that_chooses_for_itself_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """D18: the mutant draws on each rank with its own randomness, as workers of the earlier
    system did without a seed."""

    def alone(self: StepGroup, num_tokens: int, choose: Callable[[], Choice]) -> Choice:
        return choose()

    monkeypatch.setattr("pdcore.engine.step_group.StepGroup.share", alone)
    entropy = iter(range(100))
    monkeypatch.setattr(
        "pdcore.engine.llama.LlamaRunner._seed", lambda self, params, seq_id: next(entropy)
    )
    config = LlamaConfig(
        num_layers=1,
        hidden_size=24,
        intermediate_size=12,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_model_len=64,
    )
    case = Case(config, 2, 1, [[1, 2, 3]], 1, None, 16)
    parts = run(case, SamplingParams(temperature=50.0), None)
    with pytest.raises(AssertionError):
        assert all(part.tokens == parts[0].tokens for part in parts)
