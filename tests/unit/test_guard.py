"""Foreign code that raises: its caller hears of it, the end of the process passes."""

from __future__ import annotations

import logging

import pytest

from pdcore.guard import Raised, attempt


def test_a_value_passes() -> None:
    assert attempt(lambda: 7, "failed") == 7


def test_what_is_raised_is_logged_and_handed_back(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> int:
        raise LookupError("no such thing")

    raised = attempt(broken, "asking %s failed", "it")
    assert isinstance(raised, Raised)
    assert str(raised) == "LookupError: no such thing"
    (record,) = caplog.records
    assert (record.levelno, record.message) == (logging.ERROR, "asking it failed")
    assert record.exc_info is not None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_process_is_not_swallowed(kind: type[BaseException]) -> None:
    def ends() -> int:
        raise kind

    with pytest.raises(kind):
        attempt(ends, "failed")
