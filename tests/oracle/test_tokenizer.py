"""The exported tokenizer folder gives transformers the same ids and chat text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the oracle needs the extra `oracle`")

from transformers import PreTrainedTokenizerFast

from pdcore.engine.gguf import GGUFFile
from pdcore.engine.load import find_embedded_model
from pdcore.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.oracle

ALPHABET = "ab Z09\n\t.,:;<|>_-é漢😀" + "0123456789"


def test_export_is_the_same_tokenizer(tmp_path: Path) -> None:
    ours = Tokenizer.from_gguf(GGUFFile(find_embedded_model()))
    ours.export(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rng = random.Random(5)
    for _ in range(500):
        text = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(40)))
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids), text
    messages = [
        {"role": "user", "content": "Hello 1 2 3"},
        {"role": "assistant", "content": "Hi!\n 4"},
        {"role": "user", "content": "Bye"},
    ]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == ours.render_chat(messages)
    assert Tokenizer.from_folder(tmp_path).render_chat(messages) == ours.render_chat(messages)
