"""D45: whatever an engine returns either fits the batch or fails the batch."""

from __future__ import annotations

import pytest

from pdcore.errors import EngineError
from pdcore.scheduler.outputs import LOWEST_LOGPROB, check_output
from pdcore.types import Batch, Phase, SamplingParams, StepOutput


def batch_of(*sample: bool) -> Batch:
    batch = Batch(1, Phase.DECODE)
    for i, wanted in enumerate(sample):
        batch.add(i, [5], 3, {}, SamplingParams(), sample=wanted)
    return batch


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[1]],
        [[1], [2], [3]],
        [[1], None],
        [[1], []],
        [[1], [-1]],
        [[1], [100]],
        [[1], [2**70]],
        [1, 2],
        [[1], ["a"]],
        [[1], [1.5]],
        [[1], [True]],
    ],
)
def test_what_does_not_fit_is_an_engine_error(rows: list) -> None:
    with pytest.raises(EngineError):
        check_output(batch_of(True, True), StepOutput(rows), 100)


def test_a_token_for_a_sequence_that_was_not_sampled_is_refused() -> None:
    with pytest.raises(EngineError, match="other sequences"):
        check_output(batch_of(True, False), StepOutput([[1], [2]]), 100)


@pytest.mark.parametrize("logprobs", [[], [[0.1]], [[0.1], [0.2, 0.3]], [[0.1], []]])
def test_logprobs_must_match_the_tokens(logprobs: list) -> None:
    with pytest.raises(EngineError):
        check_output(batch_of(True, True), StepOutput([[1], [2]], logprobs), 100)


def test_non_finite_logprobs_are_replaced() -> None:
    """R37: a NaN of one request must not cost the others their answer."""
    output = StepOutput([[1], [2]], [[float("nan")], [float("-inf")]])
    checked = check_output(batch_of(True, True), output, 100)
    assert checked.logprobs == [[LOWEST_LOGPROB], [LOWEST_LOGPROB]]


def test_a_good_output_is_passed_on() -> None:
    output = StepOutput([[99], None], None, 0.5)
    assert check_output(batch_of(True, False), output, 100) is output
