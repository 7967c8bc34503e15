"""One runner with KV memory, driven by hand: what the contract checks are written with."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray

from pdcore.engine.base import ModelRunner
from pdcore.kv.spec import KVPlacement
from pdcore.types import Batch, Phase, SamplingParams, StepOutput

GREEDY: Final = SamplingParams()


class ContractError(AssertionError):
    """A runner broke the contract; the message starts with the check's name."""


@attrs.frozen
class RigSequence:
    """One sequence of a check: an id, its tokens so far, its blocks by manager key."""

    seq_id: int
    token_ids: list[int]
    blocks: Mapping[str, list[int]]


class Rig:
    """One runner with KV memory, and blocks dealt out in random order."""

    def __init__(self, runner: ModelRunner, num_blocks: int, rng: random.Random) -> None:
        self.runner = runner
        self.memory = bytearray()
        self._num_blocks = num_blocks
        self._rng = rng
        self._next_seq_id = 0
        self._next_batch_id = 0
        self.placement: KVPlacement = runner.initialize_cache(num_blocks, self.allocate)

    def allocate(self, size_bytes: int) -> tuple[int, memoryview]:
        if self.memory:
            raise ContractError("placement: allocate was called twice")
        self.memory = bytearray(size_bytes)
        return 7, memoryview(self.memory)

    def sequences(self, prompts: Collection[Sequence[int]], room: int) -> list[RigSequence]:
        """Fresh sequences with distinct random blocks for ``room`` more tokens each."""
        sizes = self.runner.kv_cache_spec.block_sizes
        free = list(range(1, self._num_blocks))
        self._rng.shuffle(free)
        made = []
        for prompt in prompts:
            self._next_seq_id += 1
            blocks = {
                key: [free.pop() for _ in range(-(-(len(prompt) + room) // size))]
                for key, size in sizes.items()
            }
            made.append(RigSequence(self._next_seq_id, list(prompt), blocks))
        return made

    def step(
        self,
        phase: Phase,
        work: Collection[tuple[RigSequence, int, int]],
        sampling: SamplingParams = GREEDY,
    ) -> StepOutput:
        """Run positions [start, end) of each sequence; the last chunk samples."""
        self._next_batch_id += 1
        batch = Batch(self._next_batch_id, phase)
        for seq, start, end in work:
            tokens = seq.token_ids[start:end]
            sample = end == len(seq.token_ids)
            batch.add(seq.seq_id, tokens, start, seq.blocks, sampling, sample=sample)
        output = self.runner.execute_model(batch)
        for i, (seq, _, end) in enumerate(work):
            token_ids = output.token_ids[i]
            if (token_ids is not None) != (end == len(seq.token_ids)):
                raise ContractError(f"sampling: sequence {i} got {token_ids} for sample flag")
            seq.token_ids.extend(token_ids or ())
        return output

    def prefill(
        self,
        seqs: Collection[RigSequence],
        chunk: int | None = None,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        """Whole prompts in one batch, or all of them chunk by chunk."""
        lengths = {seq.seq_id: len(seq.token_ids) for seq in seqs}
        step = chunk or max(lengths.values())
        for start in range(0, max(lengths.values()), step):
            work = [
                (seq, start, min(start + step, lengths[seq.seq_id]))
                for seq in seqs
                if start < lengths[seq.seq_id]
            ]
            self.step(Phase.PREFILL, work, sampling)

    def decode(
        self, seqs: Collection[RigSequence], num_steps: int, sampling: SamplingParams = GREEDY
    ) -> None:
        for _ in range(num_steps):
            work = [(seq, len(seq.token_ids) - 1, len(seq.token_ids)) for seq in seqs]
            self.step(Phase.DECODE, work, sampling)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        chunk: int | None = None,
    ) -> list[list[int]]:
        """Generated tokens of each prompt, all in one batch."""
        seqs = self.sequences(prompts, num_tokens)
        self.prefill(seqs, chunk, sampling)
        self.decode(seqs, num_tokens - 1, sampling)
        return [seq.token_ids[len(p) :] for seq, p in zip(seqs, prompts, strict=True)]

    def block(self, entry: int, block_id: int) -> memoryview:
        """Bytes of one block of one entry."""
        p = self.placement
        start = p.offsets[entry] + block_id * p.block_strides[entry]
        return memoryview(self.memory)[
            start : start + self.runner.kv_cache_spec.entries[entry].item_len
        ]

    def copy_to(self, other: Rig, seq: RigSequence, room: int) -> RigSequence:
        """Hand a sequence over: its KV bytes into other blocks of another runner."""
        (twin,) = other.sequences([seq.token_ids], room)
        for i, entry in enumerate(self.runner.kv_cache_spec.entries):
            key = entry.manager_key
            for mine, theirs in zip(seq.blocks[key], twin.blocks[key], strict=False):
                other.block(i, theirs)[:] = self.block(i, mine)
        return twin

    def values(
        self, seq: RigSequence, num_tokens: int
    ) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """(dtype, KV values of the first ``num_tokens`` positions) of each entry."""
        for i, entry in enumerate(self.runner.kv_cache_spec.entries):
            raw = b"".join(bytes(self.block(i, b)) for b in seq.blocks[entry.manager_key])
            yield entry.dtype, as_float(raw[: num_tokens * entry.token_bytes], entry.dtype)


def as_float(raw: bytes, dtype: str) -> NDArray[np.float64]:
    if dtype == "bfloat16":
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    form = dtype if dtype in ("float32", "float16", "int8") else "uint8"
    return np.frombuffer(raw, form).astype(np.float64)
