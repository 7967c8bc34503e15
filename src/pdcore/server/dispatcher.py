"""From HTTP handlers to workers and back: the leader's table of requests in flight.

Everything here runs on the event loop's thread. The link calls :meth:`Dispatcher.on_message`
and :meth:`Dispatcher.on_lost`; from another thread use ``loop.call_soon_threadsafe``. State
is set synchronously and handlers are woken through futures, never a thread pool (D43).

What may not happen: a request for a rank that is not connected is dropped silently (D42);
a dead worker leaves clients waiting (D45); a late result ends another request (R39); a
cancel that overtakes its request is forgotten (protocol models, Q5 RES and TOMB).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import attrs

from pdcore.clock import Clock
from pdcore.control.messages import (
    Accepted,
    Finished,
    Stop,
    Tokens,
    WorkerHealth,
    WorkerMessage,
    WorkerReady,
)
from pdcore.errors import CodecError, Overloaded, RoomInUse, failure
from pdcore.fsm.effects import Effect
from pdcore.fsm.instance import FailPending, KillWorkers, StopWorkers
from pdcore.local import submit_message
from pdcore.server.aborts import AbortTable, History, Link, Timers, call_later
from pdcore.server.pending import Ended, Pending, Refused
from pdcore.server.workers import WorkerRegistry
from pdcore.types import Failure, FinishReason, GenerateRequest, RoomKey

_SUCCESS: Final = (FinishReason.STOP.value, FinishReason.LENGTH.value)


class CancelOutcome(NamedTuple):
    """``known``: this instance has seen that dispatch. ``applied``: it was ended by this
    cancel. Unknown means: ask again, the request may still be on its way."""

    known: bool
    applied: bool


@attrs.frozen
class DispatcherLimits:
    """Bounds of one leader (habit 8)."""

    #: Requests in flight; more are answered 429 (D60).
    max_pending: int = 1024
    #: Finished and cancelled dispatches remembered (R39; seed: 1024), and for how long.
    history_cap: int = 4096
    history_ttl_s: float = 120.0
    #: Added to a request's remaining time: the worker's own timer should fire first.
    deadline_grace_s: float = 1.0
    #: An absolute expiry may be off by this much between hosts (rule 8).
    clock_skew_s: float = 5.0
    #: A refused or unanswered Abort is sent again after this, doubling up to the maximum.
    resend_initial_s: float = 0.05
    resend_max_s: float = 5.0


class Dispatcher:
    """One per instance leader. ``counters`` name what was dropped or refused, and why.
    ``history`` knows what is over here, also what was refused before it was submitted."""

    def __init__(
        self,
        link: Link,
        workers: WorkerRegistry,
        *,
        clock: Clock,
        timers: Timers | None = None,
        limits: DispatcherLimits | None = None,
        on_kill: Callable[[], None] | None = None,
    ) -> None:
        """``on_kill`` ends the worker processes that are left when draining has failed."""
        self.workers = workers
        self.limits = limits or DispatcherLimits()
        self.counters: Counter[str] = Counter()
        self._link = link
        self._clock = clock
        self._timers = timers
        self._on_kill = on_kill
        self._pending: dict[RoomKey, Pending] = {}
        #: How many of them each rank has.
        self._load: Counter[int] = Counter()
        self._rooms: dict[int, int] = {}
        self._aborts = AbortTable(
            link,
            timers,
            initial_s=self.limits.resend_initial_s,
            max_s=self.limits.resend_max_s,
        )
        self.history = History(self.limits.history_cap, self.limits.history_ttl_s)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    # --- requests ------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, dp_rank: int | None = None) -> Pending:
        """Hand a request to the worker that leads ``dp_rank`` (None: the least loaded).

        Raises Refused (expired 504, not ready 503, cancelled before 499, dp rank 400),
        RoomInUse for a live room without ``replaces`` and for a dispatch that was here
        before (D7), Overloaded beyond ``max_pending`` (D60). A request that was raised for
        was not sent.
        """
        self._check(request)
        rank = self.workers.route(dp_rank, self._load.__getitem__)
        try:
            is_sent = self._link.send(rank, submit_message(request))
        except CodecError as error:
            raise Refused(failure("prompt_too_long", f"prompt: {error}")) from None
        if not is_sent:
            self.counters["link_refused"] += 1
            why = f"worker {rank} is not connected or cannot take more; try again"
            raise Refused(failure("unavailable", why))
        pending = Pending(request, rank, self._clock.monotonic())
        self._pending[request.key] = pending
        self._load[rank] += 1
        self._rooms[request.key.room] = request.key.attempt
        pending.timer = call_later(
            self._timers,
            request.remaining_s + self.limits.deadline_grace_s,
            lambda: self._expire(request.key),
        )
        self.counters["submitted"] += 1
        return pending

    def abort(self, key: RoomKey, reason: str) -> bool:
        """End a dispatch nobody waits for any more, e.g. a client that is gone; its handler
        ends at once. False: it is not in flight."""
        pending = self._pending.get(key)
        if pending is None:
            return False
        self._aborts.send(key, pending.to_rank, reason, unless_received=False)
        self._finish(pending, _ended(pending, failure("cancelled", reason)))
        return True

    def abort_room(self, room: int, reason: str) -> bool:
        """:meth:`abort` of whichever attempt of this room is in flight here."""
        attempt = self._rooms.get(room)
        return attempt is not None and self.abort(RoomKey(room, attempt), reason)

    async def cancel(self, key: RoomKey, reason: str, *, unless_received: bool) -> CancelOutcome:
        """POST /cancel: ask the worker and wait for its answer (protocol models, Q5).

        A dispatch that has not been seen leaves a tombstone and is answered ``known=False``:
        the router asks again until it is known, so safety rests on no tombstone.
        """
        pending = self._pending.get(key)
        if pending is None:
            now_s = self._clock.monotonic()
            here = self.history.get(key, now_s)
            if here is None:
                self.history.add(key, now_s, was_here=False)
            return CancelOutcome(known=bool(here), applied=False)
        self._aborts.send(key, pending.to_rank, reason, unless_received=unless_received)
        return CancelOutcome(known=True, applied=await self._aborts.answer(key))

    # --- the end -------------------------------------------------------------------------

    def drain(self, drain_s: float) -> None:
        """Take nothing new and tell the workers to finish within ``drain_s`` and exit."""
        self._carry_out(self.workers.instance.stop_requested() or (), drain_s)

    def stop(self, drain_s: float = 0.0) -> None:
        """Fail all pending requests with ``shutting_down`` (R39); idempotent."""
        self.drain(drain_s)
        self._carry_out(self.workers.instance.drained() or ())
        self._aborts.clear()

    # --- from the link and the supervisor ------------------------------------------------

    def on_message(self, rank: int, message: WorkerMessage) -> None:
        """One message of a worker. What fits no request is counted and changes nothing."""
        if isinstance(message, Tokens):
            self.counters["late_results"] += _add_tokens(self._pending, rank, message)
        elif isinstance(message, Accepted | Finished):
            pending = self._pending.get(message.key)
            if pending is None or pending.to_rank != rank:
                self.counters["late_results"] += 1
            elif isinstance(message, Finished):
                self._finish(pending, _from_worker(message))
            else:
                pending.accept()
        elif isinstance(message, WorkerHealth):
            self.workers.report(message, self._clock.monotonic())
        elif isinstance(message, WorkerReady):
            try:
                self._carry_out(self.workers.add(message, self._clock.monotonic()))
            except ValueError:
                self.counters["foreign_workers"] += 1
        else:
            self._aborts.resolve(message.key, message.applied)

    def on_lost(self, rank: int, detail: str) -> None:
        """A worker process is gone: fail what its group had, become unhealthy (D45)."""
        self.counters["workers_lost"] += 1
        self._carry_out(self.workers.lose(rank, detail))

    # --- inside --------------------------------------------------------------------------

    def _check(self, request: GenerateRequest) -> None:
        late_s = self._clock.unix() - request.expires_at_s
        if late_s > self.limits.clock_skew_s or request.remaining_s <= 0:
            self.counters["expired_on_arrival"] += 1
            raise Refused(
                failure("deadline_exceeded", "the request's time was over when it arrived")
            )
        room, attempt = request.key
        live = self._rooms.get(room)
        if live == attempt or (live is not None and live != request.replaces):
            raise RoomInUse(
                f"bootstrap_room {room} is in use: wait for its result, choose another room, "
                "or name the attempt it replaces"
            )
        here = self.history.get(request.key, self._clock.monotonic())
        # In flight though the room names another: that one replaced it, and may be over.
        if here or request.key in self._pending:
            raise RoomInUse(f"attempt {attempt} of bootstrap_room {room} was dispatched before")
        if here is False:
            raise Refused(failure("cancelled", "cancelled before it arrived"))
        # A worker that has not answered an abort may still hold that request.
        num_held = len(self._pending) + sum(
            key not in self._pending for key in self._aborts.unanswered()
        )
        if num_held >= self.limits.max_pending:
            self.counters["overloaded"] += 1
            raise Overloaded(
                f"{num_held} requests are in flight, the limit is "
                f"{self.limits.max_pending}; try again later"
            )

    def _carry_out(self, effects: Iterable[Effect], drain_s: float = 0.0) -> None:
        for effect in effects:
            if isinstance(effect, FailPending):
                self._fail(effect)
            elif isinstance(effect, StopWorkers):
                for rank in self.workers.ranks():
                    self._link.send(rank, Stop(drain_s))
            elif isinstance(effect, KillWorkers) and self._on_kill is not None:
                self._on_kill()

    def _fail(self, effect: FailPending) -> None:
        hit = list(self._pending.values())
        why = effect.failure
        if effect.rank is not None:
            # Work may have been lost: not the same as an instance that takes nothing; and it
            # was ours, not a peer's: a router must know whom to avoid.
            why = failure("worker_lost", why.detail)
            leader = self.workers.leader_of(effect.rank)
            self._aborts.lose(leader)
            hit = [pending for pending in hit if pending.to_rank == leader]
        for pending in hit:
            self._finish(pending, _ended(pending, why))

    def _expire(self, key: RoomKey) -> None:
        pending = self._pending.get(key)
        if pending is None:
            return
        self.counters["deadline_exceeded"] += 1
        self._aborts.send(key, pending.to_rank, "deadline exceeded", unless_received=False)
        detail = (
            f"no result within {pending.request.remaining_s:g} s: waiting for worker "
            f"{pending.to_rank}, which {pending.progress}"
        )
        self._finish(pending, _ended(pending, failure("deadline_exceeded", detail)))

    def _finish(self, pending: Pending, ended: Ended) -> None:
        key = pending.key
        del self._pending[key]
        self._load[pending.to_rank] -= 1
        if self._rooms.get(key.room) == key.attempt:
            del self._rooms[key.room]
        if pending.timer is not None:
            pending.timer.cancel()
        self.history.add(key, self._clock.monotonic(), was_here=True)
        self.counters[f"finished_{ended.failure.code if ended.failure else ended.reason}"] += 1
        pending.end(ended)


def _ended(pending: Pending, why: Failure) -> Ended:
    prompt_tokens = len(pending.request.prompt_token_ids)
    return Ended(FinishReason.ERROR.value, why, prompt_tokens, pending.num_tokens, {})


def _from_worker(message: Finished) -> Ended:
    """A success keeps its reason; anything else carries a failure, so that it can never be
    answered 200 (D9)."""
    why = message.failure
    if why is None and message.finish_reason not in _SUCCESS:
        why = failure("internal", f"the worker ended the request: {message.finish_reason}")
    return Ended(
        message.finish_reason,
        why,
        message.prompt_tokens,
        message.completion_tokens,
        message.timeline,
    )


def _add_tokens(pendings: Mapping[RoomKey, Pending], rank: int, message: Tokens) -> int:
    """Hand a step's tokens out; returns how many requests have ended or are another
    rank's."""
    num_late = 0
    for i, key in enumerate(message.keys):
        pending = pendings.get(key)
        if pending is None or pending.to_rank != rank:
            num_late += 1
        else:
            logprobs = None if message.logprobs is None else message.logprobs[i]
            pending.add_tokens(message.token_ids[i], logprobs)
    return num_late
