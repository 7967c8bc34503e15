"""One tensor parallel rank as a process: what test_gloo.py runs beside itself.

``python -m tests.unit.engine.gloo_rank '{...}'`` with a :class:`Part` as JSON; prints what it
said as JSON.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Final

import msgspec
import torch

from pdcore.engine.gloo import GlooCollective, connect
from pdcore.engine.llama import LlamaRunner
from pdcore.engine.llama_model import shard_weights, weights_from_arrays
from pdcore.engine.shard import TensorParallel, TPRank
from pdcore.engine.weights import random_weights
from pdcore.testing.runner_rig import GREEDY, Rig
from pdcore.types import SamplingParams
from tests.unit.engine.files import TINY

PROMPTS: Final = [[3, 141, 59, 26], [500, 8, 97, 93, 238, 46, 2, 64, 33, 83, 279, 502, 88, 4] * 3]
HOT: Final = SamplingParams(temperature=2.0, top_p=0.9, logprobs=True)
NUM_TOKENS: Final = 6


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """``fatal``: the number of the sum in whose place ``signal`` hits this process."""

    tp_rank: int
    tp_size: int
    rendezvous: str
    step_timeout_s: float = 60.0
    rendezvous_timeout_s: float = 60.0
    identity: str = "tiny"
    fatal: int = 0
    signal: int = 0


class Mortal:
    """A collective that ends, or stops, its own process in the middle of a step."""

    def __init__(self, inner: GlooCollective, part: Part) -> None:
        self.rank = inner.rank
        self._inner = inner
        self._part = part
        self._num_sums = 0

    def all_reduce(self, values: torch.Tensor) -> None:
        self._num_sums += 1
        if self._num_sums == self._part.fatal:
            os.kill(os.getpid(), self._part.signal)
        self._inner.all_reduce(values)

    def close(self) -> None:
        self._inner.close()


def tensor_parallel(part: Part) -> TensorParallel:
    return TensorParallel(
        rank=TPRank(part.tp_size, part.tp_rank),
        rendezvous=part.rendezvous,
        step_timeout_s=part.step_timeout_s,
        rendezvous_timeout_s=part.rendezvous_timeout_s,
    )


def make_rig(part: Part) -> Rig:
    """Meets the other ranks; the same blocks on all."""
    collective = connect(tensor_parallel(part), part.identity)
    whole = weights_from_arrays(random_weights(TINY, 1), "float32")
    runner = LlamaRunner(
        TINY,
        shard_weights(TINY, whole, collective.rank),
        fingerprint="tiny",
        collective=Mortal(collective, part),
        entropy=part.tp_rank,
    )
    return Rig(runner, 32, random.Random(1))


def say(rig: Rig) -> list[list[int]]:
    """Greedy tokens, then drawn ones without a seed: those need one rank that decides."""
    greedy = rig.generate(PROMPTS, NUM_TOKENS, GREEDY, chunk=16)
    return greedy + rig.generate(PROMPTS, NUM_TOKENS, HOT)


def main(argument: str, run: Callable[[Rig], list[list[int]]] = say) -> None:
    torch.set_num_threads(1)
    rig = make_rig(msgspec.json.decode(argument.encode(), type=Part))
    said = run(rig)
    rig.runner.shutdown()
    sys.stdout.write(msgspec.json.encode(said).decode())


if __name__ == "__main__":
    # A test that was stopped hard must not leave this behind, stopped or waiting.
    signal.alarm(120)
    main(sys.argv[1])
