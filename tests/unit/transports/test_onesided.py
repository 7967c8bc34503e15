"""A transport out of an engine: what it declares, where its memory lies, and how it ends."""

from __future__ import annotations

import gc
import mmap
import os
import select
from pathlib import Path

import attrs
import numpy as np
import pytest

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array
from pdcore.testing.conformance import run_conformance
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_harness import Pair, RegistryHarness, make_batch, make_lease
from pdcore.testing.transport_watch import pump
from pdcore.transports import onesided
from pdcore.transports.base import DeviceBuffer, Revocation
from pdcore.transports.onesided import OneSidedTransport, caps_of
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


def test_what_it_declares_is_what_its_engine_takes_and_its_side_channel_reaches() -> None:
    """One call of this engine is what a user is told, not what ``submit`` takes; and peers that
    meet over AF_UNIX only are on this host, wherever the engine could write."""
    assert caps_of(LIMITS, cross_host=True).max_batch == LIMITS.max_batch == 1024
    for families, reaches in ((["unix"], False), (["unix", "tcp"], True)):
        transport = OneSidedTransport(
            NAME, Incarnation(os.urandom(16)), AttachEngine(), SideOptions(families)
        )
        try:
            assert transport.caps == caps_of(LIMITS, cross_host=reaches)
        finally:
            transport.close()


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


class Device(AttachEngine):
    """An engine of a device whose memory this process may not touch: it looks for the bytes of
    an address elsewhere."""

    def __init__(self) -> None:
        super().__init__(attrs.evolve(LIMITS, device_kinds=("npu",)))
        self.places: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        self._mapped: list[mmap.mmap] = []

    def tensor(self, size_bytes: int) -> DeviceBuffer:
        """Whoever reads or writes there dies of SIGSEGV."""
        forbidden = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
        address = int(np.frombuffer(forbidden, np.uint8).ctypes.data)
        self._mapped.append(forbidden)
        self.places[address] = np.zeros(size_bytes, np.uint8)
        return DeviceBuffer(address, size_bytes)

    def _move(self, peer: int, local: Int64Array, remote: Int64Array, lengths: Int64Array) -> None:
        for start, into, size in zip(local, remote, lengths, strict=True):
            self._bytes(int(into), int(size))[:] = self._bytes(int(start), int(size))

    def _bytes(self, start: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        for address, memory in self.places.items():
            if address <= start < address + len(memory):
                return memory[start - address :][:size]
        raise AssertionError(f"{start:#x} is nobody's")


def test_memory_of_a_device_is_moved_and_never_looked_into() -> None:
    """Issue 4.1: KV of an NPU or a GPU. It is registered by address, written by the engine, and
    this process would not survive a look at it."""
    device = Device()
    sender = make(Incarnation(os.urandom(16)), device)
    receiver = make(Incarnation(os.urandom(16)), device)
    try:
        assert receiver.caps.device_kinds == ("npu",)
        with pytest.raises(TransportError, match=r"a device \(npu\).*as a DeviceBuffer"):
            receiver.allocate(4096)
        ours, theirs = device.tensor(4096), device.tensor(8192)
        device.places[ours.address][:] = np.arange(4096) % 251
        source, target = sender.register(ours), receiver.register(theirs)
        assert (target.size_bytes, len(target.buffer)) == (8192, 0)
        lease = make_lease(receiver.incarnation, 1, {target.region_id: [(4096, 8192)]})
        receiver.grant(lease)
        session = sender.connect(receiver.descriptor())
        batch = make_batch(source, target, (8, 4096 + 16, 4000))
        sender.submit(session, [batch], lease, b"done")
        bell = select.poll()
        bell.register(receiver.fileno() or 0, select.POLLIN)
        assert bell.poll(20_000), "nothing came"
        while not receiver.poll():
            bell.poll(20_000)
        expected = np.zeros(8192, np.uint8)
        expected[4096 + 16 :][:4000] = (np.arange(4096) % 251)[8:4008]
        assert bytes(device.places[theirs.address]) == bytes(expected)
        with pytest.raises(TransportError, match="lease"):
            receiver.deregister(target)
        receiver.release(lease.lease)
        receiver.deregister(target)
    finally:
        sender.close()
        receiver.close()


def test_a_read_only_tensor_is_a_source_only() -> None:
    device = Device()
    transport = make(Incarnation(os.urandom(16)), device)
    try:
        source = transport.register(attrs.evolve(device.tensor(4096), readonly=True))
        lease = make_lease(transport.incarnation, 1, {source.region_id: [(0, 64)]})
        with pytest.raises(TransportError):
            transport.grant(lease)
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
    (kept,) = onesided.kept_memory.pop()
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
    (kept,) = onesided.kept_memory.pop()
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
