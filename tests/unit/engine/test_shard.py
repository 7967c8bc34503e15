"""Who holds what of a cut Llama: every weight is somewhere, none is computed twice."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from pdcore.engine.shard import TensorParallel, TPRank, check_divides, local_config, spans
from pdcore.engine.weights import LlamaConfig, fused_layout
from pdcore.errors import EngineError
from tests.unit.engine.files import TINY

SMOLLM2 = LlamaConfig(
    num_layers=2,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=512,
    max_model_len=8192,
    tie_embeddings=False,
)
CASES = [(TINY, 1), (TINY, 2), (TINY, 4), (TINY, 8), (SMOLLM2, 1), (SMOLLM2, 3)]


@pytest.mark.parametrize(("config", "tp_size"), CASES)
def test_the_ranks_hold_everything_and_nothing_twice(config: LlamaConfig, tp_size: int) -> None:
    """Counted per row or column. Only K and V rows may have copies, each as many; what is not
    cut is whole everywhere, the output matrix on rank 0 alone."""
    copies = max(1, tp_size // config.num_kv_heads)
    for tensor in fused_layout(config):
        what = tensor.name.rpartition(".")[2]
        cut = {spans(config, tensor, TPRank(tp_size, rank))[0] for rank in range(tp_size)}
        (axis,) = cut
        held = np.zeros(tensor.shape[axis], int)
        for rank in range(tp_size):
            for start, end in spans(config, tensor, TPRank(tp_size, rank))[1]:
                assert 0 <= start < end <= len(held)
                held[start:end] += 1
        if what == "qkv":
            q = config.num_heads * config.head_dim
            assert (held[:q] == 1).all()
            assert (held[q:] == copies).all()
        elif what in ("o", "gate_up", "down", "head"):
            assert (held == 1).all(), what
        else:
            assert (held == tp_size).all(), what


@pytest.mark.parametrize(("config", "tp_size"), CASES)
def test_the_parts_have_the_shapes_of_the_local_config(config: LlamaConfig, tp_size: int) -> None:
    for rank in (TPRank(tp_size, at) for at in range(tp_size)):
        own = {tensor.name: tensor.shape for tensor in fused_layout(local_config(config, rank))}
        for tensor in fused_layout(config):
            axis, parts = spans(config, tensor, rank)
            shape = list(tensor.shape)
            shape[axis] = sum(end - start for start, end in parts)
            if parts:
                assert own.pop(tensor.name) == tuple(shape)
        assert not own


@pytest.mark.parametrize(("config", "tp_size"), CASES)
def test_a_query_head_is_where_its_kv_head_is(config: LlamaConfig, tp_size: int) -> None:
    """Rank r's KV heads start at r * num_kv_heads // tp_size (R80 counts on it)."""
    group = config.num_heads // config.num_kv_heads
    qkv = next(tensor for tensor in fused_layout(config) if tensor.name == "0.qkv")
    dim = config.head_dim
    for rank in range(tp_size):
        _, parts = spans(config, qkv, TPRank(tp_size, rank))
        (q, q_end), (k, k_end), (v, v_end) = parts if tp_size > 1 else cut_by_hand(config)
        first = k // dim - config.num_heads
        assert first == rank * config.num_kv_heads // tp_size
        assert v - k == v_end - k_end == config.num_kv_heads * dim
        for head in range(q // dim, q_end // dim):
            assert first <= head // group < first + (k_end - k) // dim


def cut_by_hand(config: LlamaConfig) -> tuple[tuple[int, int], ...]:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (0, q), (q, q + kv), (q + kv, q + 2 * kv)


def test_local_config() -> None:
    own = local_config(SMOLLM2, TPRank(3, 1))
    assert (own.num_heads, own.num_kv_heads, own.intermediate_size) == (3, 1, 512)
    assert (own.hidden_size, own.head_dim, own.vocab_size) == (576, 64, 512)
    assert local_config(TINY, TPRank(8, 5)).num_kv_heads == 1
    assert local_config(SMOLLM2, TPRank(1, 0)) == SMOLLM2
    assert not local_config(SMOLLM2, TPRank(3, 0)).tie_embeddings
    assert own.tie_embeddings


@pytest.mark.parametrize(
    ("config", "tp_size", "message"),
    [
        (SMOLLM2, 2, "tp_size 2 does not divide num_heads 9 of the model; possible are 1, 3"),
        (TINY, 3, "tp_size 3 does not divide num_heads 8 of the model; possible are 1, 2, 4, 8"),
        (TINY, 16, "tp_size 16 does not divide num_heads 8"),
        (
            attrs.evolve(TINY, intermediate_size=258),
            4,
            "tp_size 4 does not divide intermediate_size 258 of the model; possible are 1, 2",
        ),
        (
            attrs.evolve(TINY, num_heads=12, num_kv_heads=6, intermediate_size=240),
            4,
            "tp_size 4 neither divides num_kv_heads 6 of the model nor is a multiple of it; "
            "possible are 1, 2, 3, 6, 12",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(
    config: LlamaConfig, tp_size: int, message: str
) -> None:
    for call in (
        lambda: check_divides(config, tp_size),
        lambda: local_config(config, TPRank(tp_size, 0)),
    ):
        with pytest.raises(EngineError, match=message):
            call()


def test_ranks_outside_the_group_are_refused() -> None:
    with pytest.raises(EngineError, match="tp_size is 0"):
        TPRank(0, 0)
    for tp_rank in (-1, 2):
        with pytest.raises(EngineError, match=rf"tp_rank {tp_rank} is not within 0\.\.1"):
            TPRank(2, tp_rank)


@pytest.mark.parametrize(
    ("rendezvous", "address"),
    [
        ("tcp://127.0.0.1:29500", ("127.0.0.1", 29500)),
        ("tcp://[::1]:29500", ("::1", 29500)),
        ("tcp://prefill-0.example:1", ("prefill-0.example", 1)),
        ("file:///run/pdcore/tp-7", "/run/pdcore/tp-7"),
    ],
)
def test_where_a_group_meets(rendezvous: str, address: object) -> None:
    assert TensorParallel(rank=TPRank(2, 1), rendezvous=rendezvous).address() == address


@pytest.mark.parametrize(
    "rendezvous",
    ["", "127.0.0.1:1", "tcp://127.0.0.1", "tcp://:1", "tcp://a:99999", "tcp://a:b", "tcp://a:0",
     "tcp://[::1", "tcp://a:1/x", "file://x", "file://host/x", "udp://a:1"],
)  # fmt: skip
def test_where_no_group_can_meet(rendezvous: str) -> None:
    with pytest.raises(EngineError, match=r"is neither tcp://host:port nor file:///path"):
        TensorParallel(rank=TPRank(2, 1), rendezvous=rendezvous)


@pytest.mark.parametrize("field", ["rendezvous_timeout_s", "step_timeout_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_timeouts_have_bounds(field: str, value: float) -> None:
    timeouts = {"rendezvous_timeout_s": 1.0, "step_timeout_s": 1.0, field: value}
    with pytest.raises(EngineError, match=rf"{field} is .* expected 0\.001\.\.86400 seconds"):
        TensorParallel(rank=TPRank(2, 1), rendezvous="tcp://a:1", **timeouts)
