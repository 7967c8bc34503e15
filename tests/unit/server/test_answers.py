"""Response shapes: OpenAI's, and the seed's for /generate (R37)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pdcore.server.answers import Heading, Outcome, answer_for, running_usage
from pdcore.server.openai import Endpoint, ParsedRequest, parse_request
from pdcore.server.text import Piece, TokenLogprob

HEADING = Heading("cmpl-00000007", "tiny", 1_800_000_000, 5)
OUTCOME = Outcome("length", 3, 2, {"queue": 0.5})
PIECE = Piece("hi", [104, 105], [TokenLogprob(104, "h", -0.5), TokenLogprob(105, "i", -1.0)])
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def parsed(endpoint: Endpoint, **fields: Any) -> ParsedRequest:
    if endpoint is Endpoint.CHAT:
        fields["messages"] = [{"role": "user", "content": "x"}]
    else:
        fields["prompt"] = "x"
    return parse_request(endpoint, json.dumps(fields).encode())


def events(parts: Iterable[bytes]) -> list[Any]:
    found: list[Any] = []
    for part in b"".join(parts).decode().split("\n\n")[:-1]:
        data = part.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def test_a_completion() -> None:
    request = parsed(Endpoint.COMPLETIONS, logprobs=True, return_token_ids=True)
    body = json.loads(answer_for(request, HEADING).whole(PIECE, OUTCOME))
    assert body == {
        "id": "cmpl-00000007",
        "object": "text_completion",
        "created": 1_800_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "hi",
                "logprobs": {
                    "tokens": ["h", "i"],
                    "token_logprobs": [-0.5, -1.0],
                    "top_logprobs": None,
                    "text_offset": [0, 1],
                },
                "finish_reason": "length",
                "token_ids": [104, 105],
            }
        ],
        "usage": USAGE,
    }


def test_a_completion_stream_ends_with_reason_usage_and_done() -> None:
    request = parsed(
        Endpoint.COMPLETIONS, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    answer = answer_for(request, HEADING)
    found = events([*answer.start(), *answer.piece(PIECE, None), *answer.piece(PIECE, None)])
    assert [one["choices"][0]["text"] for one in found] == ["hi", "hi"]
    assert [one["choices"][0]["logprobs"]["text_offset"] for one in found] == [[0, 1], [2, 3]]
    assert all(one["choices"][0]["finish_reason"] is None for one in found)
    last = events(answer.end(OUTCOME))
    assert last[0]["choices"][0]["finish_reason"] == "length"
    assert (last[1]["choices"], last[1]["usage"]) == ([], USAGE)
    assert last[2] == "[DONE]"


def test_a_chat_completion() -> None:
    request = parsed(Endpoint.CHAT, logprobs=True, return_token_ids=True)
    piece = PIECE._replace(logprobs=[*PIECE.logprobs, TokenLogprob(200, "�", -2.0)])
    body = json.loads(answer_for(request, HEADING).whole(piece, OUTCOME))
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hi"}
    assert choice["logprobs"]["content"][0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [],
    }
    assert choice["logprobs"]["content"][2]["bytes"] is None
    assert choice["token_ids"] == [104, 105]
    assert body["usage"] == USAGE


def test_a_chat_stream_begins_with_the_role_and_has_no_usage_unless_asked() -> None:
    request = parsed(Endpoint.CHAT, stream=True)
    answer = answer_for(request, HEADING)
    found = events([*answer.start(), *answer.piece(PIECE, None), *answer.end(OUTCOME)])
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert found[1]["choices"][0]["delta"] == {"content": "hi"}
    assert found[2]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "length"}
    assert found[3] == "[DONE]"
    assert all("usage" not in one for one in found[:3])
    assert {one["object"] for one in found[:3]} == {"chat.completion.chunk"}


def test_generate_has_the_seeds_fields_and_a_timeline() -> None:
    """R37, R32."""
    body = json.loads(answer_for(parsed(Endpoint.GENERATE), HEADING).whole(PIECE, OUTCOME))
    assert body == {
        "request_id": "cmpl-00000007",
        "bootstrap_room": 5,
        "output": "hi",
        "logprobs": None,
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "timeline": {"queue": 0.5},
    }
    request = parsed(Endpoint.GENERATE, logprobs=True, return_token_ids=True, stream=True)
    answer = answer_for(request, HEADING)
    found = events([*answer.piece(PIECE, None), *answer.end(OUTCOME)])
    assert (found[0]["output"], found[0]["logprobs"]) == ("hi", [-0.5, -1.0])
    assert found[0]["token_ids"] == [104, 105]
    assert (found[1]["finish_reason"], found[1]["timeline"]) == ("length", {"queue": 0.5})
    assert found[2] == "[DONE]"


def test_usage_so_far_is_in_every_event_when_asked() -> None:
    for endpoint in Endpoint:
        request = parsed(endpoint, stream=True, stream_options={"continuous_usage_stats": True})
        answer = answer_for(request, HEADING)
        (one,) = events(answer.piece(PIECE, running_usage(3, 2)))
        assert one["usage"] == USAGE
