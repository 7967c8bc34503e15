"""The rig: blocks are dealt out once, sequences keep their tokens, KV is compared as numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner, simulated_tokens
from pdcore.testing.runner_rig import ContractError, Rig
from pdcore.types import Phase


def make_rig() -> Rig:
    return Rig(SimulatedRunner(), 16, random.Random(1))


def test_blocks_are_distinct_and_never_the_null_block() -> None:
    seqs = make_rig().sequences([[1] * 40, [2] * 17], 8)
    blocks = [block for seq in seqs for block in seq.blocks["full"]]
    assert len(blocks) == 3 + 2
    assert len(set(blocks)) == len(blocks)
    assert 0 not in blocks
    assert seqs[0].seq_id != seqs[1].seq_id


def test_generate_drives_prefill_and_decode() -> None:
    prompts = [[1, 2, 3], [4] * 20]
    expected = [simulated_tokens(SimulatedConfig(), prompt, 6) for prompt in prompts]
    assert make_rig().generate(prompts, 6) == expected
    assert make_rig().generate(prompts, 6, chunk=2) == expected


def test_a_chunk_that_is_not_the_last_samples_nothing() -> None:
    rig = make_rig()
    (seq,) = rig.sequences([[1, 2, 3]], 4)
    assert rig.step(Phase.PREFILL, [(seq, 0, 2)]).token_ids == [None]
    assert len(seq.token_ids) == 3
    rig.step(Phase.PREFILL, [(seq, 2, 3)])
    assert len(seq.token_ids) == 4


def test_copying_moves_the_bytes() -> None:
    here, there = make_rig(), make_rig()
    (seq,) = here.sequences([[1, 2, 3]], 4)
    here.prefill([seq])
    twin = here.copy_to(there, seq, 4)
    for entry in range(4):
        mine, theirs = seq.blocks["full"][0], twin.blocks["full"][0]
        assert here.block(entry, mine) == there.block(entry, theirs)
    assert twin.token_ids == seq.token_ids


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "bfloat16", "int8"])
def test_values_are_numbers_of_the_entrys_dtype(dtype: str) -> None:
    from pdcore.testing.runner_rig import as_float

    raw = {
        "uint8": bytes([0, 255]),
        "int8": np.array([0, -1], np.int8).tobytes(),
        "float32": np.array([0.5, -2], np.float32).tobytes(),
        "float16": np.array([0.5, -2], np.float16).tobytes(),
        "bfloat16": b"\x00\x3f\x00\xc0",
    }[dtype]
    expected = {"uint8": [0, 255], "int8": [0, -1]}.get(dtype, [0.5, -2])
    assert as_float(raw, dtype).tolist() == expected


def test_allocating_twice_is_refused() -> None:
    rig = make_rig()
    with pytest.raises(ContractError, match="allocate was called twice"):
        rig.runner.initialize_cache(4, rig.allocate)
