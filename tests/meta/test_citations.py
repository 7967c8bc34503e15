"""A defect that the code claims to prevent has a test that names it.

Numbers in pages and docstrings (D3, R70) are those of the requirements the project was
written from; docs/requirements.md says in one line what each one means.
"""

from __future__ import annotations

import re

from tests.meta.source import ROOT, modules

NUMBER = re.compile(r"\bD(\d{1,2})[ab]?\b")


def numbers(text: str) -> set[str]:
    return {f"D{n}" for n in NUMBER.findall(text)}


def test_every_defect_named_in_the_source_is_named_in_a_test() -> None:
    tests = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "tests").rglob("*.py")
        if "meta" not in path.parts
    ]
    tested = numbers("\n".join(tests))
    claims: dict[str, list[str]] = {}
    for module in modules():
        for number in numbers(module.text) - tested:
            claims.setdefault(number, []).append(module.name)
    assert not claims, f"claimed in the source, named by no test: {dict(sorted(claims.items()))}"
