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
from numpy.typing import NDArray

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
from pdcore.errors import EngineError
from pdcore.kv.spec import KVCacheSpec, KVPlacement
from pdcore.types import Batch, Phase, SamplingParams, StepOutput, rows_of

Words = NDArray[np.uint64]

_WORD_BYTES: Final = 8
_START: Final = 0x5EED0FA11C0FFEE5
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)


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
        pairs = list(zip(batch.query_lens, batch.num_computed_tokens, strict=True))
        if batch.phase is Phase.PREFILL:
            quadratic = sum(new * (computed + new / 2) for new, computed in pairs)
            return (
                self.prefill_base_s
                + self.prefill_token_s * batch.num_tokens
                + self.prefill_pair_s * quadratic
            )
        context = sum(new + computed for new, computed in pairs)
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
        if self.head_dim < 2 * _WORD_BYTES or self.head_dim % _WORD_BYTES:
            raise EngineError(
                f"head_dim is {self.head_dim} bytes, expected a multiple of 8 from 16 on"
            )
        if self.tp_size < 1 or self.num_kv_heads % self.tp_size:
            raise EngineError(
                f"tp_size {self.tp_size} does not divide num_kv_heads {self.num_kv_heads}"
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
    tokens = np.array(prompt, np.uint64)
    g = int(_prefix_sums(tokens, np.arange(len(prompt), dtype=np.uint64))[-1])
    generated: list[int] = []
    for position in range(len(prompt), len(prompt) + num_tokens):
        token = _next_token(config, g, position, params)
        generated.append(token)
        step = _hash(np.array([token], np.uint64), np.array([position], np.uint64))
        g = (g + int(step[0])) & ((1 << 64) - 1)
    return generated


def _mix(values: Words) -> Words:
    """splitmix64's finaliser over an array (wraps without a warning, unlike scalars)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hash(tokens: Words, positions: Words) -> Words:
    return _mix(tokens + (positions + np.uint64(1)) * _GOLDEN)


def _prefix_sums(tokens: Words, positions: Words) -> Words:
    return np.cumsum(_hash(tokens, positions), dtype=np.uint64) + np.array([_START], np.uint64)


def _next_token(config: SimulatedConfig, g: int, position: int, params: SamplingParams) -> int:
    key = mix64(g + position * int(_GOLDEN))
    if params.temperature > 0.0:
        key = mix64(key + mix64(params.seed or 0))
    if config.eos_period and mix64(key + 1) % config.eos_period == 0:
        return config.eos_token_id
    token = key % (config.vocab_size - 1)
    return token + 1 if token >= config.eos_token_id else token


class _ShadowCache:
    """The words of every (block, entry, offset, head), and what they must be."""

    def __init__(self, config: SimulatedConfig, buffer: memoryview, num_blocks: int) -> None:
        heads = config.num_kv_heads // config.tp_size
        words = config.head_dim // _WORD_BYTES
        entries = 2 * config.num_layers
        shape = (num_blocks, entries, config.block_size, heads, words)
        self.words: Words = np.frombuffer(buffer, np.uint64).reshape(shape)
        self._stride = entries * config.block_size
        # A different constant for each word of each entry and head of the whole group, so
        # that KV of the wrong layer or head is as wrong as KV of the wrong position.
        first = config.tp_rank * heads
        counter = np.arange(entries * config.num_kv_heads * words, dtype=np.uint64)
        salt = _mix(counter * _GOLDEN + np.uint64(1)).reshape(entries, config.num_kv_heads, words)
        self._salt: Words = salt[:, first : first + heads]

    def place(self, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Block ids and offsets of slots."""
        return slots // self._stride, slots % self._stride

    def prefix(self, slots: Int64Array) -> Words:
        """``g`` as entry 0 holds it."""
        blocks, offsets = self.place(slots)
        column: Words = self.words[blocks, 0, offsets, 0, 0] - self._salt[0, 0, 0:1]
        return column

    def content(self, g: Words, tokens: Words, positions: Words) -> Words:
        """Words of positions, shape (n, entries, heads, words)."""
        base = np.empty((len(g), 1, 1, self._salt.shape[-1]), np.uint64)
        base[:, 0, 0, 0] = g
        base[:, 0, 0, 1] = tokens | (positions << np.uint64(32))
        for i in range(2, base.shape[-1]):
            base[:, 0, 0, i] = _mix(g + np.uint64(i))
        return base + self._salt

    def write(self, slots: Int64Array, g: Words, tokens: Words, positions: Words) -> None:
        blocks, offsets = self.place(slots)
        self.words[blocks, :, offsets] = self.content(g, tokens, positions)

    def wrong(
        self, slots: Int64Array, previous: Int64Array, positions: Words
    ) -> tuple[int, int] | None:
        """(index, entry) of the first position that is not what was computed; None if all are.

        ``previous[i]`` is the slot of the position before; unused for position 0.
        """
        blocks, offsets = self.place(slots)
        found = self.words[blocks, :, offsets]
        g = found[:, 0, 0, 0] - self._salt[0, 0, 0]
        tokens = (found[:, 0, 0, 1] - self._salt[0, 0, 1]) & _LOW_HALF
        same = (found == self.content(g, tokens, positions)).all(axis=(2, 3))
        before = np.where(positions == 0, np.uint64(_START), self.prefix(previous))
        same[:, 0] &= g - before == _hash(tokens, positions)
        if same.all():
            return None
        index = int(np.argmin(same.all(axis=1)))
        return index, int(np.argmin(same[index]))


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
        self._cache: _ShadowCache | None = None
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
        self._cache = _ShadowCache(c, buffer, num_blocks)
        stride = c.block_size * len(spec.entries)
        self._limits = PagedLimits(c.block_size, stride, num_blocks, c.max_model_len, c.vocab_size)
        return side_by_side(spec, num_blocks, region)

    def execute_model(self, batch: Batch) -> StepOutput:
        if self._cache is None or self._limits is None:
            raise EngineError("the runner has no KV cache: not initialised, or shut down")
        if not len(batch):
            return StepOutput([])
        slots = batch_slots(batch, self._limits)
        self._step += 1
        self._verify(batch, slots, self._cache)
        last = self._append(batch, slots, self._cache)
        tokens: list[int | None] = [None] * len(batch)
        logprobs: list[Sequence[float] | None] = [None] * len(batch)
        for i, sample in enumerate(batch.sample):
            if sample:
                params, position = batch.sampling[i], len(slots[i])
                tokens[i] = _next_token(self.config, last[i], position, params)
                if params.logprobs:
                    logprobs[i] = (-(mix64(last[i]) % 1000) / 1000,)
        elapsed_s = self.config.cost.step_s(batch)
        if self._sleep is not None:
            self._sleep(elapsed_s)
        wanted = any(values is not None for values in logprobs)
        return StepOutput(rows_of(tokens), logprobs if wanted else None, elapsed_s)

    def warm_up(self) -> None:
        """Nothing to warm."""

    def shutdown(self) -> None:
        self._cache = None
        self._limits = None

    def _verify(self, batch: Batch, slots: list[Int64Array], cache: _ShadowCache) -> None:
        """Raises EngineError when computed positions do not hold what was computed."""
        owners: list[int] = []
        chosen: list[Int64Array] = []
        for i, computed in enumerate(batch.num_computed_tokens):
            if computed:
                owners.append(i)
                chosen.append(self._positions_to_check(computed))
        if not chosen:
            return
        own = [slots[i][p] for i, p in zip(owners, chosen, strict=True)]
        before = [slots[i][p - 1] for i, p in zip(owners, chosen, strict=True)]
        positions = np.concatenate(chosen)
        bad = cache.wrong(np.concatenate(own), np.concatenate(before), positions.astype(np.uint64))
        if bad is None:
            return
        index, entry = bad
        owner = int(np.searchsorted(np.cumsum([len(p) for p in chosen]), index, "right"))
        seq = batch.seq_ids[owners[owner]]
        block = int(cache.place(np.concatenate(own)[index : index + 1])[0][0])
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

    def _append(self, batch: Batch, slots: list[Int64Array], cache: _ShadowCache) -> list[int]:
        """Write the new tokens' KV; the prefix sum at the end of each sequence."""
        tokens = np.array(batch.input_ids, np.uint64)
        computed = np.array(batch.num_computed_tokens, np.int64)
        lengths = np.array(batch.query_lens, np.int64)
        starts = np.cumsum(lengths) - lengths
        positions = (np.arange(len(tokens)) - np.repeat(starts - computed, lengths)).astype(
            np.uint64
        )
        before = np.array([s[n - 1] for s, n in zip(slots, computed, strict=True)], np.int64)
        carried = np.where(computed == 0, np.uint64(_START), cache.prefix(before))
        steps = _hash(tokens, positions)
        sums = np.cumsum(steps, dtype=np.uint64)
        g = sums + np.repeat(carried - (sums[starts] - steps[starts]), lengths)
        new = np.concatenate([s[n:] for s, n in zip(slots, computed, strict=True)])
        cache.write(new, g, tokens, positions)
        ends: list[int] = g[starts + lengths - 1].tolist()
        return ends
