"""The suite outside pytest, as a function; the command on top of it has tests of its own."""

from __future__ import annotations

import pytest

from pdcore.errors import ConfigError
from pdcore.testing import verify_transport
from pdcore.testing.transport_harness import LoopbackHarness, RegistryHarness
from pdcore.testing.transport_verify import harness_for, variants_of
from pdcore.transports import registry
from pdcore.transports.base import Revocation
from pdcore.transports.loopback import loopback_caps


def test_it_tells_where_it_is() -> None:
    told: list[tuple[str, int, int]] = []
    verdict = verify_transport(
        "loopback",
        ["zero_bytes", "minimum_capabilities"],
        lambda check, done, total: told.append((check, done, total)),
    )
    assert [(check, done) for check, done, _ in told] == [
        ("minimum_capabilities", 0),
        ("zero_bytes", 1),
        ("minimum_capabilities", 2),
        ("zero_bytes", 3),
        ("minimum_capabilities", 4),
        ("zero_bytes", 5),
    ]
    assert {total for _, _, total in told} == {6}
    assert verdict.available
    assert verdict.failed == {}
    assert verdict.caps == loopback_caps(Revocation.SENDER_ACK)
    assert [r.check for r in verdict.results][:2] == [
        "minimum_capabilities[receiver_enforced]",
        "zero_bytes[receiver_enforced]",
    ]


def test_an_unknown_name_is_the_callers_mistake() -> None:
    with pytest.raises(ConfigError, match="unknown name 'rdma'"):
        verify_transport("rdma")
    with pytest.raises(ValueError, match="no such check: nothing"):
        verify_transport("loopback", ["nothing"])


def test_a_transport_is_checked_as_its_workers_use_it() -> None:
    assert variants_of("shm")[0] == ""
    harness = harness_for("shm", "")
    assert isinstance(harness, RegistryHarness)
    assert harness.options == registry.load("shm").worker_options
    assert harness.cycles == 1000
    if "attach" in variants_of("shm"):
        other_way = harness_for("shm", "attach")
        assert isinstance(other_way, RegistryHarness)
        assert other_way.options == {"shared": False}
    assert variants_of("loopback") == [kind.value for kind in Revocation]
    other = harness_for("loopback", "quarantine")
    assert isinstance(other, LoopbackHarness)
    assert other.revocation is Revocation.QUARANTINE
