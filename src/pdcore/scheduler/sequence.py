"""A request while it has tokens to compute, and the rule that ends it (R74, R83, R89).

The cores own Sequences; batches and retraction work on them. Token counts: a sequence
of ``num_tokens`` = prompt + output has KV for ``num_computed_tokens`` positions. While
it decodes that is always ``num_tokens - 1``: the last sampled token has no KV yet, so a
decode step has nothing to count per sequence.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

from pdcore.types import FinishReason, GenerateRequest, RoomKey


class PendingTokens(Protocol):
    """Where a running sequence's newest tokens wait until somebody reads them: a decode
    step stores one column for all sequences instead of visiting each."""

    @property
    def num_pending(self) -> int: ...

    def flush(self) -> None:
        """Append the pending tokens to the list given to ``attach``."""
        ...


class Sequence:
    """``seq_id`` is unique per entity on this rank."""

    __slots__ = (
        "_num_prefilled",
        "_output",
        "_pending",
        "finish_reason",
        "is_prefill_done",
        "num_retractions",
        "output_logprobs",
        "request",
        "seq_id",
    )

    def __init__(self, seq_id: int, request: GenerateRequest) -> None:
        self.seq_id = seq_id
        self.request = request
        self._output: list[int] = []
        self._pending: PendingTokens | None = None
        #: Filled only when the request asked for logprobs: aligned with
        #: output_token_ids as far as it goes, None where none is known (D18).
        self.output_logprobs: list[float | None] = []
        self.finish_reason: FinishReason | None = None
        self.num_retractions = 0
        self.is_prefill_done = False
        self._num_prefilled = 0

    @property
    def key(self) -> RoomKey:
        return self.request.key

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens so far, the live list: read it, add with ``append_token``."""
        if self._pending is not None:
            self._pending.flush()
        return self._output

    @property
    def num_output_tokens(self) -> int:
        pending = 0 if self._pending is None else self._pending.num_pending
        return len(self._output) + pending

    @property
    def num_tokens(self) -> int:
        """Prompt and output together; what a prefill of this sequence computes."""
        return len(self.request.prompt_token_ids) + self.num_output_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Positions that have KV, which is also the next query position."""
        return self.num_tokens - 1 if self.is_prefill_done else self._num_prefilled

    def token_ids(self, start: int, end: int) -> list[int]:
        """Ids at positions ``start .. end - 1`` of prompt and output."""
        prompt = self.request.prompt_token_ids
        ids = list(prompt[start:end])
        if end > len(prompt):
            ids += self.output_token_ids[max(0, start - len(prompt)) : end - len(prompt)]
        return ids

    def advance_prefill(self, num_tokens: int) -> None:
        """A chunk of ``num_tokens`` positions has been computed."""
        self._num_prefilled += num_tokens
        if self._num_prefilled >= self.num_tokens:
            self.is_prefill_done = True

    def complete_prefill(self) -> None:
        """All present tokens have KV: computed here, or received from prefill. The next
        ``append_token`` is the token that this prefill sampled."""
        self._num_prefilled = self.num_tokens
        self.is_prefill_done = True

    def append_token(self, token_id: int, logprob: float | None = None) -> None:
        self.output_token_ids.append(token_id)
        if self.request.sampling.logprobs:
            self.output_logprobs.append(logprob)

    def attach(self, pending: PendingTokens) -> list[int]:
        """Let a decode batch hold back this sequence's newest tokens, until they are read.
        Returns the list that ``flush`` must append to."""
        if self._pending is not None:
            self._pending.flush()
        self._pending = pending
        return self._output

    def record_logprobs(self, logprobs: abc.Sequence[float] | None) -> None:
        """Logprobs of output tokens that were appended without; the newest ones come
        last, what is unknown before them is None."""
        if self.request.sampling.logprobs:
            missing = self.num_output_tokens - len(self.output_logprobs)
            known = list(logprobs or ())[:missing]
            self.output_logprobs += [None] * (missing - len(known))
            self.output_logprobs += known

    def retract(self) -> None:
        """Its KV is gone: prompt and output must be prefilled again (D8)."""
        self._num_prefilled = 0
        self.is_prefill_done = False
        self.num_retractions += 1

    def __repr__(self) -> str:
        done = "" if self.finish_reason is None else f", {self.finish_reason.value}"
        return (
            f"Sequence({self.seq_id}, room={self.key.room}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens}{done})"
        )


class StepResult(NamedTuple):
    """What one committed step produced, one position per sequence that got tokens.

    ``token_ids[i]`` are the new tokens of ``seqs[i]``, whose request is ``keys[i]``, already
    appended and cut where the sequence ended; ``logprobs[i]`` matches, or ``logprobs`` is
    None. ``finished`` are those whose ``finish_reason`` is now set; they have left the
    batch, the caller frees their blocks.
    """

    seqs: list[Sequence]
    keys: list[RoomKey]
    token_ids: abc.Sequence[abc.Sequence[int]]
    logprobs: abc.Sequence[abc.Sequence[float] | None] | None
    finished: list[Sequence]


def token_limit(seq: Sequence, max_model_len: int) -> int:
    """Token count at which the sequence ends with LENGTH: max_tokens after the prompt,
    or what is left of the model's length."""
    max_tokens = seq.request.sampling.max_tokens
    if max_tokens is None:
        return max_model_len
    return min(seq.num_prompt_tokens + max_tokens, max_model_len)


def stop_ids(seq: Sequence, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Every token that may stop this sequence: EOS unless ignored, and its own."""
    sampling = seq.request.sampling
    if sampling.ignore_eos:
        return frozenset(sampling.stop_token_ids)
    return frozenset(eos_token_ids).union(sampling.stop_token_ids)


def check_finished(
    seq: Sequence, eos_token_ids: Collection[int], max_model_len: int, last: int | None = None
) -> FinishReason | None:
    """Does the sequence end with its last output token? (R74, D18)

    STOP: the token is an EOS (unless ``ignore_eos``) or one of ``stop_token_ids``, and
    ``min_tokens`` are out. LENGTH: ``max_tokens`` or the model's length is reached. Run
    it on every token, the first one from prefill included: EOS as first token and
    max_tokens = 1 end the request at commit. STOP wins over LENGTH. ``last`` is the newest
    token where the caller has it at hand: then the others need not be gathered.
    """
    num_output = seq.num_output_tokens
    if not num_output:
        return None
    sampling = seq.request.sampling
    if num_output >= sampling.min_tokens:
        token = seq.output_token_ids[-1] if last is None else last
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        if not sampling.ignore_eos and token in eos_token_ids:
            return FinishReason.STOP
    if seq.num_tokens >= token_limit(seq, max_model_len):
        return FinishReason.LENGTH
    return None


def commit_tokens(
    seq: Sequence,
    token_ids: Iterable[int],
    logprobs: Iterable[float] | None,
    eos_token_ids: Collection[int],
    max_model_len: int,
) -> int:
    """Append tokens up to and including the one that ends the sequence; sets
    ``finish_reason`` and returns how many were taken (R74: output is cut after the first
    EOS, also inside a multi-token step)."""
    probs = iter(()) if logprobs is None else iter(logprobs)
    taken = 0
    for token in token_ids:
        seq.append_token(token, next(probs, None))
        taken += 1
        seq.finish_reason = check_finished(seq, eos_token_ids, max_model_len)
        if seq.finish_reason is not None:
            break
    return taken
