"""A transport out of an engine: what it declares, where its memory lies, and how it ends."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import attrs
import numpy as np
import pytest

from pdcore.errors import TransportError
from pdcore.testing.conformance import run_conformance
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import pump
from pdcore.transports import onesided
from pdcore.transports.base import Revocation
from pdcore.transports.onesided import caps_of
from pdcore.transports.onesided_side import SideOptions
from pdcore.types import Incarnation
from tests.unit.transports.attach_engine import (
    LIMITS,
    NAME,
    AttachEngine,
    AttachHarness,
    installed,
    make,
    why_unavailable,
)

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture
def harness() -> AttachHarness:
    return AttachHarness()


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_what_depends_on_processes_and_on_faults(tmp_path: Path, late_s: float) -> None:
    """The checks of the suite that vendors fail most; all of it runs in tests/conformance."""
    checks = [
        "minimum_capabilities",
        "cancel_quiesces",
        "revoke_ends_writes",
        "disconnect_ends_handles",
        "receiver_closes",
        "sender_killed",
        "receiver_killed",
        "restarted_peer",
    ]
    with installed(tmp_path):
        report = run_conformance(RegistryHarness(NAME, lands_late_s=late_s), only=checks)
    assert report.failed == {}
    assert report.skipped == {}
    assert len(report.passed) == len(checks)


def test_an_engine_whose_bytes_land_late_fences_nothing() -> None:
    """Mooncake, memfabric: bytes of a dead sender may be in the receiver's own engine."""
    exact = caps_of(LIMITS, cross_host=True)
    assert (exact.revocation, exact.death_fences, exact.quarantine_s) == (
        Revocation.SENDER_ACK,
        True,
        0.0,
    )
    late = caps_of(attrs.evolve(LIMITS, lands_late_s=30.0), cross_host=False)
    assert (late.revocation, late.death_fences, late.quarantine_s) == (
        Revocation.QUARANTINE,
        False,
        30.0,
    )


def test_memory_is_as_the_engine_needs_it() -> None:
    """Ascend: 2 MiB. What is not aligned is refused by us, who say what to do."""
    engine = AttachEngine(attrs.evolve(LIMITS, alignment=1 << 21))
    transport = make(Incarnation(os.urandom(16)), engine)
    try:
        for size in (1, 4096, 3 << 21):
            region = transport.allocate(size)
            assert np.frombuffer(region.buffer, np.uint8).ctypes.data % (1 << 21) == 0
            assert region.size_bytes == size
        pages = transport.allocate(1 << 22).buffer
        with pytest.raises(TransportError, match="aligned to 2097152 bytes: use allocate"):
            transport.register(pages[64:])
        assert len(engine.registered) == 4
    finally:
        transport.close()


def test_regions_that_the_engine_refuses_are_none(harness: AttachHarness) -> None:
    class Refusing(AttachEngine):
        def register(self, base: int, size_bytes: int) -> None:
            raise TransportError("no more regions")

    transport = make(Incarnation(os.urandom(16)), Refusing())
    try:
        with pytest.raises(TransportError, match="no more regions"):
            transport.allocate(64)
        transport.descriptor()
    finally:
        transport.close()


def test_addresses_that_cannot_be_used_close_the_engine() -> None:
    transport = make(Incarnation(os.urandom(16)), AttachEngine(), SideOptions(host="no.such"))
    with pytest.raises(TransportError, match="numeric"):
        transport.descriptor()
    transport.close()
    engine = AttachEngine()
    with pytest.raises(TransportError, match="families"):
        make(Incarnation(os.urandom(16)), engine, SideOptions(families=()))
    assert engine.is_closed


def test_a_thread_that_the_vendor_keeps_is_named_and_says_no_goodbye(
    harness: AttachHarness,
) -> None:
    """G7: close is bounded, and the peer must not hear that nothing lands any more."""
    pair = Pair(harness)
    sender = pair.sender.transport
    faults = harness.engines[0].faults
    spare = sender.allocate(64)
    try:
        faults.hang = True
        handle = pair.submit(pair.lease(), pair.batch((0, 0, 64)))
        assert faults.entered.wait(20)
        assert sender.close(0.1) == ["a thread inside a call of the vendor's engine"]
        assert not harness.engines[0].is_closed
        # Memory of an engine that is still there is still taken from it.
        known = len(harness.engines[0].registered)
        sender.deregister(spare)
        assert len(harness.engines[0].registered) == known - 1
        assert not pair.receiver.poll()
        with pytest.raises(TransportError, match="closed"):
            sender.connect(pair.receiver.transport.descriptor())
    finally:
        faults.release.set()
    # Whoever asks again, or the end of the process, gets the rest of it closed.
    assert sender.close() == []
    assert harness.engines[0].is_closed
    pair.sender.poll()
    assert handle in pair.sender.record.quiesced
    pump(pair.receiver, until=lambda: bool(pair.receiver.record.deaths))
    pair.receiver.transport.close()


def test_an_engine_that_cannot_be_closed_keeps_its_memory() -> None:
    """G7: close tells of it, and ends the rest; peers may write to what was registered yet, so it
    is given to nobody else."""

    class Open(AttachEngine):
        def close(self) -> None:
            raise TransportError("peers may still write")

    transport = make(Incarnation(os.urandom(16)), Open())
    region = transport.allocate(4096)
    address = np.frombuffer(region.buffer, np.uint8).ctypes.data
    transport.descriptor()
    assert transport.close() == ["peers may still write"]
    assert transport.close() == []
    del region
    gc.collect()
    (kept,) = onesided._kept_memory.pop()
    assert kept.ctypes.data == address


def test_the_engine_forgets_what_is_deregistered(harness: AttachHarness) -> None:
    with Pair(harness) as pair:
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64))))
        more = pair.receiver.transport.allocate(128)
        sizes = {size for _, size in harness.engines[1].registered}
        assert sizes == {1 << 16, 128}
        pair.receiver.transport.deregister(more)
        assert {size for _, size in harness.engines[1].registered} == {1 << 16}


def test_memory_that_the_engine_does_not_let_go_stays_where_it_is() -> None:
    """G5: the owner is told; peers may write there yet, so it is given to nobody else."""

    class Clinging(AttachEngine):
        def unregister(self, base: int, size_bytes: int) -> None:
            raise TransportError("peers may still write there")

    transport = make(Incarnation(os.urandom(16)), Clinging())
    region = transport.allocate(4096)
    address = np.frombuffer(region.buffer, np.uint8).ctypes.data
    with pytest.raises(TransportError, match="peers may still write there"):
        transport.deregister(region)
    del region
    gc.collect()
    (kept,) = onesided._kept_memory.pop()
    assert kept.ctypes.data == address
    assert transport.close() == []


def test_a_region_that_peers_cannot_be_told_of_is_none() -> None:
    """Neither here nor in the engine, which would keep it open to peers."""

    class Full(AttachEngine):
        def address(self) -> bytes:
            if len(self.registered) > 1:
                raise TransportError("too many regions for an address")
            return super().address()

    engine = Full()
    transport = make(Incarnation(os.urandom(16)), engine)
    try:
        first = transport.allocate(64)
        transport.descriptor()
        for enter in (lambda: transport.allocate(64), lambda: transport.register(memory())):
            with pytest.raises(TransportError, match="too many regions"):
                enter()
            assert len(engine.registered) == 1
        transport.deregister(first)
        assert not engine.registered
        transport.allocate(64)
    finally:
        transport.close()


def memory() -> memoryview:
    return memoryview(bytearray(64))
