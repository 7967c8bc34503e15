"""The benchmark of the scheduler step: its own check holds, and it can tell a wrong core."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from benchmarks import step
from benchmarks.common import CheckFailed
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler import batch, running
from pdcore.scheduler.batch import DecodeBatcher
from pdcore.scheduler.retraction import Retraction
from pdcore.types import FinishReason


def test_the_core_says_what_the_plain_rule_says() -> None:
    """D8, R74: also through stalls and retractions, which do happen."""
    assert step.check_results() > 0


def test_the_check_notices_a_step_that_forgets_the_length_limit() -> None:
    def no_limit(*args: object) -> FinishReason | None:
        return None

    with patch.object(batch, "check_finished", no_limit), pytest.raises(CheckFailed):
        step.check_results()


def test_the_check_notices_a_retraction_that_ends_the_request() -> None:
    """D8: the seed aborted the victim and returned the stump as a success."""
    retract = running.retract_until_fits

    def abort(batcher: DecodeBatcher, kv: KVBlocks, most: int) -> Retraction:
        outcome = retract(batcher, kv, most)
        return Retraction([], [*outcome.failed, *outcome.requeued])

    with patch.object(running, "retract_until_fits", abort), pytest.raises(CheckFailed):
        step.check_results()


def test_a_small_rank_is_measured() -> None:
    """All of a run's parts, at a size that takes no time."""
    steps = step.Steps(32, 10, step.never_ends)
    assert steps.run(32) != 0.0
    assert min(steps.build_us, steps.tokens_us, steps.check_us) > 0.0
    assert step.bare_loop(32)(8) >= 0.0
    assert step.numpy_loop(32)(8) >= 0.0
    assert step.full_loop(32)(8) >= 0.0
    assert step.build_by_request(steps)(2) >= 0.0
    assert step.message_per_request(32)(2) >= 0.0
