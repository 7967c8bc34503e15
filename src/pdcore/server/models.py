"""What a leader must know of its model: the tokenizer, the name, the size of its KV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdcore.config import ModelConfig
from pdcore.kv.spec import DTYPE_SIZE_BYTES
from pdcore.server.text import IdDetokenizer, IdTokenizer, TextModel

if TYPE_CHECKING:
    from pdcore.engine.tokenizer import Tokenizer
    from pdcore.engine.weights import LlamaConfig


class ServedModel(NamedTuple):
    """``kv_token_bytes``: bytes of KV cache that one token takes."""

    text: TextModel
    kv_token_bytes: int


def open_model(model: ModelConfig, cache_dir: Path) -> ServedModel:
    """Read the model's description; neither weights nor torch. Takes up to a second: call
    it in a thread. Raises EngineError when there is no usable model."""
    if model.is_simulated:
        from pdcore.engine.simulated import SimulatedConfig

        text = TextModel(model.model_name or "simulated", IdTokenizer(), IdDetokenizer)
        entries = SimulatedConfig().spec().entries
        return ServedModel(text, sum(entry.token_bytes for entry in entries))
    from pdcore.engine.load import find_embedded_model
    from pdcore.engine.tokenizer import IncrementalDetokenizer

    if model.model_path is not None:
        path = Path(model.model_path)
    else:
        path = find_embedded_model(cache_dir)
    tokenizer, shape = _describe(path)
    name = model.model_name or served_name(path)
    heads = shape.num_kv_heads * shape.head_dim
    return ServedModel(
        TextModel(name, tokenizer, lambda: IncrementalDetokenizer(tokenizer)),
        2 * shape.num_layers * heads * DTYPE_SIZE_BYTES[model.dtype],
    )


def _describe(path: Path) -> tuple[Tokenizer, LlamaConfig]:
    """A file is parsed once for both."""
    from pdcore.engine.gguf import GGUFFile
    from pdcore.engine.hf_model import hf_config
    from pdcore.engine.tokenizer import Tokenizer
    from pdcore.engine.weights import gguf_config
    from pdcore.errors import EngineError

    if path.is_dir():
        return Tokenizer.from_folder(path), hf_config(path)
    if not path.exists():
        raise EngineError(f"{path}: no such file or folder")
    file = GGUFFile(path)
    return Tokenizer.from_gguf(file), gguf_config(file)


def served_name(path: Path) -> str:
    """``.../SmolLM2-135M-Instruct.Q4_1.gguf`` -> ``SmolLM2-135M-Instruct``; a folder's own
    name."""
    if path.suffix != ".gguf":
        return path.resolve().name
    return path.name.removesuffix(".gguf").partition(".")[0]
