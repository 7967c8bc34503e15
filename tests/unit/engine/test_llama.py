"""The torch Llama: contract suite, goldens from transformers, one copy of the weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest
import torch

from pdcore.engine.llama import LlamaRunner
from pdcore.engine.llama_model import LlamaModel, weights_from_arrays
from pdcore.engine.load import EMBEDDED_SHA256, load_runner
from pdcore.engine.weights import random_weights, rope_frequencies
from pdcore.errors import EngineError
from pdcore.testing.runner import CHECKS, check_model_runner
from pdcore.testing.runner_rig import Rig
from pdcore.types import Batch, Phase, SamplingParams
from tests.unit.engine.files import TINY, Float32Array, need_embedded_model

WEIGHTS = random_weights(TINY, 1)
GOLDENS = Path(__file__).resolve().parents[2] / "oracle" / "goldens.json"


def tiny_runner(dtype: str = "float32", **options: int) -> LlamaRunner:
    weights = weights_from_arrays(WEIGHTS, dtype)
    return LlamaRunner(TINY, weights, fingerprint=f"tiny:{dtype}", **options)


@pytest.mark.parametrize("name", list(CHECKS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contract(dtype: str, name: str) -> None:
    passed = check_model_runner(
        lambda: tiny_runner(dtype), exact_tokens=dtype == "float32", checks=[name]
    )
    assert passed == [name]


def test_contract_with_another_block_size() -> None:
    check_model_runner(lambda: tiny_runner(block_size=4), num_blocks=200)


class Golden(msgspec.Struct):
    text: str
    prompt: list[int]
    tokens: list[int]


class Goldens(msgspec.Struct):
    gguf_sha256: str
    prompts: list[Golden]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaRunner]:
    need_embedded_model()
    runner = load_runner(None, cache_dir=tmp_path_factory.mktemp("cache"))
    yield runner
    runner.shutdown()


def test_tokens_equal_transformers(smollm2: LlamaRunner) -> None:
    """A part of the goldens (nox -s oracle checks them all): batched, chunked, shuffled."""
    goldens = msgspec.json.decode(GOLDENS.read_bytes(), type=Goldens)
    assert goldens.gguf_sha256 == EMBEDDED_SHA256
    chosen = [g for g in goldens.prompts if len(g.prompt) < 50][::6]
    assert len(chosen) >= 3
    rig = Rig(smollm2, 40, random.Random(3))
    found = rig.generate([golden.prompt for golden in chosen], 12, chunk=16)
    for golden, tokens in zip(chosen, found, strict=True):
        assert tokens == golden.tokens[:12], golden.text


def plain_forward(token_ids: list[int]) -> Float32Array:
    """The model once more in float64 numpy, one sequence, no cache, no fusion of steps."""
    c = TINY
    w = {name: values.astype(np.float64) for name, values in WEIGHTS.items()}
    angles = np.outer(np.arange(len(token_ids)), rope_frequencies(c).astype(np.float64))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: Float32Array, weight: Float32Array) -> Float32Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * weight

    def rotate(x: Float32Array) -> Float32Array:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w["embed"][token_ids]
    n, group = len(token_ids), c.num_heads // c.num_kv_heads
    for i in range(c.num_layers):
        qkv = norm(x, w[f"{i}.attn_norm"]) @ w[f"{i}.qkv"].T
        heads = qkv.reshape(n, -1, c.head_dim)
        q, k, v = np.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        q, k = rotate(q), rotate(k)
        out = np.empty_like(q)
        for h in range(c.num_heads):
            scores = q[:, h] @ k[:, h // group].T / np.sqrt(c.head_dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h // group]
        x = x + out.reshape(n, -1) @ w[f"{i}.o"].T
        gate, up = np.split(norm(x, w[f"{i}.mlp_norm"]) @ w[f"{i}.gate_up"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{i}.down"].T
    return norm(x, w["norm"]) @ w["embed"].T


def test_tokens_and_logprobs_equal_a_plain_numpy_llama() -> None:
    prompt = [3, 141, 59, 26, 500, 8, 97, 93, 238, 46, 2, 64, 33, 83, 279, 502, 88, 4]
    params = SamplingParams(logprobs=True)
    rig = Rig(tiny_runner(), 16, random.Random(0))
    (seq,) = rig.sequences([prompt], 12)
    logprobs = []
    for step in range(12):
        n = len(seq.token_ids)
        work = (seq, 0 if step == 0 else n - 1, n)
        output = rig.step(Phase.PREFILL if step == 0 else Phase.DECODE, [work], params)
        logprobs += (output.logprobs or [None])[0] or ()
    logits = plain_forward(seq.token_ids[:-1])[len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == seq.token_ids[len(prompt) :]
    peak = logits.max(-1, keepdims=True)
    expected = (logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))).max(-1)
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-3)


def test_every_kv_byte_matters() -> None:
    """A zeroed block changes the logits: the random model is a fair witness (std 0.15)."""
    params = SamplingParams(logprobs=True)
    rig = Rig(tiny_runner(), 16, random.Random(0))
    base = []
    for entry in (None, *range(8)):
        (seq,) = rig.sequences([list(range(40))], 4)
        rig.prefill([seq])
        if entry is not None:
            rig.block(entry, seq.blocks["full"][1])[:] = bytes(len(rig.block(entry, 1)))
        n = len(seq.token_ids)
        output = rig.step(Phase.DECODE, [(seq, n - 1, n)], params)
        base.append((seq.token_ids[-1], (output.logprobs or [None])[0]))
    assert all(base[i] != base[0] for i in range(1, 9))


def test_a_seed_of_its_own_for_requests_without_one() -> None:
    """Another start of the process draws anew; a request's own seed does not change."""
    hot = SamplingParams(temperature=5.0)
    drawn = []
    for entropy in (1, 1, 2):
        rig = Rig(tiny_runner(entropy=entropy), 16, random.Random(0))
        drawn.append(rig.generate([[1, 2, 3]], 8, hot))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(logprobs=True),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, seed=1, top_k=5, top_p=0.5),
    ],
    ids=["greedy", "logprobs", "sampled", "top_k"],
)
def test_a_step_without_finite_logits_fails(params: SamplingParams, broken: float) -> None:
    """A damaged weight: token 0 would end the sequence, the answer be empty, with no error."""
    weights = weights_from_arrays(WEIGHTS, "float32")
    rig = Rig(LlamaRunner(TINY, weights, fingerprint="tiny"), 16, random.Random(0))
    (seq,) = rig.sequences([[3, 141, 59, 26]], 8)
    rig.step(Phase.PREFILL, [(seq, 0, 4)], params)
    weights["2.down"][5, 7] = broken
    n = len(seq.token_ids)
    for phase, start in ((Phase.DECODE, n - 1), (Phase.PREFILL, 0)):
        with pytest.raises(EngineError, match=r"no finite logits .*Delete the converted weights"):
            rig.step(phase, [(seq, start, n)], params)


def test_the_runner_says_what_it_is() -> None:
    runner = tiny_runner("bfloat16")
    assert runner.kv_cache_spec.entries[3].name == "layers.1.v"
    assert runner.kv_cache_spec.entries[0].dtype == "bfloat16"
    assert runner.kv_cache_spec.entries[0].item_len == 16 * 4 * 16 * 2
    assert (runner.max_model_len, runner.vocab_size) == (256, 512)
    assert runner.eos_token_ids == {2}
    assert torch.get_num_threads() == 1


def test_what_is_refused() -> None:
    with pytest.raises(EngineError, match="block_size 0"):
        tiny_runner(block_size=0)
    wrong = attrs.evolve(TINY, intermediate_size=255)
    with pytest.raises(EngineError, match=r"weights: 0\.gate_up has shape \(512, 128\), the con"):
        LlamaModel(wrong, weights_from_arrays(WEIGHTS, "float32"))
    runner = tiny_runner()
    with pytest.raises(EngineError, match="no KV cache"):
        runner.execute_model(Batch(1, Phase.DECODE))
    with pytest.raises(EngineError, match="warm_up needs"):
        runner.warm_up()
    with pytest.raises(EngineError, match="num_blocks is 1"):
        runner.initialize_cache(1, lambda size: (1, memoryview(bytearray(size))))
    rig = Rig(runner, 4, random.Random(0))
    assert rig.runner.execute_model(Batch(1, Phase.DECODE)).token_ids == []
