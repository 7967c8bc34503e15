"""The shell around the router's core: HTTP legs in, effects out, one timer.

A :class:`Session` is one client request with its legs' tasks. Events are handed to the core
synchronously and its effects are carried out at once; nothing between an event and its
consequences awaits, so no second event can slip in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec

from pdcore.clock import Clock
from pdcore.errors import failure
from pdcore.fsm.routed import Leg
from pdcore.router.core import RouterCore
from pdcore.router.events import (
    Answer,
    CancelAnswered,
    ClientLeft,
    Dispatch,
    DropLegs,
    EndStream,
    LegAnswered,
    LegLost,
    RouterEvent,
    StreamBegan,
)
from pdcore.router.fleet import Member
from pdcore.router.outbox import SendCancel
from pdcore.router.policies import ClientFields, inject
from pdcore.router.rooms import Recorded, Recording, digest_of
from pdcore.server import sse
from pdcore.server.aborts import Timers, call_later
from pdcore.server.client import (
    Client,
    Origin,
    OutOfConnections,
    Response,
    ResponseTooLarge,
    Timeout,
)
from pdcore.server.exchange import HttpError
from pdcore.server.http import JSON, SAMPLED, ClientGone, error_body
from pdcore.types import Failure

_log: Final = logging.getLogger(__name__)
_LEGS: Final = tuple(Leg)
_CANCEL_TIMEOUT: Final = Timeout(connect_s=2.0, total_s=10.0)
_CANCEL_PATH: Final = "/cancel"
_MAX_SMALL_BYTES: Final = 64 * 1024
_CONNECT_S: Final = 5.0
_SAMPLED_NAME: Final = SAMPLED[0][0]


class LegReply(NamedTuple):
    """A leg's complete answer, passed on verbatim (R32, D47b)."""

    status: int
    content_type: bytes
    retry_after: bytes | None
    body: bytes


class Decision(NamedTuple):
    """What the client gets: exactly one of the three."""

    reply: LegReply | None = None
    stream: Response | None = None
    failure: Failure | None = None


class _CancelReply(msgspec.Struct, frozen=True):
    known: bool = True


class Session:
    __slots__ = (
        "attempt",
        "decided",
        "decode",
        "fields",
        "is_over",
        "path",
        "recording",
        "replies",
        "stream_failure",
        "streams",
        "tasks",
        "ticket",
    )

    def __init__(self, path: str, fields: Mapping[str, msgspec.Raw]) -> None:
        self.path = path
        self.fields = fields
        self.ticket = 0
        #: The attempt that answered, or the current one.
        self.attempt = 0
        self.decided: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        #: Of the current attempt.
        self.decode: Member | None = None
        self.stream_failure: Failure | None = None
        #: Where the result of a room that its client chose is kept (D7).
        self.recording: Recording | None = None
        #: The core has ended it; what happens to the client now changes nothing.
        self.is_over = False
        self.tasks: dict[tuple[int, Leg], asyncio.Task[None]] = {}
        self.replies: dict[tuple[int, Leg], LegReply] = {}
        self.streams: dict[int, Response] = {}

    def drop(self, attempt: int) -> None:
        """Close what is left of an attempt."""
        for leg in _LEGS:
            task = self.tasks.pop((attempt, leg), None)
            if task is not None:
                task.cancel()
        stream = self.streams.pop(attempt, None)
        if stream is not None:
            stream.close()


class Shell:
    """One per router app; lives on one event loop."""

    def __init__(
        self,
        core: RouterCore,
        client: Client,
        clock: Clock,
        timers: Timers | None,
        *,
        max_reply_bytes: int,
    ) -> None:
        self.core = core
        self._client = client
        self._clock = clock
        self._timers = timers
        self._max_reply_bytes = max_reply_bytes
        self._sessions: dict[int, Session] = {}
        self._cancels: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._is_closed = False

    def open(
        self, path: str, fields: Mapping[str, msgspec.Raw], read: ClientFields
    ) -> Session | Recorded:
        """The session of a new request, or the recorded result of one that is finished (D7).
        Raises what :meth:`RouterCore.submit` and :meth:`Rooms.recall` raise; then nothing was
        started."""
        session = Session(path, fields)
        now_s = self._clock.monotonic()
        if read.room is not None:
            digest = digest_of(path, fields)
            recorded = self.core.rooms.recall(read.room, digest, now_s)
            if recorded is not None:
                return recorded
            if digest is not None:
                session.recording = self.core.rooms.recording(read.room, digest)
        ticket = self.core.submit(read, now_s, self._clock.unix())
        session.ticket = ticket
        self._sessions[ticket] = session
        self._pump()
        return session

    def event(self, event: RouterEvent) -> None:
        self.core.handle_event(event, self._clock.monotonic())
        self._pump()

    def leave(self, session: Session) -> None:
        """The client is gone."""
        if not session.is_over:
            session.is_over = True
            self.event(ClientLeft(session.ticket))
        if not session.decided.done():
            session.decided.set_exception(ClientGone("client gone"))
            session.decided.exception()  # read: nobody may be waiting for it any more

    def close(self, session: Session) -> None:
        """The handler is done with it, for whatever reason."""
        self.leave(session)
        self._sessions.pop(session.ticket, None)
        if session.recording is not None:
            session.recording.close()
        for attempt in {*session.streams, *(attempt for attempt, _ in session.tasks)}:
            session.drop(attempt)

    async def aclose(self) -> None:
        """Stop timers and cancels that are under way."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._cancels):
            task.cancel()
        await asyncio.gather(*self._cancels, return_exceptions=True)

    # --- effects -------------------------------------------------------------------------

    def _pump(self) -> None:
        for effect in self.core.poll_effects():
            if isinstance(effect, SendCancel):
                task = asyncio.create_task(self._send_cancel(effect))
                self._cancels.add(task)
                task.add_done_callback(partial(self._on_cancel_done, effect))
                continue
            session = self._sessions.get(effect.ticket)
            if session is None:
                continue
            if isinstance(effect, Dispatch):
                self._dispatch(session, effect)
            elif isinstance(effect, Answer):
                _decide(session, effect)
            elif isinstance(effect, EndStream):
                session.stream_failure = effect.failure
                session.is_over = True
            elif isinstance(effect, DropLegs):
                session.drop(effect.attempt)
        self._arm()

    def _dispatch(self, session: Session, effect: Dispatch) -> None:
        body = inject(session.fields, effect.added)
        session.attempt, session.decode = effect.attempt, effect.decode
        # The legs' own deadlines come first; this one only bounds a peer that went silent.
        total_s = effect.remaining_s + 2 * self.core.limits.grace_s
        for leg, member in ((Leg.PREFILL, effect.prefill), (Leg.DECODE, effect.decode)):
            if member is None:  # local prefill
                continue
            task = asyncio.create_task(
                self._run_leg(session, effect.attempt, leg, member, body, total_s)
            )
            task.add_done_callback(partial(self._on_leg_done, session, effect.attempt, leg))
            session.tasks[effect.attempt, leg] = task

    def _on_leg_done(
        self, session: Session, attempt: int, leg: Leg, task: asyncio.Task[None]
    ) -> None:
        """A bug of ours ends the leg too, or the client would wait for its deadline."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("the %s leg of ticket %d failed", leg.value, session.ticket, exc_info=error)
        detail = "an internal error; the router's log has the details"
        self.event(LegLost(session.ticket, attempt, leg, True, detail))

    async def _run_leg(
        self,
        session: Session,
        attempt: int,
        leg: Leg,
        member: Member,
        body: bytes,
        total_s: float,
    ) -> None:
        origin = Origin(member.target.host, member.target.port)
        timeout = Timeout(_CONNECT_S, None, total_s)
        event: RouterEvent
        try:
            response = await self._client.request(
                "POST", origin, session.path, body, timeout=timeout
            )
            member.heard()
            content_type = response.header(b"content-type") or b""
            is_stream = content_type.startswith(sse.CONTENT_TYPE)
            if session.recording is not None and response.header(_SAMPLED_NAME) is not None:
                session.recording.close()
            if leg is Leg.DECODE and response.status == 200 and is_stream:
                session.streams[attempt] = response
                event = StreamBegan(session.ticket, attempt)
            else:
                data = await response.read(self._max_reply_bytes)
                retry_after = response.header(b"retry-after")
                reply = LegReply(response.status, content_type or JSON, retry_after, data)
                reply = _checked(leg, member, reply)
                session.replies[attempt, leg] = reply
                code = error_code(reply.body) if reply.status >= 400 else ""
                event = LegAnswered(session.ticket, attempt, leg, reply.status, code)
        except ResponseTooLarge as error:
            # It would be as large from any instance: answered, not lost.
            reply = _unusable(f"{leg.value} instance {member.target.netloc}: {error}")
            session.replies[attempt, leg] = reply
            code = error_code(reply.body)
            event = LegAnswered(session.ticket, attempt, leg, reply.status, code)
        except HttpError as error:
            is_busy = isinstance(error, OutOfConnections)
            event = LegLost(session.ticket, attempt, leg, error.sent, str(error), is_busy)
        self.event(event)

    async def _send_cancel(self, cancel: SendCancel) -> None:
        body = msgspec.json.encode(
            {
                "room": cancel.key.room,
                "attempt": cancel.key.attempt,
                "unless_received": cancel.unless_received,
            }
        )
        origin = Origin(cancel.target.host, cancel.target.port)
        is_known: bool | None = None
        try:
            response = await self._client.request(
                "POST", origin, _CANCEL_PATH, body, timeout=_CANCEL_TIMEOUT
            )
            data = await response.read(_MAX_SMALL_BYTES)
            if response.status == 200:
                is_known = msgspec.json.decode(data, type=_CancelReply).known
        except (HttpError, msgspec.DecodeError):
            pass  # no answer: the core asks again
        self.event(CancelAnswered(cancel.key, is_known, cancel.unless_received))

    def _on_cancel_done(self, cancel: SendCancel, task: asyncio.Task[None]) -> None:
        self._cancels.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("a cancel to %s failed", cancel.target.netloc, exc_info=error)
        self.event(CancelAnswered(cancel.key, None, cancel.unless_received))

    def _arm(self) -> None:
        due_s = self.core.poll_deadline()
        if due_s is None or (self._timer is not None and self._timer_due_s <= due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_s = due_s
        delay_s = max(0.0, due_s - self._clock.monotonic())
        self._timer = call_later(self._timers, delay_s, self._on_timer)

    def _on_timer(self) -> None:
        """Completion beats expiry in the same tick (architecture, section 3): an answer whose
        last bytes came in this turn of the loop reaches the core in the next one."""
        self._timer = None
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._expire)

    def _expire(self) -> None:
        if self._is_closed:
            return
        self.core.handle_timeout(self._clock.monotonic())
        self._pump()


def _decide(session: Session, answer: Answer) -> None:
    session.attempt = answer.attempt
    if session.decided.done():
        return
    if answer.leg is not None:
        reply = session.replies[answer.attempt, answer.leg]
        decision = Decision(reply=reply)
        session.is_over = True
        if session.recording is not None and answer.failure is None:
            session.recording.add(reply.body)
            session.recording.keep(reply.status, reply.content_type)
    elif answer.failure is not None:
        decision = Decision(failure=answer.failure)
        session.is_over = True
    else:
        # Stays in `streams`: whoever ends the session first (Shell.close, or the DropLegs of
        # a deadline) closes it.
        decision = Decision(stream=session.streams[answer.attempt])
    session.decided.set_result(decision)


class _Error(msgspec.Struct, frozen=True):
    code: str = ""


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


def error_code(body: bytes) -> str:
    """The code in an error's body; empty where it has none."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _checked(leg: Leg, member: Member, reply: LegReply) -> LegReply:
    """R32: decode's 200 must be a JSON object; anything else is its fault, 502."""
    if leg is Leg.PREFILL or reply.status != 200 or reply.body[:1] == b"{":
        return reply
    return _unusable(f"decode instance {member.target.netloc} answered 200 without a JSON object")


def _unusable(detail: str) -> LegReply:
    why = failure("bad_gateway", detail)
    return LegReply(why.http_status, JSON, None, error_body(why))
