"""Calls that block a thread in a real process, on virtual time.

A bootstrap client makes one HTTP exchange in the middle of ordinary code. Here that code is
run twice: the first time its exchange raises :class:`Wanted`, which names the request; the
request is made over the simulated wire, in the same process; then the code runs again and is
given the answer. It must make one exchange at most, and change nothing before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from pdcore.background import FailedCall
from pdcore.control.bootstrap_client import Answer, CallFailed, CallReply, Registrar
from pdcore.fsm.events import Event
from pdcore.server.client import HttpError, Origin, Timeout
from pdcore.sim.loop import SimLoop
from pdcore.sim.wire import WireClient

T = TypeVar("T")
#: What a worker's bootstrap client waits for an answer, in seconds.
TIMEOUT_S: Final = 5.0


class Wanted(BaseException):
    """The request that a call needs answered; never seen outside this module."""

    def __init__(
        self,
        method: str,
        where: tuple[str, int],
        target: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> None:
        super().__init__(target)
        self.method = method
        self.origin = Origin(*where)
        self.target = target
        self.body = body or b""
        self.headers = tuple(headers.items())


class ReplayedHttp:
    """The ``http`` of a :class:`~pdcore.control.bootstrap_client.BootstrapClient`."""

    def __init__(self, client: WireClient) -> None:
        self._client = client
        self._answer: Answer | CallFailed | None = None

    def __call__(
        self,
        method: str,
        where: tuple[str, int],
        target: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> Answer:
        answer, self._answer = self._answer, None
        if answer is None:
            raise Wanted(method, where, target, body, headers)
        if isinstance(answer, CallFailed):
            raise answer
        return answer

    async def run(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, after the time that its exchange takes."""
        try:
            return call()
        except Wanted as wanted:
            answer = await self._ask(wanted)
        self._answer = answer
        return call()

    async def _ask(self, wanted: Wanted) -> Answer | CallFailed:
        timeout = Timeout(connect_s=TIMEOUT_S, total_s=TIMEOUT_S)
        try:
            response = await self._client.request(
                wanted.method,
                wanted.origin,
                wanted.target,
                wanted.body,
                headers=wanted.headers,
                timeout=timeout,
            )
            body = await response.read()
        except HttpError as error:
            return CallFailed(str(error))
        etag = response.header(b"etag") or b""
        return Answer(response.status, body, etag.decode())


class SimBackground:
    """``BackgroundCalls`` of one worker: ``wake_loop`` makes its loop look at its inputs."""

    def __init__(self, loop: SimLoop, http: ReplayedHttp, wake_loop: Callable[[], None]) -> None:
        self._loop = loop
        self._http = http
        self._wake_loop = wake_loop
        self._events: list[Event] = []

    def run(self, call: Callable[[], Event], failed: FailedCall) -> None:
        """An error of the call itself is a bug of the world and ends it."""
        self._loop.create_task(self._answer(call))

    def compute(self, call: Callable[[], Event], failed: FailedCall) -> None:
        self.run(call, failed)

    async def _answer(self, call: Callable[[], Event]) -> None:
        event = await self._http.run(call)
        self._events.append(event)
        self._wake_loop()

    def wake(self) -> None:
        self._wake_loop()

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing to release."""


class Registering:
    """What the registration thread of a worker does (:mod:`pdcore.server.registration`)."""

    def __init__(
        self,
        registrar: Registrar,
        http: ReplayedHttp,
        register: Callable[[], CallReply],
        loop: SimLoop,
    ) -> None:
        self._registrar = registrar
        self._http = http
        self._register = register
        self._loop = loop

    async def call_if_due(self) -> None:
        if self._registrar.is_due(self._loop.time()):
            self._registrar.handle_started(self._loop.time())
            reply = await self._http.run(self._register)
            self._registrar.handle_reply(reply, self._loop.time())

    async def run(self) -> None:
        """For ever."""
        while True:
            due_s = self._registrar.poll_deadline()
            await asyncio.sleep(0.0 if due_s is None else max(0.0, due_s - self._loop.time()))
            await self.call_if_due()
