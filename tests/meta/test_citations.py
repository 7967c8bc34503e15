"""A defect that the code claims to prevent has a test that names it.

Numbers in pages and docstrings (D3, R70) are those of the requirements the project was
written from; docs/requirements.md says in one line what each one means.
"""

from __future__ import annotations

import re

from tests.meta.source import ROOT, modules

NUMBER = re.compile(r"\bD(\d{1,2})[ab]?\b")


PAGE = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
CITED = re.compile(r"\b([RD]\d{1,3})[ab]?\b")


def explained() -> set[str]:
    """Every number the page explains; "R130-R141" in its first column means all of them."""
    found: set[str] = set()
    for cell in re.findall(r"^\| ([RD]\d[^|]*) \|", PAGE, re.MULTILINE):
        for part in cell.split(", "):
            first, _, last = part.partition("-")
            end = int((last or first)[1:])
            found |= {f"{first[0]}{n}" for n in range(int(first[1:]), end + 1)}
    return found


def test_every_number_cited_is_explained() -> None:
    """A reader of the source never meets a number that leads nowhere."""
    known = explained()
    assert {"R1", "R55", "R135", "D1", "D61"} <= known
    unknown = {
        f"{module.name}: {number}"
        for module in modules()
        for number in CITED.findall(module.text)
        if number not in known
    }
    assert not unknown, f"not in docs/requirements.md: {sorted(unknown)}"


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
