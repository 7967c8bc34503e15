"""The whole suite over Mooncake's engine with protocol tcp, for real.

The engine listens on all interfaces; who minds runs this in a network namespace that has
nothing but its loopback.
"""

from __future__ import annotations

import pytest

from pdcore.testing.conformance import run_conformance
from pdcore.testing.transport_harness import RegistryHarness
from tests.conformance.test_transports import passes, skip_without

pytestmark = pytest.mark.slow


def test_mooncake_tcp() -> None:
    skip_without("mooncake")
    passes(run_conformance(RegistryHarness("mooncake", cycles=30)), "mooncake, tcp")


@pytest.mark.parametrize("check", ["sender_killed", "receiver_killed", "partial_failure"])
def test_mooncake_again_and_again(check: str) -> None:
    """What depends on the moment of a signal, some times."""
    skip_without("mooncake")
    for _ in range(3):
        passes(run_conformance(RegistryHarness("mooncake"), only=[check]))
