"""What the server tests share: manual timers, a link that records, a byte tokenizer, ASGI calls."""

from __future__ import annotations

import asyncio
import codecs
import heapq
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pdcore.clock import ManualClock
from pdcore.control.messages import (
    Accepted,
    Finished,
    LeaderMessage,
    Tokens,
    WorkerHealth,
    WorkerReady,
)
from pdcore.errors import InvalidRequest
from pdcore.server.dispatcher import Dispatcher, DispatcherLimits
from pdcore.server.text import TextModel
from pdcore.server.workers import WorkerRegistry
from pdcore.types import Failure, GenerateRequest, Incarnation, RoomKey, SamplingParams

T = TypeVar("T")

#: Far longer than anything here takes; a test that hangs fails instead of blocking the run.
PATIENCE_S = 20.0


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await coroutine

    return asyncio.run(bounded())


async def settle(turns: int = 50) -> None:
    """Let everything that can run now run: no time passes."""
    for _ in range(turns):
        await asyncio.sleep(0)


class _Handle(asyncio.TimerHandle):
    """A timer handle that no loop knows."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.run_now = callback
        self.dead = False

    def cancel(self) -> None:
        self.dead = True


class ManualTimers:
    """Timers that fire when the clock is told to move."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, _Handle]] = []
        self._count = 0

    def call_later(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle:
        handle = _Handle(callback)
        self._count += 1
        heapq.heappush(self._heap, (self.clock.monotonic() + delay, self._count, handle))
        return handle

    def advance(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        while self._heap and self._heap[0][0] <= end:
            due, _, handle = heapq.heappop(self._heap)
            self.clock.advance(max(0.0, due - self.clock.monotonic()))
            if not handle.dead:
                handle.run_now()
        self.clock.advance(end - self.clock.monotonic())

    def armed(self) -> int:
        return sum(not handle.dead for _, _, handle in self._heap)


class FakeLink:
    """Takes what is sent to connected ranks and refuses the rest, like the real one."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.connected = set(ranks)
        self.sent: list[tuple[int, LeaderMessage]] = []

    def send(self, rank: int, message: LeaderMessage) -> bool:
        if rank not in self.connected:
            return False
        self.sent.append((rank, message))
        return True

    def of(self, kind: type[T]) -> list[T]:
        return [message for _, message in self.sent if isinstance(message, kind)]


class ByteTokenizer:
    """One token per UTF-8 byte; a chat is its contents, one line each."""

    #: More than it needs to be, so that a text slightly too long is encoded all the same.
    max_token_bytes = 4

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        if kwargs.get("refuse"):
            raise InvalidRequest("messages", "the template refuses")
        return "".join(f"{one['content']}\n" for one in messages)


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(i for i in ids if i < 256))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


TEXT = TextModel("tiny", ByteTokenizer(), ByteDetokenizer)
INCARNATION = Incarnation(b"\x01" * 16)


def ready(rank: int = 0, dp_rank: int = 0, incarnation: bytes = INCARNATION) -> WorkerReady:
    return WorkerReady(
        rank=rank,
        dp_rank=dp_rank,
        incarnation=Incarnation(incarnation),
        control_address="tcp://127.0.0.1:1",
        max_model_len=128,
        max_prefill_tokens=96,
        vocab_size=256,
        num_blocks=16,
        transport="loopback",
    )


class World:
    """A dispatcher with ready workers, a recording link and manual time."""

    def __init__(
        self, num_workers: int = 1, dp_size: int = 1, limits: DispatcherLimits | None = None
    ) -> None:
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.link = FakeLink(range(num_workers))
        self.workers = WorkerRegistry(num_workers, dp_size)
        self.dispatcher = Dispatcher(
            self.link, self.workers, clock=self.clock, timers=self.timers, limits=limits
        )
        for rank in range(num_workers):
            self.dispatcher.on_message(rank, ready(rank, rank // (num_workers // dp_size)))

    def request(self, room: int = 5, attempt: int = 7, **changes: Any) -> GenerateRequest:
        values: dict[str, Any] = {
            "key": RoomKey(room, attempt),
            "request_id": f"r{attempt}",
            "prompt_token_ids": (1, 2, 3),
            "sampling": SamplingParams(max_tokens=4),
            "expires_at_s": self.clock.unix() + 60,
            "remaining_s": 60.0,
        }
        values.update(changes)
        return GenerateRequest(**values)

    def accept(self, key: RoomKey, rank: int = 0) -> None:
        self.dispatcher.on_message(rank, Accepted(key))

    def tokens(
        self, key: RoomKey, ids: list[int], rank: int = 0, logprobs: list[float] | None = None
    ) -> None:
        probs = None if logprobs is None else [logprobs]
        self.dispatcher.on_message(rank, Tokens([key], [ids], probs))

    def finish(
        self, key: RoomKey, reason: str = "stop", why: Failure | None = None, rank: int = 0
    ) -> None:
        message = Finished(key, reason, why, 3, 2, {"queue": 0.5})
        self.dispatcher.on_message(rank, message)

    def health(self, *problems: str, rank: int = 0) -> None:
        self.dispatcher.on_message(rank, WorkerHealth(rank, list(problems), {"steps": 1.0}))


# --- ASGI ------------------------------------------------------------------------------


class Reply:
    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Data of every complete event; [DONE] stays a string."""
        found = []
        for part in self.body.decode().split("\n\n")[:-1]:
            data = part.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        return found


App = Callable[[Any, Any, Any], Awaitable[None]]


class Call:
    """One request against an ASGI app, in steps: the client may leave at any of them."""

    def __init__(
        self, app: App, method: str, path: str, body: object = None, headers: Any = ()
    ) -> None:
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        self.reply = Reply()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": data, "more_body": False})
        self._news = asyncio.Event()
        #: Set while the client reads; clear it to let ``send`` block.
        self.reads = asyncio.Event()
        self.reads.set()
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-length", b"%d" % len(data)), *headers],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.reply.body += message.get("body", b"")
            self.reply.is_complete = not message.get("more_body", False)
        self._news.set()

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def until(self, condition: Callable[[Reply], bool]) -> Reply:
        while not condition(self.reply):
            self._news.clear()
            await self._news.wait()
        return self.reply

    async def done(self) -> Reply:
        await self.task
        return self.reply


async def call(app: App, method: str, path: str, body: object = None, headers: Any = ()) -> Reply:
    return await Call(app, method, path, body, headers).done()
