"""Invariants 6 and 7 as a state machine: admission, decoding and retraction over one pool.

Requests of any size arrive; admitted ones decode, grow and finish; when nobody can take a
step, victims are retracted and come back by prefilling again. Nobody is lost, everybody who
can ever fit ends, and every call returns.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pdcore.kv.cache import KVBlocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec
from pdcore.scheduler.admission import AdmissionLine
from pdcore.scheduler.batch import DecodeBatcher, Sequence
from pdcore.scheduler.chunks import select_prefill
from pdcore.scheduler.retraction import retract_until_fits
from pdcore.types import GenerateRequest, RoomKey, SamplingParams, StepOutput

SPEC = KVCacheSpec((KVCacheEntry("k", "full", "float32", 4, 1, 1, 8),))
MAX_LEN = 48
RESERVED = 4
MAX_RETRACTIONS = 2


class DecodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.kv = KVBlocks(SPEC, 14, MAX_LEN)
        self.running = DecodeBatcher(self.kv, (2,), MAX_LEN, batch_size=6)
        self.line: AdmissionLine[int] = AdmissionLine(patience=10)
        self.seqs: dict[int, Sequence] = {}
        self.requeued: list[Sequence] = []
        self.done: set[int] = set()
        self.failed: set[int] = set()

    @rule(prompt=st.integers(1, 44), max_tokens=st.integers(1, 30))
    def arrive(self, prompt: int, max_tokens: int) -> None:
        seq_id = len(self.seqs)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = GenerateRequest(RoomKey(seq_id + 1, 1), "r", (9,) * prompt, sampling, 0, 0)
        seq = self.seqs[seq_id] = Sequence(seq_id, request)
        if self.kv.can_ever_fit(prompt, 1):
            self.line.add(seq_id, self.kv.need(seq_id, prompt, 1))
        else:
            self.failed.add(seq_id)
        assert seq.num_output_tokens == 0

    @rule()
    def tick(self) -> None:
        """Admit, let retracted ones prefill again, and decode one step."""
        for seq_id in self.line.offer(self.kv.budget(RESERVED), 6 - len(self.running)):
            seq = self.seqs[seq_id]
            assert self.kv.allocate_slots(seq_id, seq.num_tokens, 1), "an offer did not hold"
            self.line.discard(seq_id)
            self.start(seq)
        for chunk in select_prefill(self.requeued, self.kv, 64, 1):
            self.requeued.remove(chunk.seq)
            chunk.seq.advance_prefill(chunk.num_tokens)
            self.start(chunk.seq)
        result = retract_until_fits(self.running, self.kv, MAX_RETRACTIONS)
        self.requeued += result.requeued
        self.failed.update(seq.seq_id for seq in result.failed)
        count = self.running.schedule()
        if count:
            self.running.build_batch(1)
            for seq in self.running.commit(StepOutput([[7]] * count)).finished:
                self.kv.free(seq.seq_id)
                self.done.add(seq.seq_id)

    def start(self, seq: Sequence) -> None:
        """The token that its prefill sampled, local or remote."""
        if not seq.is_prefill_done:
            seq.complete_prefill()
        seq.append_token(7)
        limit = min(seq.num_prompt_tokens + (seq.request.sampling.max_tokens or 0), MAX_LEN)
        if seq.num_tokens >= limit:
            self.kv.free(seq.seq_id)
            self.done.add(seq.seq_id)
        else:
            self.running.add(seq)

    @invariant()
    def everybody_is_somewhere_once(self) -> None:
        self.kv.audit()
        places = [
            *self.done,
            *self.failed,
            *(seq.seq_id for seq in self.requeued),
            *(seq.seq_id for seq in self.running.sequences()),
            *(seq_id for seq_id in self.seqs if seq_id in self.line),
        ]
        assert sorted(places) == list(self.seqs)
        holding = {seq_id for seq_id in self.seqs if seq_id in self.kv}
        assert holding <= {seq.seq_id for seq in self.running.sequences()}

    @invariant()
    def nobody_has_more_tokens_than_allowed(self) -> None:
        for seq in self.seqs.values():
            assert seq.num_output_tokens <= (seq.request.sampling.max_tokens or 0)
            assert seq.num_tokens <= MAX_LEN
            assert seq.num_retractions <= MAX_RETRACTIONS

    def teardown(self) -> None:
        """Invariant 6: without new arrivals everybody ends."""
        for _ in range(60 * (len(self.seqs) + 1)):
            if len(self.done) + len(self.failed) == len(self.seqs):
                break
            self.tick()
        assert len(self.done) + len(self.failed) == len(self.seqs), "somebody starves"
        assert self.kv.audit()["full"].free == 13


def test_admission_decode_and_retraction() -> None:
    """Invariants 6 and 7, R70, R72, D8."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        DecodeMachine, settings=settings(max_examples=30, stateful_step_count=40)
    )
