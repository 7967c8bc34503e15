"""Generated documentation is what the code generates now."""

from __future__ import annotations

from pdcore.fsm import diagram
from tests.meta.source import ROOT

LIFECYCLE = ROOT / "docs" / "lifecycle.md"


def test_the_lifecycle_page_is_fresh() -> None:
    """Regenerate it with `pdcore diagram --page > docs/lifecycle.md`."""
    assert LIFECYCLE.read_text(encoding="utf-8") == diagram.render(), (
        "docs/lifecycle.md is stale: pdcore diagram --page > docs/lifecycle.md"
    )
