"""The ModelRunner contract as named checks, for pdcore's runners and for yours.

``check_model_runner(make_runner)`` drives real batches through two runners of one model
and raises :class:`ContractError`, naming the check, at the first broken promise. Nothing
here knows a model: a runner is judged by the tokens and the KV bytes it produces.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import attrs
import numpy as np

from pdcore.engine.base import ModelRunner
from pdcore.errors import EngineError
from pdcore.testing.runner_rig import GREEDY, ContractError, Rig, RigSequence
from pdcore.types import NULL_BLOCK, Batch, Phase, SamplingParams

MakeRunner = Callable[[], ModelRunner]

#: Largest difference of KV values computed along two ways, relative to the largest value.
KV_TOLERANCE: Final = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@attrs.frozen
class Contract:
    """What the checks share: two runners of one model, and the inputs."""

    make_runner: MakeRunner
    first: Rig
    second: Rig
    prompts: Sequence[Sequence[int]]
    num_tokens: int
    exact_tokens: bool

    def expect(self, condition: bool, detail: str) -> None:
        if not condition:
            raise ContractError(detail)

    def expect_raises(self, call: Callable[[], object], what: str) -> None:
        try:
            call()
        except EngineError:
            return
        raise ContractError(f"{what} must raise EngineError and did not")

    def expect_tokens(self, found: object, expected: object, what: str) -> None:
        self.expect(found == expected, f"{what}: tokens {found}, expected {expected}")

    def expect_same_kv(
        self, a: tuple[Rig, RigSequence], b: tuple[Rig, RigSequence], n: int
    ) -> None:
        """KV of the first n positions equal, up to rounding for floating point caches."""
        pairs = zip(a[0].values(a[1], n), b[0].values(b[1], n), strict=True)
        for i, ((dtype, x), (_, y)) in enumerate(pairs):
            scale = float(np.abs(x).max(initial=0.0))
            limit = KV_TOLERANCE.get(dtype, 0.0) * scale
            worst = float(np.abs(x - y).max(initial=0.0))
            name = a[0].runner.kv_cache_spec.entries[i].name
            self.expect(worst <= limit, f"KV of {name} differs by {worst}, allowed {limit}")


def _placement(c: Contract) -> None:
    """Every block of every entry lies inside its region and overlaps no other."""
    spec, placement = c.first.runner.kv_cache_spec, c.first.placement
    spans = [
        (placement.offsets[i] + b * placement.block_strides[i], entry.item_len)
        for i, entry in enumerate(spec.entries)
        for b in range(placement.num_blocks)
    ]
    spans.sort()
    for (start, size), (after, _) in pairwise(spans):
        c.expect(start + size <= after, f"blocks overlap at byte {after}")
    last = spans[-1]
    c.expect(spans[0][0] >= 0 and sum(last) <= len(c.first.memory), "blocks leave the region")


def _identity(c: Contract) -> None:
    """Two runners of one model are compatible and say so (D35)."""
    a, b = c.first.runner, c.second.runner
    c.expect(bool(a.fingerprint) and a.fingerprint == b.fingerprint, "fingerprints differ")
    c.expect(a.kv_cache_spec.digest() == b.kv_cache_spec.digest(), "layout digests differ")
    c.expect(all(0 <= t < a.vocab_size for t in a.eos_token_ids), "EOS outside the vocabulary")


def _repeatable(c: Contract) -> None:
    """The same prompt gives the same tokens again, in other blocks full of old bytes."""
    expected = c.first.generate(c.prompts, c.num_tokens)
    c.expect(all(len(t) == c.num_tokens for t in expected), "not one token per step")
    c.expect_tokens(c.first.generate(c.prompts, c.num_tokens), expected, "second run")


def _block_ids(c: Contract) -> None:
    """Block ids do not matter: ascending, descending or shuffled, same tokens and KV."""
    expected: list[int] | None = None
    prompt = c.prompts[0]
    for reverse in (False, True):
        (seq,) = c.first.sequences([prompt], c.num_tokens)
        for blocks in seq.blocks.values():
            blocks.sort(reverse=reverse)
        c.first.prefill([seq])
        c.first.decode([seq], c.num_tokens - 1)
        found = seq.token_ids[len(prompt) :]
        c.expect_tokens(found, expected or found, "other block order")
        expected = found


def _chunked(c: Contract) -> None:
    """A prompt in chunks leaves the KV and gives the tokens of the whole prompt."""
    if not c.first.runner.caps.chunked_prefill:
        return
    for prompt in c.prompts:
        (whole,) = c.first.sequences([prompt], c.num_tokens)
        c.first.prefill([whole])
        for chunk in (1, 7) if len(prompt) < 64 else (7, 32):
            (seq,) = c.second.sequences([prompt], c.num_tokens)
            c.second.prefill([seq], chunk)
            c.expect_same_kv((c.first, whole), (c.second, seq), len(prompt))
            if c.exact_tokens:
                c.expect_tokens(seq.token_ids, whole.token_ids, f"chunks of {chunk}")


def _batched(c: Contract) -> None:
    """Many sequences at once give each one what it gets alone."""
    together = c.first.sequences(c.prompts, c.num_tokens)
    c.first.prefill(together, chunk=None)
    c.first.decode(together, c.num_tokens - 1)
    for seq, prompt in zip(together, c.prompts, strict=True):
        (alone,) = c.second.sequences([prompt], c.num_tokens)
        c.second.prefill([alone])
        c.expect_same_kv((c.first, seq), (c.second, alone), len(prompt))
        c.second.decode([alone], c.num_tokens - 1)
        if c.exact_tokens:
            c.expect_tokens(seq.token_ids, alone.token_ids, "in a batch")


def _handover(c: Contract) -> None:
    """Prefill here, KV bytes copied, decode there: as if it had stayed (greedy)."""
    _compare_handover(c, GREEDY, decode_first=0)


def _copied(c: Contract) -> None:
    """KV copied in the middle of decode, the last block half full, continues the same."""
    _compare_handover(c, GREEDY, decode_first=max(1, c.num_tokens // 2))


def _draws(c: Contract) -> None:
    """A draw depends only on (seed, position): not on earlier draws, ids or runner (D18)."""
    params = SamplingParams(temperature=1.5, seed=1234)
    _compare_handover(c, params, decode_first=0)
    prompt = c.prompts[0]
    expected = c.first.generate([prompt], c.num_tokens, params)
    c.expect_tokens(c.first.generate([prompt], c.num_tokens, params), expected, "same seed again")
    hot = [SamplingParams(temperature=5.0, seed=seed) for seed in range(16)]
    drawn = {tuple(c.first.generate([prompt], 2, p)[0]) for p in hot}
    c.expect(len(drawn) > 1, "16 seeds at temperature 5 all drew the same tokens")


def _compare_handover(c: Contract, params: SamplingParams, decode_first: int) -> None:
    for prompt in c.prompts:
        stay, go = c.first.sequences([prompt, prompt], c.num_tokens)
        c.first.prefill([stay], sampling=params)
        c.first.decode([stay], c.num_tokens - 1, params)
        c.first.prefill([go], sampling=params)
        c.first.decode([go], decode_first, params)
        twin = c.first.copy_to(c.second, go, c.num_tokens)
        c.second.decode([twin], c.num_tokens - 1 - decode_first, params)
        c.expect_tokens(twin.token_ids, stay.token_ids, "after the handover")


def _limits(c: Contract) -> None:
    """A batch that cannot run raises EngineError, and the runner goes on."""
    rig, prompt = c.first, c.prompts[0]
    runner = rig.runner
    (seq,) = rig.sequences([prompt], c.num_tokens)
    far = attrs.evolve(seq, blocks={k: b * runner.max_model_len for k, b in seq.blocks.items()})
    batch = Batch(0, Phase.DECODE)
    batch.add(1, [prompt[0]], runner.max_model_len, far.blocks, GREEDY)
    c.expect_raises(lambda: runner.execute_model(batch), "a position beyond max_model_len")
    short = attrs.evolve(seq, blocks={k: [] for k in seq.blocks})
    c.expect_raises(lambda: rig.prefill([short]), "a short block table")
    for block, what in ((NULL_BLOCK, "the null block"), (rig.placement.num_blocks, "no block")):
        bad = attrs.evolve(seq, blocks={k: [block, *b[1:]] for k, b in seq.blocks.items()})
        c.expect_raises(partial(rig.prefill, [bad]), f"{what} in a block table")
    unknown = attrs.evolve(seq, token_ids=[runner.vocab_size])
    c.expect_raises(lambda: rig.prefill([unknown]), "a token outside the vocabulary")
    rig.prefill([seq])


def _isolation(c: Contract) -> None:
    """A step writes only its own blocks; the null block stays zero (R93)."""
    rig = c.first
    seqs = rig.sequences(c.prompts, c.num_tokens)
    spec = rig.runner.kv_cache_spec
    owned = {(k, b) for seq in seqs for k, blocks in seq.blocks.items() for b in blocks}
    before = bytes(rig.memory)
    rig.prefill(seqs)
    rig.decode(seqs, c.num_tokens - 1)
    for i, entry in enumerate(spec.entries):
        c.expect(not any(rig.block(i, NULL_BLOCK)), f"{entry.name}: the null block was written")
        start, stride = rig.placement.offsets[i], rig.placement.block_strides[i]
        for b in range(1, rig.placement.num_blocks):
            if (entry.manager_key, b) not in owned:
                old = before[start + b * stride : start + b * stride + entry.item_len]
                c.expect(rig.block(i, b) == old, f"{entry.name}: block {b} is nobody's, written")


def _poison(c: Contract) -> None:
    """What a block held before it was handed out does not matter, NaN included."""
    rig = c.first
    expected = rig.generate(c.prompts, c.num_tokens)
    for i in range(len(rig.runner.kv_cache_spec.entries)):
        for b in range(1, rig.placement.num_blocks):
            view = rig.block(i, b)
            view[:] = b"\xff" * len(view)
    c.expect_tokens(rig.generate(c.prompts, c.num_tokens), expected, "blocks full of 0xff")


def _logprobs(c: Contract) -> None:
    """Asked for, a logprob comes with each sampled token, finite and at most 0 (R37)."""
    (seq,) = c.first.sequences([c.prompts[0]], c.num_tokens)
    params = SamplingParams(logprobs=True)
    output = c.first.step(Phase.PREFILL, [(seq, 0, len(seq.token_ids))], params)
    c.expect(output.logprobs is not None, "no logprobs")
    values = (output.logprobs or [None])[0]
    c.expect(values is not None and len(values) == 1, f"logprobs {values} for one token")
    c.expect(all(np.isfinite(v) and v <= 1e-6 for v in values or ()), f"logprobs {values}")


def _warm_up(c: Contract) -> None:
    """warm_up leaves no trace in the cache."""
    before = bytes(c.first.memory)
    c.first.runner.warm_up()
    c.expect(before == c.first.memory, "warm_up changed KV memory")


def _shutdown(c: Contract) -> None:
    """shutdown is idempotent, lets go of KV memory, and a step after it raises."""
    rig = Rig(c.make_runner(), 8, random.Random(0))
    (seq,) = rig.sequences([c.prompts[0][:4]], 1)
    rig.prefill([seq])
    rig.runner.shutdown()
    rig.runner.shutdown()
    c.expect_raises(lambda: rig.decode([seq], 1), "a step after shutdown")
    try:
        rig.memory.clear()
    except BufferError:
        raise ContractError("KV memory is still referenced after shutdown") from None


#: Name -> check, in the order they run.
CHECKS: Final[dict[str, Callable[[Contract], None]]] = {
    "placement": _placement,
    "identity": _identity,
    "repeatable": _repeatable,
    "block_ids_do_not_matter": _block_ids,
    "chunked_equals_whole": _chunked,
    "batch_equals_single": _batched,
    "handover_equals_colocated": _handover,
    "copied_kv_continues": _copied,
    "draws_depend_on_seed_and_position": _draws,
    "impossible_batch_raises": _limits,
    "writes_only_its_blocks": _isolation,
    "stale_bytes_do_not_matter": _poison,
    "logprobs": _logprobs,
    "warm_up_leaves_no_trace": _warm_up,
    "shutdown": _shutdown,
}


def default_prompts(vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Prompts around block boundaries, from a fixed seed."""
    rng = random.Random(20)
    lengths = [n for n in (1, 5, 16, 33, 50) if n + 16 <= max_model_len] or [1]
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]


def check_model_runner(
    make_runner: MakeRunner,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    num_tokens: int = 8,
    num_blocks: int = 64,
    exact_tokens: bool = True,
    checks: Collection[str] = tuple(CHECKS),
) -> list[str]:
    """Run the contract suite; returns the names of the checks that passed.

    ``make_runner`` is called three times and must give runners of one model, without KV
    cache. ``num_blocks`` must hold all prompts plus ``num_tokens`` each, twice.
    ``exact_tokens`` False is for low precision, where another order of the same sums may
    rightly give another token: chunked and batched runs are then judged by their KV.
    Raises ContractError (an AssertionError) naming the check.
    """
    rng = random.Random(7)
    first = Rig(make_runner(), num_blocks, rng)
    second = Rig(make_runner(), num_blocks, rng)
    chosen = prompts or default_prompts(first.runner.vocab_size, first.runner.max_model_len)
    contract = Contract(make_runner, first, second, chosen, num_tokens, exact_tokens)
    passed = []
    try:
        for name in checks:
            try:
                CHECKS[name](contract)
            except (ContractError, EngineError) as exc:
                raise ContractError(f"{name}: {exc}") from exc
            passed.append(name)
    finally:
        first.runner.shutdown()
        second.runner.shutdown()
    return passed
