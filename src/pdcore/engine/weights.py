"""Llama configuration and weights by pdcore's own names, from GGUF or Hugging Face.

pdcore fuses q, k, v into one matrix and gate, up into another (fewer, larger matrix
products). :func:`fused_layout` says which source tensors make up which fused one;
everything here is numpy, so that weights can be prepared without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import attrs
import msgspec
import numpy as np
from numpy.typing import NDArray

from pdcore.engine.gguf import GGUFFile
from pdcore.engine.safetensors import SafetensorsFolder
from pdcore.errors import EngineError

Float32Array = NDArray[np.float32]


@attrs.frozen
class RopeScaling:
    """Llama 3's frequency correction ("rope_type": "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


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
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_model_len",
        ):
            value: int = attrs.asdict(self, recurse=False)[name]
            if value < 1:
                raise EngineError(f"model config: {name} is {value}, expected at least 1")
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

HF_NAMES: Final = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class GGUFWeights:
    """Weights of a GGUF file of architecture ``llama``."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.config = gguf_config(file)

    def part(self, name: str) -> Float32Array:
        layer, _, what = name.rpartition(".")
        prefix = f"blk.{layer}." if layer else ""
        values = self._file.tensor(f"{prefix}{_GGUF_NAMES[what]}.weight")
        if what in ("q", "k"):
            return _half_rotation(values, self.config.head_dim)
        return values


def _half_rotation(rows: Float32Array, head_dim: int) -> Float32Array:
    """GGUF stores q and k rows for interleaved rope; reorder for half-rotation rope."""
    paired = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


class SafetensorsWeights:
    """Weights of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._files = SafetensorsFolder(folder)
        self.config = hf_config(folder)

    def part(self, name: str) -> Float32Array:
        layer, _, what = name.rpartition(".")
        prefix = f"model.layers.{layer}." if layer else ""
        full = f"{prefix}{HF_NAMES[what]}.weight"
        # Some exports store a tied matrix only under the output's name.
        if what == "embed" and full not in self._files and self.config.tie_embeddings:
            full = "lm_head.weight"
        return self._files.tensor(full)


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """Config from GGUF metadata. Raises EngineError for another architecture."""
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
    return LlamaConfig(
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


class _HFRope(msgspec.Struct, frozen=True):
    rope_type: str = "default"
    type: str = "default"
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class _HFConfig(msgspec.Struct, frozen=True):
    """config.json, unknown fields ignored. Newer files keep rope in rope_parameters."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    vocab_size: int
    model_type: str = "llama"
    max_position_embeddings: int = 2048
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: _HFRope | None = None
    rope_parameters: _HFRope | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"


class _HFEos(msgspec.Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


def hf_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """EOS ids of ``generation_config.json``, else of ``config.json``, ascending."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            eos = msgspec.json.decode(path.read_bytes(), type=_HFEos).eos_token_id
        except (OSError, msgspec.DecodeError) as exc:
            raise EngineError(f"{path}: cannot read eos_token_id: {exc}") from exc
        if eos is not None:
            return tuple(sorted(set(eos if isinstance(eos, list) else [eos])))
    return ()


def hf_config(folder: Path) -> LlamaConfig:
    """Config from ``config.json``, EOS from ``generation_config.json`` where present.

    Raises EngineError naming file and field for anything that is not a plain Llama.
    """
    path = folder / "config.json"
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=_HFConfig)
    except (OSError, msgspec.DecodeError) as exc:
        raise EngineError(f"{path}: cannot read the model config: {exc}") from exc
    for field, value, expected in (
        ("model_type", raw.model_type, "llama"),
        ("hidden_act", raw.hidden_act, "silu"),
        ("attention_bias", raw.attention_bias, False),
        ("mlp_bias", raw.mlp_bias, False),
    ):
        if value != expected:
            raise EngineError(f"{path}: {field} is {value!r}, supported is {expected!r}")
    rope = raw.rope_parameters or raw.rope_scaling
    heads = raw.num_attention_heads
    return LlamaConfig(
        num_layers=raw.num_hidden_layers,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_heads=heads,
        num_kv_heads=raw.num_key_value_heads or heads,
        head_dim=raw.head_dim or raw.hidden_size // max(heads, 1),
        vocab_size=raw.vocab_size,
        max_model_len=raw.max_position_embeddings,
        rope_theta=rope.rope_theta if rope and rope.rope_theta else raw.rope_theta,
        rope_scaling=_rope_scaling(path, rope),
        rms_norm_eps=raw.rms_norm_eps,
        tie_embeddings=raw.tie_word_embeddings,
        eos_token_ids=hf_eos_token_ids(folder),
    )


def _rope_scaling(path: Path, rope: _HFRope | None) -> RopeScaling | None:
    if rope is None:
        return None
    kind = rope.rope_type if rope.rope_type != "default" else rope.type
    if kind == "default":
        return None
    if kind != "llama3":
        raise EngineError(f"{path}: rope_type {kind!r} is not supported, only default and llama3")
    return RopeScaling(
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position_embeddings,
    )


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
