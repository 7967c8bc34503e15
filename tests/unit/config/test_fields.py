"""Numbers, choices, texts and flags refuse what is not one, naming the field."""

from __future__ import annotations

import math

import attrs
import pytest

from pdcore.config.fields import (
    bounded,
    choice,
    flag,
    optional_int,
    optional_share,
    optional_text,
    port,
    text,
)


@attrs.frozen
class Sample:
    count: int = bounded(3, "blocks", "why", low=1, high=9, seed="7")
    delay_s: float = bounded(0.5, "s", "why", low=0)
    limit: int | None = optional_int("tokens", "none: all", low=1)
    share: float | None = optional_share("of memory")
    word: str = choice("a", ("a", "b"), "why")
    name: str = text("", "why")
    needed: str = text("x", "why", is_required=True)
    path: str | None = optional_text("none: the default")
    is_on: bool = flag(False, "why")
    http_port: int = port(8000, "why")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("count", 0, "count must be between 1 and 9 blocks, got 0"),
        ("count", 10, "count must be between 1 and 9 blocks, got 10"),
        ("count", 2.0, "count must be an integer, got 2.0"),
        ("count", True, "count must be an integer, got True"),
        ("count", None, "count must be an integer, got None"),
        ("delay_s", -1, "delay_s must be >= 0 s, got -1"),
        ("delay_s", math.nan, "delay_s must be >= 0 s, got nan"),
        ("delay_s", math.inf, "delay_s must be >= 0 s, got inf"),
        ("delay_s", "1", "delay_s must be a number, got '1'"),
        ("limit", 0, "limit must be >= 1 tokens, got 0"),
        ("share", 1.5, "share must be between 0.01 and 1, got 1.5"),
        ("word", "c", "word must be one of a, b, got 'c'"),
        ("name", 5, "name must be text, got 5"),
        ("needed", " ", "needed must not be empty"),
        ("path", "", "path must be text that is not empty, got ''"),
        ("is_on", 1, "is_on must be true or false, got 1"),
        ("http_port", 70_000, "http_port must be between 0 and 65535, got 70000"),
    ],
)
def test_a_wrong_value_is_named_with_field_range_and_value(
    field: str, value: object, text: str
) -> None:
    with pytest.raises(ValueError) as error:
        Sample(**{field: value})
    assert str(error.value) == text


def test_what_is_right_is_taken() -> None:
    """D44: port 0 is a legal port to bind."""
    sample = Sample(count=9, delay_s=2, limit=None, share=1, word="b", http_port=0)
    assert sample.http_port == 0
    assert sample.delay_s == 2


def test_metadata_feeds_the_constants_table() -> None:
    meta = attrs.fields_dict(Sample)["count"].metadata
    assert dict(meta) == {"unit": "blocks", "reason": "why", "seed": "7", "allowed": "1 to 9"}
