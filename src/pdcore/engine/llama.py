"""The embedded model's runner: a Llama (:mod:`pdcore.engine.llama_model`) behind ModelRunner.

What one step is lives here: from a batch to slots, rope positions and masks, the forward
pass, and a token for each sequence that samples. With tensor parallelism each rank of the
group is a runner of its own with its share of weights and KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pdcore.engine.base import Allocate, RunnerCaps
from pdcore.engine.collective import Collective
from pdcore.engine.llama_model import DTYPES, LlamaModel, Span, Step
from pdcore.engine.paging import (
    FULL_ATTENTION,
    Int64Array,
    PagedLimits,
    batch_slots,
    full_attention_spec,
    side_by_side,
)
from pdcore.engine.sampling import draw, log_probability, require_finite
from pdcore.engine.shard import local_config
from pdcore.engine.step_group import Choice, StepGroup
from pdcore.engine.weights import LlamaConfig
from pdcore.errors import EngineError
from pdcore.kv.spec import KVPlacement
from pdcore.types import Batch, Phase, SamplingParams, StepOutput, rows_of


class LlamaRunner:
    """ModelRunner over :class:`LlamaModel`. ``weights`` as
    :func:`pdcore.engine.llama_model.map_weights` gives them.

    ``collective``: this runner is one rank of a tensor parallel group, ``config`` describes
    the whole model and ``weights`` are the rank's
    (:func:`pdcore.engine.llama_model.shard_weights`). ``shutdown`` closes it.

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
        collective: Collective | None = None,
    ) -> None:
        self._group = StepGroup(collective)
        rank = self._group.rank
        if block_size < 1 or num_threads < 1:
            raise EngineError(
                f"block_size {block_size} and num_threads {num_threads} must be at least 1"
            )
        torch.set_num_threads(num_threads)
        self.caps = RunnerCaps(collectives=collective is not None)
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
            tp_size=rank.tp_size,
            tp_rank=rank.tp_rank,
        )
        model = LlamaModel(local_config(config, rank), weights, self._group.all_reduce)
        self._model: LlamaModel | None = model
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
        width = spec.entries[0].num_heads * spec.entries[0].head_dim
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
        model, limits = self._model, self._limits
        if model is None or limits is None:
            raise EngineError("the runner has no KV cache: not initialised, or shut down")
        if not len(batch):
            return StepOutput([])
        slots = self._group.agree(batch, lambda: batch_slots(batch, limits))
        wanted = [i for i, sample in enumerate(batch.sample) if sample]
        tokens: list[int | None] = [None] * len(batch)
        logprobs: list[Sequence[float] | None] = [None] * len(batch)
        with torch.inference_mode():
            with self._group.unbroken():
                token_ids = torch.tensor(batch.input_ids, dtype=torch.int64)
                hidden = model.forward(token_ids, self._plan(batch, slots), self._pool)
            if wanted:
                ends = [end - 1 for _, _, end in batch.spans()]
                rows = hidden[[ends[i] for i in wanted]] if len(wanted) < len(hidden) else hidden
                choice = self._group.share(
                    len(wanted), lambda: self._choose(batch, wanted, model.logits(rows))
                )
                for i, token, logprob in zip(wanted, choice.tokens, choice.logprobs, strict=True):
                    tokens[i] = token
                    logprobs[i] = (logprob,) if batch.sampling[i].logprobs else None
        has_logprobs = any(values is not None for values in logprobs)
        elapsed_s = time.perf_counter() - started
        return StepOutput(rows_of(tokens), logprobs if has_logprobs else None, elapsed_s)

    def warm_up(self) -> None:
        """Run one prefill and one decode on the null block, then zero it again."""
        if self._model is None or not self._pool:
            raise EngineError("warm_up needs initialize_cache first")
        self._group.agree_to_warm_up()
        with self._group.unbroken(), torch.inference_mode():
            slot = torch.zeros(1, dtype=torch.int64)
            cos, sin = self._model.rope(slot)
            for read in (None, slot.view(1, 1)):
                spans: list[Span] = [(0, 1, None, None)] if read is None else []
                step = Step(cos, sin, slot, read, None, spans)
                hidden = self._model.forward(slot, step, self._pool)
                if self._group.rank.tp_rank == 0:
                    self._model.logits(hidden)
            for k_rows, v_rows in self._pool:
                k_rows[0].zero_()
                v_rows[0].zero_()

    def shutdown(self) -> None:
        self._group.close()
        self._pool = []
        self._limits = None
        self._model = None

    def _plan(self, batch: Batch, slots: list[Int64Array]) -> Step:
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
            return Step(cos, sin, write, torch.from_numpy(read), mask, ())
        spans: list[Span] = []
        for i, start, end in batch.spans():
            if computed[i] == 0:
                spans.append((start, end, None, None))
                continue
            visible = np.arange(len(slots[i])) <= np.arange(computed[i], len(slots[i]))[:, None]
            spans.append((start, end, torch.from_numpy(slots[i]), torch.from_numpy(visible)))
        positions = [np.arange(n, len(s)) for n, s in zip(computed, slots, strict=True)]
        written = [s[n:] for n, s in zip(computed, slots, strict=True)]
        cos, sin = self._model.rope(torch.from_numpy(np.concatenate(positions)))
        return Step(cos, sin, torch.from_numpy(np.concatenate(written)), None, None, spans)

    def _choose(self, batch: Batch, wanted: Sequence[int], logits: torch.Tensor) -> Choice:
        """A token for each wanted sequence from float32 logits (len(wanted), vocab)."""
        tokens: list[int] = logits.argmax(-1).tolist()
        logprobs = [0.0] * len(tokens)
        rows = logits.numpy()
        for row, i in enumerate(wanted):
            params = batch.sampling[i]
            if params.temperature > 0.0 or np.isnan(rows[row, tokens[row]]):
                position = batch.num_computed_tokens[i] + batch.query_lens[i]
                seed = self._seed(params, batch.seq_ids[i])
                tokens[row] = draw(rows[row], params, seed, position)
            require_finite(float(rows[row, tokens[row]]))
            if params.logprobs:
                logprobs[row] = log_probability(rows[row], tokens[row])
        return Choice(tokens, logprobs)

    def _seed(self, params: SamplingParams, seq_id: int) -> int:
        return hash((self._entropy, seq_id)) if params.seed is None else params.seed
