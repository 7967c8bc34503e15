"""The runner contract: good runners pass, and every check finds a runner that breaks it."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import pytest

from pdcore.engine.base import Allocate, RunnerCaps
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner
from pdcore.errors import EngineError
from pdcore.kv.spec import KVPlacement
from pdcore.testing.runner import CHECKS, check_model_runner, default_prompts
from pdcore.testing.runner_rig import ContractError
from pdcore.types import Batch, Phase, SamplingParams, StepOutput


def test_the_simulated_runner_passes_every_check() -> None:
    config = SimulatedConfig(verify_all=True)
    assert check_model_runner(lambda: SimulatedRunner(config)) == list(CHECKS)


def test_other_shapes_pass_too() -> None:
    config = SimulatedConfig(head_dim=32, num_layers=3, block_size=4, eos_period=5)
    check_model_runner(lambda: SimulatedRunner(config), num_blocks=200)
    long = [[i % 1000 for i in range(300)], [5]]
    check_model_runner(SimulatedRunner, prompts=long, num_tokens=20, num_blocks=100)


def test_a_runner_without_chunking_is_not_chunked() -> None:
    class Whole(SimulatedRunner):
        def __init__(self) -> None:
            super().__init__()
            self.caps = RunnerCaps(chunked_prefill=False)

        def execute_model(self, batch: Batch) -> StepOutput:
            if batch.phase is Phase.PREFILL and any(batch.num_computed_tokens):
                raise EngineError("no chunks")
            return super().execute_model(batch)

    assert check_model_runner(Whole) == list(CHECKS)


def test_default_prompts_fit_small_models() -> None:
    assert [len(p) for p in default_prompts(100, 4096)] == [1, 5, 16, 33, 50]
    assert [len(p) for p in default_prompts(100, 32)] == [1, 5, 16]
    assert [len(p) for p in default_prompts(100, 8)] == [1]


class Mutant(SimulatedRunner):
    """A simulated runner whose outputs or memory a subclass falsifies."""

    memory: memoryview

    def initialize_cache(self, num_blocks: int, allocate: Allocate) -> KVPlacement:
        def keep(size_bytes: int) -> tuple[int, memoryview]:
            region, self.memory = allocate(size_bytes)
            return region, self.memory

        return super().initialize_cache(num_blocks, keep)

    def shutdown(self) -> None:
        super().shutdown()
        self.memory = memoryview(b"")

    def shifted(self, output: StepOutput, by: Callable[[int], int]) -> StepOutput:
        tokens = [
            None if t is None else tuple((x + by(i)) % self.vocab_size for x in t)
            for i, t in enumerate(output.token_ids)
        ]
        return attrs.evolve(output, token_ids=tokens)


class Overlapping(Mutant):
    def initialize_cache(self, num_blocks: int, allocate: Allocate) -> KVPlacement:
        placement = super().initialize_cache(num_blocks, allocate)
        return attrs.evolve(placement, offsets=(0,) * len(placement.offsets))


class Anonymous(Mutant):
    def __init__(self) -> None:
        super().__init__()
        self.fingerprint = str(id(self))


class Forgetful(Mutant):
    """Tokens depend on how many steps were run before."""

    def execute_model(self, batch: Batch) -> StepOutput:
        return self.shifted(super().execute_model(batch), lambda i: self._step)


class OrderOfBlocks(Mutant):
    """Tokens depend on the block ids."""

    def execute_model(self, batch: Batch) -> StepOutput:
        first = [table["full"][0] for table in batch.block_tables]
        return self.shifted(super().execute_model(batch), lambda i: first[i])


class OnlyTheLastChunk(Mutant):
    """Forgets that a chunk has a past: tokens depend on the chunk's length."""

    def execute_model(self, batch: Batch) -> StepOutput:
        lens = list(batch.query_lens)
        chunked = [n > 0 for n in batch.num_computed_tokens]
        return self.shifted(
            super().execute_model(batch),
            lambda i: lens[i] if batch.phase is Phase.PREFILL and chunked[i] else 0,
        )


class NeighbourDependent(Mutant):
    def execute_model(self, batch: Batch) -> StepOutput:
        return self.shifted(super().execute_model(batch), lambda i: len(batch) - 1)


class KeepsRequestState(Mutant):
    """Decode relies on what this very runner saw at prefill."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def execute_model(self, batch: Batch) -> StepOutput:
        tables = [tuple(table["full"]) for table in batch.block_tables]
        if batch.phase is Phase.PREFILL:
            self.seen.update(tables)
        return self.shifted(
            super().execute_model(batch), lambda i: 0 if tables[i] in self.seen else 1
        )


class StatefulGenerator(Mutant):
    """D18: the seed's rule, one generator per process and request seed, drawn from in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.generators: dict[int, random.Random] = {}

    def execute_model(self, batch: Batch) -> StepOutput:
        seeds = [p.seed if p.temperature > 0 else None for p in batch.sampling]
        drawn = [
            0
            if seed is None
            else self.generators.setdefault(seed, random.Random(seed)).randrange(100)
            for seed in seeds
        ]
        return self.shifted(super().execute_model(batch), lambda i: drawn[i])


class IgnoresTheSeed(Mutant):
    def execute_model(self, batch: Batch) -> StepOutput:
        batch.sampling = [attrs.evolve(p, temperature=0.0) for p in batch.sampling]
        return super().execute_model(batch)


class Unlimited(Mutant):
    def execute_model(self, batch: Batch) -> StepOutput:
        try:
            return super().execute_model(batch)
        except EngineError:
            return StepOutput([(0,) if sample else None for sample in batch.sample])


class WritesTheNullBlock(Mutant):
    """Padding goes to block 0."""

    def execute_model(self, batch: Batch) -> StepOutput:
        output = super().execute_model(batch)
        self.memory[0] = 1
        return output


class WritesElsewhere(Mutant):
    """Rounds a write up to the end of the pool."""

    def execute_model(self, batch: Batch) -> StepOutput:
        output = super().execute_model(batch)
        self.memory[-1] = (self.memory[-1] + 1) % 256
        return output


class ReadsWholeBlocks(Mutant):
    """Attends to the tail of the last block, which nobody has computed."""

    def execute_model(self, batch: Batch) -> StepOutput:
        ends = [c + q for c, q in zip(batch.num_computed_tokens, batch.query_lens, strict=True)]
        last = [t["full"][(end - 1) // 16] for t, end in zip(batch.block_tables, ends, strict=True)]
        tail = [self.memory[(b + 1) * 4 * 16 * 32 - 1] // 255 for b in last]
        return self.shifted(super().execute_model(batch), lambda i: tail[i])


class NoLogprobs(Mutant):
    def execute_model(self, batch: Batch) -> StepOutput:
        return attrs.evolve(super().execute_model(batch), logprobs=None)


class InfiniteLogprobs(Mutant):
    def execute_model(self, batch: Batch) -> StepOutput:
        return attrs.evolve(super().execute_model(batch), logprobs=[(float("-inf"),)])


class DirtyWarmUp(Mutant):
    def warm_up(self) -> None:
        self.memory[5] ^= 1


class KeepsMemory(Mutant):
    def shutdown(self) -> None:
        """Lets the cache go, not the buffer."""
        SimulatedRunner.shutdown(self)


class SamplesEveryChunk(Mutant):
    def execute_model(self, batch: Batch) -> StepOutput:
        batch.sample = [True] * len(batch)
        return super().execute_model(batch)


MUTANTS: list[tuple[str, Callable[[], SimulatedRunner]]] = [
    ("placement", Overlapping),
    ("identity", Anonymous),
    ("repeatable", Forgetful),
    ("block_ids_do_not_matter", OrderOfBlocks),
    ("chunked_equals_whole", OnlyTheLastChunk),
    ("chunked_equals_whole", SamplesEveryChunk),
    ("batch_equals_single", NeighbourDependent),
    ("handover_equals_colocated", KeepsRequestState),
    ("copied_kv_continues", KeepsRequestState),
    ("draws_depend_on_seed_and_position", StatefulGenerator),
    ("draws_depend_on_seed_and_position", IgnoresTheSeed),
    ("impossible_batch_raises", Unlimited),
    ("writes_only_its_blocks", WritesTheNullBlock),
    ("writes_only_its_blocks", WritesElsewhere),
    ("stale_bytes_do_not_matter", ReadsWholeBlocks),
    ("logprobs", NoLogprobs),
    ("logprobs", InfiniteLogprobs),
    ("warm_up_leaves_no_trace", DirtyWarmUp),
    ("shutdown", KeepsMemory),
]


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=[m.__name__ for _, m in MUTANTS])
def test_a_broken_runner_is_found(name: str, mutant: Callable[[], SimulatedRunner]) -> None:
    """D18 among them (StatefulGenerator): the check fails, and says its name."""
    with pytest.raises(ContractError, match=f"^{name}: "):
        check_model_runner(mutant, checks=[name])


def test_every_check_has_a_runner_that_breaks_it() -> None:
    assert {name for name, _ in MUTANTS} == set(CHECKS)


def test_sampling_is_part_of_the_reference() -> None:
    """The check of draws would be empty if temperature changed nothing."""
    greedy = check_model_runner(SimulatedRunner, checks=["draws_depend_on_seed_and_position"])
    assert greedy == ["draws_depend_on_seed_and_position"]
    assert SamplingParams().temperature == 0.0
