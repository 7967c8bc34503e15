"""Known, unsupported, misspelt and unknown field names."""

from __future__ import annotations

import msgspec
import pytest

from pdcore.errors import InvalidRequest
from pdcore.server.fields import NEUTRAL, WITHOUT_EFFECT, check_names

KNOWN = ("prompt", "max_tokens", "temperature", "stream")


def check(**fields: object) -> None:
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    check_names(raw, KNOWN)


def test_an_unsupported_field_is_accepted_with_every_value_that_changes_nothing() -> None:
    for name, values in NEUTRAL.items():
        for value in (*values, None):
            check(**{name: value})
    check(repetition_penalty=1.0, presence_penalty=0.0)
    for name in WITHOUT_EFFECT:
        check(**{name: {"any": "thing"}})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("n", 2, "n: is not supported: leave it out or send 1"),
        ("best_of", 3, "best_of: is not supported"),
        ("echo", True, "echo: is not supported: leave it out or send false"),
        ("suffix", "x", "suffix: is not supported"),
        ("logit_bias", {"5": 1}, "logit_bias: is not supported"),
        ("tools", [{"type": "function"}], "tools: is not supported"),
        ("response_format", {"type": "json_object"}, "response_format: is not supported"),
        ("presence_penalty", 0.5, "presence_penalty: is not supported: leave it out or send 0"),
        ("guided_json", {}, "guided_json: is not supported: leave it out"),
    ],
)
def test_any_other_value_is_refused_by_name(name: str, value: object, says: str) -> None:
    """D47a: n and stop were accepted and ignored."""
    with pytest.raises(InvalidRequest) as caught:
        check(**{name: value})
    assert str(caught.value).startswith(says)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("streem", "stream")],
)
def test_a_misspelt_field_is_refused_with_the_suggestion(typo: str, meant: str) -> None:
    """D47a: unknown fields were dropped silently."""
    with pytest.raises(InvalidRequest, match=f"did you mean '{meant}'"):
        check(**{typo: 1})


def test_a_name_like_no_other_is_ignored() -> None:
    check(x_trace_id="abc", cache_salt="s", **{"k" * 100: 1})


def test_the_number_of_names_is_bounded() -> None:
    """Each unknown name is compared with all known ones: not a hundred thousand of them."""
    with pytest.raises(InvalidRequest, match="129 fields"):
        check(**{f"zz{i}": 1 for i in range(129)})
