"""The whole way against transformers: router, prefill process, decode process, KV over shared
memory and over sockets.

The goldens are greedy tokens that transformers made from the same dequantised float32
weights. Prompts go in as token ids and come back through HTTP; prefill works in chunks
of 16 tokens and sends while it computes, and pools that many requests have passed through
hand out their blocks in no particular order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcore.server.client import HttpClient, Origin
from tests.scenarios.processes import Program

pytestmark = pytest.mark.oracle

GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text("utf-8"))["prompts"]
NUM_TOKENS = 64
#: Prompts of one test: few enough that it ends within the session's limit for a test.
GROUP = 4


@pytest.fixture(scope="module")
def origin(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Origin]:
    settings = tmp_path_factory.mktemp("cluster") / "both.yaml"
    settings.write_text("scheduler_config:\n  prefill_chunk_tokens: 16\n  num_blocks: 600\n")
    how = ("--transport", request.param)
    program = Program("up", "--port", "0", "--yaml-file-path", str(settings), *how)
    ready = program.wait_for(r"ready: http://([\d.]+):(\d+)", timeout_s=110)
    yield Origin(ready[1], int(ready[2]))
    assert program.stop() == 0
    program.close()


async def complete(client: HttpClient, origin: Origin, golden: dict, num_tokens: int) -> None:
    body = {
        "prompt": golden["prompt"],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "timeout": 100,
    }
    headers = [("content-type", "application/json")]
    response = await client.request(
        "POST", origin, "/v1/completions", json.dumps(body).encode(), headers=headers
    )
    answer = json.loads(await response.read())
    assert response.status == 200, answer
    assert answer["choices"][0]["token_ids"] == golden["tokens"][:num_tokens], golden["text"]
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert answer["usage"]["prompt_tokens"] == len(golden["prompt"])


async def run(
    origin: Origin, goldens: list[dict], at_once: int, num_tokens: int = NUM_TOKENS
) -> None:
    client = HttpClient()
    for start in range(0, len(goldens), at_once):
        group = goldens[start : start + at_once]
        await asyncio.gather(*(complete(client, origin, golden, num_tokens) for golden in group))
    await client.aclose()


def test_enough_goldens() -> None:
    assert len(GOLDENS) >= 20
    assert all(len(golden["tokens"]) >= NUM_TOKENS for golden in GOLDENS)


@pytest.mark.parametrize("origin", ["shm", "socket"], indirect=True, scope="module")
@pytest.mark.parametrize("start", range(0, len(GOLDENS), 8))
def test_eight_at_once_equal_transformers(origin: Origin, start: int) -> None:
    asyncio.run(run(origin, GOLDENS[start : start + 8], at_once=8))


@pytest.mark.parametrize("origin", ["shm"], indirect=True, scope="module")
@pytest.mark.parametrize("start", range(0, len(GOLDENS), GROUP))
def test_one_at_a_time_equal_transformers(origin: Origin, start: int) -> None:
    asyncio.run(run(origin, GOLDENS[start : start + GROUP], at_once=1))
