"""The prefill batch: strict FIFO, whole prompts or chunks (R84-R87).

A batch stops at the token budget, the sequence budget or the first allocation that
fails. The seed's ``continue`` on a failed head spins for ever on a full pool (D15).
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

from pdcore.errors import EngineError
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.sequence import Sequence, StepResult, commit_tokens
from pdcore.types import Batch, Phase, StepOutput


class PrefillChunk(NamedTuple):
    """``num_tokens`` positions of one sequence from ``start``; slots are allocated."""

    seq: Sequence
    start: int
    num_tokens: int
    is_last: bool


def select_prefill(
    waiting: abc.Iterable[Sequence],
    kv: KVBlocks,
    max_tokens: int,
    max_seqs: int,
    *,
    chunked: bool = True,
    align: int = 1,
) -> list[PrefillChunk]:
    """Take sequences from the head of ``waiting`` (unchanged) and allocate their slots.

    Stops before ``max_tokens`` is exceeded, at ``max_seqs``, or at the first sequence
    that gets no blocks, and never looks at a sequence twice (D15, invariant 7). With
    ``chunked`` a prompt longer than what is left is split, chunk ends rounded down to a
    multiple of ``align``; without, a prompt over the budget still runs alone (R87).
    """
    chunks: list[PrefillChunk] = []
    budget = max_tokens
    for seq in waiting:
        if len(chunks) >= max_seqs or budget <= 0:
            break
        start = seq.num_computed_tokens
        left = seq.num_tokens - start
        take = left
        if left > budget:
            if chunked:
                take = (start + budget) // align * align - start
                if take <= 0 and not chunks:
                    take = budget
            elif chunks:
                take = 0
        if take <= 0 or not kv.allocate_slots(seq.seq_id, start, take):
            break
        chunks.append(PrefillChunk(seq, start, take, take == left))
        budget -= take
        if take < left:
            # Whoever comes later must not finish before a half-done head.
            break
    return chunks


def build_prefill_batch(batch_id: int, chunks: abc.Iterable[PrefillChunk], kv: KVBlocks) -> Batch:
    """The runner's batch for these chunks; only a last chunk samples."""
    batch = Batch(batch_id, Phase.PREFILL)
    for seq, start, num_tokens, is_last in chunks:
        batch.add(
            seq.seq_id,
            seq.token_ids(start, start + num_tokens),
            start,
            kv.get_block_ids(seq.seq_id),
            seq.request.sampling,
            sample=is_last,
        )
    return batch


def commit_prefill(
    chunks: abc.Sequence[PrefillChunk],
    output: StepOutput,
    eos_token_ids: abc.Collection[int],
    max_model_len: int,
) -> StepResult:
    """Record a prefill step: chunks count as computed, last ones get their first token
    and the finish check (D18).

    Raises EngineError, changing nothing, when the output does not fit the chunks.
    """
    rows = output.token_ids
    if len(rows) != len(chunks) or any(
        chunk.is_last and not ids for chunk, ids in zip(chunks, rows, strict=True)
    ):
        raise EngineError(
            f"prefill of {len(chunks)} chunks returned {len(rows)} rows, or no token for a "
            f"last chunk"
        )
    seqs: list[Sequence] = []
    emitted: list[abc.Sequence[int]] = []
    probs: list[abc.Sequence[float] | None] = []
    for i, (chunk, ids) in enumerate(zip(chunks, rows, strict=True)):
        seq = chunk.seq
        seq.advance_prefill(chunk.num_tokens)
        if not chunk.is_last or not ids:
            continue
        row = None if output.logprobs is None else output.logprobs[i]
        taken = commit_tokens(seq, ids, row, eos_token_ids, max_model_len)
        seqs.append(seq)
        emitted.append(ids[:taken])
        probs.append(None if row is None else row[:taken])
    finished = [seq for seq in seqs if seq.finish_reason is not None]
    keys = [seq.key for seq in seqs]
    logprobs = None if output.logprobs is None else probs
    return StepResult(seqs, keys, emitted, logprobs, finished)
