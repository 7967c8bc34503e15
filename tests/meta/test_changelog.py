"""CHANGELOG.md follows Keep a Changelog, and knows the version being built."""

from __future__ import annotations

import re

import pdcore
from tests.meta.source import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def releases() -> list[tuple[str, str]]:
    """(version, date) of every section, newest first; an unreleased one has no date."""
    return re.findall(r"^## \[([^\]]+)\](?: - (\S+))?$", TEXT, re.MULTILINE)


def test_unreleased_comes_first_and_the_rest_is_dated() -> None:
    (first, undated), *others = releases()
    assert (first, undated) == ("Unreleased", "")
    dates = [date for _, date in others]
    assert all(re.fullmatch(r"\d{4}-\d{2}-\d{2}", date) for date in dates)
    assert dates == sorted(dates, reverse=True)


def test_the_current_version_is_described() -> None:
    """The version is released with its section, or it is what Unreleased describes."""
    versions = [version for version, _ in releases()]
    assert pdcore.__version__ in versions or f"`{pdcore.__version__}`" in TEXT


def test_every_group_is_of_a_known_kind_and_not_empty() -> None:
    groups = re.findall(r"^### (.+)\n+(.*)$", TEXT, re.MULTILINE)
    assert groups
    for kind, first_line in groups:
        assert kind in KINDS
        assert first_line.startswith("- "), f"{kind} has no entry"
