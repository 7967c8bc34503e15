"""Forward passes of a Llama in plain torch over a paged KV cache.

The KV pool is one allocation of shape (num_blocks, entries, block_size, kv_heads,
head_dim), entries being K then V of each layer: a block of one entry is one contiguous
run, and all entries of a block lie side by side. Its rows are addressed by slot (see
:mod:`pdcore.engine.paging`).

Attention gathers exactly the slots that hold computed positions, never whole blocks:
the tail of a block may hold anything (a failed transfer, poison), and zero probability
times NaN is NaN. Padding reads the null block, which stays zero.

With tensor parallelism (Megatron) a model is one rank's shard: it is built from the rank's
own shapes (:func:`pdcore.engine.shard.local_config`), and the output of o and of down is a
partial sum, added up over the ranks by ``all_reduce``. Between the two everything is whole
on every rank. ``embed`` is whole everywhere: a lookup reads the rows that it uses and
computes nothing, so to cut it would save no time and cost one more sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from pdcore.engine.safetensors import SafetensorsFile
from pdcore.engine.shard import TPRank, spans
from pdcore.engine.weights import LlamaConfig, fused_layout, rope_frequencies
from pdcore.errors import EngineError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Positions with cos and sin at first; more are made when a sequence gets there, so that a
#: model which claims millions costs what its sequences use.
_ROPE_POSITIONS = 8192


def map_weights(file: SafetensorsFile, dtype: str) -> dict[str, torch.Tensor]:
    """Tensors over a private mapping of the cache file: pages shared between processes.

    Private (copy on write) rather than read-only because torch has no read-only tensor.
    """
    size = file.path.stat().st_size
    flat = torch.from_file(str(file.path), shared=False, size=size, dtype=torch.uint8)
    stored = {"F32": torch.float32, "BF16": torch.bfloat16}
    tensors: dict[str, torch.Tensor] = {}
    for info in file.tensors.values():
        raw = flat[info.offset : info.offset + info.size_bytes]
        # Norm vectors are stored as float32 whatever the dtype; converting them is cheap.
        tensors[info.name] = raw.view(stored[info.dtype]).view(info.shape).to(DTYPES[dtype])
    return tensors


def weights_from_arrays(
    arrays: Mapping[str, NDArray[np.float32]], dtype: str
) -> dict[str, torch.Tensor]:
    """Tensors of :func:`pdcore.engine.weights.random_weights`."""
    return {name: torch.tensor(values, dtype=DTYPES[dtype]) for name, values in arrays.items()}


def shard_weights(
    config: LlamaConfig, weights: Mapping[str, torch.Tensor], rank: TPRank
) -> dict[str, torch.Tensor]:
    """One rank's part of whole weights, copied: of the others' only pages are touched that
    hold both. What every rank holds whole stays the view that it was.

    Raises EngineError where heads or MLP do not divide over the ranks.
    """
    shard: dict[str, torch.Tensor] = {}
    for tensor in fused_layout(config):
        axis, parts = spans(config, tensor, rank)
        whole = weights[tensor.name]
        if parts == ((0, tensor.shape[axis]),):
            shard[tensor.name] = whole
        elif parts:
            pieces = [whole.narrow(axis, start, end - start) for start, end in parts]
            shard[tensor.name] = torch.cat(pieces, axis)
    return shard


@attrs.frozen(eq=False)
class _Layer:
    """One layer's matrices, shape (out, in) as torch stores them."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


#: One sequence of a prefill: (start, end) in the packed tokens, context slots or None when
#: the context is exactly the span, bool mask or None.
Span = tuple[int, int, torch.Tensor | None, torch.Tensor | None]


@attrs.frozen(eq=False)
class Step:
    """What every layer of one forward pass needs.

    ``write`` (N,): slot of each new token. ``read`` (B, T) and ``mask`` (B, 1, 1, T):
    decode only. ``spans``: prefill only, one per sequence.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor | None
    mask: torch.Tensor | None
    spans: Sequence[Span]


def _project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (N, in) times weight (out, in) transposed. One bfloat16 row goes as a vector: the
    matrix product repacks the whole weight first and takes 1.5 to 2 times as long."""
    if x.shape[0] == 1 and x.dtype is torch.bfloat16:
        return torch.mv(weight, x[0]).unsqueeze(0)
    return functional.linear(x, weight)


class LlamaModel:
    """Forward passes of one Llama over a pool it is given; no request state.

    ``all_reduce`` adds a partial sum up over the ranks, in place; None for a whole model.
    Raises EngineError for weights that do not have the config's shapes.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, torch.Tensor],
        all_reduce: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        for tensor in fused_layout(config):
            found = weights.get(tensor.name)
            if found is None or tuple(found.shape) != tensor.shape:
                shape = None if found is None else tuple(found.shape)
                raise EngineError(
                    f"weights: {tensor.name} has shape {shape}, the config wants {tensor.shape}"
                )
        self.config = config
        self._all_reduce = all_reduce
        self._embed = weights["embed"]
        self._norm = weights["norm"]
        self._head = weights["embed" if config.tie_embeddings else "head"]
        parts = ("attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down")
        self._layers = [
            _Layer(*(weights[f"{i}.{part}"] for part in parts)) for i in range(config.num_layers)
        ]
        self._tabulate(min(config.max_model_len, _ROPE_POSITIONS))

    def _tabulate(self, length: int) -> None:
        c = self.config
        both = np.tile(np.outer(np.arange(length), rope_frequencies(c)), 2).astype(np.float32)
        sign = np.where(np.arange(c.head_dim) < c.head_dim // 2, -1.0, 1.0).astype(np.float32)
        self._cos = torch.from_numpy(np.cos(both)).to(self._embed.dtype)
        self._sin = torch.from_numpy(np.sin(both) * sign).to(self._embed.dtype)

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of shape (N, 1, head_dim) for positions below max_model_len."""
        if (last := int(positions.max())) >= len(self._cos):
            self._tabulate(min(self.config.max_model_len, max(last + 1, 2 * len(self._cos))))
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def forward(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Hidden states (N, hidden) of packed tokens; writes their K and V to the pool.

        ``pool[layer]`` = K and V rows of that layer, shape (slots, kv_heads * head_dim).
        """
        c = self.config
        size, eps = (c.hidden_size,), c.rms_norm_eps
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        rotated = c.num_heads + c.num_kv_heads
        attention = self._decode_attention if step.read is not None else self._prefill_attention
        x = functional.embedding(token_ids, self._embed)
        for layer, (k_rows, v_rows) in zip(self._layers, pool, strict=True):
            qkv = _project(functional.rms_norm(x, size, layer.attn_norm, eps), layer.qkv)
            qk = qkv[:, : q_size + kv_size].view(-1, rotated, c.head_dim)
            # Rolling by half swaps the halves; the sign of rotate_half is in ``sin``.
            qk = torch.addcmul(qk * step.cos, qk.roll(c.head_dim // 2, -1), step.sin)
            q, k, v = qk[:, : c.num_heads], qk[:, c.num_heads :], qkv[:, q_size + kv_size :]
            k_rows.index_copy_(0, step.write, k.reshape(-1, kv_size))
            v_rows.index_copy_(0, step.write, v)
            x = x + self._summed(attention(step, q, k, v, k_rows, v_rows), layer.o)
            gate, up = _project(
                functional.rms_norm(x, size, layer.mlp_norm, eps), layer.gate_up
            ).chunk(2, -1)
            x = x + self._summed(functional.silu(gate) * up, layer.down)
        return x

    def _summed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A row-parallel product: this rank's columns, then the sum over all ranks."""
        out = _project(x, weight)
        if self._all_reduce is not None:
            self._all_reduce(out)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (S, vocab) of hidden states (S, hidden)."""
        c = self.config
        normed = functional.rms_norm(hidden, (c.hidden_size,), self._norm, c.rms_norm_eps)
        return _project(normed, self._head).float()

    def _decode_attention(
        self,
        step: Step,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
    ) -> torch.Tensor:
        """One query per sequence. The query heads of a KV head act as SDPA's length, so
        that KV heads need no repeating."""
        assert step.read is not None
        c = self.config
        batch, length = step.read.shape
        index = step.read.view(-1)
        shape = (batch, length, c.num_kv_heads, c.head_dim)
        keys = k_rows.index_select(0, index).view(shape).transpose(1, 2)
        values = v_rows.index_select(0, index).view(shape).transpose(1, 2)
        grouped = q.reshape(batch, c.num_kv_heads, -1, c.head_dim)
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=step.mask)
        return out.reshape(batch, -1)

    def _prefill_attention(
        self,
        step: Step,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Each sequence's span alone; a later chunk reads its context from the pool."""
        c = self.config
        width = c.num_heads * c.head_dim
        out = torch.empty(q.shape[0], width, dtype=q.dtype)
        for start, end, slots, mask in step.spans:
            if slots is None:
                keys, values = k[start:end], v[start:end]
            else:
                keys, values = k_rows.index_select(0, slots), v_rows.index_select(0, slots)
            shape = (1, -1, c.num_kv_heads, c.head_dim)
            piece = functional.scaled_dot_product_attention(
                q[start:end].unsqueeze(0).transpose(1, 2),
                keys.reshape(shape).transpose(1, 2),
                values.reshape(shape).transpose(1, 2),
                attn_mask=mask,
                is_causal=slots is None,
                enable_gqa=True,
            )
            out[start:end] = piece.transpose(1, 2).reshape(end - start, width)
        return out
