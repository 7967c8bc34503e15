"""The whole suite over memfabric's stand-in, as this process and its peers find it installed:
bytes move between processes, through the interface of the version named."""

from __future__ import annotations

import pytest

from pdcore.testing.conformance import run_conformance
from pdcore.testing.transport_harness import RegistryHarness
from tests.conformance.test_transports import passes
from tests.unit.transports.memfabric_rig import free_port, vendor, why_unmoved

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_unmoved() is not None, reason=str(why_unmoved())),
]


@pytest.mark.parametrize("version", ["1.0.0", "1.1.2", "1.3.0"])
def test_memfabric_on_a_stand_in(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R76: one version of each interface; with one store for all, or each receiver's own."""
    with vendor(version, monkeypatch) as module:
        options: dict[str, object] = {}
        if version != "1.3.0":
            options["store_url"] = f"tcp://127.0.0.1:{free_port()}"
            assert module.create_config_store(options["store_url"]) == 0
        harness = RegistryHarness("memfabric", cycles=30, **options)
        passes(run_conformance(harness), f"memfabric, on a stand-in of {version}")


@pytest.mark.parametrize("check", ["sender_killed", "receiver_killed", "partial_failure"])
def test_memfabric_again_and_again(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on the moment of a signal, some times."""
    with vendor("1.3.0", monkeypatch):
        for _ in range(5):
            passes(run_conformance(RegistryHarness("memfabric"), only=[check]))
