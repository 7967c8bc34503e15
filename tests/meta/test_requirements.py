"""docs/requirements.md against the tests: what it says is tested is named by those tests."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.meta.source import ROOT, parse_quietly

TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
#: "D3/P2" is prefill tp 2 with decode tp 3, no number of a defect.
CITED = re.compile(r"\b([RD]\d{1,3})[ab]?\b(?!/P)")
IN_NAME = re.compile(r"(?<![a-z0-9])([rd]\d{1,3})[ab]?(?=_|$)")
NUM_DEFECTS = 61


class Row(NamedTuple):
    """One line of the page: its numbers, and what its last column says."""

    numbers: tuple[str, ...]
    status: str

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(re.findall(r"`([\w/]+\.py)`", self.status))

    @property
    def is_later(self) -> bool:
        return self.status.startswith("later: ")


def read(page: str) -> list[Row]:
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and re.match(r"[RD]\d", cells[0]):
            found.append(Row(numbers(cells[0]), cells[-1] if len(cells) > 2 else ""))
    return found


def numbers(cell: str) -> tuple[str, ...]:
    """ "R54, R55" and "R130-R141" in full."""
    found: list[str] = []
    for part in cell.split(", "):
        first, _, last = part.partition("-")
        found += (f"{first[0]}{n}" for n in range(int(first[1:]), int((last or first)[1:]) + 1))
    return tuple(found)


def named(text: str) -> frozenset[str]:
    """Numbers in the names and docstrings of the tests in a module, and in its own."""
    tree = parse_quietly(text)
    found = set(CITED.findall(ast.get_docstring(tree) or ""))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found |= set(CITED.findall(ast.get_docstring(node) or ""))
            found |= {number.upper() for number in IN_NAME.findall(node.name)}
    return frozenset(found)


@functools.cache
def named_by_file() -> dict[str, frozenset[str]]:
    """File below tests -> the numbers it names."""
    return {
        str(path.relative_to(TESTS)): named(path.read_text(encoding="utf-8"))
        for path in sorted(TESTS.rglob("*.py"))
        if "meta" not in path.parts or path.name != Path(__file__).name
    }


def complaints(rows: list[Row], files: dict[str, frozenset[str]]) -> list[str]:
    """What the page says and the tests do not bear out."""
    found = []
    anywhere = frozenset().union(*files.values())
    for row in rows:
        for number in row.numbers:
            if row.is_later:
                continue
            if row.files:
                naming = [file for file in row.files if number in files.get(file, frozenset())]
                if not naming:
                    found.append(f"{number}: {' and '.join(row.files)} do not name it")
            elif number.startswith("D") or row.status != "built":
                found.append(f"{number}: neither a test, nor later with its reason")
            elif number in anywhere:
                found.append(f"{number}: a test names it, the page should")
    return found


def test_the_page_and_the_tests_agree() -> None:
    """D61: a document promises nothing that no test holds."""
    rows = read(PAGE)
    defects = [number for row in rows for number in row.numbers if number.startswith("D")]
    assert defects == [f"D{n}" for n in range(1, NUM_DEFECTS + 1)]
    found = complaints(rows, named_by_file())
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("| D1 | a | b | |", "D1: neither a test, nor later with its reason"),
        ("| D1 | a | b | built |", "D1: neither a test, nor later with its reason"),
        ("| D1 | a | b | later |", "D1: neither a test, nor later with its reason"),
        ("| D1 | a | b | `x.py` |", "D1: x.py do not name it"),
        ("| D1 | a | b | `gone.py` |", "D1: gone.py do not name it"),
        ("| R2 | a | |", "R2: neither a test, nor later with its reason"),
        ("| R3 | a | built |", "R3: a test names it, the page should"),
    ],
)
def test_a_promise_without_a_test_is_found(line: str, said: str) -> None:
    """D61, as the earlier documents were: a claim that nothing holds."""
    assert complaints(read(line), {"x.py": frozenset({"D2", "R3"})}) == [said]


@pytest.mark.parametrize(
    "line",
    [
        "| D2 | a | b | `x.py` |",
        "| D5 | a | b | later: no groups |",
        "| R7 | a | built |",
        "| R5, R8-R9 | a | later: no groups |",
    ],
)
def test_what_is_borne_out_passes(line: str) -> None:
    assert complaints(read(line), {"x.py": frozenset({"D2", "R3"})}) == []


def test_where_a_number_counts() -> None:
    text = (
        'def test_d3_x() -> None:\n    """R70: all."""\n    "D9"\n'
        '# D8\ndef kit() -> None:\n    """D2/P3"""'
    )
    assert named(text) == {"D3", "R70"}
