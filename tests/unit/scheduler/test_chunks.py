"""The prefill batch: R84-R87, D15, D18."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import EngineError
from pdcore.kv.cache import KVBlocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec
from pdcore.scheduler.chunks import (
    PrefillChunk,
    build_prefill_batch,
    commit_prefill,
    select_prefill,
)
from pdcore.scheduler.sequence import Sequence
from pdcore.types import FinishReason, GenerateRequest, Phase, RoomKey, SamplingParams, StepOutput

EOS = frozenset({2})


def blocks(num_blocks: int, block_size: int = 4) -> KVBlocks:
    entry = KVCacheEntry("k", "full", "float32", block_size, 1, 1, 8)
    return KVBlocks(KVCacheSpec((entry,)), num_blocks, 1000)


def seq(seq_id: int, prompt: int, max_tokens: int | None = None) -> Sequence:
    ids = tuple(range(100 * seq_id, 100 * seq_id + prompt))
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(seq_id, GenerateRequest(RoomKey(seq_id, 1), "r", ids, sampling, 0, 0))


def shape(chunks: Iterable[PrefillChunk]) -> list[tuple[int, int, int, bool]]:
    return [(c.seq.seq_id, c.start, c.num_tokens, c.is_last) for c in chunks]


Select = Callable[[deque[Sequence], KVBlocks], list[PrefillChunk]]


def check_full_pool(select: Select) -> None:
    """D15: pool of 4 blocks, two 3-block prompts: one-request batch, and it returns."""
    waiting = deque([seq(1, 12), seq(2, 12)])
    chunks = select(waiting, blocks(5))
    assert shape(chunks) == [(1, 0, 12, True)]


def seed_select(waiting: deque[Sequence], kv: KVBlocks) -> list[PrefillChunk]:
    """The seed: a failed allocation does ``continue`` on the same head."""
    chunks: list[PrefillChunk] = []
    spins = 0
    while waiting:
        spins += 1
        assert spins < 1000, "the scheduling loop spins on a full pool"
        head = waiting[0]
        if not kv.allocate_slots(head.seq_id, 0, head.num_tokens):
            continue
        chunks.append(PrefillChunk(waiting.popleft(), 0, head.num_tokens, True))
    return chunks


def test_a_failed_allocation_ends_the_batch() -> None:
    """D15, invariant 7; the mutant is the seed's loop."""
    check_full_pool(lambda waiting, kv: select_prefill(waiting, kv, 1000, 8))
    with pytest.raises(AssertionError, match="spins"):
        check_full_pool(seed_select)


def test_strict_fifo_within_the_token_budget() -> None:
    """R87: stop before the budget is exceeded; nobody overtakes the head."""
    kv = blocks(100)
    waiting = [seq(1, 6), seq(2, 6), seq(3, 1)]
    assert shape(select_prefill(waiting, kv, 10, 8, chunked=False)) == [(1, 0, 6, True)]
    assert shape(select_prefill([seq(4, 30), seq(5, 1)], kv, 10, 8, chunked=False)) == [
        (4, 0, 30, True)
    ]
    assert select_prefill([], kv, 10, 8) == []
    assert shape(select_prefill([seq(6, 1), seq(7, 1)], kv, 10, 1)) == [(6, 0, 1, True)]


def test_a_long_prompt_is_split_and_the_rest_of_the_budget_is_used() -> None:
    kv = blocks(100)
    long = seq(1, 25)
    waiting = [long, seq(2, 3)]
    for expected in (
        [(1, 0, 10, False)],
        [(1, 10, 10, False)],
        [(1, 20, 5, True), (2, 0, 3, True)],
    ):
        chunks = select_prefill(waiting, kv, 10, 8)
        assert shape(chunks) == expected
        for chunk in chunks:
            chunk.seq.advance_prefill(chunk.num_tokens)


def test_chunk_ends_are_aligned_but_there_is_always_progress() -> None:
    kv = blocks(100)
    one = seq(1, 25)
    (chunk,) = select_prefill([one], kv, 10, 8, align=4)
    assert chunk.num_tokens == 8
    one.advance_prefill(8)
    assert shape(select_prefill([one], kv, 3, 8, align=4)) == [(1, 8, 3, False)]
    assert shape(select_prefill([seq(2, 9), seq(3, 9)], kv, 11, 8, align=4)) == [(2, 0, 9, True)]
    assert shape(select_prefill([seq(4, 9), seq(5, 1)], kv, 6, 8, align=4)) == [(4, 0, 4, False)]


def test_a_partial_prompt_that_gets_no_more_blocks_waits() -> None:
    kv = blocks(4)
    one = seq(1, 16)
    (chunk,) = select_prefill([one], kv, 8, 8)
    one.advance_prefill(chunk.num_tokens)
    assert select_prefill([one], kv, 8, 8) == []
    assert kv.audit()["full"].held == 2


def test_the_batch_carries_tokens_tables_and_who_samples() -> None:
    """R84: packed ids; only a last chunk samples."""
    kv = blocks(100)
    chunks = select_prefill([seq(1, 6), seq(2, 9)], kv, 10, 8)
    batch = build_prefill_batch(7, chunks, kv)
    assert batch.phase is Phase.PREFILL
    assert batch.batch_id == 7
    assert batch.input_ids == [*range(100, 106), *range(200, 204)]
    assert batch.query_lens == [6, 4]
    assert batch.num_computed_tokens == [0, 0]
    assert batch.sample == [True, False]
    assert batch.block_tables[1] is kv.get_block_ids(2)


def test_commit_appends_the_first_token_and_checks_it() -> None:
    """D18: EOS as first token and max_tokens = 1 end here."""
    kv = blocks(100)
    seqs = [seq(1, 4), seq(2, 4), seq(3, 4, max_tokens=1), seq(4, 40)]
    chunks = select_prefill(seqs, kv, 20, 8)
    output = StepOutput([[9], [2], [9], None], [[-0.5], [-0.25], [-1.0], None])
    result = commit_prefill(chunks, output, EOS, 1000)
    assert result.seqs == seqs[:3]
    assert [list(ids) for ids in result.token_ids] == [[9], [2], [9]]
    assert result.logprobs == [[-0.5], [-0.25], [-1.0]]
    assert result.finished == seqs[1:3]
    assert seqs[1].finish_reason is FinishReason.STOP
    assert seqs[2].finish_reason is FinishReason.LENGTH
    assert seqs[0].num_computed_tokens == 4
    assert (seqs[3].num_computed_tokens, seqs[3].is_prefill_done) == (8, False)


@pytest.mark.parametrize("rows", [[], [None], [[]], [[1], [1]]])
def test_an_output_that_does_not_fit_changes_nothing(rows: list[list[int] | None]) -> None:
    one = seq(1, 4)
    chunks = select_prefill([one], blocks(10), 20, 8)
    with pytest.raises(EngineError, match="prefill of 1 chunks"):
        commit_prefill(chunks, StepOutput(rows), EOS, 1000)
    assert one.num_computed_tokens == 0


@given(
    st.lists(st.integers(1, 40), max_size=6),
    st.integers(2, 14),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_every_call_returns_and_respects_its_bounds(
    prompts: list[int], num_blocks: int, budget: int, max_seqs: int, align: int
) -> None:
    """Invariant 7: no unbounded loop for any pool; budgets hold; the head never starves."""
    kv = blocks(num_blocks)
    waiting = deque(seq(i + 1, n) for i, n in enumerate(prompts))
    for _ in range(200):
        chunks = select_prefill(waiting, kv, budget, max_seqs, align=align)
        assert len(chunks) <= max_seqs
        assert sum(c.num_tokens for c in chunks) <= budget
        assert [c.seq for c in chunks] == [s for s, _ in zip(waiting, chunks, strict=False)]
        assert all(c.num_tokens > 0 for c in chunks)
        if not chunks:
            break
        for chunk in chunks:
            chunk.seq.advance_prefill(chunk.num_tokens)
            if chunk.is_last:
                assert chunk.seq is waiting.popleft()
                kv.free(chunk.seq.seq_id)
    kv.audit()
    if waiting:
        assert not kv.can_ever_fit(0, waiting[0].num_tokens)
