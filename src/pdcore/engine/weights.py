"""Llama configuration and weights by pdcore's own names, here from GGUF (Hugging Face:
:mod:`pdcore.engine.hf_model`).

pdcore fuses q, k, v into one matrix and gate, up into another (fewer, larger matrix
products). :func:`fused_layout` says which source tensors make up which fused one;
everything here is numpy, so that weights can be prepared without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from pdcore.engine.gguf import GGUFFile
from pdcore.errors import EngineError

Float32Array = NDArray[np.float32]

#: Most of each dimension: beyond every Llama there is. A model file is untrusted input, and
#: with these its few numbers cannot make anybody reserve memory before they are checked
#: against the tensors themselves (:func:`check_shapes`).
LIMITS: Final = {
    "num_layers": 1024,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 1024,
    "vocab_size": 1 << 22,
    "max_model_len": 1 << 24,
}


@attrs.frozen
class RopeScaling:
    """Llama 3's frequency correction ("rope_type": "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __attrs_post_init__(self) -> None:
        factors = (self.factor, self.low_freq_factor, self.high_freq_factor)
        if (
            not all(math.isfinite(factor) and factor > 0 for factor in factors)
            or self.low_freq_factor >= self.high_freq_factor
            or not 1 <= self.original_max_position <= LIMITS["max_model_len"]
        ):
            raise EngineError(f"model config: impossible rope scaling {self}")


@attrs.frozen(kw_only=True)
class LlamaConfig:
    """Shape of a Llama. ``tie_embeddings``: the output matrix is the embedding."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = True
    eos_token_ids: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        fields: dict[str, int] = attrs.asdict(self, recurse=False)
        for name, limit in LIMITS.items():
            value = fields[name]
            if not 1 <= value <= limit:
                raise EngineError(f"model config: {name} is {value}, expected 1..{limit}")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise EngineError(f"model config: rope_theta is {self.rope_theta}, expected above 0")
        if not 0 <= self.rms_norm_eps < 1:
            raise EngineError(f"model config: rms_norm_eps is {self.rms_norm_eps}, not in 0..1")
        if self.num_heads % self.num_kv_heads:
            raise EngineError(
                f"model config: num_kv_heads {self.num_kv_heads} does not divide "
                f"num_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise EngineError(f"model config: head_dim {self.head_dim} is odd, rope needs pairs")

    @property
    def qkv_size(self) -> int:
        """Rows of the fused q, k, v matrix."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@attrs.frozen
class FusedTensor:
    """One tensor of pdcore: the rows of ``parts`` (source-independent names) stacked."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]

    @property
    def is_norm(self) -> bool:
        return len(self.shape) == 1


def fused_layout(config: LlamaConfig) -> Iterator[FusedTensor]:
    """All tensors in file order. Part names are ``embed``, ``norm``, ``head`` and
    ``<layer>.<what>``."""
    c = config
    yield FusedTensor("embed", (c.vocab_size, c.hidden_size), ("embed",))
    yield FusedTensor("norm", (c.hidden_size,), ("norm",))
    if not c.tie_embeddings:
        yield FusedTensor("head", (c.vocab_size, c.hidden_size), ("head",))
    for i in range(c.num_layers):
        yield FusedTensor(f"{i}.attn_norm", (c.hidden_size,), (f"{i}.attn_norm",))
        parts = (f"{i}.q", f"{i}.k", f"{i}.v")
        yield FusedTensor(f"{i}.qkv", (c.qkv_size, c.hidden_size), parts)
        width = c.num_heads * c.head_dim
        yield FusedTensor(f"{i}.o", (c.hidden_size, width), (f"{i}.o",))
        yield FusedTensor(f"{i}.mlp_norm", (c.hidden_size,), (f"{i}.mlp_norm",))
        size = (2 * c.intermediate_size, c.hidden_size)
        yield FusedTensor(f"{i}.gate_up", size, (f"{i}.gate", f"{i}.up"))
        yield FusedTensor(f"{i}.down", (c.hidden_size, c.intermediate_size), (f"{i}.down",))


class WeightSource(Protocol):
    """Where float32 parts come from."""

    @property
    def config(self) -> LlamaConfig: ...

    def part(self, name: str) -> Float32Array:
        """One part by its name in :func:`fused_layout`. Raises EngineError."""
        ...


def part_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shape of every part of :func:`fused_layout`."""
    rows = {
        "q": config.num_heads * config.head_dim,
        "k": config.num_kv_heads * config.head_dim,
        "v": config.num_kv_heads * config.head_dim,
        "gate": config.intermediate_size,
        "up": config.intermediate_size,
    }
    for tensor in fused_layout(config):
        for name in tensor.parts:
            own = rows.get(name.rpartition(".")[2], tensor.shape[0])
            yield name, (own, *tensor.shape[1:])


def check_shapes(
    where: Path, config: LlamaConfig, shape_of: Callable[[str], tuple[int, ...]]
) -> None:
    """Raises EngineError unless every part that the config promises is in the files, in its
    shape: before anything as large as the config says is planned or reserved."""
    for name, expected in part_shapes(config):
        if (found := shape_of(name)) != expected:
            raise EngineError(
                f"{where}: weights do not fit the model config: {name} has shape {found}, "
                f"the config wants {expected}"
            )


def fused(source: WeightSource, tensor: FusedTensor) -> Float32Array:
    """One fused tensor, shape checked. Raises EngineError when a part does not fit."""
    parts = [source.part(name) for name in tensor.parts]
    rows = sum(part.shape[0] for part in parts)
    if any(part.shape[1:] != tensor.shape[1:] for part in parts) or rows != tensor.shape[0]:
        shapes = ", ".join(f"{n} {p.shape}" for n, p in zip(tensor.parts, parts, strict=True))
        raise EngineError(f"weights do not fit the model config: {shapes} for {tensor.shape}")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


_GGUF_NAMES: Final = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


class GGUFWeights:
    """Weights of a GGUF file of architecture ``llama``."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.config = gguf_config(file)

    def part(self, name: str) -> Float32Array:
        values = self._file.tensor(_gguf_name(name))
        if name.rpartition(".")[2] in ("q", "k"):
            return _half_rotation(values, self.config.head_dim)
        return values


def _gguf_name(part: str) -> str:
    layer, _, what = part.rpartition(".")
    prefix = f"blk.{layer}." if layer else ""
    return f"{prefix}{_GGUF_NAMES[what]}.weight"


def _half_rotation(rows: Float32Array, head_dim: int) -> Float32Array:
    """GGUF stores q and k rows for interleaved rope; reorder for half-rotation rope."""
    paired = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """Config from GGUF metadata. Raises EngineError for another architecture, and where the
    tensors are not those that the metadata promises."""
    if (arch := file.text("general.architecture")) != "llama":
        raise EngineError(f"{file.path}: architecture {arch!r} is not supported, only 'llama'")
    if "rope_freqs.weight" in file.tensors or "llama.rope.scaling.type" in file.metadata:
        raise EngineError(
            f"{file.path}: scaled rope in GGUF is not supported; use the model's "
            "Hugging Face safetensors folder"
        )
    num_heads = file.integer("llama.attention.head_count")
    hidden = file.integer("llama.embedding_length")
    if num_heads < 1:
        raise EngineError(f"{file.path}: llama.attention.head_count is {num_heads}")
    head_dim = file.integer("llama.attention.key_length", hidden // num_heads)
    if (rotary := file.integer("llama.rope.dimension_count", head_dim)) != head_dim:
        raise EngineError(f"{file.path}: partial rope ({rotary} of {head_dim}) is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise EngineError(f"{file.path}: tensor token_embd.weight is missing")
    eos = [file.integer(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot")]
    config = LlamaConfig(
        num_layers=file.integer("llama.block_count"),
        hidden_size=hidden,
        intermediate_size=file.integer("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=file.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_model_len=file.integer("llama.context_length"),
        rope_theta=file.number("llama.rope.freq_base", 10_000.0),
        rms_norm_eps=file.number("llama.attention.layer_norm_rms_epsilon", 1e-5),
        tie_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tuple(sorted({token for token in eos if token >= 0})),
    )
    check_shapes(file.path, config, lambda part: file.shape(_gguf_name(part)))
    return config


def rope_frequencies(config: LlamaConfig) -> NDArray[np.float32]:
    """Angle per position of each rotated pair, shape (head_dim / 2,)."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    plain = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    # Llama 3: long wavelengths are stretched by the factor, short ones kept, a ramp between.
    turns = scaling.original_max_position * plain / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(ramp, 0.0, 1.0)
    mixed: Float32Array = ((1 - keep) * plain / scaling.factor + keep * plain).astype(np.float32)
    return mixed


def random_weights(config: LlamaConfig, seed: int, std: float = 0.15) -> Mapping[str, Float32Array]:
    """Fused weights of a model that says nothing but reacts to every KV byte.

    ``std`` below 0.15 degenerates: a model that repeats one token hides a zeroed block.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, Float32Array] = {}
    for tensor in fused_layout(config):
        if tensor.is_norm:
            weights[tensor.name] = np.ones(tensor.shape, np.float32)
        else:
            values = rng.standard_normal(tensor.shape, np.float32)
            weights[tensor.name] = values * np.float32(std)
    return weights
