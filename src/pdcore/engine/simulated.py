"""A runner without a model whose KV cache proves itself.

Every position's KV is a function of the whole prefix: entry by entry, head by head it
holds the prefix sum ``g`` of a hash over (token, position), the token and the position.
The next token is a hash of ``g`` read back *from the cache*, so a block that is missing,
stale, swapped, or of another sequence changes the tokens; and each step checks what it is
about to build on and raises EngineError naming sequence, position and block. A lost first
token, a repeated step or a wrong order changes every later token, which
:func:`simulated_tokens` predicts without any cache.

Content does not depend on the TP rank (a head's words depend on its number over the whole
group), so that resharded KV can be checked too. Nothing here reads a clock or sleeps
unless it is given a ``sleep``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import numpy as np

from pdcore.engine.base import Allocate, RunnerCaps
from pdcore.engine.paging import (
    FULL_ATTENTION,
    Int64Array,
    PagedLimits,
    batch_slots,
    full_attention_spec,
    side_by_side,
)
from pdcore.engine.sampling import mix64
from pdcore.engine.shadow import GOLDEN, WORD_BYTES, ShadowCache, prefix_sum
from pdcore.errors import EngineError
from pdcore.kv.spec import KVCacheSpec, KVPlacement
from pdcore.types import Batch, Phase, SamplingParams, StepOutput, rows_of


@attrs.frozen
class CostModel:
    """Seconds of a step, linear as in the field; all zero: a step costs nothing.

    prefill = base + token * new + pair * new * (computed + new / 2);
    decode = base + sequence * batch + context * sum of contexts.
    """

    prefill_base_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    decode_base_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0

    def step_s(self, batch: Batch) -> float:
        """Seconds that ``batch`` takes."""
        if batch.phase is Phase.PREFILL:
            pairs = zip(batch.query_lens, batch.num_computed_tokens, strict=True)
            quadratic = sum(new * (computed + new / 2) for new, computed in pairs)
            return (
                self.prefill_base_s
                + self.prefill_token_s * batch.num_tokens
                + self.prefill_pair_s * quadratic
            )
        context = sum(batch.query_lens) + sum(batch.num_computed_tokens)
        return (
            self.decode_base_s
            + self.decode_sequence_s * len(batch)
            + self.decode_context_s * context
        )


#: Fitted to SmolLM2-135M, float32, one CPU thread.
SMOLLM2_CPU: Final = CostModel(
    prefill_token_s=3.1e-3,
    prefill_pair_s=3.7e-7,
    decode_base_s=55e-3,
    decode_sequence_s=5e-3,
    decode_context_s=13e-6,
)


@attrs.frozen(kw_only=True)
class SimulatedConfig:
    """Shape of the pretended model. ``head_dim`` is in bytes (the cache is uint8).

    ``eos_period`` n makes one token in n the EOS; 0 never produces it. ``verify_all``
    checks every computed position each step instead of the first, the last, and per
    block the first and one that moves from step to step.
    """

    num_layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    vocab_size: int = 1000
    max_model_len: int = 4096
    eos_token_id: int = 2
    eos_period: int = 0
    fingerprint: str = "simulated"
    verify_all: bool = False
    tp_size: int = 1
    tp_rank: int = 0
    cost: CostModel = CostModel()

    def __attrs_post_init__(self) -> None:
        if self.head_dim < 2 * WORD_BYTES or self.head_dim % WORD_BYTES:
            raise EngineError(
                f"head_dim is {self.head_dim} bytes, expected a multiple of 8 from 16 on"
            )
        heads, size = self.num_kv_heads, self.tp_size
        if size < 1 or (heads % size and size % heads):
            raise EngineError(
                f"tp_size {size} neither divides num_kv_heads {heads} nor is a multiple of it"
            )
        if not 0 <= self.tp_rank < self.tp_size:
            raise EngineError(f"tp_rank {self.tp_rank} is not within 0..{self.tp_size - 1}")
        if not 0 <= self.eos_token_id < self.vocab_size or self.vocab_size < 2:
            raise EngineError(
                f"eos_token_id {self.eos_token_id} is not within a vocabulary of "
                f"{self.vocab_size} (at least 2)"
            )
        if min(self.num_layers, self.block_size, self.max_model_len) < 1 or self.eos_period < 0:
            raise EngineError(
                "num_layers, block_size and max_model_len must be at least 1, eos_period at least 0"
            )

    def spec(self) -> KVCacheSpec:
        """Entries K and V of each layer, per rank."""
        return full_attention_spec(
            num_layers=self.num_layers,
            dtype="uint8",
            block_size=self.block_size,
            num_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
        )


def simulated_tokens(
    config: SimulatedConfig,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: SamplingParams | None = None,
) -> list[int]:
    """What a correct run generates after ``prompt``, EOS not stopping it; needs no cache."""
    params = sampling or SamplingParams()
    g = prefix_sum(prompt)
    generated: list[int] = []
    for position in range(len(prompt), len(prompt) + num_tokens):
        token = _next_token(config, g, position, params)
        generated.append(token)
        g = prefix_sum((token,), g, position)
    return generated


def _next_token(config: SimulatedConfig, g: int, position: int, params: SamplingParams) -> int:
    key = mix64(g + position * GOLDEN)
    if params.temperature > 0.0:
        key = mix64(key + mix64(params.seed or 0))
    if config.eos_period and mix64(key + 1) % config.eos_period == 0:
        return config.eos_token_id
    token = key % (config.vocab_size - 1)
    return token + 1 if token >= config.eos_token_id else token


class SimulatedRunner:
    """ModelRunner that computes hashes instead of a model. See the module's text.

    ``sleep`` (seconds) is called with the cost of each step, for demonstrations in real
    time; without it a step takes microseconds and ``elapsed_s`` is the model's cost.
    """

    def __init__(
        self,
        config: SimulatedConfig | None = None,
        *,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.config = config or SimulatedConfig()
        self.caps = RunnerCaps()
        self.kv_cache_spec = self.config.spec()
        self.fingerprint = self.config.fingerprint
        self._sleep = sleep
        self._cache: ShadowCache | None = None
        self._limits: PagedLimits | None = None
        self._step = 0

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset((self.config.eos_token_id,))

    def initialize_cache(self, num_blocks: int, allocate: Allocate) -> KVPlacement:
        """One region in which the entries of a block lie side by side."""
        if num_blocks < 2:
            raise EngineError(f"num_blocks is {num_blocks}, need the null block and one more")
        c, spec = self.config, self.kv_cache_spec
        region, buffer = allocate(num_blocks * spec.block_bytes[FULL_ATTENTION])
        heads = max(1, c.num_kv_heads // c.tp_size)
        self._cache = ShadowCache(
            buffer,
            entries=len(spec.entries),
            block_size=c.block_size,
            words=c.head_dim // WORD_BYTES,
            heads=heads,
            first_head=c.tp_rank * c.num_kv_heads // c.tp_size,
            all_heads=c.num_kv_heads,
        )
        stride = c.block_size * len(spec.entries)
        self._limits = PagedLimits(c.block_size, stride, num_blocks, c.max_model_len, c.vocab_size)
        return side_by_side(spec, num_blocks, region)

    def execute_model(self, batch: Batch) -> StepOutput:
        if self._cache is None or self._limits is None:
            raise EngineError("the runner has no KV cache: not initialised, or shut down")
        num_seqs = len(batch)
        if not num_seqs:
            return StepOutput([])
        slots = batch_slots(batch, self._limits)
        self._step += 1
        self._verify(batch, slots, self._cache)
        last = self._cache.append(batch, slots, learn=self.config.verify_all)
        tokens: list[int | None] = [None] * num_seqs
        logprobs: list[Sequence[float] | None] = [None] * num_seqs
        is_wanted = False
        for i, sample in enumerate(batch.sample):
            if sample:
                params, position = batch.sampling[i], len(slots[i])
                tokens[i] = _next_token(self.config, last[i], position, params)
                if params.logprobs:
                    is_wanted = True
                    logprobs[i] = (-(mix64(last[i]) % 1000) / 1000,)
        elapsed_s = self.config.cost.step_s(batch)
        if self._sleep is not None:
            self._sleep(elapsed_s)
        return StepOutput(rows_of(tokens), logprobs if is_wanted else None, elapsed_s)

    def warm_up(self) -> None:
        """Nothing to warm."""

    def shutdown(self) -> None:
        self._cache = None
        self._limits = None

    def _verify(self, batch: Batch, slots: list[Int64Array], cache: ShadowCache) -> None:
        """Raises EngineError when computed positions do not hold what was computed."""
        computed = batch.num_computed_tokens
        owners = [i for i, count in enumerate(computed) if count]
        if not owners:
            return
        seq_ids = [batch.seq_ids[i] for i in owners]
        if self.config.verify_all and cache.holds(
            seq_ids, [slots[i][: computed[i]] for i in owners]
        ):
            return
        chosen = [self._positions_to_check(computed[i]) for i in owners]
        own = [slots[i][p] for i, p in zip(owners, chosen, strict=True)]
        before = [slots[i][p - 1] for i, p in zip(owners, chosen, strict=True)]
        positions = np.concatenate(chosen)
        bad = cache.wrong(np.concatenate(own), np.concatenate(before), positions.astype(np.uint64))
        if bad is None:
            if self.config.verify_all:
                for seq_id, rows in zip(seq_ids, own, strict=True):
                    cache.learn(seq_id, rows)
            return
        index, entry = bad
        owner = int(np.searchsorted(np.cumsum([len(p) for p in chosen]), index, "right"))
        seq = batch.seq_ids[owners[owner]]
        stride = self.config.block_size * len(self.kv_cache_spec.entries)
        block = int(np.concatenate(own)[index]) // stride
        raise EngineError(
            f"sequence {seq}: the KV of position {int(positions[index])} in block {block}, entry "
            f"{self.kv_cache_spec.entries[entry].name}, is not what was computed",
            seq_ids=(seq,),
        )

    def _positions_to_check(self, computed: int) -> Int64Array:
        if self.config.verify_all:
            return np.arange(computed, dtype=np.int64)
        size = self.config.block_size
        first = np.arange(0, computed, size, dtype=np.int64)
        # Every block is looked at in every step, and inside it in time every offset.
        moving = np.minimum(first + self._step % size, computed - 1)
        return np.concatenate([first, moving, np.array([computed - 1])])
