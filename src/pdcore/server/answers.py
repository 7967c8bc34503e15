"""What clients get back: OpenAI's shapes and ``/generate``'s, blocking and as events (R37).

One :class:`Answer` per request builds both forms, so that a stream and a blocking response
cannot disagree. Usage counts are the engine's; a request that a stop string cut counts the
tokens up to the one that completed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import attrs
import msgspec

from pdcore.server import sse
from pdcore.server.openai import Endpoint, ParsedRequest
from pdcore.server.text import Piece, TokenLogprob

#: A JSON object under construction.
Json = dict[str, object]


@attrs.frozen
class Outcome:
    """How a request ended well. ``finish_reason`` is stop or length; ``timeline`` holds
    seconds since acceptance for named points."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    timeline: Mapping[str, float] = attrs.field(factory=dict)

    def usage(self) -> Json:
        return _usage(self.prompt_tokens, self.completion_tokens)


@attrs.frozen
class Heading:
    """What every part of one response repeats. ``id`` is cmpl-/chatcmpl- and 8 hex digits or
    more; ``created`` Unix seconds."""

    id: str
    model: str
    created: int
    room: int


class Answer(Protocol):
    """``piece`` and ``end`` yield events of a stream, ``whole`` is the blocking body."""

    def start(self) -> Iterator[bytes]: ...

    def piece(self, piece: Piece, usage: Json | None) -> Iterator[bytes]: ...

    def end(self, outcome: Outcome) -> Iterator[bytes]: ...

    def whole(self, piece: Piece, outcome: Outcome) -> bytes: ...


def answer_for(request: ParsedRequest, heading: Heading) -> Answer:
    if request.endpoint is Endpoint.CHAT:
        return ChatAnswer(request, heading)
    if request.endpoint is Endpoint.COMPLETIONS:
        return CompletionAnswer(request, heading)
    return GenerateAnswer(request, heading)


def _usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def running_usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Usage so far, for ``stream_options.continuous_usage_stats``."""
    return _usage(prompt_tokens, completion_tokens)


def _event(body: Json) -> bytes:
    return sse.event(msgspec.json.encode(body))


class CompletionAnswer:
    """``/v1/completions``: text_completion objects."""

    def __init__(self, request: ParsedRequest, heading: Heading) -> None:
        self._request = request
        self._heading = heading
        self._offset = 0

    def start(self) -> Iterator[bytes]:
        return iter(())

    def piece(self, piece: Piece, usage: Json | None) -> Iterator[bytes]:
        yield _event(self._body(self._choice(piece, None), usage))

    def end(self, outcome: Outcome) -> Iterator[bytes]:
        yield _event(self._body(self._choice(Piece("", [], []), outcome.finish_reason), None))
        if self._request.include_usage:
            yield _event(self._body(None, outcome.usage()))
        yield sse.DONE

    def whole(self, piece: Piece, outcome: Outcome) -> bytes:
        choice = self._choice(piece, outcome.finish_reason)
        return msgspec.json.encode(self._body(choice, outcome.usage()))

    def _choice(self, piece: Piece, finish_reason: str | None) -> Json:
        choice: Json = {
            "index": 0,
            "text": piece.text,
            "logprobs": self._logprobs(piece.logprobs) if piece.logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json:
        offsets = []
        for one in logprobs:
            offsets.append(self._offset)
            self._offset += len(one.text)
        return {
            "tokens": [one.text for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _body(self, choice: Json | None, usage: Json | None) -> Json:
        heading = self._heading
        body: Json = {
            "id": heading.id,
            "object": "text_completion",
            "created": heading.created,
            "model": heading.model,
            "choices": [] if choice is None else [choice],
        }
        if usage is not None:
            body["usage"] = usage
        return body


class ChatAnswer:
    """``/v1/chat/completions``: chat.completion and chat.completion.chunk objects."""

    def __init__(self, request: ParsedRequest, heading: Heading) -> None:
        self._request = request
        self._heading = heading

    def start(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""}, None, None)

    def piece(self, piece: Piece, usage: Json | None) -> Iterator[bytes]:
        yield self._chunk({"content": piece.text}, piece, usage)

    def end(self, outcome: Outcome) -> Iterator[bytes]:
        yield self._chunk({}, None, None, outcome.finish_reason)
        if self._request.include_usage:
            yield _event(self._body("chat.completion.chunk", None, outcome.usage()))
        yield sse.DONE

    def whole(self, piece: Piece, outcome: Outcome) -> bytes:
        choice: Json = {
            "index": 0,
            "message": {"role": "assistant", "content": piece.text},
            "logprobs": _chat_logprobs(piece.logprobs),
            "finish_reason": outcome.finish_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return msgspec.json.encode(self._body("chat.completion", choice, outcome.usage()))

    def _chunk(
        self, delta: Json, piece: Piece | None, usage: Json | None, finish_reason: str | None = None
    ) -> bytes:
        choice: Json = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if piece is not None:
            choice["logprobs"] = _chat_logprobs(piece.logprobs)
            if self._request.return_token_ids:
                choice["token_ids"] = piece.token_ids
        return _event(self._body("chat.completion.chunk", choice, usage))

    def _body(self, kind: str, choice: Json | None, usage: Json | None) -> Json:
        heading = self._heading
        body: Json = {
            "id": heading.id,
            "object": kind,
            "created": heading.created,
            "model": heading.model,
            "choices": [] if choice is None else [choice],
        }
        if usage is not None:
            body["usage"] = usage
        return body


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Json | None:
    if not logprobs:
        return None
    content: list[Json] = [
        {
            "token": one.text,
            "logprob": one.logprob,
            # A token that is part of a character has no text of its own.
            "bytes": None if "�" in one.text else list(one.text.encode()),
            "top_logprobs": [],
        }
        for one in logprobs
    ]
    return {"content": content}


class GenerateAnswer:
    """``/generate``: the seed's fields (R37) plus a timeline; events carry the new output,
    the last one the outcome."""

    def __init__(self, request: ParsedRequest, heading: Heading) -> None:
        self._request = request
        self._heading = heading

    def start(self) -> Iterator[bytes]:
        return iter(())

    def piece(self, piece: Piece, usage: Json | None) -> Iterator[bytes]:
        body = self._body(piece)
        if usage is not None:
            body["usage"] = usage
        yield _event(body)

    def end(self, outcome: Outcome) -> Iterator[bytes]:
        yield _event({**self._body(Piece("", [], [])), **self._outcome(outcome)})
        yield sse.DONE

    def whole(self, piece: Piece, outcome: Outcome) -> bytes:
        body: Json = {"logprobs": None, **self._body(piece), **self._outcome(outcome)}
        return msgspec.json.encode(body)

    def _body(self, piece: Piece) -> Json:
        body: Json = {
            "request_id": self._heading.id,
            "bootstrap_room": self._heading.room,
            "output": piece.text,
        }
        if self._request.sampling.logprobs:
            body["logprobs"] = [one.logprob for one in piece.logprobs]
        if self._request.return_token_ids:
            body["token_ids"] = piece.token_ids
        return body

    @staticmethod
    def _outcome(outcome: Outcome) -> Json:
        return {
            "finish_reason": outcome.finish_reason,
            "prompt_tokens": outcome.prompt_tokens,
            "completion_tokens": outcome.completion_tokens,
            "timeline": dict(outcome.timeline),
        }
