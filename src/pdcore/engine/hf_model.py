"""A Llama in a Hugging Face folder: config.json, generation_config.json, *.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdcore.engine.safetensors import SafetensorsFolder
from pdcore.engine.weights import LlamaConfig, RopeScaling, check_shapes
from pdcore.errors import EngineError

Float32Array = NDArray[np.float32]

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


class SafetensorsWeights:
    """Weights of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._files = SafetensorsFolder(folder)
        self.config = hf_config(folder)
        check_shapes(folder, self.config, lambda part: self._files.shape(self._name(part)))

    def part(self, name: str) -> Float32Array:
        return self._files.tensor(self._name(name))

    def _name(self, name: str) -> str:
        layer, _, what = name.rpartition(".")
        prefix = f"model.layers.{layer}." if layer else ""
        full = f"{prefix}{HF_NAMES[what]}.weight"
        # Some exports store a tied matrix only under the output's name.
        if what == "embed" and full not in self._files and self.config.tie_embeddings:
            full = "lm_head.weight"
        return full


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
        except (OSError, msgspec.DecodeError, RecursionError) as exc:
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
    except (OSError, msgspec.DecodeError, RecursionError) as exc:
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
