"""One tensor parallel rank of the embedded model as a process, as a worker makes it.

``python -m tests.oracle.one_tp_rank '{...}'`` with a :class:`Work` as JSON; prints the tokens
as JSON. Imports no reference implementation: that would take longer than the work.
"""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import msgspec

from pdcore.engine.load import load_runner
from pdcore.engine.shard import TensorParallel, TPRank
from pdcore.testing.runner_rig import Rig


class Work(msgspec.Struct, frozen=True, kw_only=True):
    tp_rank: int
    tp_size: int
    rendezvous: str
    cache: str
    prompts: list[list[int]]
    num_tokens: int


def run(work: Work) -> list[list[int]]:
    group = TensorParallel(
        rank=TPRank(work.tp_size, work.tp_rank), rendezvous=work.rendezvous, step_timeout_s=60.0
    )
    runner = load_runner(None, cache_dir=Path(work.cache), tensor_parallel=group)
    rig = Rig(runner, 100, random.Random(1))
    runner.warm_up()
    said = rig.generate(work.prompts, work.num_tokens)
    runner.shutdown()
    return said


if __name__ == "__main__":
    signal.alarm(600)  # a test that was stopped hard must not leave this behind
    sys.stdout.write(msgspec.json.encode(run(msgspec.json.decode(sys.argv[1], type=Work))).decode())
