"""docs/public-reports.md against the tests: every report has a test whose docstring names it.

A row is ``| reports | what pdcore does | shown by |``. The first cell lists reports by project
and number ("vllm #46283, PR #46289"; in a section that is headed by one project, its name may
be left out); the last names tests as ``file below tests::test``, or says "later" and why.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import NamedTuple

import pytest

from tests.meta.source import ROOT, parse_quietly

TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "public-reports.md").read_text(encoding="utf-8")
#: The last word of a report: a number with its kind, or a name such as CVE-2025-32444.
NUMBER = re.compile(r"(?:PR |[A-Z]{1,2})?#?(\d{2,6})")
SHOWN = re.compile(r"`([\w/]+\.py)::(\w+)`")


class Report(NamedTuple):
    """One report: ``project`` in lower case, ``mark`` what a docstring must contain."""

    project: str
    mark: str


class Row(NamedTuple):
    reports: tuple[Report, ...]
    does: str
    shown: str

    @property
    def tests(self) -> tuple[tuple[str, str], ...]:
        return tuple(SHOWN.findall(self.shown))

    @property
    def is_later(self) -> bool:
        return re.search(r"(?:^|; )later: \w", self.shown) is not None


def reports_in(cell: str, project: str) -> tuple[Report, ...]:
    """ "SGLang I24527, PR24580, 27372; nixl I795": the project holds until another is named.
    A report without a number ("Mooncake partial batch") is its own words."""
    found = []
    for item in re.split(r"[,;] ", cell):
        numbered = re.fullmatch(rf"(?:([\w./-]+) )?{NUMBER.pattern}", item)
        if numbered is None:
            project = item.split()[0].lower()
            found.append(Report(project, item.lower()))
            continue
        named, number = numbered.groups()
        if named is not None and named != "PR":
            project = named.lower()
        found.append(Report(project, number))
    return tuple(found)


def read(page: str) -> list[Row]:
    rows, project = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            project = line[3:].strip().lower()
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        is_head = cells[0] == "reports" or set(line) <= set("|-: ")
        if line.startswith("|") and not is_head:
            cells += [""] * (3 - len(cells))
            rows.append(Row(reports_in(cells[0], project), cells[1], cells[2]))
    return rows


def is_named(report: Report, docstring: str) -> bool:
    text = " ".join(docstring.lower().split())
    if report.project not in text:
        return False
    if report.mark.isdigit():
        return re.search(rf"(?<!\d){report.mark}(?!\d)", text) is not None
    return report.mark in text


@functools.cache
def docstrings() -> dict[tuple[str, str], str]:
    """(file below tests, test) -> its docstring, also of tests inside a class and of state
    machines, which are classes or names that stand for one."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        tree = parse_quietly(path.read_text(encoding="utf-8"))
        file = str(path.relative_to(TESTS))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found[file, node.name] = ast.get_docstring(node) or ""
    return found


def complaints(rows: list[Row], known: dict[tuple[str, str], str]) -> list[str]:
    """What the page says and the tests do not bear out."""
    found = []
    for row in rows:
        first = f"{row.reports[0].project} {row.reports[0].mark}"
        found += [
            f"{first}: there is no {file}::{test}"
            for file, test in row.tests
            if (file, test) not in known
        ]
        if not row.does:
            found.append(f"{first}: what pdcore does is not said")
        if not row.tests and not row.is_later:
            found.append(f"{first}: neither a test, nor later with its reason")
        if row.tests:
            texts = [known.get(test, "") for test in row.tests]
            found += [
                f"{report.project} {report.mark}: no docstring of its tests names it"
                for report in row.reports
                if not any(is_named(report, text) for text in texts)
            ]
    return found


def test_every_report_has_a_test_that_names_it() -> None:
    rows = read(PAGE)
    found = complaints(rows, docstrings())
    assert not found, "\n" + "\n".join(found)


KNOWN = {
    ("a.py", "test_a"): "SGLang I123, PR456: one.",
    ("a.py", "test_b"): "vllm #46283; Mooncake partial batch: two.",
}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("| I123 | x | |", ["sglang 123: neither a test, nor later with its reason"]),
        ("| I123 | x | later: |", ["sglang 123: neither a test, nor later with its reason"]),
        ("| I123 |  | `a.py::test_a` |", ["sglang 123: what pdcore does is not said"]),
        (
            "| I123, 789 | x | `a.py::test_a` |",
            ["sglang 789: no docstring of its tests names it"],
        ),
        (
            "| PR12 | x | `a.py::test_a` |",
            ["sglang 12: no docstring of its tests names it"],
        ),
        (
            "| dynamo #123 | x | `a.py::test_a` |",
            ["dynamo 123: no docstring of its tests names it"],
        ),
        (
            "| I123 | x | `a.py::test_a`, `a.py::test_gone` |",
            ["sglang 123: there is no a.py::test_gone"],
        ),
        (
            "| Mooncake whole batch | x | `a.py::test_b` |",
            ["mooncake mooncake whole batch: no docstring of its tests names it"],
        ),
    ],
)
def test_a_claim_that_nothing_holds_is_found(line: str, said: list[str]) -> None:
    assert complaints(read(f"## SGLang\n{line}"), KNOWN) == said


@pytest.mark.parametrize(
    "line",
    [
        "| I123, PR456 | x | `a.py::test_a` |",
        "| vllm PR #46283, Mooncake partial batch | x | `a.py::test_b` |",
        "| I999 | x | later: one rank per instance is served |",
        "| I123 | x | `a.py::test_a`; later: groups of ranks |",
        "| reports | what pdcore does | shown by |",
        "|---|---|---|",
    ],
)
def test_what_is_borne_out_passes(line: str) -> None:
    assert complaints(read(f"## SGLang\n{line}"), KNOWN) == []
