"""Requests as clients write them, to one typed form; every mistake is a 400 naming its field.

Endpoints: ``/v1/completions`` and ``/v1/chat/completions`` in OpenAI's shape, ``/generate``
with the sampling fields beside ``prompt`` (D47a: the seed's could not pass any). ``prompt`` is
text, a list of token ids, or a list that holds one of these (R33). ``max_tokens`` defaults to
16 for completions (R33) and to what is left of the context elsewhere. ``temperature`` defaults
to 0, greedy (R33), so that two identical requests get the same answer; an instance may have
other defaults (:class:`SamplingDefaults`).

The fields of PD disaggregation (R31) travel beside them: the router adds them, instances
read them.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Final

import attrs
import msgspec

from pdcore.errors import InvalidRequest
from pdcore.server.fields import check_names
from pdcore.types import MAX_ID, RoomKey, SamplingParams

COMPLETIONS_MAX_TOKENS: Final = 16
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_MESSAGES: Final = 4096
_ROLES: Final = frozenset({"system", "developer", "user", "assistant"})

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Id63 = Annotated[int, msgspec.Meta(ge=1, le=MAX_ID)]


class Endpoint(enum.Enum):
    GENERATE = "/generate"
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class PdFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the router adds to both legs (R31, rule 8). ``expires_at_s`` is Unix time,
    ``remaining_s`` the budget of the leg's own timer. ``replaces`` is the attempt that this
    one takes the place of. Instances are the leaders' ``host:port``. ``local_prefill``: decode
    computes the prompt itself, and needs no bootstrap server."""

    bootstrap_room: Id63 | None = None
    attempt: Id63 | None = None
    bootstrap_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] | None = None
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    prefill_instance: Annotated[str, msgspec.Meta(max_length=300)] | None = None
    decode_instance: Annotated[str, msgspec.Meta(max_length=300)] | None = None
    disagg_prefill_dp_rank: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    expires_at_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    remaining_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    replaces: Id63 | None = None
    local_prefill: bool | None = None


class _Body(PdFields, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-MAX_ID - 1, le=MAX_ID)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    logprobs: bool | Count | None = None
    top_logprobs: Count | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None


class _PromptBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]]


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None


class _ChatBody(_Body, frozen=True, kw_only=True):
    messages: list[_Message]
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None


@attrs.frozen
class ParsedRequest:
    """One request. Exactly one of ``prompt`` (text or ids) and ``messages`` is set."""

    endpoint: Endpoint
    sampling: SamplingParams
    pd: PdFields
    model: str | None = None
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, object], ...] = ()
    chat_template_kwargs: dict[str, bool | int | float | str | None] = attrs.field(factory=dict)
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    timeout_s: float | None = None


@attrs.frozen
class SamplingDefaults:
    """What holds where a request says nothing (``data_config``), and ``max_new_tokens``, the
    most that it may ask for (None: what is left of the context)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_new_tokens: int | None = None


PLAIN: Final = SamplingDefaults()

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PROMPT: Final = msgspec.json.Decoder(_PromptBody)
_CHAT: Final = msgspec.json.Decoder(_ChatBody)
_PROMPT_NAMES: Final = frozenset(f.name for f in msgspec.structs.fields(_PromptBody))
_CHAT_NAMES: Final = frozenset(f.name for f in msgspec.structs.fields(_ChatBody))

_AT: Final = re.compile(r"^(?P<what>.*?) - at `(?P<key>key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"required field `([^`]+)`")


def decode_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object, values still encoded. Raises InvalidRequest."""
    try:
        return _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise explain(error) from None


def explain(error: Exception) -> InvalidRequest:
    """A decoding error in the client's words: the field, what was expected, what came."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequest("body", f"is not valid JSON: {text}")
    missing = _MISSING.search(text)
    found = _AT.match(text)
    path = found["path"] if found else ""
    if missing:
        return InvalidRequest(f"{path}.{missing[1]}".lstrip("."), "is required")
    what = (found["what"] if found else text).replace("`", "")
    return InvalidRequest(path or "body", what[:1].lower() + what[1:])


class _Key(msgspec.Struct):
    bootstrap_room: Id63
    attempt: Id63


def read_key(body: bytes) -> RoomKey | None:
    """The dispatch that a body names, whatever else is wrong with it; None if it names none."""
    try:
        key = msgspec.json.decode(body, type=_Key)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return RoomKey(key.bootstrap_room, key.attempt)


def parse_request(
    endpoint: Endpoint, body: bytes, defaults: SamplingDefaults = PLAIN
) -> ParsedRequest:
    """Decode and check one request. Raises InvalidRequest naming the field."""
    is_chat = endpoint is Endpoint.CHAT
    fields = decode_fields(body)
    if "messages" in fields and not is_chat:
        raise InvalidRequest("messages", f"belongs to {Endpoint.CHAT.value}; send prompt here")
    if "prompt" in fields and is_chat:
        raise InvalidRequest("prompt", f"belongs to {Endpoint.COMPLETIONS.value}; send messages")
    check_names(fields, _CHAT_NAMES if is_chat else _PROMPT_NAMES)
    try:
        decoded = _CHAT.decode(body) if is_chat else _PROMPT.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise explain(error) from None
    options = decoded.stream_options or StreamOptions()
    if decoded.stream_options is not None and not decoded.stream:
        raise InvalidRequest("stream_options", "needs stream: true")
    messages: tuple[dict[str, object], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    kwargs: dict[str, bool | int | float | str | None] = {}
    if isinstance(decoded, _ChatBody):
        messages = _messages(decoded.messages)
        kwargs = _template_kwargs(decoded)
    else:
        prompt = _prompt(decoded.prompt)
    return ParsedRequest(
        endpoint=endpoint,
        sampling=_sampling(endpoint, decoded, defaults),
        pd=decoded,
        model=decoded.model,
        prompt=prompt,
        messages=messages,
        chat_template_kwargs=kwargs,
        stop=_stops(decoded.stop),
        stream=bool(decoded.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        return_token_ids=bool(decoded.return_token_ids),
        timeout_s=decoded.timeout,
    )


# --- the parts ---------------------------------------------------------------------------


def _max_tokens(endpoint: Endpoint, body: _Body, most: int | None) -> int | None:
    """None: as much as may be."""
    field, max_tokens = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens is not None and max_tokens != body.max_completion_tokens:
            raise InvalidRequest(
                "max_completion_tokens", f"contradicts max_tokens ({max_tokens}): send one of them"
            )
        field, max_tokens = "max_completion_tokens", body.max_completion_tokens
    if max_tokens is None and endpoint is Endpoint.COMPLETIONS:
        return min(COMPLETIONS_MAX_TOKENS, most or COMPLETIONS_MAX_TOKENS)
    if max_tokens is not None and most is not None and max_tokens > most:
        raise InvalidRequest(field, f"is {max_tokens}, more than the {most} this instance gives")
    return max_tokens


def _sampling(endpoint: Endpoint, body: _Body, defaults: SamplingDefaults) -> SamplingParams:
    max_tokens = _max_tokens(endpoint, body, defaults.max_new_tokens)
    min_tokens = body.min_tokens or 0
    most = defaults.max_new_tokens if max_tokens is None else max_tokens
    if most is not None and min_tokens > most:
        raise InvalidRequest("min_tokens", f"is {min_tokens}, more than max_tokens ({most})")
    ids = body.stop_token_ids or []
    if len(ids) > MAX_STOP_TOKEN_IDS:
        limit = MAX_STOP_TOKEN_IDS
        raise InvalidRequest("stop_token_ids", f"has {len(ids)} ids, more than {limit}")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        seed=defaults.seed if body.seed is None else body.seed & MAX_ID,
        stop_token_ids=tuple(ids),
        ignore_eos=bool(body.ignore_eos),
        logprobs=_wants_logprobs(endpoint, body),
    )


def with_max_tokens(sampling: SamplingParams, most: int | None, left: int) -> SamplingParams:
    """Who does not say how many tokens gets ``most`` (None: as they are), or what is ``left``
    of the context. Raises InvalidRequest for ``min_tokens`` that do not fit."""
    if sampling.max_tokens is not None or most is None:
        return sampling
    if sampling.min_tokens > left:
        raise InvalidRequest(
            "min_tokens", f"is {sampling.min_tokens}, but the prompt leaves {left} tokens"
        )
    return attrs.evolve(sampling, max_tokens=min(most, left))


def _wants_logprobs(endpoint: Endpoint, body: _Body) -> bool:
    """The engine gives the logprob of the chosen token and no alternatives."""
    remedy = "only the chosen token's logprob is given, not alternatives: send"
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs", f"is {body.top_logprobs}; {remedy} 0")
    value = body.logprobs
    if isinstance(value, bool) or value is None:
        return bool(value)
    if endpoint is Endpoint.CHAT:
        raise InvalidRequest("logprobs", f"expected true or false, got {value}")
    if value > 0:
        raise InvalidRequest("logprobs", f"is {value}; {remedy} 0 or true")
    return True  # completions: 0 alternatives, but the chosen token's


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"has {len(stops)} strings, more than the {MAX_STOPS} allowed")
    for i, one in enumerate(stops):
        if not one or len(one) > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _prompt(prompt: str | list[int | str | list[int]]) -> str | tuple[int, ...]:
    """R33: text, ids, or a list of one of them; several prompts are several requests."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0] if isinstance(prompt[0], str) else list(prompt[0])
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("prompt", "is empty")
        return prompt
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    ids = [one for one in prompt if isinstance(one, int)]
    if len(ids) != len(prompt):
        raise InvalidRequest(
            "prompt",
            f"holds {len(prompt)} prompts: send one request for each, or one list of token ids",
        )
    return tuple(ids)


def _messages(messages: list[_Message]) -> tuple[dict[str, object], ...]:
    if not messages:
        raise InvalidRequest("messages", "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"has {len(messages)}, more than {MAX_MESSAGES}")
    result: list[dict[str, object]] = []
    for i, message in enumerate(messages):
        if message.role not in _ROLES:
            raise InvalidRequest(
                f"messages[{i}].role", f"{message.role!r} is not one of {', '.join(sorted(_ROLES))}"
            )
        one: dict[str, object] = {"role": message.role, "content": _content(i, message)}
        if message.name is not None:
            one["name"] = message.name
        result.append(one)
    return tuple(result)


def _content(i: int, message: _Message) -> str:
    content = message.content
    if content is None:
        raise InvalidRequest(f"messages[{i}].content", "is required")
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for k, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"messages[{i}].content[{k}]", f"is a {part.type!r} part; only text is supported"
            )
        texts.append(part.text)
    return "".join(texts)


def _template_kwargs(body: _ChatBody) -> dict[str, bool | int | float | str | None]:
    kwargs = body.chat_template_kwargs or {}
    for name in ("messages", "add_generation_prompt", "tokenize", "self"):
        if name in kwargs:
            raise InvalidRequest(f"chat_template_kwargs.{name}", "is set by the server")
    return kwargs
