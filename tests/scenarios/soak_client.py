"""A load of simulated requests against a router, each answer checked against the model."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any, NamedTuple

from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.server.client import HttpClient, HttpError, Origin, Response, Timeout

MODEL = SimulatedConfig(block_size=16)
#: Beyond a request's own time: legs have grace, and a busy machine is slow.
GRACE_S = 15.0


class Outcome(NamedTuple):
    """How one request ended: "ok"; the code of an error that says why; "lost" for a
    connection that closed without an answer; "wrong" for anything that must never be."""

    kind: str
    detail: str
    seconds: float

    @property
    def problem(self) -> str:
        return "ok" if self.kind == "ok" else f"{self.kind}: {self.detail}"


async def ask(
    client: HttpClient,
    origin: Origin,
    rng: random.Random,
    *,
    timeout_s: float = 120.0,
    is_stream: bool = False,
) -> Outcome:
    """One request of random length. Every token that arrives is checked, also those before
    an error; an answer that takes longer than its own time and a grace is "wrong"."""
    prompt = [rng.randrange(3, 1000) for _ in range(rng.choice((1, 5, 17, 64, 300)))]
    num_tokens = rng.choice((1, 2, 8, 24))
    fields = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "return_token_ids": True,
        "ignore_eos": True,
        "timeout": timeout_s,
        "stream": is_stream,
    }
    start_s = time.monotonic()
    try:
        response = await client.request(
            "POST",
            origin,
            "/generate",
            json.dumps(fields).encode(),
            headers=[("content-type", "application/json")],
            timeout=Timeout(5.0, None, timeout_s + GRACE_S),
        )
        answer = await _read(response)
    except HttpError as error:
        seconds = time.monotonic() - start_s
        kind = "wrong" if seconds > timeout_s + GRACE_S else "lost"
        return Outcome(kind, f"{type(error).__name__}: {error}", seconds)
    wanted = simulated_tokens(MODEL, prompt, num_tokens)
    kind, detail = _judge(response.status, answer, wanted)
    return Outcome(kind, detail, time.monotonic() - start_s)


async def _read(response: Response) -> dict[str, Any]:
    """The blocking answer, or a stream's events as if they had been one."""
    body = await response.read()
    if not (response.header(b"content-type") or b"").startswith(b"text/event-stream"):
        whole: dict[str, Any] = json.loads(body)
        return whole
    answer: dict[str, Any] = {"token_ids": [], "is_complete": False}
    for line in body.decode().splitlines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            answer["is_complete"] = True
        elif data:
            event = json.loads(data)
            answer["token_ids"] += event.pop("token_ids", [])
            answer |= event
    return answer


def _judge(status: int, answer: dict[str, Any], wanted: list[int]) -> tuple[str, str]:
    got = answer.get("token_ids", [])
    if got != wanted[: len(got)]:
        return "wrong", f"tokens {got} instead of {wanted}"
    if "error" in answer:
        error = answer["error"]
        is_precise = error["message"] and error["code"] and not answer.get("is_complete")
        return (error["code"] if is_precise else "wrong"), f"{status} {error['message']}"
    if status != 200 or not answer.get("is_complete", True):
        return "wrong", f"{status} without an end or a reason: {answer}"
    if got != wanted or answer["completion_tokens"] != len(wanted):
        return "wrong", f"only {len(got)} of {len(wanted)} tokens, and no error"
    return "ok", ""


async def load(origin: Origin, num_requests: int, concurrency: int, seed: int) -> Counter[str]:
    """Outcomes of ``num_requests`` requests of mixed length, ``concurrency`` at once."""
    client = HttpClient()
    rng = random.Random(seed)
    left = iter(range(num_requests))
    outcomes: Counter[str] = Counter()

    async def lane() -> None:
        for _ in left:
            outcomes[(await ask(client, origin, rng)).problem] += 1

    await asyncio.gather(*(lane() for _ in range(concurrency)))
    await client.aclose()
    return outcomes
