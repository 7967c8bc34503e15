"""A thousand trials on each transport (a minute or two in all); the numbers are printed."""

from __future__ import annotations

import json

import attrs
import pytest

from tests.chaos.late_writes import TRIALS, check, free_on_abort, run_late_writes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transport", TRIALS)
def test_d3_a_thousand_late_writers_corrupt_nobody(transport: str) -> None:
    """D3, D4: 0 corrupted bytes in other requests; with quarantine switched off, some."""
    make, reports = TRIALS[transport], {}
    reports["product"] = run_late_writes(transport, make, 1000, 1000)
    reports["quarantine off"] = run_late_writes(transport, make, 100, 1000, free_on_abort)
    print(json.dumps({rules: attrs.asdict(one) for rules, one in reports.items()}))
    check(reports)
