"""Retraction: R72, D8, invariant 7."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.kv.cache import KVBlocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec
from pdcore.scheduler.batch import DecodeBatcher, Sequence
from pdcore.scheduler.retraction import Retraction, choose_victim, retract_until_fits
from pdcore.types import GenerateRequest, RoomKey, SamplingParams

SPEC = KVCacheSpec((KVCacheEntry("k", "full", "float32", 4, 1, 1, 8),))


def seq(seq_id: int, prompt: int, output: int = 1) -> Sequence:
    request = GenerateRequest(RoomKey(seq_id + 1, 1), "r", (9,) * prompt, SamplingParams(), 0, 0)
    one = Sequence(seq_id, request)
    one.complete_prefill()
    for _ in range(output):
        one.append_token(7)
    return one


def full_pool(num_blocks: int, *seqs: Sequence) -> tuple[DecodeBatcher, KVBlocks]:
    """Every sequence has KV for what it computed; its next token may need a block."""
    kv = KVBlocks(SPEC, num_blocks, 200)
    running = DecodeBatcher(kv, (2,), 200, 16)
    for one in seqs:
        assert kv.allocate_slots(one.seq_id, 0, one.num_computed_tokens)
        running.add(one)
    return running, kv


def test_the_victim_loses_least() -> None:
    """R72: fewest output tokens, then the longest prompt, then the first."""
    seqs = [seq(0, 4, 3), seq(1, 4, 1), seq(2, 8, 1), seq(3, 8, 1)]
    assert choose_victim(seqs) is seqs[2]
    assert choose_victim(seqs[:2]) is seqs[1]
    assert choose_victim([]) is None


def test_nothing_happens_while_somebody_can_go_on() -> None:
    running, kv = full_pool(6, seq(0, 4), seq(1, 4))
    assert retract_until_fits(running, kv, 3) == Retraction([], [])
    assert running.schedule() == 2


Retract = Callable[[DecodeBatcher, KVBlocks, int], Retraction]


def check_victims_come_back(retract: Retract) -> None:
    """D8: a victim keeps its tokens and is prefilled again; it is not aborted."""
    running, kv = full_pool(5, seq(0, 8, 1), seq(1, 4, 5))
    assert running.schedule() == 0
    result = retract(running, kv, 3)
    assert [s.seq_id for s in result.requeued] == [0], "the victim was aborted"
    victim = result.requeued[0]
    assert victim.output_token_ids == [7]
    assert victim.num_computed_tokens == 0
    assert victim.finish_reason is None
    assert victim.num_retractions == 1
    assert 0 not in kv
    assert running.schedule() == 1
    kv.audit()


def seed_rule(running: DecodeBatcher, kv: KVBlocks, max_retractions: int) -> Retraction:
    """The seed finishes the victim with preempted_oom and returns the stump."""
    result = retract_until_fits(running, kv, max_retractions)
    return Retraction([], result.requeued + result.failed)


def test_a_victim_is_requeued() -> None:
    check_victims_come_back(retract_until_fits)
    with pytest.raises(AssertionError, match="aborted"):
        check_victims_come_back(seed_rule)


def test_retractions_are_bounded() -> None:
    """D8: bounded attempts, then a proper error."""
    often = seq(0, 8, 1)
    often.num_retractions = 3
    running, kv = full_pool(5, often, seq(1, 4, 5))
    assert retract_until_fits(running, kv, 3) == Retraction([], [often])
    assert often.num_retractions == 3


def test_the_last_one_that_cannot_fit_alone_fails() -> None:
    """R72: out of memory for the last one, not an endless requeue."""
    alone = seq(0, 8, 1)
    running, kv = full_pool(3, alone)
    assert retract_until_fits(running, kv, 3) == Retraction([], [alone])
    assert len(running) == 0
    assert kv.audit()["full"].free == 2


def test_the_last_one_waits_when_others_hold_the_pool_for_now() -> None:
    """Blocks in leases and quarantines come back: requeue, do not fail."""
    running, kv = full_pool(5, seq(0, 8, 1))
    assert kv.allocate_slots(50, 0, 8)
    kv.quarantine(50)
    result = retract_until_fits(running, kv, 3)
    assert [s.seq_id for s in result.requeued] == [0]
    assert len(running) == 0


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), max_size=8),
    st.integers(1, 30),
    st.integers(0, 2),
)
def test_it_ends_for_any_pool(shapes: list[tuple[int, int]], free: int, limit: int) -> None:
    """Invariant 7: afterwards a batch fits or nobody is left, and no block is lost."""
    need = sum(-(-(p + o - 1) // 4) for p, o in shapes)
    seqs = [seq(i, p, o) for i, (p, o) in enumerate(shapes)]
    running, kv = full_pool(need + free, *seqs)
    result = retract_until_fits(running, kv, limit)
    gone = [*result.requeued, *result.failed]
    assert len(gone) + len(running) == len(seqs)
    assert running.schedule() > 0 or len(running) == 0
    assert all(s.seq_id not in kv for s in gone)
    assert all(s.num_retractions <= limit for s in result.requeued)
    kv.audit()
