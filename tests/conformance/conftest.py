"""The capability matrix at the end of a run."""

from __future__ import annotations

import pytest

from tests.conformance import matrix


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    table = matrix.table()
    if table:
        terminalreporter.section("transports: capabilities and checks")
        terminalreporter.write_line(table)
