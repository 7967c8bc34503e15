"""Small model files for the engine's tests: a GGUF writer, a tiny model, a Hugging Face folder."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from numpy.typing import NDArray

from pdcore.engine.hf_model import HF_NAMES
from pdcore.engine.load import EMBEDDED_REMEDY, locate_embedded_model
from pdcore.engine.safetensors import layout
from pdcore.engine.tokenizer import byte_symbols
from pdcore.engine.weights import LlamaConfig, fused_layout

Float32Array = NDArray[np.float32]

TINY = LlamaConfig(
    num_layers=4,
    hidden_size=128,
    intermediate_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=512,
    max_model_len=256,
    eos_token_ids=(2,),
)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def need_embedded_model() -> Path:
    """The embedded model's file; skips visibly where it is missing, never in CI."""
    path = locate_embedded_model()
    if path is None:
        message = f"the embedded model is not installed: {EMBEDDED_REMEDY}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: object) -> bytes:
    """Type number and value, as the file has them."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    assert isinstance(value, list)
    if all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    return struct.pack("<IIQ", 9, 11, len(value)) + struct.pack(f"<{len(value)}q", *value)


def pack(values: Float32Array, kind: int) -> bytes:
    """Quantise as llama.cpp's reference does; exact for what the tests store."""
    flat = values.reshape(-1)
    if kind == 0:
        return flat.tobytes()
    if kind == 1:
        return flat.astype(np.float16).tobytes()
    if kind == 30:
        return (flat.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    blocks = flat.reshape(-1, 32)
    out = bytearray()
    for block in blocks:
        if kind == 8:
            scale = np.float16(np.abs(block).max() / 127)
            quantised = np.round(block / np.float32(scale or 1)).clip(-127, 127).astype(np.int8)
            out += scale.tobytes() + quantised.tobytes()
        else:
            low = np.float16(block.min())
            scale = np.float16((block.max() - block.min()) / 15)
            q = np.round((block - np.float32(low)) / np.float32(scale or 1)).clip(0, 15)
            nibbles = q.astype(np.uint8)
            out += scale.tobytes() + low.tobytes() + (nibbles[:16] | nibbles[16:] << 4).tobytes()
    return bytes(out)


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[Float32Array, int]],
    *,
    version: int = 3,
) -> Path:
    """``tensors``: name -> (values, GGUF type number)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += gguf_string(key) + gguf_value(value)
    data = b""
    for name, (values, kind) in tensors.items():
        dims = tuple(reversed(values.shape))
        head += gguf_string(name) + struct.pack(
            f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data)
        )
        raw = pack(values, kind)
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def interleaved(rows: Float32Array, head_dim: int) -> Float32Array:
    """q or k rows in GGUF's order: pair j holds dimensions j and j + head_dim / 2."""
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def parts_of(config: LlamaConfig, weights: Mapping[str, Float32Array]) -> dict[str, Float32Array]:
    """Fused tensors cut back into source parts."""
    widths = {
        "q": config.num_heads * config.head_dim,
        "k": config.num_kv_heads * config.head_dim,
        "v": config.num_kv_heads * config.head_dim,
        "gate": config.intermediate_size,
        "up": config.intermediate_size,
    }
    parts: dict[str, Float32Array] = {}
    for tensor in fused_layout(config):
        row = 0
        for name in tensor.parts:
            size = widths.get(name.rpartition(".")[2], tensor.shape[0])
            parts[name] = weights[tensor.name][row : row + size]
            row += size
    return parts


def tokenizer_metadata(vocab_size: int, *, pre: str = "smollm") -> dict[str, object]:
    """Three special tokens, every byte, and a few merges, one of them space + digit."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ 1", "Ġ hello", "1 2"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_symbols()]
    tokens += [pair.replace(" ", "") for pair in merges]
    tokens += [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


GGUF_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def write_tiny_gguf(
    path: Path, config: LlamaConfig, weights: Mapping[str, Float32Array], kind: int = 0
) -> Path:
    """A whole model as GGUF: matrices as ``kind``, norms as F32."""
    tensors = {}
    for name, values in parts_of(config, weights).items():
        layer, _, what = name.rpartition(".")
        stored = interleaved(values, config.head_dim) if what in ("q", "k") else values
        prefix = f"blk.{layer}." if layer else ""
        tensors[f"{prefix}{GGUF_NAMES[what]}.weight"] = (stored, 0 if stored.ndim == 1 else kind)
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_model_len,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    return write_gguf(path, metadata | tokenizer_metadata(config.vocab_size), tensors)


def write_safetensors(path: Path, tensors: Mapping[str, Float32Array]) -> Path:
    header, placed, size = layout({n: ("F32", v.shape) for n, v in tensors.items()}, {})
    data = bytearray(size)
    data[: len(header)] = header
    for name, values in tensors.items():
        start = placed[name].offset
        data[start : start + values.nbytes] = values.tobytes()
    path.write_bytes(data[: max(t.offset + t.size_bytes for t in placed.values())])
    return path


def hf_json(config: LlamaConfig) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_hidden_layers": config.num_layers,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids),
    }


def write_hf_folder(
    folder: Path,
    config: LlamaConfig,
    weights: Mapping[str, Float32Array],
    *,
    rename: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """A whole model as a Hugging Face folder of two shards, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {}
    for name, values in parts_of(config, weights).items():
        layer, _, what = name.rpartition(".")
        prefix = f"model.layers.{layer}." if layer else ""
        full = f"{prefix}{HF_NAMES[what]}.weight"
        named[rename.get(full, full)] = values
    names = list(named)
    for i, shard in enumerate((names[::2], names[1::2])):
        write_safetensors(folder / f"model-{i}.safetensors", {n: named[n] for n in shard})
    (folder / "config.json").write_text(json.dumps(hf_json(config)))
    return folder
