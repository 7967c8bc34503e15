"""Router and two leaders on sockets, with workers that answer by themselves: a new user's view.

The workers echo: the output of a prompt is the prompt in capitals, so that every answer can
be checked against its request.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from pdcore.clock import ManualClock
from pdcore.control.messages import (
    Abort,
    Aborted,
    Accepted,
    Finished,
    LeaderMessage,
    Submit,
    Tokens,
    WorkerMessage,
)
from pdcore.server.client import HttpClient, Origin
from pdcore.server.dispatcher import Dispatcher
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.server.router import create_router_app
from pdcore.server.serve import AppServer, bind, port_of
from pdcore.server.sse import EventSplitter
from pdcore.server.workers import WorkerRegistry
from pdcore.types import Role
from tests.unit.server.kit import PATIENCE_S, TEXT, FakeLink, ready


class EchoLink(FakeLink):
    """A worker that does what its role does, at once, in another turn of the loop."""

    def __init__(self, role: Role) -> None:
        super().__init__([0])
        self.role = role
        self.dispatcher: Dispatcher | None = None

    def send(self, rank: int, message: LeaderMessage) -> bool:
        if isinstance(message, Submit):
            self._later(Accepted(message.key))
            if self.role is Role.PREFILL:
                self._end(message, 0)
            else:
                self._decode(message)
        elif isinstance(message, Abort):
            self._later(Aborted(message.key, False))
        return super().send(rank, message)

    def _decode(self, message: Submit) -> None:
        text = bytes(np.frombuffer(message.prompt, "<i4").astype(np.uint8)).upper()
        ids = list(text[: message.sampling.max_tokens or 64])
        for token_id in ids:
            logprobs = [[-0.5]] if message.sampling.logprobs else None
            self._later(Tokens([message.key], [[token_id]], logprobs))
        self._end(message, len(ids))

    def _end(self, message: Submit, num_tokens: int) -> None:
        prompt_tokens = len(message.prompt) // 4
        self._later(Finished(message.key, "length", None, prompt_tokens, num_tokens, {}))

    def _later(self, message: WorkerMessage) -> None:
        assert self.dispatcher is not None
        asyncio.get_running_loop().call_soon(self.dispatcher.on_message, 0, message)


class Stack:
    async def start(self) -> None:
        self.clock = ManualClock()
        self.dispatchers = []
        self.servers = []
        addresses = []
        for role in (Role.PREFILL, Role.DECODE):
            link = EchoLink(role)
            dispatcher = Dispatcher(link, WorkerRegistry(1), clock=self.clock)
            link.dispatcher = dispatcher
            dispatcher.on_message(0, ready())
            listener = bind("127.0.0.1", 0)
            address = f"127.0.0.1:{port_of(listener)}"
            options = InstanceOptions(LegOptions(role, address))
            app = create_instance_app(options, TEXT, dispatcher, clock=self.clock)
            self.dispatchers.append(dispatcher)
            self.servers.append(AppServer(app, listener))
            addresses.append(address)
        router = create_router_app(
            addresses[:1], addresses[1:], clock=self.clock, rng=random.Random(3)
        )
        self.servers.append(AppServer(router, bind("127.0.0.1", 0)))
        for server in self.servers:
            await server.start()
        self.origin = Origin("127.0.0.1", self.servers[2].port)
        self.client = HttpClient()

    async def stop(self) -> None:
        await self.client.aclose()
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def post(self, path: str, body: object) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.client.request("POST", self.origin, path, data)
        headers = {name.decode(): value.decode() for name, value in response.headers}
        return response.status, headers, await response.read()

    async def get(self, path: str) -> bytes:
        return await (await self.client.request("GET", self.origin, path)).read()


Scene = Callable[[Stack], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.Runner, Stack]]:
    with asyncio.Runner() as runner:
        stack = Stack()
        runner.run(stack.start())
        yield runner, stack
        runner.run(stack.stop())


@pytest.fixture
def play(running: tuple[asyncio.Runner, Stack]) -> Callable[[Scene], None]:
    runner, stack = running

    async def bounded(scene: Scene) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene(stack)

    return lambda scene: runner.run(bounded(scene))


def events_of(body: bytes) -> list[Any]:
    splitter = EventSplitter()
    parts = splitter.feed(body).decode().split("\n\n")[:-1]
    assert splitter.rest == b""
    data = [part.removeprefix("data: ") for part in parts]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def test_every_endpoint_answers_blocking_and_streaming(play: Any) -> None:
    async def scene(stack: Stack) -> None:
        chat = {"messages": [{"role": "user", "content": "hey"}], "max_tokens": 3}
        status, _, body = await stack.post("/v1/chat/completions", chat)
        answer = json.loads(body)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "HEY")
        assert answer["usage"]["total_tokens"] == 7
        status, _, body = await stack.post("/v1/completions", {"prompt": "hello", "max_tokens": 4})
        assert json.loads(body)["choices"][0]["text"] == "HELL"
        status, _, body = await stack.post(
            "/generate",
            {
                "prompt": [104, 105],
                "return_token_ids": True,
                "logprobs": True,
                "bootstrap_room": 77,
            },
        )
        answer = json.loads(body)
        assert (answer["output"], answer["token_ids"]) == ("HI", [72, 73])
        assert (answer["bootstrap_room"], answer["logprobs"]) == (77, [-0.5, -0.5])
        options = {"stream": True, "stream_options": {"include_usage": True}}
        status, headers, body = await stack.post("/v1/chat/completions", {**chat, **options})
        events = events_of(body)
        assert headers["content-type"].startswith("text/event-stream")
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-2])
        assert text == "HEY"
        assert events[-2]["usage"]["completion_tokens"] == 3
        assert events[-1] == "[DONE]"

    play(scene)


def test_three_hundred_requests_at_once_each_get_their_own_answer(play: Any) -> None:
    async def scene(stack: Stack) -> None:
        async def one(i: int) -> None:
            body = {"prompt": f"request {i}", "stream": i % 3 == 0, "max_tokens": 64}
            status, _, data = await stack.post("/v1/completions", body)
            assert status == 200
            if i % 3 == 0:
                text = "".join(e["choices"][0]["text"] for e in events_of(data)[:-1])
            else:
                text = json.loads(data)["choices"][0]["text"]
            assert text == f"REQUEST {i}"

        await asyncio.gather(*(one(i) for i in range(300)))
        stats = json.loads(await stack.get("/stats"))
        assert (stats["in_flight"], stats["cancels"]) == (0, 0)
        assert [d.num_pending for d in stack.dispatchers] == [0, 0]

    play(scene)


def test_a_stop_string_ends_the_output_through_the_whole_stack(play: Any) -> None:
    async def scene(stack: Stack) -> None:
        body = {"prompt": "abcdef", "max_tokens": 64, "stop": "DE"}
        _, _, data = await stack.post("/v1/completions", body)
        answer = json.loads(data)
        assert answer["choices"][0]["text"] == "ABC"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 5

    play(scene)


CHAT = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
MALFORMED: list[tuple[str, object, int, str]] = [
    (TEXT_PATH, b"", 400, "body: is not valid JSON"),
    (TEXT_PATH, b"prompt=hi", 400, "body: is not valid JSON"),
    (TEXT_PATH, b'{"prompt": "hi",}', 400, "body: is not valid JSON"),
    (TEXT_PATH, [], 400, "body: expected object, got array"),
    (TEXT_PATH, {}, 400, "prompt: is required"),
    (TEXT_PATH, {"prompt": ""}, 400, "prompt: is empty"),
    (TEXT_PATH, {"prompt": 7}, 400, "prompt: expected str | array, got int"),
    (TEXT_PATH, {"prompt": ["a", "b"]}, 400, "prompt: holds 2 prompts"),
    (TEXT_PATH, {"prompt": [999]}, 400, "prompt: token id 999 is outside 0..255"),
    (TEXT_PATH, {"prompt": "x" * 97}, 413, "prompt has 97 tokens, more than the 96"),
    (TEXT_PATH, {"prompt": "hi", "model": "gpt-4"}, 404, "model: 'gpt-4' is not served here"),
    (TEXT_PATH, {"prompt": "hi", "max_tokens": 0}, 400, "max_tokens: expected int >= 1"),
    (TEXT_PATH, {"prompt": "hi", "max_tokens": 5000}, 400, "max_tokens: is 5000, but a prompt"),
    (TEXT_PATH, {"prompt": "hi", "temperature": -1}, 400, "temperature: expected float >= 0"),
    (TEXT_PATH, {"prompt": "hi", "temperature": "hot"}, 400, "temperature: expected float"),
    (TEXT_PATH, {"prompt": "hi", "top_p": 2}, 400, "top_p: expected float <= 1"),
    (TEXT_PATH, {"prompt": "hi", "n": 3}, 400, "n: is not supported"),
    (TEXT_PATH, {"prompt": "hi", "echo": True}, 400, "echo: is not supported"),
    (TEXT_PATH, {"prompt": "hi", "max_token": 9}, 400, "max_token: unknown field: did you mean"),
    (TEXT_PATH, {"prompt": "hi", "stop": [1]}, 400, "stop[0]: expected str, got int"),
    (TEXT_PATH, {"prompt": "hi", "logprobs": 5}, 400, "logprobs: is 5; only the chosen token's"),
    (TEXT_PATH, {"prompt": "hi", "timeout": -1}, 400, "timeout: expected seconds above 0"),
    (TEXT_PATH, {"prompt": "hi", "bootstrap_host": "evil"}, 400, "bootstrap_host: evil:*"),
    (CHAT, {}, 400, "messages: is required"),
    (CHAT, {"messages": []}, 400, "messages: must hold at least one message"),
    (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, 400, "messages[0].role: 'alien'"),
    (CHAT, {"messages": HI, "tools": [{}]}, 400, "tools: is not supported"),
    (
        CHAT,
        {"messages": HI, "response_format": {"type": "json_object"}},
        400,
        "response_format: is not supported",
    ),
    ("/v1/embeddings", {"input": "x"}, 404, "POST /v1/embeddings: no such endpoint"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), MALFORMED)
def test_a_malformed_request_gets_one_clear_message_and_the_cluster_goes_on(
    play: Any, path: str, body: object, status: int, says: str
) -> None:
    """D45: a request that the worker could choke on never gets there."""

    async def scene(stack: Stack) -> None:
        found, _, data = await stack.post(path, body)
        error = json.loads(data)["error"]
        assert found == status
        assert error["message"].startswith(says)
        assert "\n" not in error["message"]
        assert error["type"] in ("invalid_request_error", "not_found_error")
        good, _, data = await stack.post(TEXT_PATH, {"prompt": "ok"})
        assert (good, json.loads(data)["choices"][0]["text"]) == (200, "OK")

    play(scene)


def test_models_and_health_come_through_the_router(play: Any) -> None:
    async def scene(stack: Stack) -> None:
        assert json.loads(await stack.get("/v1/models"))["data"][0]["id"] == "tiny"
        assert json.loads(await stack.get("/health"))["status"] == "Up"
        assert b"pdcore_router_requests_total" in await stack.get("/metrics")

    play(scene)
