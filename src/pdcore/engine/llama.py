"""A Llama in plain torch over a paged KV cache; the one engine file that imports torch.

The KV pool is one allocation of shape (num_blocks, entries, block_size, kv_heads,
head_dim), entries being K then V of each layer: a block of one entry is one contiguous
run, and all entries of a block lie side by side. Its rows are addressed by slot (see
:mod:`pdcore.engine.paging`).

Attention gathers exactly the slots that hold computed positions, never whole blocks:
the tail of a block may hold anything (a failed transfer, poison), and zero probability
times NaN is NaN. Padding reads the null block, which stays zero.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from pdcore.engine.base import Allocate, RunnerCaps
from pdcore.engine.paging import (
    FULL_ATTENTION,
    Int64Array,
    PagedLimits,
    batch_slots,
    full_attention_spec,
    side_by_side,
)
from pdcore.engine.safetensors import SafetensorsFile
from pdcore.engine.sampling import draw, log_probability, require_finite
from pdcore.engine.weights import LlamaConfig, fused_layout, rope_frequencies
from pdcore.errors import EngineError
from pdcore.kv.spec import KVPlacement
from pdcore.types import Batch, Phase, SamplingParams, StepOutput, rows_of

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


@attrs.frozen(eq=False)
class _Layer:
    """One layer's matrices, shape (out, in) as torch stores them."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


#: (start, end) in the packed tokens, context slots or None when the context is exactly
#: the span, bool mask or None.
_Span = tuple[int, int, torch.Tensor | None, torch.Tensor | None]


@attrs.frozen(eq=False)
class _Step:
    """What every layer of one forward pass needs.

    ``write`` (N,): slot of each new token. ``read`` (B, T) and ``mask`` (B, 1, 1, T):
    decode only. ``spans``: prefill only, one per sequence.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor | None
    mask: torch.Tensor | None
    spans: Sequence[_Span]


def _project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (N, in) times weight (out, in) transposed. One bfloat16 row goes as a vector: the
    matrix product repacks the whole weight first and takes 1.5 to 2 times as long."""
    if x.shape[0] == 1 and x.dtype is torch.bfloat16:
        return torch.mv(weight, x[0]).unsqueeze(0)
    return functional.linear(x, weight)


class LlamaModel:
    """Forward passes of one Llama over a pool it is given; no request state."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, torch.Tensor]) -> None:
        for tensor in fused_layout(config):
            found = weights.get(tensor.name)
            if found is None or tuple(found.shape) != tensor.shape:
                shape = None if found is None else tuple(found.shape)
                raise EngineError(
                    f"weights: {tensor.name} has shape {shape}, the config wants {tensor.shape}"
                )
        self.config = config
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
        step: _Step,
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
            x = x + _project(attention(step, q, k, v, k_rows, v_rows), layer.o)
            gate, up = _project(
                functional.rms_norm(x, size, layer.mlp_norm, eps), layer.gate_up
            ).chunk(2, -1)
            x = x + _project(functional.silu(gate) * up, layer.down)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (S, vocab) of hidden states (S, hidden)."""
        c = self.config
        normed = functional.rms_norm(hidden, (c.hidden_size,), self._norm, c.rms_norm_eps)
        return _project(normed, self._head).float()

    def _decode_attention(
        self,
        step: _Step,
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
        step: _Step,
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


class LlamaRunner:
    """ModelRunner over :class:`LlamaModel`. ``weights`` as :func:`map_weights` gives them.

    ``fingerprint`` must identify weights, dtype and tokenizer. ``num_threads`` is torch's
    intra-op pool, process-wide: more threads than free cores collapse. ``entropy`` seeds
    requests without a seed of their own.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        fingerprint: str,
        block_size: int = 16,
        num_threads: int = 1,
        entropy: int = 0,
    ) -> None:
        if block_size < 1 or num_threads < 1:
            raise EngineError(
                f"block_size {block_size} and num_threads {num_threads} must be at least 1"
            )
        torch.set_num_threads(num_threads)
        self.caps = RunnerCaps()
        self.config = config
        self.fingerprint = fingerprint
        self._dtype = weights["embed"].dtype
        self._entropy = entropy
        self.kv_cache_spec = full_attention_spec(
            num_layers=config.num_layers,
            dtype=next(name for name, value in DTYPES.items() if value is self._dtype),
            block_size=block_size,
            num_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self._model: LlamaModel | None = LlamaModel(config, weights)
        self._pool: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._limits: PagedLimits | None = None

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.config.eos_token_ids)

    def initialize_cache(self, num_blocks: int, allocate: Allocate) -> KVPlacement:
        """One region in which the entries of a block lie side by side."""
        if num_blocks < 2:
            raise EngineError(f"num_blocks is {num_blocks}, need the null block and one more")
        spec = self.kv_cache_spec
        region, buffer = allocate(num_blocks * spec.block_bytes[FULL_ATTENTION])
        width = self.config.num_kv_heads * self.config.head_dim
        rows = torch.frombuffer(buffer, dtype=self._dtype).view(-1, width)
        block_size = spec.entries[0].block_size
        # Every entry is the same array shifted by whole blocks of rows, so that one slot
        # number serves all of them.
        slices = [rows[e * block_size :] for e in range(len(spec.entries))]
        self._pool = list(zip(slices[0::2], slices[1::2], strict=True))
        self._limits = PagedLimits(
            block_size,
            block_size * len(spec.entries),
            num_blocks,
            self.max_model_len,
            self.vocab_size,
        )
        return side_by_side(spec, num_blocks, region)

    def execute_model(self, batch: Batch) -> StepOutput:
        started = time.perf_counter()
        if self._model is None or self._limits is None:
            raise EngineError("the runner has no KV cache: not initialised, or shut down")
        if not len(batch):
            return StepOutput([])
        slots = batch_slots(batch, self._limits)
        with torch.inference_mode():
            step = self._plan(batch, slots)
            token_ids = torch.tensor(batch.input_ids, dtype=torch.int64)
            hidden = self._model.forward(token_ids, step, self._pool)
            wanted = [i for i, sample in enumerate(batch.sample) if sample]
            ends = [end - 1 for _, _, end in batch.spans()]
            tokens: list[int | None] = [None] * len(batch)
            logprobs: list[Sequence[float] | None] = [None] * len(batch)
            if wanted:
                rows = hidden[[ends[i] for i in wanted]] if len(wanted) < len(hidden) else hidden
                self._sample(batch, wanted, self._model.logits(rows), tokens, logprobs)
        has_logprobs = any(values is not None for values in logprobs)
        elapsed_s = time.perf_counter() - started
        return StepOutput(rows_of(tokens), logprobs if has_logprobs else None, elapsed_s)

    def warm_up(self) -> None:
        """Run one prefill and one decode on the null block, then zero it again."""
        if self._model is None or not self._pool:
            raise EngineError("warm_up needs initialize_cache first")
        with torch.inference_mode():
            slot = torch.zeros(1, dtype=torch.int64)
            cos, sin = self._model.rope(slot)
            for read in (None, slot.view(1, 1)):
                spans: list[_Span] = [(0, 1, None, None)] if read is None else []
                step = _Step(cos, sin, slot, read, None, spans)
                self._model.logits(self._model.forward(slot, step, self._pool))
            for k_rows, v_rows in self._pool:
                k_rows[0].zero_()
                v_rows[0].zero_()

    def shutdown(self) -> None:
        self._pool = []
        self._limits = None
        self._model = None

    def _plan(self, batch: Batch, slots: list[Int64Array]) -> _Step:
        assert self._model is not None
        computed = batch.num_computed_tokens
        if batch.phase is Phase.DECODE and max(batch.query_lens) == 1:
            lengths = np.array([len(s) for s in slots])
            read = np.zeros((len(slots), int(lengths.max())), np.int64)
            for row, own in zip(read, slots, strict=True):
                row[: len(own)] = own
            mask = None
            if lengths.min() < lengths.max():
                valid = np.arange(read.shape[1]) < lengths[:, None]
                mask = torch.from_numpy(valid[:, None, None, :])
            cos, sin = self._model.rope(torch.from_numpy(lengths - 1))
            write = torch.from_numpy(read[np.arange(len(slots)), lengths - 1])
            return _Step(cos, sin, write, torch.from_numpy(read), mask, ())
        spans: list[_Span] = []
        for i, start, end in batch.spans():
            if computed[i] == 0:
                spans.append((start, end, None, None))
                continue
            visible = np.arange(len(slots[i])) <= np.arange(computed[i], len(slots[i]))[:, None]
            spans.append((start, end, torch.from_numpy(slots[i]), torch.from_numpy(visible)))
        positions = [np.arange(n, len(s)) for n, s in zip(computed, slots, strict=True)]
        written = [s[n:] for n, s in zip(computed, slots, strict=True)]
        cos, sin = self._model.rope(torch.from_numpy(np.concatenate(positions)))
        return _Step(cos, sin, torch.from_numpy(np.concatenate(written)), None, None, spans)

    def _sample(
        self,
        batch: Batch,
        wanted: list[int],
        logits: torch.Tensor,
        tokens: list[int | None],
        logprobs: list[Sequence[float] | None],
    ) -> None:
        greedy: list[int] = logits.argmax(-1).tolist()
        rows = logits.numpy()
        for row, i in enumerate(wanted):
            params = batch.sampling[i]
            token = greedy[row]
            if params.temperature > 0.0 or np.isnan(rows[row, token]):
                position = batch.num_computed_tokens[i] + batch.query_lens[i]
                token = draw(rows[row], params, self._seed(params, batch.seq_ids[i]), position)
            require_finite(float(rows[row, token]))
            tokens[i] = token
            if params.logprobs:
                logprobs[i] = (log_probability(rows[row], token),)

    def _seed(self, params: SamplingParams, seq_id: int) -> int:
        return hash((self._entropy, seq_id)) if params.seed is None else params.seed
