"""Greedy tokens of pdcore equal transformers' on the same dequantised float32 weights.

All golden prompts, 64 tokens each, single and 8 at once, with shuffled block ids and
chunked prefill; the goldens themselves are checked against one teacher-forced forward of
transformers per prompt, so that they cannot have come from pdcore.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("transformers", reason="the oracle needs the extra `oracle`")

import torch
from transformers import LlamaConfig as HFLlamaConfig
from transformers import LlamaForCausalLM

from pdcore.engine.hf_model import SafetensorsWeights
from pdcore.engine.llama import LlamaRunner
from pdcore.engine.llama_model import map_weights, weights_from_arrays
from pdcore.engine.load import find_embedded_model, load_runner
from pdcore.engine.weight_cache import cached_weights
from pdcore.engine.weights import fused, fused_layout
from pdcore.testing.runner_rig import Rig
from pdcore.types import Phase, SamplingParams
from tests.oracle.reference import build_reference, continue_greedily, teacher_forced

pytestmark = pytest.mark.oracle

NUM_TOKENS = 64
LOGPROBS = SamplingParams(logprobs=True)


class Golden(msgspec.Struct):
    text: str
    margin: float
    prompt: list[int]
    tokens: list[int]


class Goldens(msgspec.Struct):
    gguf_sha256: str
    prompts: list[Golden]


GOLDENS = msgspec.json.decode(
    Path(__file__).with_name("goldens.json").read_bytes(), type=Goldens
).prompts
TEXTS = [golden.text[:24] for golden in GOLDENS]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    runner = load_runner(None, cache_dir=tmp_path_factory.mktemp("cache"))
    yield Rig(runner, 400, random.Random(1))
    runner.shutdown()


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return build_reference(find_embedded_model())


def test_there_are_enough_goldens() -> None:
    assert len(GOLDENS) >= 20
    assert all(len(golden.tokens) == NUM_TOKENS for golden in GOLDENS)
    # Far above the rounding of float32: a different token is a mistake, not noise.
    assert min(golden.margin for golden in GOLDENS) > 1e-3


@pytest.mark.parametrize("golden", GOLDENS, ids=TEXTS)
def test_goldens_and_logprobs_come_from_transformers(
    rig: Rig, reference: LlamaForCausalLM, golden: Golden
) -> None:
    forced, expected, _ = teacher_forced(reference, golden.prompt, golden.tokens)
    assert forced == golden.tokens
    (seq,) = rig.sequences([golden.prompt], NUM_TOKENS)
    output = rig.step(Phase.PREFILL, [(seq, 0, len(golden.prompt))], LOGPROBS)
    found = list((output.logprobs or [None])[0] or ())
    for _ in range(7):
        n = len(seq.token_ids)
        output = rig.step(Phase.DECODE, [(seq, n - 1, n)], LOGPROBS)
        found += (output.logprobs or [None])[0] or ()
    assert found == pytest.approx(expected[:8], abs=2e-3)


@pytest.mark.parametrize("golden", GOLDENS, ids=TEXTS)
def test_one_at_a_time_in_chunks(rig: Rig, golden: Golden) -> None:
    (tokens,) = rig.generate([golden.prompt], NUM_TOKENS, chunk=7)
    assert tokens == golden.tokens


@pytest.mark.parametrize("chunk", [None, 32])
@pytest.mark.parametrize("start", range(0, len(GOLDENS), 8))
def test_eight_at_once(rig: Rig, start: int, chunk: int | None) -> None:
    group = GOLDENS[start : start + 8]
    found = rig.generate([golden.prompt for golden in group], NUM_TOKENS, chunk=chunk)
    for golden, tokens in zip(group, found, strict=True):
        assert tokens == golden.tokens, golden.text


@pytest.mark.parametrize("rope_type", ["default", "llama3"])
def test_a_hugging_face_folder(tmp_path: Path, rope_type: str) -> None:
    """A random untied Llama saved by transformers, scaled rope included: same tokens."""
    torch.manual_seed(3)
    rope: dict[str, object] = {"rope_type": rope_type, "rope_theta": 10_000.0}
    if rope_type == "llama3":
        rope |= {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    config = HFLlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters=rope,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path / "model")
    source = SafetensorsWeights(tmp_path / "model")
    arrays = {t.name: fused(source, t) for t in fused_layout(source.config)}
    cached = cached_weights(lambda: source, source.config, "ab" * 32, "float32", tmp_path / "cache")
    for weights in (weights_from_arrays(arrays, "float32"), map_weights(cached, "float32")):
        rig = Rig(LlamaRunner(source.config, weights, fingerprint="x"), 64, random.Random(2))
        rng = random.Random(4)
        prompts = [[rng.randrange(512) for _ in range(n)] for n in (3, 40, 100)]
        expected = [continue_greedily(model, prompt, 24) for prompt in prompts]
        assert rig.generate(prompts, 24, chunk=16) == expected
        rig.runner.shutdown()
