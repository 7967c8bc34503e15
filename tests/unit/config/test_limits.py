"""CoreLimits: the bounds every core is built with."""

from __future__ import annotations

import attrs
import pytest

from pdcore.config import DEFAULT_LIMITS, CoreLimits


def test_every_bound_has_a_reason_and_a_unit() -> None:
    """D60, D61: a bound on everything, and the table can say why."""
    for field in attrs.fields(CoreLimits):
        assert field.metadata["reason"], field.name
        assert field.metadata["unit"], field.name


def test_defaults_are_coherent() -> None:
    assert DEFAULT_LIMITS.num_metadata_slots == 2 * DEFAULT_LIMITS.max_running
    assert DEFAULT_LIMITS.prefill_chunk_tokens <= DEFAULT_LIMITS.max_prefill_tokens
    assert CoreLimits() == DEFAULT_LIMITS


def test_backoff_must_not_shrink() -> None:
    with pytest.raises(ValueError, match="resend_max_s must be >= resend_initial_s"):
        CoreLimits(resend_initial_s=2.0, resend_max_s=1.0)
