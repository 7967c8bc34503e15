"""Text and stop strings in the leader."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import InvalidRequest
from pdcore.server.pending import NewTokens
from pdcore.server.text import IdDetokenizer, IdTokenizer, OutputText, StopStrings, TextModel
from tests.unit.server.kit import TEXT

LETTERS = st.text("ab", max_size=24)


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    filter_ = StopStrings(stops)
    out = "".join(filter_.feed(piece) for piece in pieces)
    return out if filter_.has_stopped else out + filter_.finish(), filter_.has_stopped


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """Letter by letter: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    LETTERS,
    st.lists(st.integers(0, 24), max_size=6),
)
def test_the_cut_does_not_depend_on_the_pieces(stops: list[str], text: str, at: list[int]) -> None:
    edges = [0, *sorted(min(a, len(text)) for a in at), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert feed(stops, pieces) == reference(stops, text)
    assert feed(stops, [text]) == reference(stops, text)


def test_what_might_be_a_stop_string_is_held_back() -> None:
    filter_ = StopStrings(["END"])
    assert filter_.feed("a E") == "a "
    assert filter_.feed("N") == ""
    assert filter_.feed("x") == "ENx"
    assert filter_.feed("EN") == ""
    assert filter_.finish() == "EN"
    assert filter_.feed("END!") == ""
    assert filter_.has_stopped
    assert filter_.feed("more") == ""


def test_tokens_up_to_the_one_that_stops_are_counted() -> None:
    output = OutputText(TEXT, ["lo"])
    piece = output.push(NewTokens(list(b"hello you"), []))
    assert (piece.text, piece.token_ids) == ("hel", list(b"hello"))
    assert output.has_stopped
    assert output.num_tokens == 5
    assert output.finish() == ""


def test_stop_strings_wait_for_min_tokens() -> None:
    output = OutputText(TEXT, ["a"], min_tokens=3)
    assert output.push(NewTokens(list(b"aab"), [])).text == "aab"
    assert not output.has_stopped
    assert output.push(NewTokens(list(b"ca"), [])).text == "c"
    assert output.has_stopped


def test_an_incomplete_character_is_held_back() -> None:
    output = OutputText(TEXT, [])
    euro = list("€".encode())
    assert output.push(NewTokens(euro[:2], [])).text == ""
    assert output.push(NewTokens(euro[2:], [])).text == "€"
    assert output.push(NewTokens(euro[:1], [])).text == ""
    assert output.finish() == "�"


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, math.inf, None])
def test_a_logprob_that_json_cannot_hold_becomes_the_lowest(logprob: float | None) -> None:
    """R37: minus the largest float32."""
    output = OutputText(TEXT, [])
    piece = output.push(NewTokens([97, 98, 99], [-0.25, logprob, 0.0]))
    values = [one.logprob for one in piece.logprobs]
    assert values == [-0.25, -3.4028234663852886e38, 0.0]
    assert [one.text for one in piece.logprobs] == ["a", "b", "c"]


def test_a_model_without_vocabulary_speaks_ids() -> None:
    assert IdTokenizer().encode(" 1 22  3 ") == [1, 22, 3]
    for wrong in ("1 two", "-1", "1.5", "²"):
        with pytest.raises(InvalidRequest, match="token ids"):
            IdTokenizer().encode(wrong)
    with pytest.raises(InvalidRequest, match="messages"):
        IdTokenizer().render_chat([])
    output = OutputText(TextModel("sim", IdTokenizer(), IdDetokenizer), [])
    assert output.push(NewTokens([5, 6], [])).text + output.finish() == "5 6 "
