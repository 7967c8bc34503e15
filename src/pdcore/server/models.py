"""Text of the model a leader serves: its tokenizer, and the name clients use."""

from __future__ import annotations

from pathlib import Path

from pdcore.config import ModelConfig
from pdcore.server.text import IdDetokenizer, IdTokenizer, TextModel


def load_text(model: ModelConfig, cache_dir: Path) -> TextModel:
    """The tokenizer of ``model_path``; torch is not imported. Takes up to a second: call it
    in a thread. Raises EngineError when there is no usable model."""
    if model.is_simulated:
        return TextModel(model.model_name or "simulated", IdTokenizer(), IdDetokenizer)
    from pdcore.engine.load import find_embedded_model, load_tokenizer
    from pdcore.engine.tokenizer import IncrementalDetokenizer

    if model.model_path is not None:
        path = Path(model.model_path)
    else:
        path = find_embedded_model(cache_dir)
    tokenizer = load_tokenizer(path, cache_dir)
    name = model.model_name or served_name(path)
    return TextModel(name, tokenizer, lambda: IncrementalDetokenizer(tokenizer))


def served_name(path: Path) -> str:
    """``.../SmolLM2-135M-Instruct.Q4_1.gguf`` -> ``SmolLM2-135M-Instruct``; a folder's own
    name."""
    if path.suffix != ".gguf":
        return path.resolve().name
    return path.name.removesuffix(".gguf").partition(".")[0]
