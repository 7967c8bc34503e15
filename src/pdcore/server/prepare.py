"""A parsed request, checked against this instance and made into the worker's form of it.

What both legs refuse they refuse alike, so that whichever answers first says the same: another
model, a prompt that is too long, tokens that do not fit (R35, R36, R66).
"""

from __future__ import annotations

import asyncio
from typing import Final

import attrs
import msgspec

from pdcore.clock import Clock
from pdcore.control.messages import WorkerReady
from pdcore.errors import InvalidRequest, failure
from pdcore.scheduler.topologies import bracket
from pdcore.server.dispatcher import Dispatcher
from pdcore.server.openai import (
    PLAIN,
    Endpoint,
    ParsedRequest,
    PdFields,
    SamplingDefaults,
    with_max_tokens,
)
from pdcore.server.pending import Refused
from pdcore.server.text import TextModel
from pdcore.topology import choose_dp_rank
from pdcore.types import GenerateRequest, Role, RoomKey, SamplingParams

#: Longer texts are rendered and encoded in a thread, so that the event loop goes on serving.
_LONG_TEXT_CHARS: Final = 2048

_PREFIX = {Endpoint.GENERATE: "gen-", Endpoint.COMPLETIONS: "cmpl-", Endpoint.CHAT: "chatcmpl-"}
_REQUIRED = ("bootstrap_room", "bootstrap_host", "bootstrap_port", "attempt")
_REQUIRED_LOCAL = ("bootstrap_room", "attempt")
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@attrs.frozen
class LegOptions:
    """What an instance's endpoints need to know. ``instance`` is the leader's advertised
    ``host:port``. ``allowed_bootstraps`` are ``host:port`` or ``[v6]:port`` a decode instance
    may ask; empty: any on its own host, given by ``local_hosts`` besides loopback (D41).
    ``sampling`` must be the same on both roles: prefill draws the first token, decode the
    others."""

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
            raise Refused(failure("model_not_found", why), "model")
        pd = parsed.pd
        key = self._key(pd)
        # An instance that takes nothing says so before it encodes anything.
        self._dispatcher.workers.route(None, lambda rank: 0)
        dp_rank = pd.disagg_prefill_dp_rank
        if self._options.role is Role.PREFILL:
            # Where it was not named decode finds the same one, once it has our route (R60).
            dp_rank = choose_dp_rank(key.room, self._dispatcher.workers.dp_size, dp_rank)
        ids = await self._encode(parsed)
        timeout_s = parsed.timeout_s or self._options.request_timeout_s
        remaining_s = timeout_s if pd.remaining_s is None else pd.remaining_s
        is_local = bool(pd.local_prefill)
        return GenerateRequest(
            key=key,
            request_id=f"{_PREFIX[parsed.endpoint]}{key.attempt:016x}",
            prompt_token_ids=ids,
            sampling=self._check_lengths(parsed, ids),
            expires_at_s=pd.expires_at_s or self._clock.unix() + remaining_s,
            remaining_s=remaining_s,
            bootstrap="" if is_local else f"{bracket(pd.bootstrap_host or '')}:{pd.bootstrap_port}",
            prefill=pd.prefill_instance or "",
            decode=pd.decode_instance or "",
            prefill_dp_rank=dp_rank,
            replaces=pd.replaces,
            is_local=is_local,
        )

    def _key(self, pd: PdFields) -> RoomKey:
        """R35: room, host and port of the bootstrap, and the attempt, each named if missing.
        A local prefill needs no bootstrap server."""
        fields = msgspec.structs.asdict(pd)
        if pd.local_prefill and self._options.role is Role.PREFILL:
            raise InvalidRequest("local_prefill", "is for decode instances: leave it out")
        for name in _REQUIRED_LOCAL if pd.local_prefill else _REQUIRED:
            if fields[name] is None:
                raise InvalidRequest(
                    name,
                    f"is required by a {self._options.role.value} instance: send the request "
                    "to the router, which adds it",
                )
        if pd.local_prefill:
            return RoomKey(pd.bootstrap_room or 0, pd.attempt or 0)
        host, port = pd.bootstrap_host or "", pd.bootstrap_port or 0
        if self._options.role is Role.DECODE and not self._may_ask(host, port):
            raise InvalidRequest(
                "bootstrap_host",
                f"{bracket(host)}:{port} is not one of this instance's allowed bootstrap servers",
            )
        return RoomKey(pd.bootstrap_room or 0, pd.attempt or 0)

    def _may_ask(self, host: str, port: int) -> bool:
        if self._options.allowed_bootstraps:
            return f"{bracket(host)}:{port}" in self._options.allowed_bootstraps
        return host in _LOOPBACK or host in self._options.local_hosts

    async def _encode(self, parsed: ParsedRequest) -> tuple[int, ...]:
        field = _prompt_field(parsed)
        if isinstance(parsed.prompt, tuple):
            ids = parsed.prompt
        elif isinstance(parsed.prompt, str):
            ids = await self._ids(parsed.prompt, field)
        else:
            ids = await self._ids(await self._render(parsed), field)
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

    async def _ids(self, text: str, field: str) -> tuple[int, ...]:
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
                raise Refused(failure("prompt_too_long", why), field)
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
            raise Refused(failure("prompt_too_long", why), _prompt_field(parsed))
        left = limits.max_model_len - len(ids)
        wanted = parsed.sampling.max_tokens
        if wanted is not None and wanted > left:
            raise InvalidRequest(
                "max_tokens",
                f"is {wanted}, but a prompt of {len(ids)} tokens leaves {left} of the model's "
                f"{limits.max_model_len}",
            )
        return with_max_tokens(parsed.sampling, self._options.sampling.max_new_tokens, left)


def _prompt_field(parsed: ParsedRequest) -> str:
    return "messages" if parsed.prompt is None else "prompt"


def _longest(limits: WorkerReady) -> int:
    """Tokens of the longest prompt: one more must still fit behind it."""
    return min(limits.max_prefill_tokens, limits.max_model_len - 1)
