"""A load of simulated requests against a router, each answer checked against the model."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.server.client import HttpClient, Origin

MODEL = SimulatedConfig(block_size=16)


async def _one(client: HttpClient, origin: Origin, rng: random.Random) -> str:
    """'ok', or what was wrong with the answer."""
    prompt = [rng.randrange(3, 1000) for _ in range(rng.choice((1, 5, 17, 64, 300)))]
    num_tokens = rng.choice((1, 2, 8, 24))
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "return_token_ids": True,
            "ignore_eos": True,
            "timeout": 120,
        }
    ).encode()
    response = await client.request(
        "POST", origin, "/generate", body, headers=[("content-type", "application/json")]
    )
    answer = json.loads(await response.read())
    if response.status != 200:
        return f"{response.status}: {answer}"
    wanted = simulated_tokens(MODEL, prompt, num_tokens)
    if answer["token_ids"] != wanted or answer["completion_tokens"] != num_tokens:
        return f"wrong tokens for a prompt of {len(prompt)}"
    return "ok"


async def load(origin: Origin, num_requests: int, concurrency: int, seed: int) -> Counter[str]:
    """Outcomes of ``num_requests`` requests of mixed length, ``concurrency`` at once."""
    client = HttpClient()
    rng = random.Random(seed)
    left = iter(range(num_requests))
    outcomes: Counter[str] = Counter()

    async def lane() -> None:
        for _ in left:
            outcomes[await _one(client, origin, rng)] += 1

    await asyncio.gather(*(lane() for _ in range(concurrency)))
    await client.aclose()
    return outcomes
