"""Prefill and decode with blocks of different sizes: the KV proves itself (R57, R94)."""

from __future__ import annotations

import pytest

from pdcore.config import CoreLimits
from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.testing.world import make_world
from pdcore.types import SamplingParams

TEN = SamplingParams(max_tokens=10)


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize(("prefill", "decode"), [(4, 6), (6, 4), (4, 1), (3, 16), (16, 5)])
def test_kv_is_cut_into_the_blocks_of_decode(prefill: int, decode: int, chunk: int | None) -> None:
    """Whole prompts and early sends whose ends lie inside blocks of decode; every word of the
    cache is verified by the runner that reads it."""
    model = SimulatedConfig(block_size=prefill, max_model_len=512, verify_all=True)
    limits = CoreLimits() if chunk is None else CoreLimits(prefill_chunk_tokens=chunk)
    world = make_world(model=model, limits=limits, decode_block_size=decode)
    for length in (1, 5, 17, 48, 49):
        prompt = list(range(10, 10 + length))
        assert world.run_request(prompt, TEN) == simulated_tokens(model, prompt, 10)
    assert world.prefill.worker.core.setup.spec.block_sizes == {"full": prefill}
    assert world.decode.worker.core.setup.spec.block_sizes == {"full": decode}


def test_a_handshake_that_comes_first_may_list_many_small_blocks() -> None:
    """Habit 8: the bound on what is parked is in tokens of the longest prompt, whatever
    decode's block size."""
    model = SimulatedConfig(block_size=16, max_model_len=64)
    world = make_world(model=model, decode_block_size=1)
    prompt = list(range(10, 70))
    assert world.run_request(prompt, SamplingParams(max_tokens=2)) == simulated_tokens(
        model, prompt, 2
    )
