"""Public reports about bytes that are not what was computed: who fails, and who does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdcore.config import CoreLimits
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import EngineError
from pdcore.testing.world import World, make_world
from pdcore.types import Batch, Phase, RoomKey, SamplingParams, StepOutput
from tests.scenarios.reports.kit import (
    FIVE,
    PROMPT,
    check_serves,
    check_whole,
    code,
    finish,
    move_bytes,
    until_posted,
)

LONG = SamplingParams(max_tokens=30)


def check_one_flip(world: World) -> None:
    """Four requests decode together; the KV of one arrives with one byte inverted."""
    prompts = {number: [number + j for j in range(20)] for number in (7, 70, 400)}
    keys = {number: world.submit(prompt, sampling=LONG) for number, prompt in prompts.items()}
    world.run(lambda: _moved(world) and all(world.decode.tokens(k) for k in keys.values()))
    bad = until_posted(world)
    me = world.prefill.worker.core.setup.me.incarnation
    world.fabric.faults(me).corrupt_next = True
    assert finish(world, bad) == "internal"
    result = world.decode.result(bad)
    assert result is not None
    assert result.failure is not None
    assert "is not what was computed" in result.failure.detail
    # The first token is prefill's; none was computed from the wrong byte.
    assert world.decode.tokens(bad) == simulated_tokens(world.model, PROMPT, 1)
    for number, key in keys.items():
        assert finish(world, key) is None, code(world, key)
        assert world.decode.tokens(key) == simulated_tokens(world.model, prompts[number], 30)


def _moved(world: World) -> bool:
    move_bytes(world)
    return True


def test_a_byte_that_flips_on_the_way_fails_its_request_and_no_other() -> None:
    """SGLang PR39229, PR39500: corrupted KV was taken for good, because only metadata was
    checked. An engine that can tell (this world's, whose KV proves itself) blames the
    sequence: its request ends with an error before a token is computed from the wrong byte,
    and those that decode in the same batch get all of theirs, right."""
    world = make_world(stepped=True)
    check_one_flip(world)
    check_serves(world)
    check_whole(world)


def test_a_core_that_fails_the_whole_batch_is_caught() -> None:
    """SGLang PR39500: one request's bytes end everybody's."""
    world = make_world(stepped=True)
    runner = world.decode.worker.runner
    run = runner.execute_model

    def anonymous(batch: Batch) -> StepOutput:
        try:
            return run(batch)
        except EngineError as error:
            raise EngineError(str(error)) from None

    vars(runner)["execute_model"] = anonymous
    with pytest.raises(AssertionError):
        check_one_flip(world)


def blame_once(
    world: World, side: str, wanted: Callable[[Batch], bool], number: int = 0
) -> list[int]:
    """The next wanted step of this rank's engine fails for one of its sequences."""
    runner = world.ranks[side].worker.runner
    run = runner.execute_model
    blamed: list[int] = []

    def execute(batch: Batch) -> StepOutput:
        if not blamed and len(batch) > 1 and wanted(batch):
            blamed.append(batch.seq_ids[number])
            raise EngineError("this one", seq_ids=blamed)
        return run(batch)

    vars(runner)["execute_model"] = execute
    return blamed


def check_the_others_finish(world: World, keys: dict[RoomKey, list[int]], blamed: list[int]) -> int:
    ended = {key: finish(world, key) for key in keys}
    assert len(blamed) == 1
    failed = [key for key, why in ended.items() if why is not None]
    for key, prompt in keys.items():
        if key not in failed:
            assert world.decode.tokens(key) == simulated_tokens(world.model, prompt, 30)
    check_whole(world)
    return len(failed)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("chunk", [8, 512])
def test_only_the_request_that_the_engine_blames_fails(side: str, number: int, chunk: int) -> None:
    """SGLang PR39229: in either half, also in the middle of a prompt; the step is run again
    for the others, which lose nothing."""
    world = make_world(limits=CoreLimits(prefill_chunk_tokens=chunk))
    prompts = [[40 * n + j for j in range(3 + n)] for n in range(1, 5)]
    keys = {world.submit(prompt, sampling=LONG): prompt for prompt in prompts}
    blamed = blame_once(world, side, lambda batch: True, number)
    assert check_the_others_finish(world, keys, blamed) == 1


def test_also_among_those_that_come_back_after_a_retraction() -> None:
    """SGLang PR39229: a batch of decode that computes prompts again."""
    limits = CoreLimits(num_reserved_decode_tokens=0, max_retractions=50)
    world = make_world(num_blocks=19, prefill_blocks=64, limits=limits)
    prompts = [[n] * 4 for n in range(10, 18)]
    keys = {world.submit(prompt, sampling=LONG): prompt for prompt in prompts}
    blamed = blame_once(world, "decode", lambda batch: batch.phase is Phase.PREFILL)
    assert check_the_others_finish(world, keys, blamed) == 1


def test_an_engine_that_blames_a_stranger_blames_everybody() -> None:
    """A sequence that is not in the batch excuses nobody: or the loop would try for ever."""
    world = make_world()
    runner = world.decode.worker.runner

    def execute(batch: Batch) -> StepOutput:
        raise EngineError("somebody", seq_ids=(10**6,))

    vars(runner)["execute_model"] = execute
    keys = [world.submit(PROMPT, sampling=FIVE) for _ in range(3)]
    assert [finish(world, key) for key in keys] == ["internal"] * 3
    vars(runner).pop("execute_model")
    check_serves(world)
