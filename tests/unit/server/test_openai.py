"""Requests as clients write them. The table of mistakes is what a new user might send."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdcore.errors import InvalidRequest
from pdcore.server.openai import (
    Endpoint,
    ParsedRequest,
    SamplingDefaults,
    parse_request,
    read_key,
)
from pdcore.types import MAX_ID, SamplingParams

CHAT = Endpoint.CHAT
TEXT = Endpoint.COMPLETIONS
HELLO = [{"role": "user", "content": "hi"}]


def parse(endpoint: Endpoint, **fields: Any) -> ParsedRequest:
    return parse_request(endpoint, json.dumps(fields).encode())


# --- what works ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "means"),
    [
        ("text", "text"),
        (["text"], "text"),
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2]], (1, 2)),
    ],
)
def test_a_prompt_is_text_ids_or_a_list_of_one(prompt: object, means: object) -> None:
    """R33."""
    assert parse(TEXT, prompt=prompt).prompt == means


def test_defaults_are_greedy_and_sixteen_tokens_for_completions_only() -> None:
    assert parse(TEXT, prompt="x").sampling == SamplingParams(max_tokens=16)
    assert parse(Endpoint.GENERATE, prompt="x").sampling == SamplingParams()
    assert parse(CHAT, messages=HELLO).sampling == SamplingParams()


def test_every_supported_field_arrives() -> None:
    """D47a: the seed's /generate could pass no sampling parameter."""
    parsed = parse(
        Endpoint.GENERATE,
        prompt="x",
        model="m",
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[2],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
        logprobs=True,
        timeout=2.5,
    )
    assert parsed.sampling == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=MAX_ID,
        stop_token_ids=(2,),
        ignore_eos=True,
        logprobs=True,
    )
    assert parsed.stop == ("a", "b")
    assert (parsed.stream, parsed.include_usage, parsed.continuous_usage) == (True, True, True)
    assert (parsed.return_token_ids, parsed.timeout_s, parsed.model) == (True, 2.5, "m")


def test_explicit_nulls_mean_the_default() -> None:
    fields = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "logprobs")
    assert parse(TEXT, prompt="x", **dict.fromkeys(fields)) == parse(TEXT, prompt="x")


@pytest.mark.parametrize(
    ("sent", "means"),
    [
        ({"max_tokens": 4}, 4),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 6, "max_completion_tokens": 6}, 6),
    ],
)
def test_both_names_of_max_tokens(sent: dict[str, int], means: int) -> None:
    assert parse(CHAT, messages=HELLO, **sent).sampling.max_tokens == means


def test_top_k_minus_one_is_off() -> None:
    assert parse(TEXT, prompt="x", top_k=-1).sampling.top_k == 0


def test_a_chat_message_is_text_or_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parsed = parse(CHAT, messages=[{"role": "user", "content": parts, "name": "n"}])
    assert parsed.messages == ({"role": "user", "content": "ab", "name": "n"},)
    assert parse(CHAT, messages=HELLO, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    ("value", "wants"), [(False, False), (True, True), (0, True), (None, False)]
)
def test_completions_logprobs_zero_is_the_chosen_tokens(value: object, wants: bool) -> None:
    assert parse(TEXT, prompt="x", logprobs=value).sampling.logprobs is wants


def test_what_benchmark_clients_send_is_accepted() -> None:
    """guidellm, vllm bench and sglang bench, as recorded."""
    parse(
        CHAT,
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        max_completion_tokens=16,
        ignore_eos=True,
        stream=True,
        stop=None,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    parse(
        TEXT,
        model="m",
        prompt="x",
        repetition_penalty=1.0,
        max_tokens=16,
        logprobs=None,
        stream=True,
        stream_options={"include_usage": True},
        ignore_eos=True,
        temperature=0.0,
        best_of=1,
    )


def test_the_fields_of_pd_are_read() -> None:
    pd = parse(
        TEXT,
        prompt="x",
        bootstrap_room=5,
        attempt=7,
        bootstrap_host="h",
        bootstrap_port=1,
        prefill_instance="p:1",
        decode_instance="d:1",
        disagg_prefill_dp_rank=2,
        expires_at_s=10.5,
        remaining_s=3,
        replaces=6,
    ).pd
    assert (pd.bootstrap_room, pd.attempt, pd.replaces) == (5, 7, 6)
    assert (pd.bootstrap_host, pd.bootstrap_port) == ("h", 1)
    assert (pd.prefill_instance, pd.decode_instance) == ("p:1", "d:1")
    assert (pd.disagg_prefill_dp_rank, pd.expires_at_s, pd.remaining_s) == (2, 10.5, 3.0)


# --- what does not ------------------------------------------------------------------------

MISTAKES: list[tuple[Endpoint, object, str]] = [
    (TEXT, b"", "body: is not valid JSON"),
    (TEXT, b'{"prompt": "x"', "body: is not valid JSON"),
    (TEXT, b"\xff\xfe", "body: is not valid JSON"),
    (TEXT, b"[" * 50_000, "body: "),
    (TEXT, [], "body: expected object, got array"),
    (TEXT, {}, "prompt: is required"),
    (CHAT, {}, "messages: is required"),
    (TEXT, {"prompt": ""}, "prompt: is empty"),
    (TEXT, {"prompt": []}, "prompt: is empty"),
    (TEXT, {"prompt": [[]]}, "prompt: is empty"),
    (TEXT, {"prompt": None}, "prompt: expected str | array, got null"),
    (TEXT, {"prompt": 5}, "prompt: expected str | array, got int"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt: holds 2 prompts"),
    (TEXT, {"prompt": [[1], [2]]}, "prompt: holds 2 prompts"),
    (TEXT, {"prompt": [1, "a"]}, "prompt: holds 2 prompts"),
    (TEXT, {"prompt": [1.5]}, "prompt[0]: expected int"),
    (TEXT, {"prompt": "x", "messages": HELLO}, "messages: belongs to /v1/chat/completions"),
    (CHAT, {"prompt": "x", "messages": HELLO}, "prompt: belongs to /v1/completions"),
    (CHAT, {"messages": []}, "messages: must hold at least one message"),
    (CHAT, {"messages": "hi"}, "messages: expected array, got str"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role: is required"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: 'tool'"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content: is required"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]: is a 'image_url' part; only text",
    ),
    (CHAT, {"messages": HELLO, "logprobs": 1}, "logprobs: expected true or false"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs: is 2; only the chosen"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    (TEXT, {"prompt": "x", "logprobs": 5}, "logprobs: is 5; only the chosen token's"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens: expected int >= 1"),
    (TEXT, {"prompt": "x", "max_tokens": "9"}, "max_tokens: expected int | null, got str"),
    (TEXT, {"prompt": "x", "max_tokens": 1.5}, "max_tokens: expected int | null, got float"),
    (
        TEXT,
        {"prompt": "x", "max_tokens": 4, "max_completion_tokens": 5},
        "max_completion_tokens: contradicts max_tokens (4)",
    ),
    (TEXT, {"prompt": "x", "min_tokens": 17}, "min_tokens: is 17, more than max_tokens (16)"),
    (TEXT, {"prompt": "x", "temperature": -1}, "temperature: expected float >= 0"),
    (TEXT, b'{"prompt":"x","temperature":1e999}', "temperature: "),
    (TEXT, {"prompt": "x", "top_p": 0}, "top_p: expected float > 0"),
    (TEXT, {"prompt": "x", "top_p": 1.1}, "top_p: expected float <= 1"),
    (TEXT, {"prompt": "x", "top_k": -2}, "top_k: expected int >= -1"),
    (TEXT, {"prompt": "x", "seed": 1 << 64}, "seed: expected int <="),
    (TEXT, {"prompt": "x", "stop": ["a"] * 17}, "stop: has 17 strings, more than the 16"),
    (TEXT, {"prompt": "x", "stop": [""]}, "stop[0]: must have 1 to 256 characters"),
    (TEXT, {"prompt": "x", "stop": [1]}, "stop[0]: expected str, got int"),
    (TEXT, {"prompt": "x", "stop_token_ids": [1] * 65}, "stop_token_ids: has 65 ids"),
    (TEXT, {"prompt": "x", "stream": "yes"}, "stream: expected bool | null, got str"),
    (TEXT, {"prompt": "x", "stream_options": {}}, "stream_options: needs stream: true"),
    (
        TEXT,
        {"prompt": "x", "stream": True, "stream_options": {"usage": True}},
        "stream_options: object contains unknown field usage",
    ),
    (TEXT, {"prompt": "x", "timeout": 0}, "timeout: expected float > 0"),
    (TEXT, {"prompt": "x", "n": 2}, "n: is not supported"),
    (TEXT, {"prompt": "x", "max_token": 2}, "max_token: unknown field: did you mean"),
    (TEXT, {"prompt": "x", "bootstrap_room": 0}, "bootstrap_room: expected int >= 1"),
    (TEXT, {"prompt": "x", "bootstrap_room": 1 << 63}, "bootstrap_room: expected int <="),
    (TEXT, {"prompt": "x", "bootstrap_port": 70000}, "bootstrap_port: expected int <= 65535"),
]


@pytest.mark.parametrize(("endpoint", "body", "says"), MISTAKES)
def test_a_mistake_is_one_sentence_that_names_the_field(
    endpoint: Endpoint, body: object, says: str
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse_request(endpoint, data)
    text = str(caught.value)
    assert text.startswith(says)
    assert text.startswith(caught.value.field)
    assert "\n" not in text
    assert len(text) < 250


# --- what an instance adds ---------------------------------------------------------------------


WARM = SamplingDefaults(temperature=0.7, top_p=0.9, top_k=40, seed=11, max_new_tokens=8)


def sampled(endpoint: Endpoint, **fields: object) -> SamplingParams:
    body = {"messages": [{"role": "user", "content": "x"}]}
    asked = {**(body if endpoint is Endpoint.CHAT else {"prompt": "x"}), **fields}
    return parse_request(endpoint, json.dumps(asked).encode(), WARM).sampling


def check_defaults(sampled: Callable[..., SamplingParams]) -> None:
    for endpoint in Endpoint:
        got = sampled(endpoint)
        assert (got.temperature, got.top_p, got.top_k, got.seed) == (0.7, 0.9, 40, 11)
        said = sampled(endpoint, temperature=0, top_p=1, top_k=-1, seed=0)
        assert (said.temperature, said.top_p, said.top_k, said.seed) == (0.0, 1.0, 0, 0)


def test_what_a_request_does_not_say_is_the_instances() -> None:
    """D30, R17: ``data_config`` was accepted and changed nothing."""
    check_defaults(sampled)

    def mutant(endpoint: Endpoint, **fields: object) -> SamplingParams:
        return parse_request(endpoint, json.dumps({"prompt": "x", **fields}).encode()).sampling

    with pytest.raises(AssertionError):
        check_defaults(lambda endpoint, **fields: mutant(Endpoint.GENERATE, **fields))


def test_no_request_asks_for_more_than_max_new_tokens() -> None:
    """R18: one number for both roles, whatever else a worker could hold."""
    assert sampled(Endpoint.COMPLETIONS).max_tokens == 8, "the default of 16 is no request"
    assert sampled(Endpoint.CHAT).max_tokens is None
    assert sampled(Endpoint.GENERATE, max_tokens=8, min_tokens=8).max_tokens == 8
    for field in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(InvalidRequest, match=f"{field}: is 9, more than the 8"):
            sampled(Endpoint.GENERATE, **{field: 9})
    with pytest.raises(InvalidRequest, match="min_tokens: is 9"):
        sampled(Endpoint.CHAT, min_tokens=9)


def test_the_dispatch_is_read_from_a_body_whatever_else_is_wrong_with_it() -> None:
    assert read_key(b'{"x": [1], "attempt": 7, "temperature": "hot", "bootstrap_room": 5}') == (
        5,
        7,
    )
    deep = b'{"bootstrap_room": 5, "attempt": 7, "x": ' + b"[" * 100_000
    for body in (b"", b"[]", b'{"attempt": 7}', b'{"bootstrap_room": "5", "attempt": 7}', deep):
        assert read_key(body) is None
