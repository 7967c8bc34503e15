"""The shadow cache: rows that were found right are compared, everything else is checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.engine.paging import Int64Array
from pdcore.engine.shadow import START, WORD_BYTES, ShadowCache, hash_token, prefix_sum
from pdcore.types import Batch, Phase, SamplingParams

BLOCK_SIZE = 4
ENTRIES = 2
STRIDE = ENTRIES * BLOCK_SIZE
TOKENS = [(7 * i) % 997 for i in range(60)]


def make_cache(num_blocks: int = 20, words: int = 2) -> tuple[ShadowCache, bytearray]:
    memory = bytearray(num_blocks * STRIDE * words * WORD_BYTES)
    cache = ShadowCache(
        memoryview(memory),
        entries=ENTRIES,
        block_size=BLOCK_SIZE,
        words=words,
        heads=1,
        first_head=0,
        all_heads=1,
    )
    return cache, memory


def slots_of(first_block: int, count: int) -> Int64Array:
    positions = np.arange(count, dtype=np.int64)
    return (first_block + positions // BLOCK_SIZE) * STRIDE + positions % BLOCK_SIZE


def append(cache: ShadowCache, seq_id: int, tokens: list[int], computed: int = 0) -> int:
    batch = Batch(1, Phase.PREFILL)
    batch.add(seq_id, tokens, computed, {}, SamplingParams())
    return cache.append(batch, [slots_of(1, computed + len(tokens))], learn=True)[0]


def wrong(cache: ShadowCache, count: int) -> tuple[int, int] | None:
    slots = slots_of(1, count)
    return cache.wrong(slots, np.roll(slots, 1), np.arange(count, dtype=np.uint64))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=120), st.integers(0, 1000))
def test_many_tokens_add_up_as_one_after_the_other(tokens: list[int], first: int) -> None:
    g = START
    for position, token in enumerate(tokens, first):
        g = (g + hash_token(token, position)) & ((1 << 64) - 1)
    assert prefix_sum(tokens, START, first) == g
    assert prefix_sum([], g, first) == g


@pytest.mark.parametrize("words", [2, 3])
def test_what_is_written_is_right(words: int) -> None:
    cache, _ = make_cache(words=words)
    assert append(cache, 5, TOKENS[:3]) == prefix_sum(TOKENS[:3])
    assert append(cache, 5, TOKENS[3:], 3) == prefix_sum(TOKENS)
    assert wrong(cache, len(TOKENS)) is None


def test_rows_that_were_right_are_known_until_a_byte_of_them_changes() -> None:
    cache, memory = make_cache()
    append(cache, 5, TOKENS[:10])
    slots = slots_of(1, 10)
    assert cache.holds([5], [slots])
    assert cache.holds([5], [slots[:7]])  # some of them are computed again
    for at in range(STRIDE * 2 * WORD_BYTES, 2 * STRIDE * 2 * WORD_BYTES, 13):
        memory[at] ^= 1
        assert not cache.holds([5], [slots])
        memory[at] ^= 1
    assert cache.holds([5], [slots])


def test_nothing_is_known_of_who_was_not_checked() -> None:
    cache, _ = make_cache()
    append(cache, 5, TOKENS[:10])
    slots = slots_of(1, 10)
    assert not cache.holds([6], [slots])
    assert not cache.holds([5, 6], [slots, slots])
    assert not cache.holds([5], [slots_of(1, 11)])  # one more than was computed here
    cache.learn(6, slots)
    assert cache.holds([5, 6], [slots, slots])


def test_the_rows_of_another_sequence_are_not_ones_own() -> None:
    """Both are right, each for itself: who reads the other's is told so."""
    cache, _ = make_cache()
    append(cache, 5, TOKENS[:8])
    batch = Batch(2, Phase.PREFILL)
    batch.add(6, TOKENS[8:16], 0, {}, SamplingParams())
    cache.append(batch, [slots_of(10, 8)], learn=True)
    assert cache.holds([5, 6], [slots_of(1, 8), slots_of(10, 8)])
    assert not cache.holds([5, 6], [slots_of(10, 8), slots_of(1, 8)])


def test_only_the_latest_sequences_are_remembered() -> None:
    cache, _ = make_cache()
    append(cache, 0, TOKENS[:4])
    for seq_id in range(1, 80):
        cache.learn(seq_id, slots_of(1, 4))
    assert not cache.holds([0], [slots_of(1, 4)])
    assert cache.holds([79], [slots_of(1, 4)])


def test_not_learning_means_every_step_is_checked() -> None:
    cache, _ = make_cache()
    batch = Batch(1, Phase.PREFILL)
    batch.add(5, TOKENS[:4], 0, {}, SamplingParams())
    cache.append(batch, [slots_of(1, 4)], learn=False)
    assert not cache.holds([5], [slots_of(1, 4)])


def forgetful(cache: ShadowCache) -> Callable[[int], bool]:
    """A known-bad variant: what was right once is right for ever."""
    return lambda count: cache.holds([5], [slots_of(1, count)]) or True


def test_a_cache_that_trusts_its_memory_is_caught() -> None:
    cache, memory = make_cache()
    append(cache, 5, TOKENS[:4])
    memory[STRIDE * 2 * WORD_BYTES] ^= 1

    def check(holds: Callable[[int], bool]) -> None:
        assert not holds(4)

    check(lambda count: cache.holds([5], [slots_of(1, count)]))
    with pytest.raises(AssertionError):
        check(forgetful(cache))
