"""What a client may get, and what is a violation."""

from __future__ import annotations

from collections.abc import AsyncIterator

import attrs
import pytest
from starlette.responses import Response, StreamingResponse

from pdcore.sim.clients import Outcome, ask, expected_text, judge
from pdcore.sim.cluster import ROUTER, Cluster
from pdcore.sim.plan import Request, make_plan
from pdcore.sim.world import in_world

REQUEST = Request(0, 0.0, "/v1/completions", (5, 6, 7), 3, True, 2.0, None, None)


def outcome(
    *,
    ended_s: float | None = 10.5,
    status: int = 200,
    code: str = "",
    text: str | None = None,
    lost: str = "",
    problems: tuple[str, ...] = (),
) -> Outcome:
    given = expected_text(REQUEST) if text is None else text
    return Outcome(REQUEST, 10.0, ended_s, status, code, given, True, lost, problems=list(problems))


def test_right_tokens_in_time_are_right() -> None:
    assert judge(outcome(), [], 0.0) == []


def test_a_seeded_request_has_tokens_of_its_own() -> None:
    assert expected_text(attrs.evolve(REQUEST, seed=9)) != expected_text(REQUEST)


def test_a_precise_error_is_right_and_may_follow_some_tokens() -> None:
    text = expected_text(REQUEST).partition(" ")[0] + " "
    assert judge(outcome(status=200, code="peer_lost", text=text), [], 0.0) == []
    assert judge(outcome(status=503, code="unavailable", text=""), [], 0.0) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (outcome(ended_s=None), "has no end"),
        (outcome(text="1 2 3 "), "expected"),
        (outcome(text=""), "got only"),
        (outcome(ended_s=16.0), "deadline"),
        (outcome(lost="reset", status=0), "the router lives"),
        (outcome(status=503, text=""), "no reason given"),
        (outcome(problems=("the stream ended without [DONE]",)), "DONE"),
    ],
)
def test_anything_else_is_a_violation(seen: Outcome, words: str) -> None:
    found = judge(seen, [], 0.0)
    assert len(found) == 1
    assert words in found[0]


def test_a_broken_connection_is_excused_while_the_router_was_down() -> None:
    lost = outcome(lost="reset", status=0)
    assert judge(lost, [(10.2, 11.0)], 0.0) == []
    assert judge(lost, [(11.0, 12.0)], 0.0) != []


def test_an_answer_may_be_as_late_as_processes_stood_still() -> None:
    late = outcome(ended_s=16.0)
    assert judge(late, [], 0.0) != []
    assert judge(late, [], 2.0) == []


def test_what_came_before_a_connection_broke_or_a_client_left_is_judged_too() -> None:
    """D5: wrong tokens are wrong tokens, whatever happens after them."""
    was_down = [(10.2, 11.0)]
    assert judge(outcome(lost="reset", status=200, text="1 "), was_down, 0.0) != []
    gone = outcome(text="1 ")
    gone.has_left = True
    assert judge(gone, [], 0.0) != []
    gone.text = expected_text(REQUEST).partition(" ")[0] + " "
    assert judge(gone, [], 0.0) == []


def test_a_deadline_that_has_not_come_is_no_reason() -> None:
    early = outcome(status=504, code="deadline_exceeded", text="")
    assert "it had 2.000 s" in judge(early, [], 0.0)[0]
    assert judge(attrs.evolve(early, ended_s=12.1), [], 0.0) == []


@pytest.mark.parametrize("code", ["unavailable", "peer_lost", "transfer_failed", "cancelled"])
def test_before_anything_went_wrong_only_the_load_may_fail_a_request(code: str) -> None:
    """A cluster that refuses healthy requests precisely is broken all the same."""
    seen = outcome(status=503, code=code, text="")
    assert judge(seen, [], 0.0) == []
    assert "nothing had gone wrong" in judge(seen, [], 0.0, is_calm=True)[0]
    assert judge(outcome(status=429, code="overloaded", text=""), [], 0.0, is_calm=True) == []


ERROR = b'{"error": {"code": "unavailable", "message": "no"}}'
GOOD = b'{"output": ""}'


def stream_of(events: list[bytes]) -> StreamingResponse:
    async def told() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    return StreamingResponse(told(), media_type="text/event-stream")


@pytest.mark.parametrize(
    ("answer", "is_streamed", "words"),
    [
        (Response(ERROR, 200, media_type="application/json"), False, "status 200 for"),
        (Response(ERROR, 502, media_type="application/json"), True, "status 502 for"),
        (Response(ERROR, 503, media_type="application/json"), True, ""),
        (Response(GOOD, 200, media_type="application/json"), True, "asked for and not given"),
        ([b"data: [DONE]\n\n"], False, "was not asked for"),
        ([b"data: " + ERROR + b"\n\n"], True, ""),
        ([b"data: [DONE]\n\n", b"data: " + GOOD + b"\n\n"], True, "after its end"),
        ([b"data: " + ERROR + b"\n\n", b"data: [DONE]\n\n"], True, "after its end"),
        ([b"data: " + GOOD + b"\n\n"], True, "without [DONE]"),
    ],
)
def test_the_form_of_an_answer_is_judged(
    answer: Response | list[bytes], is_streamed: bool, words: str
) -> None:
    """A router that answers like this in place of the product's."""

    async def scenario(cluster: Cluster) -> list[str]:
        app = answer if isinstance(answer, Response) else stream_of(answer)
        cluster.site.wire.listen(ROUTER, cluster.router.process, app)
        return (await ask(cluster, attrs.evolve(REQUEST, is_streamed=is_streamed))).problems

    found = in_world(make_plan(1), scenario)
    assert (words in found[0]) if words else found == []
