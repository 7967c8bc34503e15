"""One leg of a dispatch at an instance: from the HTTP request to its answer.

Prefill answers 202 at admission (D10): a later failure reaches decode over the control
channel and the client through decode's answer. Its connection may break without consequence,
for decode decides (protocol models, Q5 UNK). Decode answers when it has a token or a failure,
never 200 without tokens (D9), and takes a lost connection for a client that is gone (D47a).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import attrs
import msgspec
from starlette.types import Receive, Scope, Send

from pdcore.clock import Clock
from pdcore.control.messages import WorkerReady
from pdcore.errors import InvalidRequest, PdcoreError, failure
from pdcore.server import sse
from pdcore.server.answers import Heading, Outcome, answer_for, running_usage
from pdcore.server.dispatcher import Dispatcher
from pdcore.server.http import (
    ClientGone,
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
    PLAIN,
    Endpoint,
    ParsedRequest,
    PdFields,
    SamplingDefaults,
    parse_request,
    read_key,
    with_max_tokens,
)
from pdcore.server.pending import Ended, NewTokens, Pending, Refused
from pdcore.server.text import OutputText, Piece, TextModel, TokenLogprob
from pdcore.types import Failure, GenerateRequest, Role, RoomKey, SamplingParams

#: Longer texts are rendered and encoded in a thread, so that the event loop goes on serving.
_LONG_TEXT_CHARS: Final = 2048

_PREFIX = {Endpoint.GENERATE: "gen-", Endpoint.COMPLETIONS: "cmpl-", Endpoint.CHAT: "chatcmpl-"}
_REQUIRED = ("bootstrap_room", "bootstrap_host", "bootstrap_port", "attempt")
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@attrs.frozen
class LegOptions:
    """What an instance's endpoints need to know. ``instance`` is the leader's advertised
    ``host:port``. ``allowed_bootstraps`` are ``host:port`` a decode instance may ask; empty:
    any on its own host, given by ``local_hosts`` besides loopback (D41). ``sampling`` must
    be the same on both roles: prefill draws the first token, decode the others."""

    role: Role
    instance: str
    request_timeout_s: float = 1800.0
    max_body_bytes: int = 8 << 20
    allowed_bootstraps: frozenset[str] = frozenset()
    local_hosts: frozenset[str] = frozenset()
    sampling: SamplingDefaults = PLAIN


class Preparer:
    """Checks a parsed request against this instance and makes the worker's form of it."""

    def __init__(
        self, options: LegOptions, text: TextModel, dispatcher: Dispatcher, clock: Clock
    ) -> None:
        self._options = options
        self._text = text
        self._dispatcher = dispatcher
        self._clock = clock

    async def prepare(self, parsed: ParsedRequest) -> GenerateRequest:
        """Raises InvalidRequest naming the field, Refused (413 for a prompt that is too
        long, 404 for another model)."""
        if parsed.model not in (None, self._text.name):
            why = f"model: {parsed.model!r} is not served here, only {self._text.name!r}"
            raise Refused(failure("model_not_found", why))
        pd = parsed.pd
        key = self._key(pd)
        # An instance that takes nothing says so before it encodes anything.
        self._dispatcher.workers.route(None, lambda rank: 0)
        ids = await self._encode(parsed)
        timeout_s = parsed.timeout_s or self._options.request_timeout_s
        remaining_s = timeout_s if pd.remaining_s is None else pd.remaining_s
        dp_rank = pd.disagg_prefill_dp_rank
        if dp_rank is None:  # a router that does not know dp_size leaves it out (D21)
            is_prefill = self._options.role is Role.PREFILL
            dp_rank = key.room % self._dispatcher.workers.dp_size if is_prefill else 0
        host = pd.bootstrap_host or ""
        return GenerateRequest(
            key=key,
            request_id=f"{_PREFIX[parsed.endpoint]}{key.attempt:016x}",
            prompt_token_ids=ids,
            sampling=self._check_lengths(parsed, ids),
            expires_at_s=pd.expires_at_s or self._clock.unix() + remaining_s,
            remaining_s=remaining_s,
            bootstrap=f"[{host}]:{pd.bootstrap_port}"
            if ":" in host
            else f"{host}:{pd.bootstrap_port}",
            prefill=pd.prefill_instance or "",
            decode=pd.decode_instance or "",
            prefill_dp_rank=dp_rank,
            replaces=pd.replaces,
        )

    def _key(self, pd: PdFields) -> RoomKey:
        """R35: room, host and port of the bootstrap, and the attempt, each named if missing."""
        fields = msgspec.structs.asdict(pd)
        for name in _REQUIRED:
            if fields[name] is None:
                raise InvalidRequest(
                    name,
                    f"is required by a {self._options.role.value} instance: send the request "
                    "to the router, which adds it",
                )
        host, port = pd.bootstrap_host or "", pd.bootstrap_port or 0
        if self._options.role is Role.DECODE and not self._may_ask(host, port):
            raise InvalidRequest(
                "bootstrap_host",
                f"{host}:{port} is not one of this instance's allowed bootstrap servers",
            )
        return RoomKey(pd.bootstrap_room or 0, pd.attempt or 0)

    def _may_ask(self, host: str, port: int) -> bool:
        if self._options.allowed_bootstraps:
            return f"{host}:{port}" in self._options.allowed_bootstraps
        return host in _LOOPBACK or host in self._options.local_hosts

    async def _encode(self, parsed: ParsedRequest) -> tuple[int, ...]:
        if isinstance(parsed.prompt, tuple):
            ids = parsed.prompt
        elif isinstance(parsed.prompt, str):
            ids = await self._ids(parsed.prompt)
        else:
            ids = await self._ids(await self._render(parsed))
        field = "messages" if parsed.prompt is None else "prompt"
        if not ids:
            raise InvalidRequest(field, "holds no tokens of this model")
        limits = self._dispatcher.workers.limits()
        if limits is not None and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidRequest(
                field, f"token id {wrong} is outside 0..{limits.vocab_size - 1} of this model"
            )
        return ids

    async def _render(self, parsed: ParsedRequest) -> str:
        messages, kwargs = parsed.messages, parsed.chat_template_kwargs

        def render() -> str:
            return self._text.tokenizer.render_chat(messages, add_generation_prompt=True, **kwargs)

        values = [*(one["content"] for one in messages), *kwargs.values()]
        size = sum(len(value) for value in values if isinstance(value, str))
        return await asyncio.to_thread(render) if size > _LONG_TEXT_CHARS else render()

    async def _ids(self, text: str) -> tuple[int, ...]:
        """A text that is too long whatever its tokens are is refused before the work of
        encoding it, which takes seconds for megabytes."""
        tokenizer, limits = self._text.tokenizer, self._dispatcher.workers.limits()
        if limits is not None:
            num_bytes = len(text.encode("utf-8", "replace"))
            longest = _longest(limits)
            most = longest * tokenizer.max_token_bytes
            if num_bytes > most:
                why = (
                    f"prompt has {num_bytes} bytes; the {longest} tokens that this instance takes "
                    f"hold at most {most}"
                )
                raise Refused(failure("prompt_too_long", why))
        if len(text) > _LONG_TEXT_CHARS:
            return tuple(await asyncio.to_thread(tokenizer.encode, text))
        return tuple(tokenizer.encode(text))

    def _check_lengths(self, parsed: ParsedRequest, ids: tuple[int, ...]) -> SamplingParams:
        """R36, R66: both roles refuse what the instance's limits do not allow. Returns the
        sampling with its ``max_tokens``."""
        limits = self._dispatcher.workers.limits()
        if limits is None:
            return parsed.sampling
        longest = _longest(limits)
        if len(ids) > longest:
            why = f"prompt has {len(ids)} tokens, more than the {longest} this instance takes"
            raise Refused(failure("prompt_too_long", why))
        left = limits.max_model_len - len(ids)
        wanted = parsed.sampling.max_tokens
        if wanted is not None and wanted > left:
            raise InvalidRequest(
                "max_tokens",
                f"is {wanted}, but a prompt of {len(ids)} tokens leaves {left} of the model's "
                f"{limits.max_model_len}",
            )
        return with_max_tokens(parsed.sampling, self._options.sampling.max_new_tokens, left)


def _longest(limits: WorkerReady) -> int:
    """Tokens of the longest prompt: one more must still fit behind it."""
    return min(limits.max_prefill_tokens, limits.max_model_len - 1)


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = self._clock.monotonic()
        status = 499
        self._metrics.in_flight.inc()
        try:
            status = await self._serve(scope, receive, send)
        except ClientGone:
            pass
        except PdcoreError as error:
            why, param = failure_of(error)
            status = why.http_status
            await respond_failure(send, why, param)
        finally:
            self._metrics.in_flight.dec()
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
        watch = asyncio.ensure_future(disconnected(receive))
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
        await respond(send, 200, run.answer.whole(whole, run.outcome(item)))
        return 200

    async def _stream(self, run: _Run, first: NewTokens, send: Send) -> int:
        await start_stream(send)
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
