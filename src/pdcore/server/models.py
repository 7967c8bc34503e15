"""Text of the model a leader serves: its tokenizer, and the name clients use."""

from __future__ import annotations

from pathlib import Path

from pdcore.config import ModelConfig
from pdcore.kv.spec import DTYPE_SIZE_BYTES
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


def kv_token_bytes(model: ModelConfig, cache_dir: Path) -> int:
    """Bytes of KV cache that one token of this model takes. Raises EngineError."""
    if model.is_simulated:
        from pdcore.engine.simulated import SimulatedConfig

        return sum(entry.token_bytes for entry in SimulatedConfig().spec().entries)
    from pdcore.engine.load import resolve_model

    path = Path(model.model_path) if model.model_path is not None else None
    shape = resolve_model(path, cache_dir).config
    heads: int = shape.num_kv_heads * shape.head_dim
    return 2 * shape.num_layers * heads * DTYPE_SIZE_BYTES[model.dtype]


def served_name(path: Path) -> str:
    """``.../SmolLM2-135M-Instruct.Q4_1.gguf`` -> ``SmolLM2-135M-Instruct``; a folder's own
    name."""
    if path.suffix != ".gguf":
        return path.resolve().name
    return path.name.removesuffix(".gguf").partition(".")[0]
