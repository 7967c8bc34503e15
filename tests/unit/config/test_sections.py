"""The YAML sections: R17 divisibility, R18 sizes, and one way to size the KV pool."""

from __future__ import annotations

import pytest

from pdcore.config import ModelConfig, ParallelConfig, SchedulerConfig


def test_parallel_sizes_default_to_one_and_derive_dp() -> None:
    """R17, R6: dp_size(W=8, tp=2, cp=2) is refused, as cp is 1 or the whole world."""
    assert ParallelConfig().dp_size == 1
    assert ParallelConfig(world_size=8, attn_tp_size=2).dp_size == 4
    assert ParallelConfig(world_size=8, attn_tp_size=2).attn_dp_size == 4
    assert ParallelConfig(world_size=16, moe_tp_size=4).moe_ep_size == 4
    assert ParallelConfig(world_size=16, embed_tp_size=8).embed_dp_size == 2
    assert ParallelConfig(world_size=4, cp_size=4).dp_size == 1


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"world_size": 8, "attn_tp_size": 3}, r"attn_tp_size must divide world_size \(8\), got 3"),
        ({"world_size": 8, "moe_tp_size": 16}, "moe_tp_size must divide"),
        ({"world_size": 8, "cp_size": 2}, "cp_size must be 1, or world_size"),
        ({"world_size": 4, "cp_size": 4, "attn_tp_size": 2}, "cp_size must be 1, or"),
        ({"world_size": 4, "pp_size": 4, "attn_tp_size": 2}, "pp_size x attn_tp_size x cp_size"),
        ({"world_size": 0}, "world_size must be >= 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], text: str) -> None:
    """R17, D30: nothing is floored silently."""
    with pytest.raises(ValueError, match=text):
        ParallelConfig(**sizes)


def test_kv_pool_is_sized_one_way() -> None:
    with pytest.raises(ValueError, match="kv_cache_bytes must not be set together with num_blocks"):
        SchedulerConfig(num_blocks=1000, kv_cache_bytes=1 << 30)


def test_kv_pool_must_hold_one_prompt() -> None:
    """R100: (blocks - 1) x block_size - 1 >= max_prefill_tokens."""
    SchedulerConfig(num_blocks=514, block_size=16, max_prefill_tokens=8192)
    with pytest.raises(ValueError, match="num_blocks must hold max_prefill_tokens"):
        SchedulerConfig(num_blocks=513, block_size=16, max_prefill_tokens=8192)


def test_r100_mutant_without_the_null_block_is_caught() -> None:
    def mutant_fits(blocks: int, block_size: int, tokens: int) -> bool:
        return blocks * block_size >= tokens  # forgets the null block and the first output

    def check(fits: bool) -> None:
        assert not fits

    with pytest.raises(AssertionError):
        check(mutant_fits(512, 16, 8192))


def test_model_path_words() -> None:
    assert not ModelConfig().is_simulated
    assert ModelConfig(model_path="simulated").is_simulated
