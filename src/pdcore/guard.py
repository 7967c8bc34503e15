"""Calls into code that is not ours: a model runner, a callback of the host's.

Whatever such code raises belongs to the one batch or message it was called for, never to the
loop that serves everybody else (D45). The end of the process is not swallowed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Raised(NamedTuple):
    """What came instead of a value."""

    error: Exception

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def attempt(call: Callable[[], T], failed: str, *about: object) -> T | Raised:
    """Its value, or what it raised, which is logged as ``failed % about``. KeyboardInterrupt,
    SystemExit and their like pass."""
    try:
        return call()
    except Exception as error:
        log.exception(failed, *about)
        return Raised(error)
