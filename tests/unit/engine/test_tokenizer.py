"""The tokenizer: digits split first, lossless round trips, streaming without re-decoding."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.engine import tokenizer as tokenizer_module
from pdcore.engine.gguf import GGUFFile
from pdcore.engine.load import find_embedded_model
from pdcore.engine.tokenizer import IncrementalDetokenizer, Tokenizer, byte_symbols
from pdcore.engine.weights import random_weights
from pdcore.errors import EngineError, InvalidRequest
from tests.unit.engine.files import (
    TINY,
    need_embedded_model,
    tokenizer_metadata,
    write_gguf,
    write_tiny_gguf,
)


def make(path: Path, *, pre: str = "smollm", **changes: object) -> Tokenizer:
    metadata = tokenizer_metadata(512, pre=pre) | changes
    return Tokenizer.from_gguf(GGUFFile(write_gguf(path, metadata, {})))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("tokenizer") / "m.gguf")


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    need_embedded_model()
    return Tokenizer.from_gguf(GGUFFile(find_embedded_model()))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


def check_digits_split_first(tokenizer: Tokenizer) -> None:
    """A space never merges with the digit after it, nor a digit with its neighbour."""
    assert pieces(tokenizer, "hello 12") == ["hello", " ", "1", "2"]


def test_digits_split_before_the_byte_level_split(tiny: Tokenizer) -> None:
    check_digits_split_first(tiny)
    assert pieces(tiny, "hello hello") == ["hello", " hello"]


def test_the_usual_conversion_fails_the_check(tmp_path: Path) -> None:
    """Mutant: byte-level alone, as other conversions of this model have it."""
    with pytest.raises(AssertionError):
        check_digits_split_first(make(tmp_path / "m.gguf", pre="gpt-2"))


def test_smollm2_ids(smollm2: Tokenizer) -> None:
    """Ids as llama.cpp gives them for this file."""
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == {2}
    assert pieces(smollm2, "list:\n 1") == ["list", ":", "\n ", "1"]
    assert pieces(smollm2, "a  1") == ["a", "  ", "1"]
    assert smollm2.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert smollm2.max_token_bytes == 81


@cache
def missing_bytes(tokenizer: Tokenizer) -> frozenset[int]:
    """Byte values without a symbol in the vocabulary."""
    vocab = tokenizer.backend.get_vocab(False)
    return frozenset(byte for symbol, byte in byte_symbols().items() if symbol not in vocab)


def test_bytes_that_the_vocabulary_lacks_are_dropped(smollm2: Tokenizer) -> None:
    missing = missing_bytes(smollm2)
    assert len(missing) == 21
    assert {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D} <= missing
    assert smollm2.decode(smollm2.encode("a\x04b")) == "ab"
    assert smollm2.encode("\x13") == []


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t 019"))


@given(TEXTS)
def test_round_trip(tiny: Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text


@given(TEXTS)
def test_round_trip_smollm2(smollm2: Tokenizer, text: str) -> None:
    kept = bytes(b for b in text.encode() if b not in missing_bytes(smollm2))
    assert smollm2.decode(smollm2.encode(text)) == kept.decode("utf-8", "replace")


@given(st.lists(st.integers(0, 300), max_size=40), st.data())
def test_streaming_equals_decoding_at_once(
    tiny: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    """Also with bytes that are no UTF-8, and against the tokenizers package's own decoder."""
    detokenizer = IncrementalDetokenizer(tiny)
    text, rest = "", list(ids)
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        text += detokenizer.push(rest[:n])
        rest = rest[n:]
    text += detokenizer.finish()
    assert text == tiny.decode(ids)
    assert text == tiny.backend.decode(ids, skip_special_tokens=True)


def test_incomplete_characters_are_held_back(tiny: Tokenizer) -> None:
    symbol = {byte: s for s, byte in byte_symbols().items()}
    ids = [tiny.backend.token_to_id(symbol[byte]) for byte in "é😀".encode()]
    detokenizer = IncrementalDetokenizer(tiny)
    assert [detokenizer.push([i]) for i in ids] == ["", "é", "", "", "", "😀"]
    assert detokenizer.finish() == ""
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(ids[:2]) == "é"


def test_special_tokens_are_ids_not_text(tiny: Tokenizer) -> None:
    ids = tiny.encode("<|im_start|>hello<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tiny.decode(ids) == "hello"
    assert tiny.decode([10**6, -1, *ids]) == "hello"


def test_a_detokenizer_looks_at_each_id_once(tiny: Tokenizer) -> None:
    """Cost per token must not grow with the text so far: nothing of it is kept."""
    detokenizer = IncrementalDetokenizer(tiny)
    (hello,) = tiny.encode("hello")
    for _ in range(1000):
        assert detokenizer.push([hello]) == "hello"
    assert not hasattr(detokenizer, "__dict__")
    assert detokenizer.finish() == ""


SPELLED = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", " 12", "\n"])


@given(st.lists(SPELLED | TEXTS, max_size=12).map("".join))
def test_a_long_text_gets_the_ids_of_a_short_one(smollm2: Tokenizer, text: str) -> None:
    """The batch call that frees the other threads: same ids, special tokens among them."""
    short = smollm2.backend.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "LONG_TEXT_CHARS", 0)
        assert smollm2.encode(text) == short


def test_a_text_above_the_threshold_has_the_same_ids(smollm2: Tokenizer) -> None:
    text = "<|im_start|>user\nlist:\n 1 é😀\x04<|im_end|>" * 100
    assert len(text) > tokenizer_module.LONG_TEXT_CHARS
    ids = smollm2.backend.encode(text, add_special_tokens=False).ids
    assert smollm2.encode(text) == ids
    assert ids.count(1) == ids.count(2) == 100


def check_others_run(encode: Callable[[str], object]) -> None:
    """While one thread encodes a long text, another one gets on."""
    text = "".join(random.Random(7).choices("abcdefghij", k=100_000))
    # A busy machine may keep a free thread waiting as well, but hardly three times; one that
    # waits for the interpreter waits for all of the encoding, every time.
    shares = [longest_wait(encode, text) for _ in range(3)]
    assert min(shares) < 0.5, f"everybody stood still for {shares} of the encoding"


def longest_wait(encode: Callable[[str], object], text: str) -> float:
    """The longest pause of this thread while another encodes, as a share of the encoding."""
    done, span = threading.Event(), [0.0, 0.0]

    def work() -> None:
        span[0] = time.perf_counter()
        encode(text)
        span[1] = time.perf_counter()
        done.set()

    thread = threading.Thread(target=work)
    looked = [time.perf_counter()]
    thread.start()
    while not done.wait(0.0005):
        looked.append(time.perf_counter())
    looked.append(time.perf_counter())
    thread.join()
    pause_s = max(b - a for a, b in itertools.pairwise(looked))
    return pause_s / (span[1] - span[0])


def test_a_long_text_keeps_no_other_thread_waiting(smollm2: Tokenizer) -> None:
    """A 1 MiB prompt held the interpreter for seconds: an event loop, heartbeats, all."""
    check_others_run(smollm2.encode)


def test_the_plain_call_fails_the_check(smollm2: Tokenizer) -> None:
    """Mutant: in a thread too, but with the interpreter held."""
    with pytest.raises(AssertionError, match="stood still"):
        check_others_run(lambda text: smollm2.backend.encode(text, add_special_tokens=False))


@given(st.lists(SPELLED | TEXTS, max_size=12).map("".join))
def test_no_id_stands_for_more_than_max_token_bytes(tiny: Tokenizer, text: str) -> None:
    assert len(text.encode()) <= len(tiny.encode(text)) * tiny.max_token_bytes
    assert tiny.max_token_bytes == len("<|endoftext|>")


def test_chat_template(tiny: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert tiny.render_chat(messages, add_generation_prompt=False) == text
    assert tiny.render_chat(messages) == text + "<|im_start|>assistant\n"


def test_smollm2_chat_has_its_default_system_prompt(smollm2: Tokenizer) -> None:
    text = smollm2.render_chat([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_what_templates_of_the_field_expect(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{% if not m.content %}{% continue %}"
    template += "{% endif %}{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}{{ x }}"
    tokenizer = make(tmp_path / "m.gguf", **{"tokenizer.chat_template": template})
    messages = [{"role": "user", "content": ""}, {"role": "user", "content": "<é>"}]
    expected = '<|im_start|>{"role": "user", "content": "<é>"}4!'
    assert tokenizer.render_chat(messages, x="!") == expected


def test_no_or_a_broken_template(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "m.gguf", **{"tokenizer.chat_template": 5})
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
        tokenizer.render_chat([])
    broken = make(tmp_path / "n.gguf", **{"tokenizer.chat_template": "{% if %}"})
    with pytest.raises(EngineError, match="chat template is broken"):
        broken.render_chat([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "qwen2"}, "'gpt2' with pre-tokenizer 'qwen2' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' with"),
        ({"tokenizer.ggml.token_type": [1]}, "tables do not fit"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tables do not fit"),
        ({"tokenizer.ggml.merges": ["nothing known"]}, "broken tokenizer"),
    ],
)
def test_a_tokenizer_that_is_not_known_exactly(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """A guess would be silent: wrong ids, plausible text."""
    with pytest.raises(EngineError, match=rf"m\.gguf.*{message}"):
        make(tmp_path / "m.gguf", **changes)


def test_export_and_reload(tiny: Tokenizer, tmp_path: Path) -> None:
    tiny.export(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    text = "hello 12 <|im_end|> é"
    assert again.encode(text) == tiny.encode(text)
    assert again.eos_token_ids == tiny.eos_token_ids
    assert again.special_texts == tiny.special_texts
    assert again.chat_template == tiny.chat_template
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 512


def test_folders_of_other_shapes(tiny: Tokenizer, tmp_path: Path) -> None:
    tiny.export(tmp_path)
    (tmp_path / "config.json").unlink()
    config = {
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": [
            {"name": "tools", "template": "no"},
            {"name": "default", "template": "{{ eos_token }}"},
        ],
    }
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.render_chat([]) == "<|im_end|>"
    path.write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert Tokenizer.from_folder(tmp_path).render_chat([]) == "from a file"
    path.unlink()
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read the tokenizer"),
        ('{"model": {"type": "Unigram"}}', "a Unigram tokenizer without ByteLevel"),
        ('{"model": {"type": "BPE"}, "decoder": {"type": "Metaspace"}}', "only byte-level BPE"),
        ('{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}', "broken tokenizer"),
    ],
)
def test_a_folder_that_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(EngineError, match=rf"tokenizer\.json: .*{message}"):
        Tokenizer.from_folder(tmp_path)


def test_the_tiny_model_has_room_for_its_tokenizer(tmp_path: Path) -> None:
    config = attrs.evolve(TINY)
    path = write_tiny_gguf(tmp_path / "m.gguf", config, random_weights(config, 1))
    assert Tokenizer.from_gguf(GGUFFile(path)).vocab_size == config.vocab_size
