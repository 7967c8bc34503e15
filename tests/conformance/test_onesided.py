"""The whole suite over the core of vendors' transports, with an engine that needs no vendor:
process_vm_writev between processes, whose writes end with their call, or may land late."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcore.testing.conformance import run_conformance
from pdcore.testing.transport_harness import RegistryHarness
from tests.conformance.test_transports import passes
from tests.unit.transports.attach_engine import NAME, PLUGIN, installed, why_unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]


@pytest.mark.parametrize("kind", list(PLUGIN.variants))
def test_an_engine_without_a_vendor(tmp_path: Path, kind: str) -> None:
    with installed(tmp_path):
        harness = RegistryHarness(NAME, cycles=200, **PLUGIN.variants[kind])
        passes(run_conformance(harness), f"one-sided engine, {kind}")


@pytest.mark.parametrize("check", ["sender_killed", "receiver_killed", "partial_failure"])
def test_it_again_and_again(tmp_path: Path, check: str) -> None:
    """What depends on the moment of a signal, ten times."""
    with installed(tmp_path):
        for _ in range(10):
            passes(run_conformance(RegistryHarness(NAME), only=[check]))
