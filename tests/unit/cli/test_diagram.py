"""Diagram: what runs is what is drawn."""

from __future__ import annotations

import pytest

from pdcore.cli import main
from pdcore.fsm.diagram import LIFECYCLES, render


def test_all_lifecycles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagram"]) == 0
    out = capsys.readouterr().out
    assert out.count("stateDiagram-v2") == len(LIFECYCLES)


def test_one_lifecycle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagram", "sender"]) == 0
    assert "Draining" in capsys.readouterr().out


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagram", "--page"]) == 0
    assert capsys.readouterr().out == render()
