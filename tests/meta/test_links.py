"""Links between committed pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from tests.meta.source import ROOT, committed_text

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, spelled as the usual viewers spell them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}


def broken(page: Path, text: str) -> list[str]:
    found = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        aim = (ROOT / page).parent / path if path else ROOT / page
        if not aim.exists():
            found.append(f"{page}: {target}")
        elif anchor and aim.suffix == ".md" and anchor not in anchors(aim.read_text("utf-8")):
            found.append(f"{page}: {target} (no such heading)")
    return found


def test_no_link_is_broken() -> None:
    pages = [(path, text) for path, text in committed_text() if path.suffix == ".md"]
    assert pages
    found = [line for path, text in pages for line in broken(path, text)]
    assert not found, "\n".join(found)


def test_a_broken_link_is_found() -> None:
    page = Path("README.md")
    assert broken(page, "[a](docs/nowhere.md)")
    assert broken(page, "[a](#no-such-heading-at-all)")
    assert not broken(page, "[a](LICENSE) [b](https://example.org/x)")


def test_decision_pages_are_numbered_and_listed() -> None:
    """docs/decisions/README.md names every page, and no number is given twice."""
    folder = ROOT / "docs" / "decisions"
    pages = sorted(path.name for path in folder.glob("[0-9]*.md"))
    index = (folder / "README.md").read_text(encoding="utf-8")
    numbers = [name[:4] for name in pages]
    assert len(numbers) == len(set(numbers))
    assert not [name for name in pages if f"({name})" not in index]
    for name in pages:
        text = (folder / name).read_text(encoding="utf-8")
        for heading in ("Context", "Choice", "Cost", "What would reverse it"):
            assert f"## {heading}\n" in text, f"{name} has no section {heading!r}"
