"""Routed request: one response, taken by whoever decides first; only this attempt counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from pdcore.errors import failure
from pdcore.fsm.effects import Effect
from pdcore.fsm.routed import (
    Answer,
    CancelLeg,
    DispatchLegs,
    EndStream,
    Leg,
    LegFailure,
    LegReport,
    Retry,
    Routed,
    RouterFailure,
)
from pdcore.fsm.states import RoutedState as S

ATTEMPT = 11
OOM = failure("out_of_memory", "no blocks")
TOO_LONG = failure("prompt_too_long", "9000 tokens, at most 8192")
LATE = failure("deadline_exceeded", "no result in time")
GOOD = LegReport(ATTEMPT)
BAD = LegFailure(ATTEMPT, OOM)


def dispatched(cls: type[Routed] = Routed) -> Routed:
    routed = cls()
    assert routed.dispatched(ATTEMPT) == (DispatchLegs(ATTEMPT, replaces=0),)
    assert (routed.state, routed.attempt) == (S.DISPATCHED, ATTEMPT)
    return routed


def streaming() -> Routed:
    routed = dispatched()
    assert routed.first_token(GOOD) == (Answer(None),)
    assert routed.state is S.STREAMING
    return routed


def test_the_way_of_a_streamed_answer() -> None:
    routed = dispatched()
    assert routed.prefill_accepted(GOOD) == ()
    assert routed.is_prefill_accepted
    assert routed.first_token(GOOD) == (Answer(None),)
    assert routed.first_token(GOOD) is None
    assert routed.decode_finished(GOOD) == (EndStream(None),)
    assert routed.state is S.DONE


def test_an_answer_in_one_piece() -> None:
    routed = dispatched()
    assert routed.decode_finished(GOOD) == (Answer(None),)
    assert routed.state is S.DONE


def test_before_the_dispatch() -> None:
    rejected, gone, late = Routed(), Routed(), Routed()
    assert rejected.rejected(RouterFailure(OOM)) == (Answer(OOM),)
    assert gone.client_gone() == ()
    assert late.deadline_expired(RouterFailure(LATE)) == (Answer(LATE),)
    assert [r.state for r in (rejected, gone, late)] == [S.FAILED, S.CANCELLED, S.FAILED]
    assert Routed().first_token(GOOD) is None


def check_prefill_refusal_is_answered(routed: Routed) -> None:
    effects = routed.prefill_failed(LegFailure(ATTEMPT, TOO_LONG))
    assert effects == (Answer(TOO_LONG), CancelLeg(Leg.DECODE, ATTEMPT, unless_received=True))
    assert routed.state is S.FAILED


def test_d10_d11_a_refusal_by_prefill_is_answered_at_once_and_cancels_decode() -> None:
    """D10: the seed dropped prefill's failure and let decode wait out its 60 s. D11: so did
    a prompt that decode accepts and prefill refuses."""
    check_prefill_refusal_is_answered(dispatched())


def test_d10_d11_mutant_a_dropped_prefill_failure_is_found() -> None:
    class Drops(Routed):
        def is_current(self, payload: LegReport | LegFailure) -> bool:
            return payload.failure is not TOO_LONG

    with pytest.raises(AssertionError):
        check_prefill_refusal_is_answered(dispatched(Drops))


def check_decode_failure_is_answered(routed: Routed) -> None:
    assert routed.decode_failed(BAD) == (Answer(OOM), CancelLeg(Leg.PREFILL, ATTEMPT))
    assert routed.state is S.FAILED


def test_d10_a_fast_decode_failure_does_not_wait_for_prefill() -> None:
    """D10: gathering both responses withheld decode's failure until prefill answered."""
    check_decode_failure_is_answered(dispatched())


def test_d10_mutant_gathering_both_legs_is_found() -> None:
    class Gathers(Routed):
        def is_current(self, payload: LegReport | LegFailure) -> bool:
            return super().is_current(payload) and self.is_prefill_accepted

    with pytest.raises(AssertionError):
        check_decode_failure_is_answered(dispatched(Gathers))


def test_a_broken_connection_to_prefill_is_not_its_failure() -> None:
    """Protocol model Q5, rule UNK: the KV may have arrived; decode decides."""
    routed = dispatched()
    assert routed.prefill_unknown(BAD) == ()
    assert (routed.state, routed.is_prefill_unknown) == (S.DISPATCHED, True)
    assert routed.first_token(GOOD) == (Answer(None),)


def test_an_evicted_prefill_leaves_it_to_a_decode_that_has_its_kv() -> None:
    routed = dispatched()
    assert routed.prefill_evicted(BAD) == (CancelLeg(Leg.DECODE, ATTEMPT, unless_received=True),)
    assert (routed.state, routed.is_prefill_unknown) == (S.DISPATCHED, True)
    assert routed.prefill_evicted(LegFailure(9, OOM)) is None
    assert streaming().prefill_evicted(BAD) is None
    assert routed.first_token(GOOD) == (Answer(None),)


def test_a_broken_connection_to_decode_cancels_both() -> None:
    routed = dispatched()
    assert routed.decode_lost(BAD) == (
        Answer(OOM),
        CancelLeg(Leg.PREFILL, ATTEMPT),
        CancelLeg(Leg.DECODE, ATTEMPT),
    )


@pytest.mark.parametrize("event", ["prefill_failed", "prefill_unknown", "prefill_accepted"])
def test_after_the_first_token_prefill_changes_nothing(event: str) -> None:
    """Protocol model Q5, rule IGN."""
    routed = streaming()
    assert getattr(routed, event)(BAD) is None
    assert (routed.state, routed.ignored) == (S.STREAMING, 1)


def test_a_stream_ends_with_its_failure() -> None:
    failed, lost, late = streaming(), streaming(), streaming()
    assert failed.decode_failed(BAD) == (EndStream(OOM),)
    assert lost.decode_lost(BAD) == (EndStream(OOM), CancelLeg(Leg.DECODE, ATTEMPT))
    expired = late.deadline_expired(RouterFailure(LATE))
    assert expired == (EndStream(LATE), CancelLeg(Leg.DECODE, ATTEMPT))
    assert {r.state for r in (failed, lost, late)} == {S.FAILED}


@pytest.mark.parametrize("start", [dispatched, streaming])
def test_a_client_that_is_gone_cancels_both(start: Callable[[], Routed]) -> None:
    routed = start()
    assert routed.client_gone() == (
        CancelLeg(Leg.PREFILL, ATTEMPT),
        CancelLeg(Leg.DECODE, ATTEMPT),
    )
    assert routed.state is S.CANCELLED


def test_the_routers_deadline_answers_and_cancels_both() -> None:
    routed = dispatched()
    assert routed.deadline_expired(RouterFailure(LATE)) == (
        Answer(LATE),
        CancelLeg(Leg.PREFILL, ATTEMPT),
        CancelLeg(Leg.DECODE, ATTEMPT),
    )


# --- attempts ---------------------------------------------------------------------------


def retrying() -> Routed:
    routed = dispatched()
    routed.prefill_accepted(GOOD)
    assert routed.attempt_lost(BAD) == (
        CancelLeg(Leg.PREFILL, ATTEMPT),
        CancelLeg(Leg.DECODE, ATTEMPT),
    )
    assert routed.state is S.RETRYING
    return routed


def test_a_lost_attempt_is_cancelled_at_both_legs_and_replaced() -> None:
    routed = retrying()
    assert routed.retried(Retry(ATTEMPT, 12)) == (DispatchLegs(12, replaces=ATTEMPT),)
    assert (routed.state, routed.attempt, routed.is_prefill_accepted) == (S.DISPATCHED, 12, False)


@pytest.mark.parametrize("retry", [Retry(ATTEMPT, ATTEMPT), Retry(9, 12)])
def test_a_retry_needs_a_fresh_attempt_that_replaces_the_current_one(retry: Retry) -> None:
    routed = retrying()
    assert routed.retried(retry) is None
    assert routed.attempts == (ATTEMPT,)


def test_nothing_is_retried_after_the_first_token_or_without_a_loss() -> None:
    assert streaming().attempt_lost(BAD) is None
    assert streaming().retried(Retry(ATTEMPT, 12)) is None
    assert dispatched().retried(Retry(ATTEMPT, 12)) is None


def test_between_two_attempts_no_leg_counts_and_every_end_is_one() -> None:
    """Both legs were cancelled when the attempt was lost: nothing is cancelled again."""
    routed = retrying()
    assert routed.first_token(GOOD) is None
    assert routed.decode_finished(GOOD) is None
    assert routed.prefill_failed(BAD) is None
    assert routed.attempt_lost(BAD) is None
    assert routed.ignored == 4
    gone, given_up, late = retrying(), retrying(), retrying()
    assert gone.client_gone() == ()
    assert given_up.rejected(RouterFailure(OOM)) == (Answer(OOM),)
    assert late.deadline_expired(RouterFailure(LATE)) == (Answer(LATE),)
    assert [r.state for r in (gone, given_up, late)] == [S.CANCELLED, S.FAILED, S.FAILED]


def check_other_attempts_do_not_count(routed: Routed) -> None:
    routed.attempt_lost(BAD)
    routed.retried(Retry(ATTEMPT, 12))
    assert routed.decode_failed(BAD) is None
    assert routed.prefill_failed(BAD) is None
    assert routed.first_token(GOOD) is None
    assert (routed.state, routed.ignored) == (S.DISPATCHED, 3)
    assert routed.first_token(LegReport(12)) == (Answer(None),)


def test_outcomes_of_another_attempt_are_ignored_and_counted() -> None:
    """Protocol model Q2: a late error of attempt 1 ended attempt 2 after four steps."""
    check_other_attempts_do_not_count(dispatched())


def test_mutant_any_attempt_counts_is_found() -> None:
    class AnyAttempt(Routed):
        def is_current(self, payload: LegReport | LegFailure) -> bool:
            return True

    with pytest.raises(AssertionError):
        check_other_attempts_do_not_count(dispatched(AnyAttempt))


# --- one response -----------------------------------------------------------------------

STEPS: dict[str, Callable[[Routed], Sequence[Effect] | None]] = {
    "prefill_failed": lambda r: r.prefill_failed(BAD),
    "prefill_unknown": lambda r: r.prefill_unknown(BAD),
    "prefill_evicted": lambda r: r.prefill_evicted(BAD),
    "first_token": lambda r: r.first_token(GOOD),
    "decode_finished": lambda r: r.decode_finished(GOOD),
    "decode_failed": lambda r: r.decode_failed(BAD),
    "decode_lost": lambda r: r.decode_lost(BAD),
    "attempt_lost": lambda r: r.attempt_lost(BAD),
    "client_gone": lambda r: r.client_gone(),
    "deadline_expired": lambda r: r.deadline_expired(RouterFailure(LATE)),
}


def test_there_is_one_response_in_every_order_of_news() -> None:
    """All sequences of four pieces of news: at most one Answer; a stream ends once, and only
    after it began; whatever is over has answered, unless the client is gone; and only then is
    there no 200 without tokens (D9)."""
    for order in itertools.product(STEPS, repeat=4):
        routed = dispatched()
        effects = [e for step in order for e in STEPS[step](routed) or ()]
        answers = [e for e in effects if isinstance(e, Answer)]
        ends = [e for e in effects if isinstance(e, EndStream)]
        assert len(answers) <= 1
        assert len(ends) <= 1
        if ends:
            assert effects.index(answers[0]) < effects.index(ends[0])
        if routed.state is S.FAILED:
            assert [e for e in (*answers, *ends) if e.failure is not None]
        if routed.state is S.DONE:
            assert answers == [Answer(None)]
        if routed.state in (S.STREAMING, S.DONE, S.FAILED):
            assert answers
