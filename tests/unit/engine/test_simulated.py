"""The simulated runner: its KV proves itself, and its tokens are known beforehand."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.engine.simulated import (
    SMOLLM2_CPU,
    CostModel,
    SimulatedConfig,
    SimulatedRunner,
    simulated_tokens,
)
from pdcore.errors import EngineError
from pdcore.testing.runner_rig import Rig, RigSequence
from pdcore.types import Batch, Phase, SamplingParams

PROMPT = [(7 * i) % 1000 for i in range(40)]


def make_rig(seed: int = 0, **config: object) -> Rig:
    return Rig(SimulatedRunner(SimulatedConfig(**config)), 32, random.Random(seed))  # type: ignore[arg-type]


def test_tokens_are_the_predicted_ones() -> None:
    rig = make_rig(verify_all=True)
    expected = simulated_tokens(SimulatedConfig(), PROMPT, 30)
    assert rig.generate([PROMPT], 30, chunk=7) == [expected]
    assert len(set(expected)) > 20
    for params in (SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=1.0)):
        sampled = simulated_tokens(SimulatedConfig(), PROMPT, 30, params)
        assert rig.generate([PROMPT], 30, params) == [sampled]
        assert sampled != expected


@given(
    st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=50), min_size=1, max_size=5),
    st.integers(1, 20),
    st.sampled_from([1, 3, 16]),
)
def test_any_batch_gives_the_predicted_tokens(
    prompts: list[list[int]], chunk: int, block_size: int
) -> None:
    config = SimulatedConfig(verify_all=True, block_size=block_size, num_layers=1)
    rig = Rig(SimulatedRunner(config), 300, random.Random(1))
    expected = [simulated_tokens(config, prompt, 5) for prompt in prompts]
    assert rig.generate(prompts, 5, chunk=chunk) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens: tokens[1:],
        lambda tokens: [*tokens, tokens[-1]],
        lambda tokens: [tokens[1], tokens[0], *tokens[2:]],
        lambda tokens: [*tokens[:20], tokens[20] ^ 1, *tokens[21:]],
    ],
    ids=["lost first", "repeated last", "swapped", "changed"],
)
def test_mistakes_in_the_sequence_change_the_tokens(
    change: Callable[[list[int]], list[int]],
) -> None:
    expected = simulated_tokens(SimulatedConfig(), PROMPT, 8)
    assert simulated_tokens(SimulatedConfig(), change(PROMPT), 8) != expected


def prefilled(rig: Rig) -> RigSequence:
    (seq,) = rig.sequences([PROMPT], 20)
    rig.prefill([seq])
    return seq


def zero_a_block(rig: Rig, seq: RigSequence) -> None:
    rig.block(2, seq.blocks["full"][1])[:] = bytes(len(rig.block(2, 1)))


def swap_two_blocks(rig: Rig, seq: RigSequence) -> None:
    blocks = seq.blocks["full"]
    blocks[0], blocks[1] = blocks[1], blocks[0]


def use_another_sequences_block(rig: Rig, seq: RigSequence) -> None:
    free = [b for b in range(1, 32) if b not in seq.blocks["full"]]
    other = RigSequence(99, [(3 * i) % 1000 for i in range(40)], {"full": free})
    rig.prefill([other])
    seq.blocks["full"][1] = free[1]


def swap_two_layers(rig: Rig, seq: RigSequence) -> None:
    block = seq.blocks["full"][2]
    first, second = bytes(rig.block(0, block)), bytes(rig.block(2, block))
    rig.block(0, block)[:], rig.block(2, block)[:] = second, first


def shift_by_one_token(rig: Rig, seq: RigSequence) -> None:
    """A layout that is off by one row."""
    for entry in range(4):
        for block in seq.blocks["full"]:
            view = rig.block(entry, block)
            row = rig.runner.kv_cache_spec.entries[entry].token_bytes
            view[row:] = bytes(view[:-row])


def halve_the_last_block(rig: Rig, seq: RigSequence) -> None:
    """The tail of a transfer is missing: the last computed row is not there."""
    row = rig.runner.kv_cache_spec.entries[3].token_bytes
    view = rig.block(3, seq.blocks["full"][2])
    view[7 * row : 8 * row] = bytes(row)


DAMAGES = [
    zero_a_block,
    swap_two_blocks,
    use_another_sequences_block,
    swap_two_layers,
    shift_by_one_token,
    halve_the_last_block,
]


@pytest.mark.parametrize("verify_all", [False, True])
@pytest.mark.parametrize("damage", DAMAGES, ids=[d.__name__ for d in DAMAGES])
def test_wrong_kv_is_an_error_in_the_next_step(
    damage: Callable[[Rig, RigSequence], None], verify_all: bool
) -> None:
    rig = make_rig(verify_all=verify_all)
    seq = prefilled(rig)
    damage(rig, seq)
    with pytest.raises(EngineError, match=r"sequence \d+: the KV of position \d+ in block \d+"):
        rig.decode([seq], 1)


def test_the_error_names_position_block_and_entry() -> None:
    rig = make_rig(verify_all=True)
    seq = prefilled(rig)
    block = seq.blocks["full"][1]
    rig.block(3, block)[5 * 32] ^= 1
    message = f"sequence {seq.seq_id}: the KV of position 21 in block {block}, entry layers.1.v,"
    with pytest.raises(EngineError, match=message):
        rig.decode([seq], 1)


def test_every_single_byte_matters() -> None:
    rig = make_rig(verify_all=True, block_size=4, num_layers=1)
    (seq,) = rig.sequences([[5, 6, 7]], 4)
    rig.prefill([seq])
    for entry in range(2):
        view = rig.block(entry, seq.blocks["full"][0])
        for i in range(3 * 32):
            view[i] ^= 0x10
            with pytest.raises(EngineError, match="is not what was computed"):
                rig.decode([seq], 1)
            view[i] ^= 0x10
    rig.decode([seq], 1)


def test_sampled_checks_reach_every_offset_in_time() -> None:
    """One damaged row anywhere is found within block_size steps."""
    for row in range(16):
        rig = make_rig(seed=row)
        seq = prefilled(rig)
        rig.block(1, seq.blocks["full"][0])[row * 32] ^= 1
        with pytest.raises(EngineError, match=f"position {row} "):
            rig.decode([seq], 16)


def test_a_healthy_neighbour_is_not_blamed() -> None:
    rig = make_rig(verify_all=True)
    first, second, third = rig.sequences([PROMPT, PROMPT[:20], PROMPT[:9]], 4)
    rig.prefill([first, second, third])
    rig.block(0, second.blocks["full"][0])[0] ^= 1
    with pytest.raises(EngineError, match=f"sequence {second.seq_id}: the KV of position 0 in"):
        rig.decode([first, second, third], 1)
    rig.decode([first, third], 2)


def test_content_does_not_depend_on_the_rank() -> None:
    """A head's bytes depend on its number in the whole group, so that KV can be resharded."""
    whole = make_rig(num_kv_heads=4)
    parts = [make_rig(num_kv_heads=4, tp_size=2, tp_rank=rank) for rank in range(2)]
    seqs = [prefilled(rig) for rig in (whole, *parts)]
    entry = whole.runner.kv_cache_spec.entries[1]
    row, half = entry.token_bytes, entry.token_bytes // 2
    expected = bytes(whole.block(1, seqs[0].blocks["full"][0]))
    for rank, (rig, seq) in enumerate(zip(parts, seqs[1:], strict=True)):
        found = bytes(rig.block(1, seq.blocks["full"][0]))
        for token in range(16):
            start = token * row + rank * half
            assert found[token * half : (token + 1) * half] == expected[start : start + half]
    assert seqs[0].token_ids == seqs[1].token_ids == seqs[2].token_ids


def test_more_ranks_than_heads_hold_copies() -> None:
    """R80: neighbours hold one head's bytes; they are those of the whole group's head."""
    whole = make_rig(num_kv_heads=2)
    parts = [make_rig(num_kv_heads=2, tp_size=4, tp_rank=rank) for rank in range(4)]
    seqs = [prefilled(rig) for rig in (whole, *parts)]
    blocks = [
        bytes(rig.block(0, seq.blocks["full"][0]))
        for rig, seq in zip((whole, *parts), seqs, strict=True)
    ]
    assert blocks[1] == blocks[2] != blocks[3] == blocks[4]
    width = parts[0].runner.kv_cache_spec.entries[0].token_bytes
    assert blocks[0][:width] == blocks[1][:width]
    assert blocks[0][width : 2 * width] == blocks[3][:width]
    assert all(seq.token_ids == seqs[0].token_ids for seq in seqs)


def test_eos_comes_at_its_rate_and_never_otherwise() -> None:
    often = SimulatedConfig(eos_period=10, eos_token_id=7)
    tokens = simulated_tokens(often, PROMPT, 2000)
    assert 120 < tokens.count(7) < 300
    never = SimulatedConfig(eos_token_id=7, vocab_size=10)
    tokens = simulated_tokens(never, [1], 500)
    assert set(tokens) == set(range(10)) - {7}
    assert SimulatedRunner(never).eos_token_ids == {7}


def test_cost_is_reported_and_slept_only_when_asked() -> None:
    cost = CostModel(1.0, 0.5, 0.25, 2.0, 0.125, 0.0625)
    slept: list[float] = []
    config = SimulatedConfig(cost=cost)
    for sleep in (None, slept.append):
        rig = Rig(SimulatedRunner(config, sleep=sleep), 8, random.Random(0))
        seqs = rig.sequences([PROMPT[:4], PROMPT[:2]], 4)
        output = rig.step(Phase.PREFILL, [(seqs[0], 0, 4), (seqs[1], 0, 2)])
        assert output.elapsed_s == 1.0 + 0.5 * 6 + 0.25 * (4 * 2 + 2 * 1)
        output = rig.step(Phase.DECODE, [(seqs[0], 4, 5), (seqs[1], 2, 3)])
        assert output.elapsed_s == 2.0 + 0.125 * 2 + 0.0625 * (5 + 3)
    assert slept == [6.5, 2.75]
    batch = Batch(1, Phase.DECODE)
    batch.add(1, [1], 256, {"full": list(range(1, 18))}, SamplingParams())
    assert 0.055 < SMOLLM2_CPU.step_s(batch) < 0.065


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"head_dim": 8}, "head_dim is 8 bytes"),
        ({"head_dim": 20}, "head_dim is 20 bytes"),
        ({"tp_size": 3}, "tp_size 3 neither divides num_kv_heads 2 nor"),
        ({"tp_size": 2, "tp_rank": 2}, r"tp_rank 2 is not within 0\.\.1"),
        ({"eos_token_id": 1000}, "eos_token_id 1000 is not within a vocabulary of 1000"),
        ({"num_layers": 0}, "must be at least 1"),
    ],
)
def test_an_impossible_config(config: dict[str, int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        SimulatedConfig(**config)  # type: ignore[arg-type]


def test_lifecycle() -> None:
    runner = SimulatedRunner()
    with pytest.raises(EngineError, match="no KV cache"):
        runner.execute_model(Batch(1, Phase.DECODE))
    with pytest.raises(EngineError, match="num_blocks is 1"):
        runner.initialize_cache(1, lambda size: (1, memoryview(bytearray(size))))
    rig = make_rig()
    assert rig.runner.execute_model(Batch(1, Phase.DECODE)).token_ids == []


def test_it_imports_no_torch() -> None:
    code = "import sys, pdcore.engine.simulated; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
