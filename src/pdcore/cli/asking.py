"""Ask a cluster over HTTP and take the time: what ``pdcore demo`` shows."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

import attrs
import msgspec

from pdcore.errors import PdcoreError
from pdcore.server.client import HttpClient, Origin
from pdcore.server.exchange import Timeout
from pdcore.server.sse import EventSplitter

#: The first answer of a cold model on a busy machine may take this long.
ANSWER_TIMEOUT_S: Final = 300.0


class NoAnswer(PdcoreError):
    """The cluster refused or failed; the message is its own."""


@attrs.frozen
class Answered:
    """One request's end. ``timeline`` holds seconds as decode and prefill measured them."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    total_s: float
    timeline: Mapping[str, float]


class _Event(msgspec.Struct):
    """What is read of an event of /generate; other fields are not looked at."""

    output: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    timeline: dict[str, float] = {}
    error: dict[str, object] | None = None


_DECODER: Final = msgspec.json.Decoder(_Event)


async def ask(
    client: HttpClient,
    origin: Origin,
    prompt: Sequence[int],
    max_tokens: int,
    on_text: Callable[[str], None],
) -> Answered:
    """Stream one greedy answer from POST /generate. Raises NoAnswer or HttpError."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    start_s = time.monotonic()
    first_s = 0.0
    texts: list[str] = []
    async for event in _events(client, origin, msgspec.json.encode(body)):
        if event.error is not None:
            raise NoAnswer(str(event.error.get("message", event.error)))
        if event.output:
            first_s = first_s or time.monotonic() - start_s
            texts.append(event.output)
            on_text(event.output)
        if event.finish_reason is not None:
            return Answered(
                "".join(texts),
                event.prompt_tokens,
                event.completion_tokens,
                first_s,
                time.monotonic() - start_s,
                event.timeline,
            )
    raise NoAnswer("the stream ended without an outcome")


async def _events(client: HttpClient, origin: Origin, body: bytes) -> AsyncIterator[_Event]:
    timeout = Timeout(total_s=ANSWER_TIMEOUT_S)
    headers = [("content-type", "application/json")]
    response = await client.request(
        "POST", origin, "/generate", body, headers=headers, timeout=timeout
    )
    if response.status != 200:
        refused = await response.read()
        raise NoAnswer(_message(response.status, refused))
    splitter = EventSplitter()
    while chunk := await response.next_chunk():
        for line in splitter.feed(chunk).splitlines():
            data = line.removeprefix(b"data: ")
            if data != line and data != b"[DONE]":
                yield _DECODER.decode(data)


def _message(status: int, body: bytes) -> str:
    try:
        error = _DECODER.decode(body).error or {}
    except msgspec.DecodeError:
        error = {}
    return f"HTTP {status}: {error.get('message', body[:200].decode('utf-8', 'replace'))}"


@attrs.frozen
class Stages:
    """Where the time of one request went, in seconds. Stages of the two legs overlap."""

    queue_s: float
    prefill_s: float
    handshake_s: float
    transfer_s: float
    decode_s: float
    kv_bytes: int

    @property
    def rate(self) -> float:
        """Bytes per second of the transfer, 0 where it was too short to tell."""
        return self.kv_bytes / self.transfer_s if self.transfer_s > 0 else 0.0


def stages(answered: Answered, token_bytes: int) -> Stages:
    """From decode's timeline, with prefill's own durations in it (``prefill_*``).

    Queue, prefill and transfer are prefill's: until the first forward pass, the passes, and
    the writes from the first post to the last completion. Handshake is decode's, from its
    handshake to its grant; decode from KV and metadata received to the last token.
    """
    line = answered.timeline
    granted_s, received_s = line.get("granted", 0.0), line.get("received", 0.0)
    return Stages(
        queue_s=line.get("prefill_queue", 0.0),
        prefill_s=line.get("prefill_prefill", 0.0),
        handshake_s=max(0.0, granted_s - line.get("admitted", granted_s)),
        transfer_s=line.get("prefill_transfer", 0.0),
        decode_s=max(0.0, line.get("finished", received_s) - received_s),
        kv_bytes=answered.prompt_tokens * token_bytes,
    )
