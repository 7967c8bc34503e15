"""Sequences and the rule that ends them: R74, R83, R89, D8, D18."""

from __future__ import annotations

import pytest

from pdcore.scheduler.sequence import (
    Sequence,
    check_finished,
    commit_tokens,
    stop_ids,
    token_limit,
)
from pdcore.types import FinishReason, GenerateRequest, RoomKey, SamplingParams

EOS = frozenset({2})


def make(prompt: int = 3, **sampling: object) -> Sequence:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    ids = tuple(range(10, 10 + prompt))
    return Sequence(1, GenerateRequest(RoomKey(5, 6), "r", ids, params, 0.0, 0.0))


def test_counts_while_prefilling_and_decoding() -> None:
    """R89: after prefill the last sampled token has no KV yet."""
    seq = make(5)
    assert (seq.num_tokens, seq.num_computed_tokens) == (5, 0)
    seq.advance_prefill(3)
    assert (seq.num_computed_tokens, seq.is_prefill_done) == (3, False)
    seq.advance_prefill(2)
    assert seq.is_prefill_done
    seq.append_token(7)
    assert (seq.num_tokens, seq.num_computed_tokens, seq.num_output_tokens) == (6, 5, 1)
    seq.append_token(8)
    assert seq.num_computed_tokens == 6
    assert seq.token_ids(0, 7) == [10, 11, 12, 13, 14, 7, 8]
    assert seq.token_ids(3, 6) == [13, 14, 7]
    assert seq.token_ids(6, 7) == [8]
    assert seq.token_ids(1, 2) == [11]
    assert seq.key == RoomKey(5, 6)
    assert "output=2" in repr(seq)


def test_a_received_prefill_is_complete() -> None:
    seq = make(5)
    seq.complete_prefill()
    seq.append_token(7)
    assert seq.num_computed_tokens == 5


def test_retraction_keeps_the_tokens() -> None:
    """D8: prompt and output are prefilled again."""
    seq = make(3)
    seq.complete_prefill()
    seq.append_token(7)
    seq.retract()
    assert seq.num_computed_tokens == 0
    assert not seq.is_prefill_done
    assert seq.token_ids(0, seq.num_tokens) == [10, 11, 12, 7]
    assert seq.num_retractions == 1
    seq.advance_prefill(4)
    seq.append_token(8)
    assert seq.num_computed_tokens == 4


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "limit"), [(None, 100, 100), (4, 100, 7), (200, 100, 100)]
)
def test_the_limit_is_max_tokens_or_what_is_left(
    max_tokens: int | None, max_model_len: int, limit: int
) -> None:
    """R74."""
    assert token_limit(make(3, max_tokens=max_tokens), max_model_len) == limit


def run(seq: Sequence, *tokens: int) -> FinishReason | None:
    for token in tokens:
        seq.append_token(token)
    return check_finished(seq, EOS, 20)


def check_first_token(rule: object) -> None:
    assert callable(rule)
    seq = make(3, max_tokens=16)
    seq.append_token(2)
    assert rule(seq, EOS, 20) is FinishReason.STOP, "EOS as first token was not noticed"
    seq = make(3, max_tokens=1)
    seq.append_token(9)
    assert rule(seq, EOS, 20) is FinishReason.LENGTH, "max_tokens = 1 gives two tokens"


def test_the_first_token_is_checked_like_any_other() -> None:
    """D18; the mutant trusts what prefill sent, as the seed does."""

    def trusts_the_first(seq: Sequence, eos: frozenset[int], limit: int) -> FinishReason | None:
        return None if seq.num_output_tokens == 1 else check_finished(seq, eos, limit)

    check_first_token(check_finished)
    with pytest.raises(AssertionError, match="EOS as first token"):
        check_first_token(trusts_the_first)


def test_what_stops_and_what_does_not() -> None:
    """R74."""
    assert run(make(3)) is None
    assert run(make(3), 9) is None
    assert run(make(3), 9, 2) is FinishReason.STOP
    assert run(make(3, ignore_eos=True), 2) is None
    assert run(make(3, ignore_eos=True, stop_token_ids=(5,)), 5) is FinishReason.STOP
    assert run(make(3, min_tokens=2), 2) is None
    assert run(make(3, min_tokens=2), 9, 2) is FinishReason.STOP
    assert run(make(3, min_tokens=3, stop_token_ids=(5,)), 5) is None
    assert run(make(3, max_tokens=2), 9, 9) is FinishReason.LENGTH
    assert run(make(3, max_tokens=2), 9, 2) is FinishReason.STOP
    assert run(make(18), 9) is None
    assert run(make(18), 9, 9) is FinishReason.LENGTH


def test_stop_ids_of_a_request() -> None:
    assert stop_ids(make(1, stop_token_ids=(5,)), EOS) == {2, 5}
    assert stop_ids(make(1, stop_token_ids=(5,), ignore_eos=True), EOS) == {5}


def test_output_is_cut_after_the_first_eos_inside_a_step() -> None:
    """R74: also inside a multi-token step."""
    seq = make(3, logprobs=True)
    assert commit_tokens(seq, [7, 2, 8], [-1.0, -2.0, -3.0], EOS, 20) == 2
    assert seq.output_token_ids == [7, 2]
    assert seq.output_logprobs == [-1.0, -2.0]
    assert seq.finish_reason is FinishReason.STOP


def test_logprobs_are_kept_only_when_asked_for_and_absent_is_none() -> None:
    """D18: an absent logprob is marked, not invented."""
    seq = make(3)
    commit_tokens(seq, [7, 8], [-1.0, -2.0], EOS, 20)
    seq.record_logprobs([-3.0])
    assert seq.output_logprobs == []
    seq = make(3, logprobs=True)
    commit_tokens(seq, [7], None, EOS, 20)
    assert seq.output_logprobs == [None]
    seq.output_token_ids.extend([8, 9])
    seq.record_logprobs([-2.0])
    assert seq.output_logprobs == [None, None, -2.0]
    seq.record_logprobs(None)
    assert seq.output_logprobs == [None, None, -2.0]


class Held:
    """A batch that holds one token back."""

    def __init__(self) -> None:
        self.out: list[int] = []
        self.waiting = [8]

    @property
    def num_pending(self) -> int:
        return len(self.waiting)

    def flush(self) -> None:
        self.out += self.waiting
        self.waiting = []


def test_pending_tokens_count_before_they_are_read() -> None:
    seq = make(3)
    seq.append_token(7)
    held = Held()
    held.out = seq.attach(held)
    assert seq.num_tokens == 5
    assert held.waiting == [8]
    assert seq.output_token_ids == [7, 8]
    assert seq.num_tokens == 5
    held.waiting = [9]
    other = Held()
    other.waiting = []
    other.out = seq.attach(other)
    assert held.waiting == []
    assert seq.output_token_ids == [7, 8, 9]
