"""The capability matrix at the end of a run, whole also when workers share the tests."""

from __future__ import annotations

from typing import Protocol

import pytest

from tests.conformance import matrix

KEY = "conformance"


class Worker(Protocol):
    """What xdist says of a worker that has ended."""

    workeroutput: dict[str, str]


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, str] | None = vars(session.config).get("workeroutput")
    if output is not None:
        output[KEY] = matrix.dump()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Worker) -> None:
    # A worker that crashed left none.
    matrix.load(vars(node).get("workeroutput", {}).get(KEY, "[]"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    table = matrix.table()
    if table:
        terminalreporter.section("transports: capabilities and checks")
        terminalreporter.write_line(table)
