"""Whole clusters whose KV moves over sockets."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator

import pytest

from pdcore.server.client import HttpClient, Origin
from tests.scenarios.processes import Program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket is Linux")


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    """Router, prefill and decode as processes; the simulated engine proves every KV block."""
    secret = tmp_path_factory.mktemp("cluster") / "secret"
    secret.write_text("a secret of enough bytes\n")
    where = ("--transport", "socket", "--transport-secret-file", str(secret))
    program = Program("up", "--port", "0", "--simulated", *where)
    try:
        ready = program.wait_for(r"ready: http://([\d.]+):(\d+)")
        yield Origin(ready[1], int(ready[2]))
        assert program.stop() == 0
    finally:
        program.close()


async def complete(client: HttpClient, origin: Origin, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 6, "return_token_ids": True, "timeout": 50}
    headers = [("content-type", "application/json")]
    response = await client.request(
        "POST", origin, "/v1/completions", json.dumps(body).encode(), headers=headers
    )
    answer = json.loads(await response.read())
    assert response.status == 200, answer
    tokens = answer["choices"][0]["token_ids"]
    assert len(tokens) == 6
    return [int(token) for token in tokens]


async def ask(origin: Origin) -> None:
    client = HttpClient()
    prompts = [[7 * i + j for j in range(20 + 40 * i)] for i in range(1, 9)]
    first = await asyncio.gather(*(complete(client, origin, prompt) for prompt in prompts))
    again = await asyncio.gather(*(complete(client, origin, prompt) for prompt in prompts))
    assert first == again
    await client.aclose()


def test_a_cluster_serves_over_sockets_with_a_secret(origin: Origin) -> None:
    """R76: the transport is chosen by name, and nothing else changes."""
    asyncio.run(ask(origin))
