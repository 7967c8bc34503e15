"""``pdcore verify``: a command of commands."""

from __future__ import annotations

import pytest

from pdcore.cli import main
from pdcore.cli.verify import PROOFS


def test_help_names_every_proof(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    out = capsys.readouterr().out
    for proof in PROOFS:
        assert f"pdcore verify {proof}" in out
