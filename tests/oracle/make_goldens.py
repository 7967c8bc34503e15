"""Write goldens.json: greedy tokens of transformers for prompts of every kind.

With the extras ``model`` and ``oracle`` and the weights installed, from the repository's
root: ``python -m tests.oracle.make_goldens``. Takes a few minutes of CPU. The generated
tokens come from transformers, never from pdcore.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path

import torch

from pdcore.engine.gguf import GGUFFile
from pdcore.engine.load import EMBEDDED_SHA256, find_embedded_model
from pdcore.engine.tokenizer import Tokenizer
from tests.oracle.reference import build_reference, continue_greedily, teacher_forced

GOLDENS = Path(__file__).with_name("goldens.json")
NUM_TOKENS = 64

CHATS = [
    "What is the capital of France? Answer in one sentence.",
    "Explain why the sky is blue to a child of ten.",
    "Write a Python function that reverses a list without using slices.",
    "Give me three tips for learning a new language.",
    "Translate to German: The cat sleeps on the warm roof.",
    "What is 17 + 25? Think step by step.",
    "Write a short poem about the sea in autumn.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
]

TEXTS = [
    "Once upon a time, in a village between two mountains, there lived",
    "The three most important properties of a good database are",
    "def fibonacci(n):\n    ",
    "List of prime numbers:\n 1. 2\n 2. 3\n 3. ",
    '{"name": "Ada", "born": 1815, "languages": [',
    "Grüße aus München! Der Bahnhof ist",
    "日本の首都は",
    "E = mc² means that energy",
    "   leading spaces and\ttabs\n\n\nand blank lines",
    "SELECT name, COUNT(*) FROM users WHERE",
    "A",
    "😀 Emoji are small pictures that",
    "In 1969, Neil Armstrong became the first person to",
    "The quick brown fox jumps over the lazy dog. " * 12 + "The moral of this story is",
    "Water boils at 100 degrees Celsius at sea level. " * 25 + "At the top of a mountain",
    "import numpy as np\n\nx = np.arange(10)\nprint(",
]


def prompts(tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """(kind and text, token ids) of every golden prompt."""
    made = [(f"text: {text}", tokenizer.encode(text)) for text in TEXTS]
    for text in CHATS:
        messages = [{"role": "user", "content": text}]
        made += [(f"chat: {text}", tokenizer.encode(tokenizer.render_chat(messages)))]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=GOLDENS)
    args = parser.parse_args()
    path = find_embedded_model()
    model = build_reference(path)
    rows = []
    for text, ids in prompts(Tokenizer.from_gguf(GGUFFile(path))):
        tokens = continue_greedily(model, ids, NUM_TOKENS)
        forced, _, margin = teacher_forced(model, ids, tokens)
        if forced != tokens:
            raise SystemExit(f"transformers disagrees with itself on {text[:40]!r}")
        print(f"{len(ids):4d} tokens, margin {margin:.4f}: {text[:50]!r}", flush=True)
        row = {"text": text, "margin": round(margin, 4), "prompt": ids, "tokens": tokens}
        rows.append(json.dumps(row, ensure_ascii=False))
    made_with = {
        "transformers": importlib.metadata.version("transformers"),
        "torch": torch.__version__,
        "dtype": "float32",
    }
    args.output.write_text(
        f'{{"gguf_sha256": "{EMBEDDED_SHA256}",\n"made_with": {json.dumps(made_with)},\n'
        + '"prompts": [\n'
        + ",\n".join(rows)
        + "\n]}\n",
        "utf-8",
    )


if __name__ == "__main__":
    main()
