"""Fields that know their unit, bounds and reason: the raw material of the constants table.

A wrong value raises ValueError whose text begins with the field's name, so that the
loader can point at the line it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import attrs

Number = TypeVar("Number", int, float)


class _Named(Protocol):
    """What a validator needs of an attrs attribute of any type."""

    @property
    def name(self) -> str: ...


Check = Callable[[object, _Named, object], None]


def _check_number(
    *, is_integer: bool, is_optional: bool, low: float, high: float, unit: str
) -> Check:
    def check(instance: object, attribute: _Named, value: object) -> None:
        if value is None and is_optional:
            return
        allowed = isinstance(value, int) or (isinstance(value, float) and not is_integer)
        if isinstance(value, bool) or not isinstance(value, int | float) or not allowed:
            kind = "an integer" if is_integer else "a number"
            raise ValueError(f"{attribute.name} must be {kind}, got {value!r}")
        if not low <= value <= high or math.isinf(value):
            span = f">= {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise ValueError(f"{attribute.name} must be {span}{unit and ' '}{unit}, got {value}")

    return check


def note(reason: str, *, seed: str = "", unit: str = "") -> dict[str, str]:
    """Metadata of a field: why the default is what it is, and what the seed had."""
    return {"unit": unit, "reason": reason, "seed": seed, "allowed": ""}


def bounded(
    default: Number,
    unit: str,
    reason: str,
    *,
    low: float,
    high: float = math.inf,
    seed: str = "",
) -> Number:
    """A finite number in [low, high], an integer if the default is one."""
    is_integer = isinstance(default, int)
    return attrs.field(
        default=default,
        validator=_check_number(
            is_integer=is_integer, is_optional=False, low=low, high=high, unit=unit
        ),
        metadata={**note(reason, seed=seed, unit=unit), "allowed": _span(low, high)},
    )


def optional_int(
    unit: str, reason: str, *, low: float, high: float = math.inf, seed: str = ""
) -> int | None:
    """An integer in [low, high], or None, which ``reason`` explains."""
    check: Callable[[object, _Named, int | None], None] = _check_number(
        is_integer=True, is_optional=True, low=low, high=high, unit=unit
    )
    metadata = {**note(reason, seed=seed, unit=unit), "allowed": _span(low, high)}
    return attrs.field(default=None, validator=check, metadata=metadata)


def optional_text(reason: str, *, seed: str = "") -> str | None:
    """A string that is not empty, or None, which ``reason`` explains."""

    def check(instance: object, attribute: _Named, value: object) -> None:
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise ValueError(f"{attribute.name} must be text that is not empty, got {value!r}")

    validator: Callable[[object, _Named, str | None], None] = check
    return attrs.field(default=None, validator=validator, metadata=note(reason, seed=seed))


def optional_share(reason: str, *, seed: str = "") -> float | None:
    """A share above 0 and up to 1, or None."""
    check: Callable[[object, _Named, float | None], None] = _check_number(
        is_integer=False, is_optional=True, low=0.01, high=1.0, unit=""
    )
    metadata = {**note(reason, seed=seed, unit="share"), "allowed": _span(0.01, 1.0)}
    return attrs.field(default=None, validator=check, metadata=metadata)


def choice(default: str, allowed: tuple[str, ...], reason: str, *, seed: str = "") -> str:
    """One of a few words."""

    def check(instance: object, attribute: _Named, value: object) -> None:
        if value not in allowed:
            raise ValueError(f"{attribute.name} must be one of {', '.join(allowed)}, got {value!r}")

    return attrs.field(
        default=default,
        validator=check,
        metadata={**note(reason, seed=seed), "allowed": ", ".join(allowed)},
    )


def text(default: str, reason: str, *, seed: str = "", is_required: bool = False) -> str:
    """A string; with ``is_required`` not an empty one."""

    def check(instance: object, attribute: _Named, value: object) -> None:
        if not isinstance(value, str):
            raise ValueError(f"{attribute.name} must be text, got {value!r}")
        if is_required and not value.strip():
            raise ValueError(f"{attribute.name} must not be empty")

    return attrs.field(default=default, validator=check, metadata=note(reason, seed=seed))


def flag(default: bool, reason: str, *, seed: str = "") -> bool:
    """A boolean and nothing that looks like one (D56)."""

    def check(instance: object, attribute: _Named, value: object) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"{attribute.name} must be true or false, got {value!r}")

    return attrs.field(
        default=default,
        validator=check,
        metadata={**note(reason, seed=seed), "allowed": "true, false"},
    )


def port(default: int, reason: str, *, seed: str = "") -> int:
    """A TCP port to bind; 0 takes a free one and reports it (D44)."""
    return bounded(default, "", reason, low=0, high=65535, seed=seed)


def _span(low: float, high: float) -> str:
    return f">= {low:g}" if high == math.inf else f"{low:g} to {high:g}"
