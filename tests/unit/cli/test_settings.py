"""Settings: the one table on the terminal, as JSON, and as docs/configuration.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdcore.cli import main
from pdcore.cli.settings import render, show
from pdcore.config import CONSTANTS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_fresh() -> None:
    """D61: documentation is generated from the same table.

    Regenerate: pdcore settings --markdown > docs/configuration.md"""
    assert PAGE.read_text(encoding="utf-8") == render()


def test_a_stale_page_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        assert render().replace("18800", "18801") == render()


def test_json_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in rows] == [constant.key for constant in CONSTANTS]


def test_text_of_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "parallel_config"]) == 0
    out = capsys.readouterr().out
    assert "world_size" in out
    assert "batch_size" not in out


def test_defaults_are_shown_as_yaml() -> None:
    assert [show(v) for v in (None, True, (), ("a", "b"), "", 3)] == [
        "none",
        "true",
        "empty",
        "a, b",
        "empty",
        "3",
    ]
