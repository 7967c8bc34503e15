"""Sizes and escapes may only go down (docs/architecture.md, section 8)."""

from __future__ import annotations

import pytest

from tests.meta.ratchets import LIMITS, differences, measure, pins
from tests.meta.source import modules, parse


def test_nothing_grew_and_no_pin_is_stale() -> None:
    found = differences(measure(modules()), pins())
    assert not found, (
        "\n"
        + "\n".join(found)
        + "\nSmaller is better: fix what grew; `python -m tests.meta.ratchets --write` after"
        " something shrank. Raising a pin needs a page in docs/decisions."
    )


def counts(text: str, name: str = "pdcore.example") -> dict[str, int]:
    return {what: n for what, n in measure([parse(text, name)])["counts"].items() if n}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x: Any", "Any"),
        ("y = cast(int, x)", "cast"),
        ("y = typing.cast(int, x)", "cast"),
        ("try:\n    f()\nexcept Exception:\n    pass", "except Exception"),
        ("try:\n    f()\nexcept (OSError, BaseException):\n    pass", "except Exception"),
        ("try:\n    f()\nexcept:\n    pass", "except Exception"),
        ("with suppress(Exception):\n    f()", "except Exception"),
        ("getattr(x, 'y')", "getattr/hasattr"),
        ("hasattr(x, 'y')", "getattr/hasattr"),
        ("x = 1  # noqa: E501", "noqa"),
        ("os.environ['A']", "reads of the environment"),
        ("os.getenv('A')", "reads of the environment"),
        ("x = 1  # type: ignore[misc]", "type: ignore"),
    ],
)
def test_an_escape_is_counted(text: str, what: str) -> None:
    assert counts(text) == {what: 1}


@pytest.mark.parametrize(
    "text",
    ["# Any name", "'noqa'", "def __getattr__(self): ...", "try:\n f()\nexcept OSError: g()"],
)
def test_other_text_is_not_counted(text: str) -> None:
    assert counts(text) == {}


def test_the_environment_belongs_to_the_config_loader() -> None:
    assert counts("os.environ", "pdcore.config_loader") == {}


def over(text: str, kind: str, name: str = "pdcore.example") -> dict[str, int]:
    return measure([parse(text, name)])[f"over {kind}"]


def test_sizes_are_measured() -> None:
    body = "\n".join("    x = 1" for _ in range(LIMITS["function lines"]))
    assert over(f"def f():\n{body}", "function lines") == {"pdcore.example.f": 61}
    assert over(f"def f():\n    '''a\n    b'''\n{body[:-10]}", "function lines") == {}
    methods = "\n".join(f"    def m{n}(self): self.a{n} = 1" for n in range(16))
    assert over(f"class C:\n{methods}", "class methods") == {"pdcore.example.C": 16}
    assert over(f"class C:\n{methods}", "class attributes") == {"pdcore.example.C": 16}
    assert over("x = 1\n" * 401, "module lines") == {"pdcore.example": 401}


def test_frozen_value_types_and_config_may_have_many_fields() -> None:
    fields = "\n".join(f"    a{n}: int" for n in range(13))
    plain = f"@attrs.define\nclass C:\n{fields}"
    assert over(plain, "class attributes") == {"pdcore.example.C": 13}
    for head in ("@attrs.frozen\nclass C:", "@attrs.define(frozen=True)\nclass C:"):
        assert over(f"{head}\n{fields}", "class attributes") == {}
    assert over(f"class C(msgspec.Struct, frozen=True):\n{fields}", "class attributes") == {}
    assert over(f"class C(msgspec.Struct, frozen=False):\n{fields}", "class attributes")
    assert over(plain, "class attributes", "pdcore.config.limits") == {}


def test_a_pin_fails_in_both_directions() -> None:
    assert differences({"counts": {"Any": 3}}, {"counts": {"Any": 2}}) == [
        "counts: Any grew from 2 to 3"
    ]
    assert differences({"counts": {"Any": 1}}, {"counts": {"Any": 2}}) == [
        "counts: Any shrank from 2 to 1: tighten its pin"
    ]
    gone = differences({"over module lines": {}}, {"over module lines": {"pdcore.x": 410}})
    assert gone == ["over module lines: pdcore.x shrank from 410 to 0: tighten its pin"]
