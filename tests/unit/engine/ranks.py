"""Tensor parallel ranks as threads of the test, and what a run leaves behind to be compared."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from pdcore.engine.base import GroupLost
from pdcore.engine.collective import InProcessGroup
from pdcore.engine.llama import LlamaRunner
from pdcore.engine.llama_model import shard_weights, weights_from_arrays
from pdcore.engine.shard import TPRank
from pdcore.engine.step_group import Choice
from pdcore.engine.weights import LlamaConfig, random_weights
from pdcore.testing.runner_rig import GREEDY, Rig
from pdcore.types import Batch, Phase, SamplingParams

T = TypeVar("T")
Array = NDArray[np.float64]

#: Largest difference to one rank, relative to the largest value. Sums over ranks add the
#: same float32 products in another order: each of some hundred additions per layer may round
#: differently by 6e-8, and std 0.15 amplifies from layer to layer. Measured: below 2e-6 on
#: every configuration here; a missing or doubled head gives 0.1 and more.
TOLERANCE = 1e-4


class RecordingRunner(LlamaRunner):
    """Keeps the logits from which it chose, by sequence id, a row per token."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: dict[int, list[Array]] = {}

    def _choose(self, batch: Batch, wanted: Sequence[int], logits: torch.Tensor) -> Choice:
        for i, row in zip(wanted, logits.numpy().astype(np.float64), strict=True):
            self.rows.setdefault(batch.seq_ids[i], []).append(row)
        return super()._choose(batch, wanted, logits)


@attrs.frozen(eq=False)
class Model:
    """A config and its whole weights as tensors."""

    config: LlamaConfig
    weights: dict[str, torch.Tensor]

    @classmethod
    def drawn(cls, config: LlamaConfig, seed: int = 1, dtype: str = "float32") -> Model:
        return cls(config, weights_from_arrays(random_weights(config, seed), dtype))


MakeRunner = Callable[[], RecordingRunner]


def one_rank(model: Model, **options: int) -> RecordingRunner:
    return RecordingRunner(model.config, model.weights, fingerprint="tp", **options)


def on_ranks(
    model: Model,
    tp_size: int,
    work: Callable[[MakeRunner], T],
    *,
    timeout_s: float = 60.0,
    **options: int,
) -> list[T]:
    """``work`` on every rank at once, each in a thread; what it returned, by rank. The runners
    that the ranks make first are one group, those that they make second another one.

    Raises what the first rank raised by itself; the others only lose their group by it.
    """
    groups: list[InProcessGroup] = []
    lock = threading.Lock()

    def group(index: int) -> InProcessGroup:
        with lock:
            while len(groups) <= index:
                groups.append(InProcessGroup(tp_size, timeout_s))
            return groups[index]

    def one(tp_rank: int) -> T:
        count = itertools.count()

        def make() -> RecordingRunner:
            end = group(next(count)).join(tp_rank)
            shard = shard_weights(model.config, model.weights, TPRank(tp_size, tp_rank))
            return RecordingRunner(model.config, shard, fingerprint="tp", collective=end, **options)

        finished = False
        try:
            result = work(make)
            finished = True
            return result
        finally:
            if not finished:
                for each in groups:
                    each.leave(tp_rank)

    with ThreadPoolExecutor(tp_size) as pool:
        futures = [pool.submit(one, tp_rank) for tp_rank in range(tp_size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, GroupLost)):
        raise error
    return [future.result() for future in futures]


@attrs.frozen(eq=False)
class Trace:
    """``tokens`` by sequence; ``logits`` too, a row per token (rank 0 only); ``kv`` by
    sequence and entry, shape (positions, heads of this rank, head_dim)."""

    tokens: list[list[int]]
    logits: list[list[Array]]
    kv: list[list[Array]]
    logprobs: list[object]


def trace(
    make: MakeRunner,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    chunk: int | None = None,
    num_blocks: int = 64,
    forced: Sequence[Sequence[int]] | None = None,
) -> Trace:
    """Generate, and look. ``forced``: the tokens to go on with, whatever the model says."""
    runner = make()
    rig = Rig(runner, num_blocks, random.Random(5))
    seqs = rig.sequences(prompts, num_tokens)
    said: list[list[int]] = [[] for _ in prompts]
    logprobs: list[object] = []

    def listen() -> None:
        for i, (seq, prompt) in enumerate(zip(seqs, prompts, strict=True)):
            said[i].append(seq.token_ids[-1])
            if forced is not None:
                seq.token_ids[-1] = forced[i][len(seq.token_ids) - len(prompt) - 1]

    rig.prefill(seqs, chunk, sampling)
    listen()
    for _ in range(num_tokens - 1):
        work = [(seq, len(seq.token_ids) - 1, len(seq.token_ids)) for seq in seqs]
        logprobs.append(rig.step(Phase.DECODE, work, sampling).logprobs)
        listen()
    kv = []
    for seq in seqs:
        count = len(seq.token_ids) - 1
        kv.append(
            [
                values.reshape(count, entry.num_heads, entry.head_dim)
                for entry, (_, values) in zip(
                    runner.kv_cache_spec.entries, rig.values(seq, count), strict=True
                )
            ]
        )
    runner.shutdown()
    return Trace(said, [runner.rows.get(seq.seq_id, []) for seq in seqs], kv, logprobs)


def assert_close(found: Array, expected: Array, what: str, tolerance: float = TOLERANCE) -> None:
    """Equal up to the rounding of another order of the same sums."""
    scale = float(np.abs(expected).max(initial=0.0))
    worst = float(np.abs(found - expected).max(initial=0.0))
    assert worst <= tolerance * scale, f"{what}: differs by {worst / scale:.1e} of {scale:.3g}"


def assert_equals_one_rank(
    config: LlamaConfig, whole: Trace, parts: Sequence[Trace], tolerance: float = TOLERANCE
) -> None:
    """Ranks agree to the bit on tokens; rank 0's logits and every rank's KV are what one
    rank computes: its heads, cut out of all heads."""
    tp_size = len(parts)
    for rank, part in enumerate(parts):
        assert part.tokens == parts[0].tokens, f"tp_rank {rank} has other tokens than tp_rank 0"
        assert part.logprobs == parts[0].logprobs, f"tp_rank {rank} has other logprobs"
    for seq, rows in enumerate(whole.logits):
        for i, (found, expected) in enumerate(zip(parts[0].logits[seq], rows, strict=True)):
            assert_close(found, expected, f"logits of token {i} of sequence {seq}", tolerance)
    assert not any(row for part in parts[1:] for row in part.logits), "only rank 0 needs logits"
    held = max(1, config.num_kv_heads // tp_size)
    for rank, part in enumerate(parts):
        first = rank * config.num_kv_heads // tp_size
        for seq, entries in enumerate(part.kv):
            for entry, values in enumerate(entries):
                cut = whole.kv[seq][entry][:, first : first + held]
                what = f"tp_rank {rank}, sequence {seq}, entry {entry}"
                assert values.shape == cut.shape, what
                assert_close(values, cut, what, tolerance)
