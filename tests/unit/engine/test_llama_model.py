"""The forward pass's own parts: rope tables, weights mapped from the shared file, shards.

What it computes is checked through the runner (test_llama.py, test_llama_tensor_parallel.py).
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from pdcore.engine import llama_model
from pdcore.engine.llama import LlamaRunner
from pdcore.engine.llama_model import LlamaModel, map_weights, shard_weights, weights_from_arrays
from pdcore.engine.shard import TPRank
from pdcore.engine.weight_cache import cached_weights
from pdcore.engine.weights import fused_layout, random_weights
from pdcore.testing.runner_rig import Rig
from tests.unit.engine.files import TINY
from tests.unit.engine.test_weight_cache import IDENTITY, Source

WEIGHTS = random_weights(TINY, 1)


def test_rope_tables_grow_with_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made for a few positions first, whatever the file claims; the same numbers later."""
    weights = weights_from_arrays(WEIGHTS, "float32")
    whole = LlamaModel(TINY, weights)
    monkeypatch.setattr(llama_model, "_ROPE_POSITIONS", 8)
    grown = LlamaModel(TINY, weights)
    assert len(grown._cos) == 8
    for last in (7, 8, 20, TINY.max_model_len - 1):
        positions = torch.tensor([0, last])
        for mine, expected in zip(grown.rope(positions), whole.rope(positions), strict=True):
            assert torch.equal(mine, expected)
    assert len(grown._cos) == TINY.max_model_len


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_views_of_the_shared_file(tmp_path: Path, dtype: str) -> None:
    """Not held twice: every matrix lies inside the file's mapping, none was copied."""
    file = cached_weights(Source().open, TINY, IDENTITY, dtype, tmp_path)
    tensors = map_weights(file, dtype)
    maps = Path("/proc/self/maps").read_text()
    spans = [
        (int(low, 16), int(high, 16))
        for low, high in re.findall(rf"(\w+)-(\w+) .*{re.escape(str(file.path))}", maps)
    ]
    assert spans
    for tensor in fused_layout(TINY):
        address = tensors[tensor.name].data_ptr()
        if not tensor.is_norm:
            assert any(low <= address < high for low, high in spans), tensor.name
    rig = Rig(LlamaRunner(TINY, tensors, fingerprint="x"), 16, random.Random(0))
    whole = LlamaRunner(TINY, weights_from_arrays(WEIGHTS, dtype), fingerprint="x")
    expected = Rig(whole, 16, random.Random(0)).generate([[1, 2, 3]], 8)
    assert rig.generate([[1, 2, 3]], 8) == expected


def test_the_mapped_file_cannot_be_changed_by_a_worker(tmp_path: Path) -> None:
    file = cached_weights(Source().open, TINY, IDENTITY, "float32", tmp_path)
    before = file.path.read_bytes()
    map_weights(file, "float32")["embed"].zero_()
    assert file.path.read_bytes() == before


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_a_rank_reads_only_its_slices_of_the_file(tmp_path: Path, tp_size: int) -> None:
    """Whatever the other ranks' slices hold does not show: here they are no numbers."""
    file = cached_weights(Source().open, TINY, IDENTITY, "float32", tmp_path)
    whole = map_weights(file, "float32")
    for rank in (TPRank(tp_size, at) for at in range(tp_size)):
        expected = shard_weights(TINY, whole, rank)
        poisoned = map_weights(file, "float32")
        for tensor in fused_layout(TINY):
            axis, parts = llama_model.spans(TINY, tensor, rank)
            mine = np.zeros(tensor.shape[axis], bool)
            for start, end in parts:
                mine[start:end] = True
            others = torch.from_numpy(np.flatnonzero(~mine))
            poisoned[tensor.name].index_fill_(axis, others, torch.nan)
        shard = shard_weights(TINY, poisoned, rank)
        assert shard.keys() == expected.keys()
        for name, values in shard.items():
            assert torch.equal(values, expected[name]), name
            assert values.is_contiguous()


def test_a_shard_lets_go_of_the_whole_matrix(tmp_path: Path) -> None:
    """A rank's memory is its share: cut matrices are copies, not views that keep the rest."""
    file = cached_weights(Source().open, TINY, IDENTITY, "float32", tmp_path)
    shard = shard_weights(TINY, map_weights(file, "float32"), TPRank(4, 2))
    for tensor in fused_layout(TINY):
        values = shard[tensor.name]
        cut = values.numel() < np.prod(tensor.shape)
        if cut:
            assert values.untyped_storage().nbytes() == values.numel() * 4, tensor.name


def test_one_rank_keeps_the_views() -> None:
    whole = weights_from_arrays(WEIGHTS, "float32")
    shard = shard_weights(attrs.evolve(TINY), whole, TPRank(1, 0))
    assert all(shard[name] is values for name, values in whole.items())
