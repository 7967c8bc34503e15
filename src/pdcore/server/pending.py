"""One dispatched request as its HTTP handler awaits it: admission, tokens, one end.

Results are handed over inside the event loop by plain method calls, never through a thread
pool: forty requests that wait must not delay one that is finished (D43).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdcore.errors import PdcoreError
from pdcore.types import Failure, GenerateRequest, RoomKey


class Refused(PdcoreError):
    """A request that was not dispatched; ``failure`` is what the client hears, ``param`` the
    field at fault, if one is."""

    def __init__(self, why: Failure, param: str | None = None) -> None:
        super().__init__(why.detail)
        self.failure = why
        self.param = param


class Ended(NamedTuple):
    """The terminal result. ``failure`` is None exactly for finish reasons stop and length."""

    reason: str
    failure: Failure | None
    prompt_tokens: int
    completion_tokens: int
    timeline: Mapping[str, float]


class NewTokens(NamedTuple):
    """Every token that arrived since the last call, at least one. ``logprobs`` is aligned
    or empty."""

    token_ids: list[int]
    logprobs: list[float | None]


class Pending:
    """Fed by the dispatcher, read by one handler. The buffer holds at most the request's
    own output, which the context length bounds."""

    __slots__ = (
        "_accepted",
        "_ended",
        "_logprobs",
        "_tokens",
        "_waiter",
        "num_tokens",
        "request",
        "submitted_s",
        "timer",
        "to_rank",
    )

    def __init__(self, request: GenerateRequest, to_rank: int, submitted_s: float) -> None:
        self.request = request
        self.to_rank = to_rank
        self.submitted_s = submitted_s
        self.timer: asyncio.TimerHandle | None = None
        #: Tokens received so far, read or not.
        self.num_tokens = 0
        self._accepted = False
        self._ended: Ended | None = None
        self._tokens: list[int] = []
        self._logprobs: list[float | None] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def key(self) -> RoomKey:
        return self.request.key

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    @property
    def progress(self) -> str:
        """What its worker has done for it, to follow "which"."""
        if self.num_tokens:
            return f"has sent {self.num_tokens} tokens"
        return "has accepted it" if self._accepted else "has not answered"

    # --- the dispatcher's side -----------------------------------------------------------

    def accept(self) -> None:
        self._accepted = True
        self._wake()

    def add_tokens(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None) -> None:
        self._accepted = True
        self._tokens.extend(token_ids)
        self._logprobs.extend(logprobs or ())
        self.num_tokens += len(token_ids)
        self._wake()

    def end(self, ended: Ended) -> None:
        """The first end counts; later ones change nothing."""
        if self._ended is None:
            self._ended = ended
            self._wake()

    # --- the handler's side --------------------------------------------------------------

    async def admitted(self) -> Ended | None:
        """Wait until a worker took the request. None: accepted; else how it ended."""
        while not self._accepted and self._ended is None:
            await self._wait()
        return None if self._accepted else self._ended

    async def next(self) -> NewTokens | Ended:
        """Wait for tokens or the end; all tokens come before the end."""
        while True:
            if self._tokens:
                tokens, self._tokens = self._tokens, []
                logprobs, self._logprobs = self._logprobs, []
                return NewTokens(tokens, logprobs)
            if self._ended is not None:
                return self._ended
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __repr__(self) -> str:
        state = self._ended.reason if self._ended else "accepted" if self._accepted else "sent"
        return f"Pending({self.request.request_id}, {state}, tokens={self.num_tokens})"
