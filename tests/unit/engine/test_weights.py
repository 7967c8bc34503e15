"""Llama configs and weights from GGUF and Hugging Face, by pdcore's names."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import pytest

from pdcore.engine.gguf import GGUFFile
from pdcore.engine.weights import (
    GGUFWeights,
    LlamaConfig,
    RopeScaling,
    SafetensorsWeights,
    fused,
    fused_layout,
    gguf_config,
    hf_config,
    hf_eos_token_ids,
    random_weights,
    rope_frequencies,
)
from pdcore.errors import EngineError
from tests.unit.engine.files import (
    TINY,
    hf_json,
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


def test_a_tied_matrix_under_the_outputs_name(tmp_path: Path) -> None:
    rename = {"model.embed_tokens.weight": "lm_head.weight"}
    source = SafetensorsWeights(write_hf_folder(tmp_path, TINY, WEIGHTS, rename=rename))
    assert np.array_equal(source.part("embed"), WEIGHTS["embed"])


def test_weights_that_do_not_fit_the_config(tmp_path: Path) -> None:
    source = SafetensorsWeights(write_hf_folder(tmp_path, TINY, WEIGHTS))
    wrong = attrs.evolve(TINY, num_kv_heads=2)
    tensor = next(t for t in fused_layout(wrong) if t.name == "0.qkv")
    with pytest.raises(EngineError, match=r"do not fit the model config: 0\.q"):
        fused(source, tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 8"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_an_impossible_config(change: dict[str, int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        LlamaConfig(**(attrs.asdict(TINY) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2', supported is 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' is not supported"),
        ({"hidden_size": "128"}, "cannot read the model config"),
    ],
)
def test_a_hugging_face_config_that_is_no_plain_llama(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_json(TINY) | change))
    with pytest.raises(EngineError, match=rf"config\.json: {message}"):
        hf_config(tmp_path)


def test_hugging_face_config_fields(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(EngineError, match="cannot read the model config"):
        hf_config(tmp_path)
    path.write_text(json.dumps(hf_json(TINY)))
    assert hf_config(tmp_path) == TINY
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    path.write_text(json.dumps(hf_json(TINY) | {"rope_parameters": scaling}))
    found = hf_config(tmp_path)
    assert found.rope_theta == 5e5
    assert found.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    old = {key: value for key, value in scaling.items() if key != "rope_theta"}
    path.write_text(json.dumps(hf_json(TINY) | {"rope_scaling": old}))
    assert hf_config(tmp_path).rope_scaling == found.rope_scaling
    assert hf_config(tmp_path).rope_theta == TINY.rope_theta


def test_eos_of_generation_config_wins(tmp_path: Path) -> None:
    assert hf_eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert hf_eos_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8, 9]}')
    assert hf_eos_token_ids(tmp_path) == (8, 9)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(EngineError, match=r"generation_config\.json: cannot read eos"):
        hf_eos_token_ids(tmp_path)


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
