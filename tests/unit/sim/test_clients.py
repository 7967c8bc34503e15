"""What a client may get, and what is a violation."""

from __future__ import annotations

import attrs
import pytest

from pdcore.sim.clients import Outcome, expected_text, judge
from pdcore.sim.plan import Request

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
