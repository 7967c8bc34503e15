"""The whole suite over Mooncake's engine with protocol tcp, for real.

The engine listens on all interfaces; who minds runs this in a network namespace that has
nothing but its loopback. It takes a second to close, so the suite is run in parts.
"""

from __future__ import annotations

import attrs
import pytest

from pdcore.testing.conformance import CHECKS, Report, run_conformance
from pdcore.testing.transport_harness import RegistryHarness
from tests.conformance import matrix
from tests.conformance.test_transports import passes, skip_without

pytestmark = pytest.mark.slow

NAMES = [check.name for check in CHECKS]
PARTS = [NAMES[start::4] for start in range(4)]
done: list[Report] = []


def merged(reports: list[Report]) -> Report:
    """One column of the table at the end."""
    whole = reports[0]
    for report in reports[1:]:
        whole = attrs.evolve(
            whole,
            passed=whole.passed + report.passed,
            failed=whole.failed | report.failed,
            skipped=whole.skipped | report.skipped,
            seconds=whole.seconds | report.seconds,
        )
    return whole


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_mooncake_tcp(part: int) -> None:
    skip_without("mooncake")
    done.append(run_conformance(RegistryHarness("mooncake", cycles=30), only=PARTS[part]))
    matrix.keep(merged(done), "mooncake, tcp")
    passes(done[-1])


@pytest.mark.parametrize("check", ["sender_killed", "receiver_killed", "partial_failure"])
def test_mooncake_again_and_again(check: str) -> None:
    """What depends on the moment of a signal, some times."""
    skip_without("mooncake")
    for _ in range(3):
        passes(run_conformance(RegistryHarness("mooncake"), only=[check]))
