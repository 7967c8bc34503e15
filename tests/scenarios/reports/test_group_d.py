"""Public reports, group D: deadlock and starvation when the KV cache is nearly full.

vLLM, TensorRT-LLM, vllm-ascend. Pools here hold one request, or one and a half; every test
asks whether the system drains and whether what it returns is still right.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.config import CoreLimits
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import OwnershipError
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.admission import AdmissionLine
from pdcore.testing.world import World, make_world
from pdcore.types import RoomKey, SamplingParams
from tests.scenarios.reports.fleet import check_nothing_leaked, check_right
from tests.unit.scheduler.kit import make_spec

BLOCK = 4


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def drain(world: World, requests: list[tuple[int, int]]) -> None:
    """(prompt tokens, output tokens) of requests that arrive at once: every one is served."""
    keys: list[tuple[RoomKey, list[int], int]] = []
    for number, (num_prompt, num_output) in enumerate(requests):
        prompt = [5 + number] * num_prompt
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
        keys.append((world.submit(prompt, sampling=sampling), prompt, num_output))
    world.run(lambda: all(world.decode.result(key) for key, _, _ in keys), max_steps=5_000)
    for key, prompt, num_output in keys:
        check_right(world.decode, key, world.model, prompt, num_output)
    world.settle()
    check_nothing_leaked(world)


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=2, max_size=7),
    spare=st.integers(0, 12),
    prefill_spare=st.integers(0, 6),
)
@settings(max_examples=25)
def test_any_order_of_arrival_drains_through_any_pool(
    requests: list[tuple[int, int]], spare: int, prefill_spare: int
) -> None:
    """vllm #45388: whoever is first in the queue and does not fit must not stop those behind
    it who hold the blocks. Any order, any sizes, any pool that holds the largest one."""
    largest = max(blocks_for(p + o) for p, o in requests)
    limits = CoreLimits(num_reserved_decode_tokens=0, max_retractions=50)
    world = make_world(
        num_blocks=largest + spare + 1,
        prefill_blocks=max(blocks_for(p + 1) for p, _ in requests) + prefill_spare + 1,
        limits=limits,
    )
    drain(world, requests)


def check_the_head_blocks_nobody(line: AdmissionLine[str]) -> None:
    line.add("large", {"full": 9})
    line.add("small", {"full": 1})
    budget = KVBlocks(make_spec(), 6, 512).budget(0)
    assert line.offer(budget, 2) == ["small"]


class StopsAtTheHead(AdmissionLine[str]):
    """The reported rule: the first who does not fit ends the round."""

    def offer(self, budget, limit):
        found = super().offer(budget, limit)
        return found if "large" in found else []


def test_the_mutant_that_stops_at_the_head_is_caught() -> None:
    check_the_head_blocks_nobody(AdmissionLine(patience=10))
    with pytest.raises(AssertionError):
        check_the_head_blocks_nobody(StopsAtTheHead(patience=10))


@pytest.mark.parametrize("spare", range(8))
def test_two_that_need_one_more_block_each(spare: int) -> None:
    """vllm #57104: both are loaded and fill the pool, both need one more block. Admission
    takes the block of the first output token along, and who cannot grow is retracted."""
    limits = CoreLimits(num_reserved_decode_tokens=0, max_retractions=20)
    world = make_world(num_blocks=2 * 3 + 1 + spare, prefill_blocks=64, limits=limits)
    drain(world, [(8, 9), (8, 9)])


def test_what_is_promised_never_exceeds_the_pool() -> None:
    """vllm #57104: at every step the blocks that requests hold, prompt and look-ahead, are
    blocks of the pool; nothing is promised twice."""
    limits = CoreLimits(num_reserved_decode_tokens=4, max_retractions=20)
    world = make_world(num_blocks=15, prefill_blocks=15, limits=limits)
    keys = [
        world.submit([n] * (3 * n), sampling=SamplingParams(max_tokens=6)) for n in range(5, 12)
    ]
    core = world.decode.worker.core

    def looked_at() -> bool:
        ledger = core.blocks.audit()["full"]
        assert ledger.free + ledger.held + ledger.leased + ledger.quarantined == ledger.total
        owned = [
            block
            for record in core.rooms.records.values()
            for block in core.blocks.get_block_ids(record.seq.seq_id).get("full", [])
            if block
        ]
        assert len(owned) == len(set(owned)) <= ledger.total
        return all(world.decode.result(key) for key in keys)

    world.run(looked_at)


def test_a_block_that_a_writer_may_use_cannot_be_taken() -> None:
    """TRT-LLM #12542: a block under a lease, or one that waits for its writer, is refused to
    whoever would free it or hand it out; that is an error and not an eviction."""
    world = make_world(stepped=True, num_blocks=10, prefill_blocks=64)
    key = world.submit(list(range(10, 30)), sampling=SamplingParams(max_tokens=2))
    world.run(lambda: bool(world.fabric.pending()))
    pool = world.decode.worker.core.blocks._by_key["full"].pool
    record = world.decode.worker.core.rooms.records[key]
    leased = world.decode.worker.core.blocks.get_block_ids(record.seq.seq_id)["full"][:5]
    with pytest.raises(OwnershipError):
        pool.free(leased)
    world.abort(key)
    world.run(lambda: world.decode.result(key) is not None)
    with pytest.raises(OwnershipError):
        pool.free(leased)
    assert not set(pool.allocate(3)) & set(leased)


@pytest.mark.parametrize("num_blocks", [13, 14, 16, 19, 21])
def test_retraction_at_a_full_pool_makes_progress(num_blocks: int) -> None:
    """vllm-ascend #2671, vllm-ascend #12383: decode at its last block. Each retraction frees
    enough for somebody's next step, there is a bounded number of them, and all are served."""
    limits = CoreLimits(num_reserved_decode_tokens=0, max_retractions=30)
    world = make_world(num_blocks=num_blocks, prefill_blocks=64, limits=limits)
    running = world.decode.worker.core.running
    make_room = running._make_room
    rounds: list[float] = []

    def counted(now: float) -> None:
        rounds.append(now)
        free = running.blocks.audit()["full"].free
        make_room(now)
        assert running.blocks.audit()["full"].free > free, "a round that frees nothing"

    running._make_room = counted
    requests = [(12, 36), (12, 30), (8, 20), (16, 10)]
    drain(world, requests)
    assert 0 < len(rounds) <= sum(num_output for _, num_output in requests)


def test_more_retractions_than_allowed_end_with_a_reason() -> None:
    """vllm-ascend #12383: a loop of retraction and recomputation has an end that the client
    is told of."""
    limits = CoreLimits(num_reserved_decode_tokens=0, max_retractions=0)
    world = make_world(num_blocks=19, prefill_blocks=64, limits=limits)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    keys = [world.submit([n] * 12, sampling=sampling) for n in (20, 30)]
    world.run(lambda: all(world.decode.result(key) for key in keys))
    results = [world.decode.result(key) for key in keys]
    assert sorted(r.failure is None for r in results) == [False, True]
    (why,) = [r.failure for r in results if r.failure is not None]
    assert (why.code, why.http_status) == ("out_of_memory", 503)
    world.settle()
    check_nothing_leaked(world)


def test_a_received_request_waits_as_long_as_it_must() -> None:
    """vllm #18631: its KV has arrived, and for a hundred steps there is no place in the
    batch. What was received stays received."""
    world = make_world(limits=CoreLimits(max_running=1))
    long = world.submit([5] * 8, sampling=SamplingParams(max_tokens=120, ignore_eos=True))
    world.run(lambda: len(world.decode.tokens(long)) > 2)
    key = world.submit([6] * 9, sampling=SamplingParams(max_tokens=4, ignore_eos=True))
    prefill = world.prefill.worker.core
    world.run(lambda: world.prefill.result(key) is not None)
    assert world.prefill.result(key).failure is None
    assert world.decode.result(long) is None, "the long one still has the only place"
    world.run(lambda: world.decode.result(key) is not None)
    assert world.decode.tokens(key) == simulated_tokens(world.model, [6] * 9, 4)
    assert world.decode.tokens(long) == simulated_tokens(world.model, [5] * 8, 120)
    assert prefill is world.prefill.worker.core
    world.settle()
    check_nothing_leaked(world)
