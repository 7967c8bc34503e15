"""Hugging Face folders: config, weights by pdcore's names, what is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import attrs
import numpy as np
import pytest

from pdcore.engine.hf_model import SafetensorsWeights, hf_config, hf_eos_token_ids
from pdcore.engine.load import load_runner
from pdcore.engine.weights import RopeScaling, fused, fused_layout, random_weights
from pdcore.errors import EngineError
from tests.unit.engine.files import TINY, hf_json, write_hf_folder

WEIGHTS = random_weights(TINY, 1)


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
        ({"num_hidden_layers": 1 << 40}, "num_layers is 1099511627776, expected 1..1024"),
        ({"num_hidden_layers": 5}, "tensor model.layers.4.input_layernorm.weight is missing"),
        ({"intermediate_size": 1 << 20}, r"0.gate has shape \(256, 128\), .* \(1048576, 128\)"),
        ({"vocab_size": 1 << 22}, "embed has shape"),
        ({"max_position_embeddings": 1 << 32}, "max_model_len is 4294967296"),
    ],
)
def test_a_folder_that_promises_too_much_is_refused_before_anything_is_reserved(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = write_hf_folder(tmp_path / "hf", TINY, WEIGHTS)
    (folder / "config.json").write_text(json.dumps(hf_json(TINY) | change))
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match=message):
            load_runner(folder, cache_dir=tmp_path / "cache")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert not list((tmp_path / "cache").glob("weights/*.safetensors"))


def test_json_of_many_levels_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"x": ' + "[" * 200_000)
    with pytest.raises(EngineError, match="cannot read the model config"):
        hf_config(tmp_path)
    with pytest.raises(EngineError, match="cannot read eos"):
        hf_eos_token_ids(tmp_path)
