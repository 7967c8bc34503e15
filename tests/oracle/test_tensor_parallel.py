"""The real model on three ranks: the goldens, and one rank's logits and KV."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pdcore.engine.llama_model import map_weights
from pdcore.engine.load import load_runner, resolve_model
from pdcore.engine.shard import TensorParallel, TPRank
from pdcore.engine.weight_cache import cached_weights
from pdcore.errors import EngineError
from tests.oracle.one_tp_rank import Work
from tests.oracle.test_llama import GOLDENS
from tests.unit.engine.ranks import Model, assert_equals_one_rank, on_ranks, one_rank, trace

pytestmark = pytest.mark.oracle

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> Model:
    found = resolve_model(None, cache)
    file = cached_weights(
        found.open_weights, found.config, found.identity, "float32", cache / "weights"
    )
    return Model(found.config, map_weights(file, "float32"))


@pytest.mark.parametrize("start", range(0, len(GOLDENS), 8))
def test_three_ranks_say_what_transformers_says(smollm2: Model, start: int) -> None:
    """9 heads, 3 KV heads: one KV head each. The goldens lead by 1e-3 and more, so that they
    are exact whatever the order of the sums; logits and KV are within the tolerance."""
    goldens = GOLDENS[start : start + 8]
    prompts = [golden.prompt for golden in goldens]
    whole = trace(lambda: one_rank(smollm2), prompts, NUM_TOKENS, num_blocks=200)
    parts = on_ranks(
        smollm2, 3, lambda make: trace(make, prompts, NUM_TOKENS, chunk=32, num_blocks=200)
    )
    for golden, said in zip(goldens, parts[0].tokens, strict=True):
        assert said == golden.tokens[:NUM_TOKENS], golden.text
    assert_equals_one_rank(smollm2.config, whole, parts)


def test_sizes_that_do_not_divide(cache: Path) -> None:
    for tp_size in (2, 9):
        group = TensorParallel(rank=TPRank(tp_size, 0), rendezvous=f"file://{cache}/none")
        with pytest.raises(EngineError, match=rf"tp_size {tp_size} does not divide .*are 1, 3$"):
            load_runner(None, cache_dir=cache, tensor_parallel=group)


def test_three_processes(smollm2: Model, cache: Path) -> None:
    """Over gloo, each process with a third of the weights: the same goldens from all."""
    goldens = GOLDENS[:4]
    children = []
    try:
        for tp_rank in range(3):
            work = Work(
                tp_rank=tp_rank,
                tp_size=3,
                rendezvous=f"file://{cache}/meet",
                cache=str(cache),
                prompts=[golden.prompt for golden in goldens],
                num_tokens=NUM_TOKENS,
            )
            argument = msgspec.json.encode(work).decode()
            command = [sys.executable, "-m", "tests.oracle.one_tp_rank", argument]
            children.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE))
        outputs = [child.communicate(timeout=300.0)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for output in outputs:
        said = msgspec.json.decode(output, type=list[list[int]])
        assert said == [golden.tokens[:NUM_TOKENS] for golden in goldens]
