"""Instances of several ranks, the whole way, against transformers.

Prefill in three tensor parallel processes, decode in one: KV of one head a rank becomes KV of
three heads, and the other way round. All of it with checksums: decode answers only with KV whose
every byte is what a prefill rank computed, and the answer is what one rank would say. Between one
rank's KV and that of several lies rounding (:mod:`tests.scenarios.test_tensor_parallel`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from pdcore.server.client import Origin
from tests.oracle.reference import continue_greedily
from tests.oracle.test_cluster import GOLDENS, run
from tests.scenarios.processes import Program

pytestmark = pytest.mark.oracle

#: Enough blocks of KV to be wrong in; ranks of a group share two cores in many places.
NUM_TOKENS = 20


def serve(*flags: str, goldens: list[dict]) -> None:
    program = Program("up", "--port", "0", "--integrity", "crc32", *flags)
    try:
        ready = program.wait_for(r"ready: http://([\d.]+):(\d+)", timeout_s=110)
        asyncio.run(run(Origin(ready[1], int(ready[2])), goldens, 4, NUM_TOKENS))
        assert program.stop() == 0
    finally:
        program.close()


def test_three_prefill_ranks_feed_one_decode_rank() -> None:
    """Issue: SmolLM2 prefill TP3 to decode TP1 says what transformers says."""
    serve("--prefill-tp", "3", goldens=GOLDENS[:4])


def test_one_prefill_rank_feeds_three_decode_ranks() -> None:
    serve("--decode-tp", "3", goldens=GOLDENS[4:6])


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Eight heads, four KV heads, drawn wide enough that a wrong KV block changes the tokens;
    and what transformers says after some prompts of token ids."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    folder = tmp_path_factory.mktemp("random") / "model"
    model.save_pretrained(folder)
    words = [*sorted(ByteLevel.alphabet()), *(f"w{number}" for number in range(256))]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(), ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    goldens = []
    for number in range(4):
        prompt = [int(t) for t in torch.randint(0, 512, (20 + 11 * number,))]
        tokens = continue_greedily(model, prompt, NUM_TOKENS)
        goldens.append({"prompt": prompt, "tokens": tokens, "text": f"prompt {number}"})
    return folder, goldens


@pytest.mark.parametrize(
    "sizes",
    [
        ("--prefill-tp", "4", "--decode-tp", "2", "--decode-dp", "2"),
        ("--prefill-tp", "2", "--decode-tp", "4"),
        ("--prefill-tp", "2", "--prefill-dp", "2", "--decode-dp", "2"),
    ],
)
def test_other_sizes_on_each_side(
    random_model: tuple[Path, list[dict]], sizes: tuple[str, ...]
) -> None:
    folder, goldens = random_model
    serve("--model", str(folder), *sizes, goldens=goldens)
