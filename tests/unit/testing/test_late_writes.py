"""The late-write harness, at a size for every run; the thousands are in tests/chaos."""

from __future__ import annotations

import attrs
import pytest

from pdcore.testing import late_writes
from pdcore.testing.late_writes import LateWriteReport, Trial, loopback_trial, run_late_writes
from tests.chaos.late_writes import TRIALS, check, free_on_abort


@pytest.mark.parametrize("transport", TRIALS)
def test_d3_a_late_write_corrupts_nobody(transport: str) -> None:
    """D3, D4, SGLang I24527: a sender that goes on writing until it acknowledges, on shared
    memory, on loopback and with writes that outlive their process: no byte of the request
    that gets the blocks next is touched. With quarantine switched off, some are."""
    make = TRIALS[transport]
    reports = {
        "product": run_late_writes(transport, make, 60, 1),
        "quarantine off": run_late_writes(transport, make, 10, 1, free_on_abort),
    }
    check(reports)


def test_the_claim_fails_on_a_variant_that_frees_on_abort() -> None:
    """The mutant: the seed's rule, blocks go back when the client gives up."""
    variant = run_late_writes("loopback", loopback_trial, 10, 1, free_on_abort)
    with pytest.raises(AssertionError):
        check({"product": variant, "quarantine off": variant})


def test_a_harness_that_tests_nothing_is_no_proof() -> None:
    nothing = LateWriteReport("nothing", 10, 0, 0, 0)
    hurt = attrs.evolve(nothing, corrupted_trials=10, corrupted_bytes=10, late_chunks=10)
    with pytest.raises(AssertionError, match="nothing was tested"):
        check({"product": nothing, "quarantine off": hurt})
    with pytest.raises(AssertionError, match="would not have seen"):
        check({"product": attrs.evolve(nothing, late_chunks=10), "quarantine off": nothing})


def test_the_same_seed_gives_the_same_numbers() -> None:
    first, second = (
        run_late_writes("loopback", loopback_trial, 5, 7, free_on_abort) for _ in range(2)
    )
    assert first == second


def test_a_trial_is_closed_also_when_it_fails() -> None:
    closed: list[int] = []

    class Over:
        """Nothing was ever posted."""

        def has_pending(self) -> bool:
            return True

        def step(self) -> None:
            raise RuntimeError("this transport is broken")

    def make(seed: int) -> Trial:
        trial = loopback_trial(seed)
        return Trial(trial.world, Over(), trial.end, lambda: closed.append(seed))

    with pytest.raises((RuntimeError, AssertionError)):
        run_late_writes("broken", make, 20, 5)
    assert closed


def test_blocks_that_never_come_back_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another known-bad variant: what is quarantined stays out for ever."""
    monkeypatch.setattr(late_writes, "MAX_STEPS", 500)

    def keep(world) -> None:
        late_writes.decode_rooms(world).release = lambda record: None

    with pytest.raises(AssertionError, match="did not get its blocks"):
        run_late_writes("loopback", loopback_trial, 3, 1, keep)
