"""Stages of a request, and what a refusal sounds like."""

from __future__ import annotations

import asyncio

import pytest

from pdcore.cli.asking import Answered, NoAnswer, ask, stages
from pdcore.server.client import HttpClient, Origin

TIMELINE = {
    "admitted": 0.001,
    "granted": 0.004,
    "prefill_queue": 0.002,
    "prefill_prefill": 0.5,
    "prefill_transfer": 0.01,
    "received": 0.52,
    "finished": 1.02,
}


def test_stages() -> None:
    found = stages(Answered("x", 100, 5, 0.6, 1.1, TIMELINE), token_bytes=46_080)
    assert found.queue_s == 0.002
    assert found.prefill_s == 0.5
    assert found.handshake_s == pytest.approx(0.003)
    assert found.transfer_s == 0.01
    assert found.decode_s == pytest.approx(0.5)
    assert found.kv_bytes == 4_608_000
    assert found.rate == pytest.approx(460_800_000)


def test_a_timeline_that_lacks_points_is_zeros() -> None:
    found = stages(Answered("x", 1, 1, 0.0, 0.0, {}), token_bytes=1)
    assert (found.queue_s, found.decode_s, found.rate) == (0.0, 0.0, 0.0)


async def serve_once(answer: bytes) -> str:
    """Ask a server that sends ``answer`` to whatever it is asked; returns the text."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient()
    pieces: list[str] = []
    try:
        async with asyncio.timeout(30):
            answered = await ask(client, Origin("127.0.0.1", port), [1], 4, pieces.append)
            assert answered.text == "".join(pieces)
            assert answered.completion_tokens == 2
            return answered.text
    finally:
        await client.aclose()
        server.close()
        await server.wait_closed()


def response(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def test_a_stream_is_put_together() -> None:
    events = (
        b'data: {"output": "Hel"}\n\ndata: {"output": "lo"}\n\n'
        b'data: {"output": "", "finish_reason": "stop", "completion_tokens": 2}\n\n'
        b"data: [DONE]\n\n"
    )
    assert asyncio.run(serve_once(response("200 OK", events))) == "Hello"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (response("503 X", b'{"error": {"message": "no decode"}}'), "HTTP 503: no decode"),
        (response("500 X", b"oops"), "HTTP 500: oops"),
        (response("200 OK", b'data: {"error": {"message": "lost"}}\n\n'), "lost"),
        (response("200 OK", b'data: {"output": "x"}\n\n'), "without an outcome"),
    ],
)
def test_a_failure_is_the_cluster_s_own_message(answer: bytes, words: str) -> None:
    with pytest.raises(NoAnswer, match=words):
        asyncio.run(serve_once(answer))
