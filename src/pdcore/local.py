"""A leader port inside one process: requests and results through thread-safe queues.

For servers that run the worker loop in a thread of their own, and for tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from pdcore.control.codec import pack_token_ids
from pdcore.control.messages import (
    Abort,
    LeaderMessage,
    Stop,
    Submit,
    SubmitSampling,
    WorkerMessage,
)
from pdcore.fsm.events import TopologyFetched
from pdcore.guard import Raised, attempt
from pdcore.scheduler.route import route_of
from pdcore.scheduler.setup import CoreSetup
from pdcore.types import GenerateRequest, RoomKey


class LocalPort:
    """``submit``, ``abort``, ``stop`` and ``put`` from any thread; ``on_message`` is called in
    the worker's thread: hand the message on (``queue.put``, ``loop.call_soon_threadsafe``),
    and never wait there. Without it what the worker says is dropped; it may be set until the
    worker runs. What it raises is logged and costs that one message, never the loop (D45)."""

    def __init__(self, on_message: Callable[[WorkerMessage], None] | None = None) -> None:
        self._inbox: deque[LeaderMessage] = deque()
        self.on_message: Callable[[WorkerMessage], None] = on_message or _drop
        #: Messages that ``on_message`` raised for.
        self.num_lost = 0
        #: Set by ``build_worker``: wakes the worker's loop (``Background.wake``).
        self.wake: Callable[[], None] = _nothing

    def submit(self, request: GenerateRequest) -> None:
        """Hand one leg of a request to the worker; it is answered by exactly one Finished.
        Raises CodecError for a token id that does not fit 31 bits."""
        self.put(submit_message(request))

    def abort(self, key: RoomKey, reason: str, *, unless_received: bool = False) -> None:
        """End the dispatch of this room, if it runs here. Answered by Aborted, and by the
        Finished of the request when there was one. A decode that already has its KV ignores
        it with ``unless_received``."""
        self.put(Abort(key, reason, unless_received))

    def stop(self, drain_s: float = 0.0) -> None:
        """End the loop when nothing is left, after ``drain_s`` seconds at the latest."""
        self.put(Stop(drain_s))

    def put(self, message: LeaderMessage) -> None:
        """Hand a Submit, Abort or Stop to the worker."""
        self._inbox.append(message)
        self.wake()

    def receive(self, limit: int = 256) -> list[LeaderMessage]:
        taken: list[LeaderMessage] = []
        while self._inbox and len(taken) < limit:
            taken.append(self._inbox.popleft())
        if self._inbox:
            # The wake-ups of what is left here may be spent already.
            self.wake()
        return taken

    def send(self, message: WorkerMessage) -> None:
        failed = "on_message failed, a message to the host is lost: %r"
        if isinstance(attempt(partial(self.on_message, message), failed, message), Raised):
            self.num_lost += 1


def local_route(setups: Sequence[CoreSetup]) -> Callable[[str], TopologyFetched]:
    """A ``fetch_route`` for whoever holds all ranks of one prefill instance in the same
    program and needs no bootstrap server. Raises ConfigError when a rank is missing."""
    route = route_of(setups)
    return lambda bootstrap: TopologyFetched(bootstrap, route)


def submit_message(request: GenerateRequest) -> Submit:
    """The request as it travels to a worker. Raises CodecError."""
    s = request.sampling
    return Submit(
        key=request.key,
        request_id=request.request_id,
        prompt=pack_token_ids(request.prompt_token_ids),
        sampling=SubmitSampling(
            s.max_tokens,
            s.min_tokens,
            s.temperature,
            s.top_p,
            s.top_k,
            s.seed,
            s.stop_token_ids,
            s.ignore_eos,
            s.logprobs,
            s.top_logprobs,
        ),
        expires_at_s=request.expires_at_s,
        remaining_s=request.remaining_s,
        bootstrap=request.bootstrap,
        prefill=request.prefill,
        decode=request.decode,
        prefill_dp_rank=request.prefill_dp_rank,
        replaces=request.replaces,
        is_local=request.is_local,
    )


def _drop(message: WorkerMessage) -> None:
    """Nobody listens."""


def _nothing() -> None:
    """Nobody sleeps yet."""
