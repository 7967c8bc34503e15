"""Codes and statuses meet in one place (D9)."""

from __future__ import annotations

import inspect

import pytest

from pdcore import errors
from pdcore.errors import HTTP_STATUS, InvalidRequest, PdcoreError, failure


@pytest.mark.parametrize("code", sorted(HTTP_STATUS))
def test_every_code_has_an_error_status(code: str) -> None:
    """D9: no failure is ever a success for the client."""
    made = failure(code, "why")
    assert made == (code, "why", HTTP_STATUS[code])
    assert 400 <= made.http_status <= 599
    assert code == code.lower()


def test_an_unknown_code_is_our_own_mistake() -> None:
    with pytest.raises(KeyError):
        failure("no_such_code", "why")


def test_everything_raised_on_purpose_has_one_base() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    raised = [c for c in classes if issubclass(c, Exception)]
    assert len(raised) > 8
    assert all(issubclass(c, PdcoreError) for c in raised)


def test_an_invalid_request_names_its_field() -> None:
    error = InvalidRequest("prompt", "is empty")
    assert (error.field, str(error)) == ("prompt", "prompt: is empty")
