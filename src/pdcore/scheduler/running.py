"""Running sequences of a decode rank: decode steps, retraction, re-prefill (R72, R88).

A sequence whose KV arrived starts with the token prefill sampled; the finish check runs on
that one too (D18). When no sequence gets a block, the cheapest victim is retracted: its
blocks go back and it is prefilled again here, prompt and output, into fresh blocks, a
bounded number of times (D8). Blocks that a forward pass still uses are freed when it ends.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from pdcore.errors import EngineError, failure
from pdcore.fsm.effects import ReportTokens
from pdcore.fsm.events import StepCompleted
from pdcore.kv.metadata import MetadataRecord
from pdcore.scheduler.batch import (
    DecodeBatcher,
    PrefillChunk,
    build_prefill_batch,
    commit_prefill,
    select_prefill,
)
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.decode_rooms import DecodeRooms
from pdcore.scheduler.retraction import retract_until_fits
from pdcore.scheduler.sequence import Sequence, StepResult, commit_tokens
from pdcore.types import Batch, Failure, FinishReason, Phase


class Running:
    """See the module. One batch is in flight at a time."""

    def __init__(self, rooms: DecodeRooms) -> None:
        self.rooms = rooms
        self.blocks = rooms.blocks
        self.limits = rooms.limits
        setup = rooms.setup
        self.batcher = DecodeBatcher(
            self.blocks, setup.eos_token_ids, setup.max_model_len, self.limits.max_running
        )
        #: seq_id -> record of everything that runs or is to resume.
        self.records: dict[int, DecodeRecord] = {}
        #: Retracted or local, waiting to be prefilled here; FIFO.
        self.resuming: OrderedDict[int, DecodeRecord] = OrderedDict()
        self._batch: Batch | None = None
        self._chunks: list[PrefillChunk] = []
        #: Ended while in flight: their blocks are freed when the forward pass is over.
        self._doomed: list[int] = []
        self._batch_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def num_unseated(self) -> int:
        """Sequences with their KV here that wait for a place in the batch."""
        return max(0, len(self.batcher) - self.limits.max_running)

    def start(self, record: DecodeRecord, metadata: MetadataRecord, now: float) -> None:
        """KV and first token are here."""
        setup, seq = self.rooms.setup, record.seq
        if metadata.output_token_id >= setup.vocab_size:
            # One peer's token must not cost the batch of all others (D18).
            self.records[seq.seq_id] = record
            why = failure(
                "bad_metadata",
                f"prefill sampled token {metadata.output_token_id}, the vocabulary has "
                f"{setup.vocab_size}",
            )
            self._end(record, FinishReason.ERROR, why, now)
            return
        seq.complete_prefill()
        logprobs = None if metadata.logprob is None else [metadata.logprob]
        commit_tokens(
            seq, [metadata.output_token_id], logprobs, setup.eos_token_ids, setup.max_model_len
        )
        record.mark("first_token", now)
        self.records[seq.seq_id] = record
        probs = None if logprobs is None else [logprobs]
        self.rooms.out.append(ReportTokens([record.key], [[metadata.output_token_id]], probs))
        if seq.finish_reason is not None:
            self._end(record, seq.finish_reason, None, now)
        else:
            self.batcher.add(seq)

    def prefill_here(self, record: DecodeRecord) -> None:
        """Local prefill: the prompt is computed here, in the way and in the order of sequences
        that were retracted. Nothing is received, so no lease and no peer has a part in it."""
        self.records[record.seq_id] = record
        self.resuming[record.seq_id] = record

    def stop(
        self, record: DecodeRecord, reason: FinishReason, why: Failure | None, now: float
    ) -> None:
        """End a running or resuming request from outside (abort, deadline)."""
        if record.seq.seq_id in self.records:
            self._end(record, reason, why, now)

    def schedule(self, now: float) -> Batch | None:
        """The next batch, or None when nothing runs or a batch is in flight."""
        if self._batch is not None:
            return None
        batch_id = next(self._batch_ids)
        if not self.records:
            return None
        if self.resuming:
            self._batch = self._resume(batch_id)
        if self._batch is None and len(self.batcher):
            if not self.batcher.schedule():
                self._make_room(now)
            if len(self.batcher):
                self._batch = self.batcher.build_batch(batch_id)
            else:
                # All of them were retracted: the first comes back at once.
                self._batch = self._resume(batch_id)
        return self._batch

    def _resume(self, batch_id: int) -> Batch | None:
        """A prefill batch of retracted sequences, if any of them finds blocks."""
        chunks = select_prefill(
            self._resumable(),
            self.blocks,
            self.limits.prefill_chunk_tokens,
            self.limits.max_running,
        )
        if not chunks:
            return None
        self._chunks = chunks
        return build_prefill_batch(batch_id, chunks, self.blocks)

    def _resumable(self) -> Iterator[Sequence]:
        """In order, up to the first that would not fit whole: one that gets half of its blocks
        keeps them from everybody, itself included."""
        budget = self.blocks.budget()
        for record in self.resuming.values():
            seq = record.seq
            if not budget.try_take(self.blocks.need(seq.seq_id, 0, seq.num_tokens + 1)):
                return
            yield seq

    def complete(self, event: StepCompleted, now: float) -> None:
        """Tokens of the batch handed out last; a failed step fails its requests only, or those
        of them that the engine blames."""
        batch = self._batch
        if batch is None or batch.batch_id != event.batch_id:
            return
        self._batch = None
        why = event.failure
        if event.output is not None and why is None:
            setup = self.rooms.setup
            try:
                if batch.phase is Phase.DECODE:
                    self._land(self.batcher.commit(event.output), now)
                else:
                    result = commit_prefill(
                        self._chunks, event.output, setup.eos_token_ids, setup.max_model_len
                    )
                    self._land(_still_here(result, self.records), now)
            except EngineError as error:
                why = failure("internal", str(error))
        if why is not None or event.output is None:
            # Those that are not to blame are in the next batch again, from the same state.
            members = list(event.blamed or batch.seq_ids)
            if batch.phase is Phase.DECODE:
                self.batcher.abandon()
            why = why or failure("internal", "the engine returned nothing for a step")
            for seq_id in members:
                if seq_id in self.records:
                    self._end(self.records[seq_id], FinishReason.ERROR, why, now)
        self._chunks = []
        for seq_id in self._doomed:
            self.blocks.free(seq_id)
        self._doomed.clear()

    # --- inside -------------------------------------------------------------------------

    def _land(self, result: StepResult, now: float) -> None:
        if result.seqs:
            self.rooms.out.append(ReportTokens(result.keys, result.token_ids, result.logprobs))
        if self.resuming:
            for seq in result.seqs:
                if self.resuming.pop(seq.seq_id, None) is not None and seq.finish_reason is None:
                    self.batcher.add(seq)
        for seq in result.finished:
            record = self.records.get(seq.seq_id)
            if record is not None and seq.finish_reason is not None:
                self._end(record, seq.finish_reason, None, now)

    def _end(
        self, record: DecodeRecord, reason: FinishReason, why: Failure | None, now: float
    ) -> None:
        """The one way out: off the batch, blocks back (or when the pass ends), one result."""
        seq = record.seq
        in_flight = self._batch is not None and seq.seq_id in self._batch.seq_ids
        self.batcher.remove(seq.seq_id)
        self.resuming.pop(seq.seq_id, None)
        self.records.pop(seq.seq_id, None)
        if in_flight:
            self._doomed.append(seq.seq_id)
        else:
            self.blocks.free(seq.seq_id)
        self.rooms.report(record, reason, why, now, seq.num_output_tokens)
        self.rooms.forget(record.key)

    def owed(self) -> list[dict[str, int]]:
        """Blocks per manager key that retracted sequences wait for: they come before
        newcomers, or admission would starve them."""
        return [
            self.blocks.need(record.seq.seq_id, 0, record.seq.num_tokens + 1)
            for record in self.resuming.values()
        ]

    def _make_room(self, now: float) -> None:
        """Nobody gets a block: retract until somebody does (R72)."""
        outcome = retract_until_fits(self.batcher, self.blocks, self.limits.max_retractions)
        for victim in outcome.requeued:
            self.resuming[victim.seq_id] = self.records[victim.seq_id]
        for victim in outcome.failed:
            why = failure(
                "out_of_memory",
                "the KV cache is full and this request was retracted too often or outgrew it; "
                "retry later",
            )
            self._end(self.records[victim.seq_id], FinishReason.ERROR, why, now)


def _still_here(result: StepResult, records: Mapping[int, DecodeRecord]) -> StepResult:
    """Without those that ended while the batch was in flight: they had their one result."""
    if all(seq.seq_id in records for seq in result.seqs):
        return result
    keep = [i for i, seq in enumerate(result.seqs) if seq.seq_id in records]
    return StepResult(
        [result.seqs[i] for i in keep],
        [result.keys[i] for i in keep],
        [result.token_ids[i] for i in keep],
        None if result.logprobs is None else [result.logprobs[i] for i in keep],
        result.finished,
    )
