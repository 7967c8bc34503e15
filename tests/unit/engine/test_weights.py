"""Llama configs and weights from GGUF and Hugging Face, by pdcore's names."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest

from pdcore.engine.gguf import GGUFFile
from pdcore.engine.hf_model import SafetensorsWeights
from pdcore.engine.weights import (
    GGUFWeights,
    LlamaConfig,
    RopeScaling,
    fused,
    fused_layout,
    gguf_config,
    part_shapes,
    random_weights,
    rope_frequencies,
)
from pdcore.errors import EngineError
from tests.unit.engine.files import (
    TINY,
    parts_of,
    write_gguf,
    write_hf_folder,
    write_tiny_gguf,
)

WEIGHTS = random_weights(TINY, 1)


def test_gguf_and_hugging_face_give_the_same_fused_weights(tmp_path: Path) -> None:
    """Also: q and k rows are put back from GGUF's interleaved order."""
    config = attrs.evolve(TINY, tie_embeddings=False)
    weights = random_weights(config, 2)
    for source in (
        GGUFWeights(GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", config, weights))),
        SafetensorsWeights(write_hf_folder(tmp_path / "hf", config, weights)),
    ):
        assert source.config == config
        for tensor in fused_layout(config):
            assert np.array_equal(fused(source, tensor), weights[tensor.name]), tensor.name


def test_half_rotation_reorders_pairs(tmp_path: Path) -> None:
    """GGUF row 2j of a head is dimension j, row 2j + 1 is dimension j + head_dim / 2."""
    source = GGUFWeights(GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", TINY, WEIGHTS)))
    stored = GGUFFile(tmp_path / "m.gguf").tensor("blk.0.attn_k.weight")
    half = TINY.head_dim // 2
    for row in range(TINY.head_dim):
        assert np.array_equal(stored[row], source.part("0.k")[row // 2 + (row % 2) * half])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 8"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_layers": 1025}, r"num_layers is 1025, expected 1\.\.1024"),
        ({"vocab_size": 1 << 32}, "vocab_size is 4294967296"),
        ({"max_model_len": 1 << 32}, "max_model_len is 4294967296"),
        ({"rope_theta": 0.0}, "rope_theta is 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ],
)
def test_an_impossible_config(change: dict[str, float], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        LlamaConfig(**(attrs.asdict(TINY) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled rope in GGUF is not supported"),
        ({"llama.rope.dimension_count": 8}, r"partial rope \(8 of 16\)"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
    ],
)
def test_a_gguf_that_is_no_plain_llama(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    file = GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", TINY, WEIGHTS))
    changed = write_gguf(
        tmp_path / "n.gguf",
        file.metadata | change,
        {"token_embd.weight": (np.ones((4, 32), np.float32), 0)},
    )
    with pytest.raises(EngineError, match=message):
        gguf_config(GGUFFile(changed))


@pytest.mark.parametrize(
    "scaling",
    [
        (0.0, 1.0, 4.0, 64),
        (8.0, float("nan"), 4.0, 64),
        (8.0, 4.0, 4.0, 64),
        (float("inf"), 1.0, 4.0, 64),
        (8.0, 1.0, 4.0, 0),
        (8.0, 1.0, 4.0, 1 << 40),
    ],
)
def test_an_impossible_rope_scaling(scaling: tuple[float, float, float, int]) -> None:
    with pytest.raises(EngineError, match="impossible rope scaling"):
        RopeScaling(*scaling)


def test_part_shapes_are_those_of_the_parts() -> None:
    config = attrs.evolve(TINY, tie_embeddings=False)
    parts = parts_of(config, random_weights(config, 2))
    assert dict(part_shapes(config)) == {name: part.shape for name, part in parts.items()}


def test_a_gguf_without_embedding(tmp_path: Path) -> None:
    file = GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", TINY, WEIGHTS))
    bare = write_gguf(tmp_path / "n.gguf", file.metadata, {})
    with pytest.raises(EngineError, match=r"token_embd\.weight is missing"):
        gguf_config(GGUFFile(bare))


def test_rope_frequencies_of_llama3_lie_between() -> None:
    plain = rope_frequencies(TINY)
    assert plain[0] == 1.0
    assert plain.shape == (TINY.head_dim // 2,)
    scaled = rope_frequencies(attrs.evolve(TINY, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)))
    assert (scaled <= plain).all()
    assert (scaled >= plain / np.float32(8.0)).all()
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8)


def test_random_weights_depend_on_the_seed_only() -> None:
    again = random_weights(TINY, 1)
    assert all(np.array_equal(again[name], WEIGHTS[name]) for name in WEIGHTS)
    assert not np.array_equal(random_weights(TINY, 2)["embed"], WEIGHTS["embed"])
    assert WEIGHTS["embed"].std() == pytest.approx(0.15, rel=0.05)
