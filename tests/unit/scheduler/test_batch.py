"""The decode batch: R74, R84, R88, R89, D18, D45, and cost that follows what changed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.errors import EngineError, OwnershipError
from pdcore.kv.cache import KVBlocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec
from pdcore.scheduler.batch import DecodeBatcher, Sequence, StepResult
from pdcore.scheduler.sequence import commit_tokens
from pdcore.types import FinishReason, GenerateRequest, Phase, RoomKey, SamplingParams, StepOutput

EOS = frozenset({2})
MAX_LEN = 60


def entry(name: str, key: str, size: int = 4, window: int | None = None) -> KVCacheEntry:
    return KVCacheEntry(name, key, "float32", size, 1, 1, 8, sliding_window=window)


FULL = KVCacheSpec((entry("k", "full"),))
MIXED = KVCacheSpec((entry("k", "full"), entry("w", "win", 2, 5)))


def seq(seq_id: int, prompt: int, **sampling: object) -> Sequence:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    request = GenerateRequest(RoomKey(seq_id + 1, 1), "r", (9,) * prompt, params, 0, 0)
    one = Sequence(seq_id, request)
    one.complete_prefill()
    one.append_token(100 + seq_id)
    return one


def batcher(kv: KVBlocks, batch_size: int = 8, next_n: int = 0) -> DecodeBatcher:
    return DecodeBatcher(kv, EOS, MAX_LEN, batch_size, next_n)


def step(running: DecodeBatcher, token: Callable[[int], int] = lambda _: 9) -> StepResult:
    running.schedule()
    batch = running.build_batch(1)
    return running.commit(StepOutput([[token(s)] for s in batch.seq_ids]))


def test_the_batch_is_one_token_per_sequence_at_its_next_position() -> None:
    """R84, R89."""
    kv = KVBlocks(FULL, 20, MAX_LEN)
    running = batcher(kv)
    running.add(seq(1, 3))
    running.add(seq(2, 7))
    assert running.schedule() == 2
    batch = running.build_batch(5)
    assert batch.phase is Phase.DECODE
    assert batch.batch_id == 5
    assert batch.seq_ids == [1, 2]
    assert batch.input_ids == [101, 102]
    assert batch.query_lens == [1, 1]
    assert batch.num_computed_tokens == [3, 7]
    assert batch.sample == [True, True]
    assert batch.block_tables == [kv.get_block_ids(1), kv.get_block_ids(2)]
    assert batch.block_tables[0] is kv.get_block_ids(1)
    result = running.commit(StepOutput([[21], [22]], [[-1.0], [-2.0]]))
    assert [s.seq_id for s in result.seqs] == [1, 2]
    assert list(map(list, result.token_ids)) == [[21], [22]]
    assert result.logprobs == [[-1.0], [-2.0]]
    running.schedule()
    again = running.build_batch(6)
    assert again.input_ids == [21, 22]
    assert again.num_computed_tokens == [4, 8]


def test_the_first_batch_size_sequences_run_in_order_of_arrival() -> None:
    """R88, D49: later ones wait until a place is free."""
    running = batcher(KVBlocks(FULL, 40, MAX_LEN), batch_size=2)
    for i in range(4):
        running.add(seq(i, 3, max_tokens=2 + i))
    assert running.schedule() == 2
    assert [s.seq_id for s in step(running).finished] == [0]
    assert running.schedule() == 2
    assert sorted(running.build_batch(1).seq_ids) == [1, 2]
    assert len(running) == 3
    assert 0 not in running
    assert 3 in running


def test_who_gets_no_block_sits_out_and_the_others_go_on() -> None:
    """R88: failures skip that sequence for this step."""
    kv = KVBlocks(FULL, 4, MAX_LEN)
    running = batcher(kv)
    running.add(seq(0, 3))
    running.add(seq(1, 4))
    assert running.schedule() == 2
    step(running)
    assert running.schedule() == 1
    assert running.build_batch(1).seq_ids == [1]
    running.commit(StepOutput([[9]]))
    running.remove(1)
    kv.free(1)
    assert running.schedule() == 1
    assert "stalled=0" in repr(running)


@pytest.mark.parametrize("order", [[3, 1, 2], [1, 2, 3]])
def test_the_earlier_one_gets_the_last_block(order: list[int]) -> None:
    """R88: by order of arrival, whatever the ids, when it is due and when it stalls."""
    kv = KVBlocks(FULL, 6, MAX_LEN)
    running = batcher(kv)
    for i in order:
        running.add(seq(i, 3))
    step(running)
    assert kv.num_free == {"full": 2}
    kv.allocate_slots(50, 0, 4)
    assert running.schedule() == 1
    assert running.build_batch(1).seq_ids == order[:1]
    running.commit(StepOutput([[9]]))
    kv.free(50)
    assert running.schedule() == 2
    assert sorted(running.build_batch(1).seq_ids) == sorted(order[:2])


def test_finishing_is_seen_at_commit() -> None:
    """R74, D18: EOS, stop ids, max_tokens, the model's length."""
    running = batcher(KVBlocks(FULL, 40, MAX_LEN))
    running.add(seq(0, 3))
    running.add(seq(1, 3, max_tokens=2))
    running.add(seq(2, 3, stop_token_ids=(5,)))
    running.add(seq(3, 3, ignore_eos=True, max_tokens=3))
    running.add(seq(4, MAX_LEN - 2))
    result = step(running, lambda s: {2: 5}.get(s, 2))
    reasons = {s.seq_id: s.finish_reason for s in result.finished}
    assert reasons == {
        0: FinishReason.STOP,
        1: FinishReason.STOP,
        2: FinishReason.STOP,
        4: FinishReason.STOP,
    }
    assert len(result.seqs) == 5
    result = step(running)
    assert [s.finish_reason for s in result.finished] == [FinishReason.LENGTH]
    assert len(running) == 0
    assert running.schedule() == 0


def test_only_prefilled_unfinished_new_sequences_may_run() -> None:
    running = batcher(KVBlocks(FULL, 40, MAX_LEN))
    one = seq(0, 3)
    running.add(one)
    with pytest.raises(OwnershipError, match="must be new here"):
        running.add(one)
    fresh = seq(1, 3)
    fresh.retract()
    with pytest.raises(OwnershipError, match="prefilled"):
        running.add(fresh)
    done = seq(2, 3)
    done.finish_reason = FinishReason.STOP
    with pytest.raises(OwnershipError, match="has finished"):
        running.add(done)
    assert running.remove(7) is None
    assert running.sequences() == [one]


def test_a_sequence_removed_in_flight_gets_nothing_and_nobody_else_notices() -> None:
    """A forward pass counts like a handle: it leaves at the commit."""
    kv = KVBlocks(FULL, 40, MAX_LEN)
    running = batcher(kv)
    seqs = [seq(i, 3, logprobs=True) for i in range(4)]
    for one in seqs:
        running.add(one)
    running.schedule()
    running.build_batch(1)
    assert running.remove(1) is seqs[1]
    running.remove(3)
    seqs[3].finish_reason = FinishReason.ABORT
    with pytest.raises(OwnershipError, match="in flight"):
        running.schedule()
    result = running.commit(StepOutput([[20], [21], [22], [2]], [[-1.0]] * 4))
    assert result.seqs == [seqs[0], seqs[2]]
    assert list(map(list, result.token_ids)) == [[20], [22]]
    assert result.logprobs == [[-1.0], [-1.0]]
    assert result.finished == []
    assert seqs[1].output_token_ids == [101]
    assert seqs[3].finish_reason is FinishReason.ABORT
    assert seqs[0].output_logprobs == [None, -1.0]
    assert running.schedule() == 2


@pytest.mark.parametrize("rows", [[[9]], [[9], []], [[9], None], [[9], [9, 9]]])
def test_an_output_that_does_not_fit_changes_nothing(rows: list[list[int] | None]) -> None:
    """Without speculation a row is exactly one token: more would have no KV slot."""
    kv = KVBlocks(FULL, 40, MAX_LEN)
    running = batcher(kv)
    seqs = [seq(0, 3), seq(1, 3)]
    for one in seqs:
        running.add(one)
    running.schedule()
    running.build_batch(1)
    with pytest.raises(EngineError, match="decode"):
        running.commit(StepOutput(rows))
    assert [s.num_output_tokens for s in seqs] == [1, 1]
    running.abandon()
    with pytest.raises(OwnershipError, match="no decode batch"):
        running.commit(StepOutput([[9], [9]]))
    assert len(step(running).seqs) == 2


def test_several_tokens_a_step() -> None:
    """R74, R88: slots for 1 + next_n, output cut after the first EOS."""
    kv = KVBlocks(FULL, 40, MAX_LEN)
    running = batcher(kv, next_n=2)
    seqs = [seq(0, 3, logprobs=True), seq(1, 3), seq(2, 3, max_tokens=3)]
    for one in seqs:
        running.add(one)
    running.schedule()
    assert len(kv.get_block_ids(0)["full"]) == 2  # positions 3..6
    running.build_batch(1)
    probs = [[-1.0, -2.0], [-3.0] * 3, [-4.0] * 3]
    result = running.commit(StepOutput([[7, 8], [7, 2, 8], [7, 8, 9]], probs))
    assert [list(ids) for ids in result.token_ids] == [[7, 8], [7, 2], [7, 8]]
    assert seqs[0].output_logprobs == [None, -1.0, -2.0]
    assert [s.finish_reason for s in seqs] == [None, FinishReason.STOP, FinishReason.LENGTH]
    running.schedule()
    batch = running.build_batch(2)
    assert batch.input_ids == [8]
    assert batch.num_computed_tokens == [5]
    running.commit(StepOutput([[7]]))
    running.schedule()
    running.build_batch(3)
    with pytest.raises(EngineError, match="got 4 tokens"):
        running.commit(StepOutput([[7, 7, 7, 7]]))


def test_near_the_maximum_length_nothing_breaks() -> None:
    """D45: look-ahead beyond the block table near max length."""
    kv = KVBlocks(FULL, 40, MAX_LEN)
    running = batcher(kv, next_n=3)
    one = seq(0, MAX_LEN - 4)
    running.add(one)
    while len(running):
        step(running)
    assert one.num_tokens == MAX_LEN
    assert one.finish_reason is FinishReason.LENGTH


# --- against a plain reference -----------------------------------------------------------------


class Reference:
    """R88 word by word: visit every sequence in every step."""

    def __init__(self, kv: KVBlocks, batch_size: int, next_n: int) -> None:
        self.kv, self.batch_size, self.next_n = kv, batch_size, next_n
        self.running: list[Sequence] = []
        self.batch: list[Sequence] = []

    def schedule(self) -> list[int]:
        n = self.next_n
        self.batch = [
            s
            for s in self.running[: self.batch_size]
            if self.kv.allocate_slots(s.seq_id, s.num_computed_tokens, 1 + n, max(n - 1, 0))
        ]
        return sorted(s.seq_id for s in self.batch)

    def commit(self, tokens: Callable[[int, int], list[int]]) -> list[int]:
        finished = []
        for s in self.batch:
            if s not in self.running:
                continue
            commit_tokens(s, tokens(s.seq_id, s.num_tokens), None, EOS, MAX_LEN)
            if s.finish_reason is not None:
                finished.append(s.seq_id)
                self.running.remove(s)
        return sorted(finished)


OPS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 30), st.booleans()),
    st.tuples(st.just("remove"), st.integers(0, 5), st.just(0), st.just(False)),
    st.tuples(st.just("step"), st.integers(1, 12), st.integers(0, 99), st.booleans()),
)


@given(
    st.lists(OPS, max_size=40),
    st.sampled_from([FULL, MIXED]),
    st.integers(2, 25),
    st.integers(1, 5),
    st.sampled_from([0, 0, 1, 2]),
)
@settings(max_examples=300)
def test_it_does_what_the_plain_loop_does(
    ops: list[tuple[str, int, int, bool]],
    spec: KVCacheSpec,
    num_blocks: int,
    batch_size: int,
    next_n: int,
) -> None:
    """Same batches, same tokens, same free blocks as visiting everybody every step."""
    kv, kv2 = KVBlocks(spec, num_blocks, MAX_LEN), KVBlocks(spec, num_blocks, MAX_LEN)
    running, plain = batcher(kv, batch_size, next_n), Reference(kv2, batch_size, next_n)
    ours: dict[int, Sequence] = {}
    theirs: dict[int, Sequence] = {}
    for kind, a, b, flag in ops:
        if kind == "add":
            seq_id = len(ours)
            for table, sink in ((ours, running.add), (theirs, plain.running.append)):
                table[seq_id] = seq(seq_id, a, max_tokens=b, ignore_eos=flag)
                if table[seq_id].num_tokens < MAX_LEN:
                    sink(table[seq_id])
        elif kind == "remove" and plain.running:
            seq_id = plain.running.pop(a % len(plain.running)).seq_id
            running.remove(seq_id)
            assert kv.free(seq_id) == kv2.free(seq_id)
        elif kind == "step":
            for i in range(a):
                is_cut = flag and i == 0
                if not one_step(running, plain, kv, kv2, (b, i), is_cut, has_window=spec is MIXED):
                    break
    assert [s.seq_id for s in running.sequences()] == [s.seq_id for s in plain.running]
    for seq_id, mine in ours.items():
        assert mine.output_token_ids == theirs[seq_id].output_token_ids
        assert mine.finish_reason == theirs[seq_id].finish_reason
    kv.audit()


def one_step(
    running: DecodeBatcher,
    plain: Reference,
    kv: KVBlocks,
    kv2: KVBlocks,
    salt: tuple[int, int],
    remove_one: bool,
    *,
    has_window: bool,
) -> bool:
    def tokens(seq_id: int, position: int) -> list[int]:
        mixed = hash((salt, seq_id, position))
        return [(mixed >> i) % 11 for i in range(1 + mixed % (1 + plain.next_n))]

    expected = plain.schedule()
    assert running.schedule() == len(expected)
    if not has_window:
        assert running.schedule() == len(expected), "scheduling again must change nothing"
    assert kv.num_free == kv2.num_free
    if not expected:
        return False
    batch = running.build_batch(1)
    assert sorted(batch.seq_ids) == expected
    by_id = {s.seq_id: s for s in plain.batch}
    for i, seq_id in enumerate(batch.seq_ids):
        assert batch.input_ids[i] == by_id[seq_id].output_token_ids[-1]
        assert batch.num_computed_tokens[i] == by_id[seq_id].num_computed_tokens
    rows = [tokens(s, by_id[s].num_tokens) for s in batch.seq_ids]
    if remove_one:
        plain.running.remove(by_id[expected[0]])
        running.remove(expected[0])
    result = running.commit(StepOutput(rows))
    finished = plain.commit(tokens)
    assert sorted(s.seq_id for s in result.finished) == finished
    for seq_id in [*finished, *([expected[0]] if remove_one else [])]:
        assert kv.free(seq_id) == kv2.free(seq_id)
    for one, ids in zip(result.seqs, result.token_ids, strict=True):
        assert by_id[one.seq_id].output_token_ids[-len(ids) :] == list(ids)
    assert kv.num_free == kv2.num_free
    return True


def test_a_step_costs_less_than_visiting_everybody() -> None:
    """The step benchmark in small: against a bare loop that counts and compares. The
    target is 1.0; 3.0 allows for a busy machine and still catches a visit per sequence
    (a real check of each costs ten times the loop)."""
    n, block_size = 1000, 128
    spec = KVCacheSpec((entry("k", "full", block_size),))
    kv = KVBlocks(spec, 6 * n, 10_000)
    running = DecodeBatcher(kv, EOS, 10_000, n)
    for i in range(n):
        running.add(seq(i, 1 + i % 300))
    output = StepOutput([[9] for _ in range(n)])
    counts = [[i % 300] for i in range(n)]
    ours, loops = [], []
    gc.disable()
    try:
        for i in range(60):
            start = time.perf_counter()
            running.schedule()
            middle = time.perf_counter()
            running.build_batch(i)
            built = time.perf_counter()
            running.commit(output)
            end = time.perf_counter()
            for count in counts:
                count[0] += 1
                if count[0] >= 10_000 or count[0] % block_size == 0:
                    count[0] += 0
            loops.append(time.perf_counter() - end)
            ours.append(end - built + middle - start)
    finally:
        gc.enable()
    assert sorted(ours)[30] < 3.0 * sorted(loops)[30]
