"""One leg of a dispatch at an instance: from the HTTP request to its answer.

Prefill answers 202 at admission (D10): a later failure reaches decode over the control
channel and the client through decode's answer. Its connection may break without consequence,
for decode decides (protocol models, Q5 UNK). Decode answers when it has a token or a failure,
never 200 without tokens (D9), and takes a lost connection for a client that is gone (D47a).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
from starlette.types import Receive, Scope, Send

from pdcore.clock import Clock
from pdcore.errors import PdcoreError, failure
from pdcore.server import sse
from pdcore.server.answers import Heading, Outcome, answer_for, running_usage
from pdcore.server.dispatcher import Dispatcher
from pdcore.server.gate import Gate
from pdcore.server.http import (
    SAMPLED,
    ClientGone,
    Headers,
    bounded_send,
    disconnected,
    error_body,
    failure_of,
    read_body,
    respond,
    respond_failure,
    start_stream,
)
from pdcore.server.metrics import Metrics
from pdcore.server.openai import (
    Endpoint,
    ParsedRequest,
    parse_request,
    read_key,
)
from pdcore.server.pending import Ended, NewTokens, Pending
from pdcore.server.prepare import LegOptions, Preparer
from pdcore.server.text import OutputText, Piece, TextModel, TokenLogprob
from pdcore.types import Failure, Role

__all__ = ["LegEndpoint", "LegOptions"]


class LegEndpoint:
    """POST /generate, /v1/completions or /v1/chat/completions of one instance, as raw ASGI."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: LegOptions,
        text: TextModel,
        dispatcher: Dispatcher,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._endpoint = endpoint
        self._options = options
        self._text = text
        self._dispatcher = dispatcher
        self._clock = clock
        self._metrics = metrics
        self._preparer = Preparer(options, text, dispatcher, clock)
        # Those in flight, and as many whose body is read or whose prompt is encoded.
        self._gate = Gate(2 * dispatcher.limits.max_pending, dispatcher.counters)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = self._clock.monotonic()
        status = 499
        self._metrics.in_flight += 1
        try:
            with self._gate:
                status = await self._serve(scope, receive, send)
        except ClientGone:
            pass
        except PdcoreError as error:
            why, param = failure_of(error)
            status = why.http_status
            await respond_failure(send, why, param)
        finally:
            self._metrics.in_flight -= 1
            elapsed_s = self._clock.monotonic() - start_s
            self._metrics.finished(self._endpoint.value, status, elapsed_s)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        body = await read_body(scope, receive, self._options.max_body_bytes)
        is_prefill = self._options.role is Role.PREFILL
        try:
            parsed = parse_request(self._endpoint, body, self._options.sampling)
            request = await self._preparer.prepare(parsed)
            dp_rank = request.prefill_dp_rank if is_prefill else None
            pending = self._dispatcher.submit(request, dp_rank)
        except PdcoreError:
            key = read_key(body)
            if key is not None:  # over here: a cancel of it is known and not asked again
                self._dispatcher.history.add(key, self._clock.monotonic(), was_here=True)
            raise
        send = bounded_send(send, request.remaining_s)
        if is_prefill:
            return await self._admit(pending, send)
        # From here on every await may be the last: a client that is gone ends the request,
        # and a handler that is cancelled takes it along.
        watch = asyncio.create_task(disconnected(receive))
        watch.add_done_callback(
            lambda done: None if done.cancelled() else self._abort(pending, "the client is gone")
        )
        try:
            return await self._decode(parsed, pending, send)
        finally:
            watch.cancel()
            self._abort(pending, "the request was given up")

    def _abort(self, pending: Pending, reason: str) -> None:
        if not pending.has_ended:
            self._dispatcher.abort(pending.key, reason)

    async def _admit(self, pending: Pending, send: Send) -> int:
        refused = await pending.admitted()
        if refused is not None and refused.failure is not None:
            await respond_failure(send, refused.failure)
            return refused.failure.http_status
        body = {
            "request_id": pending.request.request_id,
            "bootstrap_room": pending.key.room,
            "accepted": True,
        }
        await respond(send, 202, msgspec.json.encode(body))
        return 202

    async def _decode(self, parsed: ParsedRequest, pending: Pending, send: Send) -> int:
        heading = Heading(
            pending.request.request_id, self._text.name, int(self._clock.unix()), pending.key.room
        )
        run = _Run(parsed, pending, self._text, heading)
        first = await pending.next()
        self._metrics.first_token(self._clock.monotonic() - pending.submitted_s)
        if isinstance(first, Ended):
            why = first.failure or failure("internal", "the request ended without a token")
            await respond_failure(send, why)
            return why.http_status
        if parsed.stream:
            return await self._stream(run, first, send)
        return await self._whole(run, first, send)

    async def _whole(self, run: _Run, first: NewTokens, send: Send) -> int:
        texts: list[str] = []
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        item: NewTokens | Ended = first
        while isinstance(item, NewTokens):
            piece = run.output.push(item)
            texts.append(piece.text)
            ids.extend(piece.token_ids)
            logprobs.extend(piece.logprobs)
            item = run.stopped() or await run.pending.next()
        why = item.failure
        if why is not None:
            await respond_failure(send, why)
            return why.http_status
        self._abort(run.pending, "a stop string ended the output")
        texts.append(run.output.finish())
        whole = Piece("".join(texts), ids, logprobs)
        body = run.answer.whole(whole, run.outcome(item))
        await respond(send, 200, body, run.headers)
        return 200

    async def _stream(self, run: _Run, first: NewTokens, send: Send) -> int:
        await start_stream(send, run.headers)
        await _send_events(send, run.answer.start())
        item: NewTokens | Ended = first
        while isinstance(item, NewTokens):
            piece = run.output.push(item)
            if piece.text or run.shows_every_token:
                await _send_events(send, run.answer.piece(piece, run.usage()))
            item = run.stopped() or await run.pending.next()
        why = item.failure
        if why is not None:
            await _end_stream(send, why)
            return why.http_status
        self._abort(run.pending, "a stop string ended the output")
        tail = run.output.finish()
        events = [*run.answer.end(run.outcome(item))]
        if tail:
            events = [*run.answer.piece(Piece(tail, [], []), run.usage()), *events]
        await send({"type": "http.response.body", "body": b"".join(events)})
        return 200


class _Run:
    """One decode request while it is answered."""

    __slots__ = ("_parsed", "answer", "output", "pending")

    def __init__(
        self, parsed: ParsedRequest, pending: Pending, text: TextModel, heading: Heading
    ) -> None:
        self._parsed = parsed
        self.pending = pending
        self.output = OutputText(text, parsed.stop, parsed.sampling.min_tokens)
        self.answer = answer_for(parsed, heading)

    @property
    def shows_every_token(self) -> bool:
        """Events also for tokens that made no text yet."""
        return self._parsed.return_token_ids or self._parsed.sampling.logprobs

    @property
    def headers(self) -> Headers:
        sampling = self._parsed.sampling
        return SAMPLED if sampling.temperature > 0 and sampling.seed is None else ()

    def stopped(self) -> Ended | None:
        """The end that a stop string makes, before the worker knows of it."""
        if not self.output.has_stopped:
            return None
        prompt_tokens = len(self.pending.request.prompt_token_ids)
        return Ended("stop", None, prompt_tokens, self.output.num_tokens, {})

    def outcome(self, ended: Ended) -> Outcome:
        return Outcome(ended.reason, ended.prompt_tokens, ended.completion_tokens, ended.timeline)

    def usage(self) -> dict[str, object] | None:
        if not self._parsed.continuous_usage:
            return None
        return running_usage(len(self.pending.request.prompt_token_ids), self.output.num_tokens)


async def _send_events(send: Send, events: Iterator[bytes]) -> None:
    body = b"".join(events)
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _end_stream(send: Send, why: Failure) -> None:
    """A stream that fails ends with an error event and without [DONE]."""
    await send({"type": "http.response.body", "body": sse.event(error_body(why))})
