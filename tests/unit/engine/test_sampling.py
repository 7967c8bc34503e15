"""Sampling: counter-based draws (D18), top_k, top_p, finite logprobs (R37)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from pdcore.engine.sampling import (
    LOWEST_LOGPROB,
    draw,
    log_probability,
    mix64,
    require_finite,
    uniform,
)
from pdcore.errors import EngineError
from pdcore.types import SamplingParams

Draw = Callable[[np.ndarray, SamplingParams, int, int], int]

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
SAMPLED = SamplingParams(temperature=1.0)


def check_draw(make_draw: Callable[[], Draw]) -> None:
    """D18: two engines, each with a part of the positions, draw what one engine draws."""
    whole = make_draw()
    expected = [whole(LOGITS, SAMPLED, 42, position) for position in range(200)]
    prefill, decode = make_draw(), make_draw()
    first = [prefill(LOGITS, SAMPLED, 42, position) for position in range(100)]
    rest = [decode(LOGITS, SAMPLED, 42, position) for position in range(100, 200)]
    assert first + rest == expected
    assert first != rest
    other = make_draw()
    assert [other(LOGITS, SAMPLED, 43, position) for position in range(200)] != expected


def seeded_generator() -> Draw:
    """The seed's rule: every process seeds the same generator and draws from it in turn."""
    rng = random.Random(42)

    def draw_next(logits: np.ndarray, params: SamplingParams, seed: int, position: int) -> int:
        return rng.choices(range(len(logits)), np.exp(logits).tolist())[0]

    return draw_next


def test_a_draw_depends_only_on_seed_and_position() -> None:
    """D18."""
    check_draw(lambda: draw)


def test_the_seeds_generator_fails_the_check() -> None:
    """D18, mutant."""
    with pytest.raises(AssertionError):
        check_draw(seeded_generator)


def test_uniform_is_uniform() -> None:
    values = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert 0.0 <= min(values) < max(values) < 1.0
    buckets = Counter(int(value * 10) for value in values)
    assert all(850 < n < 1150 for n in buckets.values())
    neighbours = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(neighbours) < 0.05
    assert uniform(-1, 5) == uniform(-1, 5)
    assert mix64(1) != mix64(2)


def test_frequencies_follow_the_probabilities() -> None:
    drawn = Counter(draw(LOGITS, SAMPLED, 7, position) for position in range(4000))
    for token, share in enumerate((0.5, 0.25, 0.15, 0.1)):
        assert drawn[token] / 4000 == pytest.approx(share, abs=0.03)


def test_temperature_flattens() -> None:
    hot = SamplingParams(temperature=100.0)
    drawn = Counter(draw(LOGITS, hot, 7, position) for position in range(2000))
    assert all(n > 400 for n in drawn.values())
    cold = SamplingParams(temperature=0.01)
    assert {draw(LOGITS, cold, 7, position) for position in range(100)} == {0}


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=5.0, top_k=1), {0}),
        (SamplingParams(temperature=5.0, top_k=2), {0, 1}),
        (SamplingParams(temperature=5.0, top_k=9), {0, 1, 2, 3}),
        (SamplingParams(temperature=1.0, top_p=0.4), {0}),
        (SamplingParams(temperature=1.0, top_p=0.6), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=0.8), {0, 1, 2}),
        (SamplingParams(temperature=1.0, top_p=1e-9), {0}),
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.95), {0, 1, 2}),
        (SamplingParams(temperature=0.0, top_p=0.9), {0}),
    ],
)
def test_exactly_the_allowed_tokens_are_drawn(params: SamplingParams, allowed: set[int]) -> None:
    order = np.array([2, 0, 3, 1])
    shuffled = np.empty(4, np.float32)
    shuffled[order] = LOGITS
    drawn = {draw(shuffled, params, 3, position) for position in range(400)}
    assert drawn == {int(order[token]) for token in allowed}


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=1.0, top_p=0.5, top_k=2)])
def test_logits_that_are_no_numbers_still_give_a_token(params: SamplingParams) -> None:
    for broken in (np.nan, np.inf, -np.inf):
        logits = np.full(4, broken, np.float32)
        assert 0 <= draw(logits, params, 1, 2) < 4
        logits = LOGITS.copy()
        logits[2] = broken
        assert 0 <= draw(logits, params, 1, 2) < 4


@pytest.mark.parametrize("top_k", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_is_never_drawn_while_there_is_a_number(temperature: float, top_k: int) -> None:
    """numpy's argmax takes the first NaN for the largest: the engine's own failure would
    then be a token of the answer."""
    logits = LOGITS.copy()
    logits[[0, 2]] = np.nan
    params = SamplingParams(temperature=temperature, top_k=top_k)
    drawn = {draw(logits, params, 3, position) for position in range(200)}
    assert drawn == ({1} if temperature == 0.0 or top_k == 1 else {1, 3})
    assert np.isnan(logits[0]), "the engine's array is not changed"
    logits[1] = np.inf
    assert draw(logits, params, 3, 0) == 1


def test_the_chosen_logit_must_be_a_number() -> None:
    require_finite(-3.0e38)
    for broken in (np.nan, np.inf, -np.inf):
        with pytest.raises(EngineError, match=r"no finite logits .* check the model file"):
            require_finite(broken)


def test_logprobs_are_of_the_model_and_finite() -> None:
    """R37: never infinity or NaN, which JSON cannot carry."""
    assert log_probability(LOGITS, 1) == pytest.approx(np.log(0.25), abs=1e-6)
    assert log_probability(LOGITS + 500, 1) == pytest.approx(np.log(0.25), abs=1e-4)
    for broken in (np.nan, np.inf, -np.inf):
        logits = LOGITS.copy()
        logits[3] = broken
        assert log_probability(logits, 3) == LOWEST_LOGPROB
    assert LOWEST_LOGPROB == -3.4028234663852886e38
