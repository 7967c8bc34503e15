"""The reference of e2e: the same engine and scheduler parts, prefill and decode in one loop.

Continuous batching, prefill first: as long as a prompt waits it is computed, in chunks of
the same size, and running sequences wait. One process, one thread, no HTTP, no messages
per token: what disaggregation adds is measured against the least there can be.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Sequence as Items
from multiprocessing.connection import Connection
from pathlib import Path

import attrs

from pdcore.config import CoreLimits
from pdcore.engine.base import ModelRunner
from pdcore.engine.load import load_runner
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.batch import (
    DecodeBatcher,
    build_prefill_batch,
    commit_prefill,
    select_prefill,
)
from pdcore.scheduler.sequence import Sequence
from pdcore.types import GenerateRequest, RoomKey, SamplingParams


@attrs.frozen
class Job:
    prompt: tuple[int, ...]
    max_tokens: int


@attrs.frozen
class Heard:
    """One answer as its reader saw it: moments in seconds since the request was made."""

    token_ids: tuple[int, ...]
    moments: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.moments[0]

    @property
    def largest_gap_s(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.moments)), default=0.0)


class Colocated:
    """One loop over one runner. ``run`` keeps at most ``concurrency`` jobs in flight."""

    def __init__(self, runner: ModelRunner, num_blocks: int, limits: CoreLimits) -> None:
        def allocate(size_bytes: int) -> tuple[int, memoryview]:
            return 0, memoryview(bytearray(size_bytes))

        runner.initialize_cache(num_blocks, allocate)
        runner.warm_up()
        self.runner = runner
        self.limits = limits
        self.blocks = KVBlocks(runner.kv_cache_spec, num_blocks, runner.max_model_len)
        self.ids = itertools.count(1)

    def run(self, jobs: Items[Job], concurrency: int) -> list[Heard]:
        """Results in the order of jobs; the next job starts when one ends."""
        self.batcher = DecodeBatcher(
            self.blocks,
            self.runner.eos_token_ids,
            self.runner.max_model_len,
            self.limits.max_running,
        )
        left = deque(enumerate(jobs))
        waiting: deque[Sequence] = deque()
        moments: dict[int, list[float]] = {}
        started: dict[int, float] = {}
        seqs: dict[int, Sequence] = {}
        number: dict[int, int] = {}
        while left or waiting or len(self.batcher):
            while left and len(waiting) + len(self.batcher) < concurrency:
                i, job = left.popleft()
                seq = self._sequence(job)
                number[seq.seq_id], seqs[i] = i, seq
                started[i], moments[i] = time.perf_counter(), []
                waiting.append(seq)
            result = self._prefill(waiting) if waiting else self._decode()
            now = time.perf_counter()
            for seq in result:
                i = number[seq.seq_id]
                moments[i].append(now - started[i])
        return [Heard(tuple(seqs[i].output_token_ids), tuple(moments[i])) for i in range(len(jobs))]

    def _prefill(self, waiting: deque[Sequence]) -> list[Sequence]:
        limits = self.limits
        chunks = select_prefill(
            waiting, self.blocks, limits.prefill_chunk_tokens, limits.max_running
        )
        batch = build_prefill_batch(1, chunks, self.blocks)
        output = self.runner.execute_model(batch)
        result = commit_prefill(
            chunks, output, self.runner.eos_token_ids, self.runner.max_model_len
        )
        for seq in result.seqs:
            waiting.popleft()
            if seq.finish_reason is None:
                self.batcher.add(seq)
            else:
                self.blocks.free(seq.seq_id)
        return result.seqs

    def _decode(self) -> list[Sequence]:
        self.batcher.schedule()
        result = self.batcher.commit(self.runner.execute_model(self.batcher.build_batch(1)))
        for seq in result.finished:
            self.blocks.free(seq.seq_id)
        return result.seqs

    def _sequence(self, job: Job) -> Sequence:
        sampling = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
        seq_id = next(self.ids)
        key = RoomKey(seq_id, 1)
        return Sequence(seq_id, GenerateRequest(key, "", job.prompt, sampling, 1e12, 1e9))


def _serve(connection: Connection, cache_dir: str, num_blocks: int) -> None:
    runner = load_runner(None, num_threads=1, cache_dir=Path(cache_dir))
    loop = Colocated(runner, num_blocks, CoreLimits())
    connection.send(os.getpid())
    while True:
        try:
            jobs, concurrency = connection.recv()
        except EOFError:  # the benchmark is over, however it ended
            return
        connection.send(loop.run(jobs, concurrency))


class ColocatedProcess:
    """A :class:`Colocated` of the embedded model in a process of its own; ends with us."""

    def __init__(self, cache_dir: Path, num_blocks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, str(cache_dir), num_blocks), daemon=True
        )
        self._process.start()
        theirs.close()
        self._connection.recv()

    def run(self, jobs: Items[Job], concurrency: int) -> list[Heard]:
        self._connection.send((list(jobs), concurrency))
        heard: list[Heard] = self._connection.recv()
        return heard

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
