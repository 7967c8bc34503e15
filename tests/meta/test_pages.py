"""Hand-written pages: what the code says is fresh, and what they show in Python runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pdcore.errors import HTTP_STATUS
from tests.meta import pages
from tests.meta.source import ROOT

DOCS = ROOT / "docs"
EXAMPLE = ROOT / "examples" / "own_runner.py"
#: Pages that show an example in pieces, all of it.
WALKTHROUGHS = {
    "tutorial": "examples/own_runner.py",
    "your-transport": "examples/own_transport/files_transport.py",
}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PIECES = re.compile(r"<!-- piece of (\S+) -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Pages whose Python is a whole, run block after block; the tutorial's pieces run as a file.
RUNNABLE = ("library", "operations", "testing", "transports", "tutorial", "your-transport")


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.stem)
def test_a_generated_table_is_fresh(page: Path) -> None:
    """Regenerate with `python -m tests.meta.pages`."""
    text = page.read_text(encoding="utf-8")
    assert pages.render(text) == text, f"{page.name} is stale: python -m tests.meta.pages"


def test_both_pages_have_their_tables() -> None:
    found = {
        match[2] for page in pages.pages() for match in pages.SECTION.finditer(page.read_text())
    }
    assert found == set(pages.TABLES)


def test_every_failure_code_is_explained_and_no_other() -> None:
    assert set(pages.FAILURES) == set(HTTP_STATUS)


def test_a_stale_table_is_found() -> None:
    stale = "<!-- generated: failures -->\n| 200 | `prefill_failed` |\n<!-- end -->\n"
    assert pages.render(stale) != stale
    assert "| 502 | `prefill_failed` |" in pages.render(stale)


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_python_of_a_page_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.delitem(sys.modules, EXAMPLE.stem, raising=False)
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": name}
    for block in BLOCK.findall(PIECES.sub("", text)):
        exec(compile(block, f"docs/{name}.md", "exec"), namespace)
    sys.modules.pop(EXAMPLE.stem, None)


def check_walkthrough(text: str, example: str) -> None:
    """The pieces, in order, are the whole example: nothing is shown that is not run."""
    pieces = PIECES.findall(text)
    assert {path for path, _ in pieces} == {example}
    shown = [line for _, piece in pieces for line in piece.splitlines() if line]
    source = (ROOT / example).read_text(encoding="utf-8")
    assert shown == [line for line in source.splitlines() if line]


@pytest.mark.parametrize(("page", "example"), WALKTHROUGHS.items())
def test_a_page_shows_the_example_as_it_runs(page: str, example: str) -> None:
    check_walkthrough((DOCS / f"{page}.md").read_text(encoding="utf-8"), example)


def test_a_piece_that_has_drifted_is_found() -> None:
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    drifted = text.replace("WorkerThread(prefill)", "WorkerThread(other)")
    with pytest.raises(AssertionError):
        check_walkthrough(drifted, WALKTHROUGHS["tutorial"])


def test_metrics_in_the_page_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src/pdcore/server").glob("*.py"))
    made = set(re.findall(r'"(pdcore_(?:router|instance|worker)\w*)"', sources))
    suffixes = set(re.findall(r'f"\{prefix\}(_\w+)"', sources))
    made |= {
        prefix + suffix for prefix in ("pdcore_router", "pdcore_instance") for suffix in suffixes
    }
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(pdcore_\w+)`", text))
    assert named
    assert {name.removesuffix("_total") for name in named} <= made
    assert made - {"pdcore_router", "pdcore_instance"} <= {
        name.removesuffix("_total") for name in named
    }
