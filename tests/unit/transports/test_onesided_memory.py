from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import pytest

from pdcore.errors import TransportError
from pdcore.transports.base import DeviceBuffer
from pdcore.transports.onesided import OneSidedTransport
from pdcore.transports.onesided_chunks import base_of
from pdcore.transports.onesided_memory import EngineMemory, StillRegistered, kept_memory
from pdcore.transports.regions import RegionTable, zeroed_pages
from pdcore.types import Incarnation
from tests.unit.transports.attach_engine import LIMITS, AttachEngine, make

PAGE = 1 << 21


@pytest.fixture
def engine() -> AttachEngine:
    return AttachEngine(attrs.evolve(LIMITS, target_page=PAGE))


@pytest.fixture
def regions() -> RegionTable:
    return RegionTable()


@pytest.fixture
def memory(engine: AttachEngine, regions: RegionTable) -> EngineMemory:
    return EngineMemory(engine, regions)


def address(buffer: memoryview) -> int:
    return base_of(np.frombuffer(buffer, np.uint8))


def test_what_is_allocated_has_pages_of_its_own(
    engine: AttachEngine, memory: EngineMemory, regions: RegionTable
) -> None:
    """D58: an engine that opens whole pages opens nobody else's bytes; the tail is ours."""
    for size in (1, PAGE, PAGE + 5):
        region = memory.allocate(size)
        base = address(region.buffer)
        whole = -(-size // PAGE) * PAGE
        assert region.size_bytes == size
        assert engine.registered == {(base, whole)}
        assert regions.targets() == {region.region_id: size}
        assert memory.remove(region) == (base, whole)
        engine.unregister(base, whole)


def test_memory_that_shares_a_page_is_a_source_only(
    engine: AttachEngine, memory: EngineMemory, regions: RegionTable
) -> None:
    pages = zeroed_pages(4 * PAGE, PAGE)
    for part in (pages[64:PAGE], pages[: PAGE + 64], pages[64 : PAGE + 64], pages[1:2]):
        memory.register(part)
    memory.register(pages[:PAGE].toreadonly())
    assert regions.targets() == {}
    assert len(engine.registered) == 5
    whole = memory.register(pages[2 * PAGE :])
    assert regions.targets() == {whole.region_id: 2 * PAGE}


class Clings(AttachEngine):
    """Refuses memory, and has it all the same."""

    def register(self, base: int, size_bytes: int) -> None:
        super().register(base, size_bytes)
        raise StillRegistered("refused, and kept")


def test_what_a_vendor_does_not_let_go_of_stays(regions: RegionTable) -> None:
    """D58: no region, but nobody else's memory either, for as long as this process lives."""
    memory = EngineMemory(Clings(), regions)
    ours = memoryview(bytearray(100))
    with pytest.raises(StillRegistered):
        memory.register(ours)
    assert regions.targets() == {}
    (kept,) = kept_memory.pop()
    assert base_of(kept) == address(ours)


def test_a_device_has_pages_of_its_own_too(regions: RegionTable) -> None:
    """Peers would be let into what else lies in the page. Nobody looks into it here."""
    limits = attrs.evolve(LIMITS, target_page=PAGE, device_kinds=("cpu", "npu"))
    memory = EngineMemory(AttachEngine(limits), regions)
    whole = memory.register(DeviceBuffer(8 * PAGE, PAGE))
    memory.register(DeviceBuffer(8 * PAGE + 64, PAGE))
    memory.register(DeviceBuffer(8 * PAGE, PAGE - 64))
    assert regions.targets() == {whole.region_id: PAGE}


def test_without_pages_any_writable_memory_is_a_target(regions: RegionTable) -> None:
    memory = EngineMemory(AttachEngine(), regions)
    odd = memory.register(memoryview(bytearray(100))[1:])
    memory.register(memoryview(bytes(100)))
    assert regions.targets() == {odd.region_id: 99}


def test_buffers_that_are_no_regions(memory: EngineMemory, regions: RegionTable) -> None:
    for buffer in (memoryview(bytearray(100))[::2], memoryview(bytearray())):
        with pytest.raises(TransportError, match="contiguous"):
            memory.register(buffer)
    assert regions.targets() == {}


def test_what_the_engine_refuses_is_no_region(regions: RegionTable) -> None:
    class Refusing(AttachEngine):
        def register(self, base: int, size_bytes: int) -> None:
            raise TransportError("no more regions")

    for engine in (Refusing(), AttachEngine(attrs.evolve(LIMITS, alignment=PAGE))):
        with pytest.raises(TransportError, match=r"no more regions|aligned to 2097152 bytes"):
            EngineMemory(engine, regions).register(memoryview(bytearray(PAGE))[8:])
        assert regions.targets() == {}
        assert not engine.registered


class Asked(AttachEngine):
    """Counts how often it is asked where it is."""

    times = 0

    def address(self) -> bytes:
        self.times += 1
        return super().address()


@pytest.fixture
def asked() -> Iterator[tuple[Asked, OneSidedTransport]]:
    engine = Asked()
    transport = make(Incarnation(b"a" * 16), engine)
    yield engine, transport
    transport.close()


def test_nobody_is_told_before_there_is_a_descriptor(
    asked: tuple[Asked, OneSidedTransport],
) -> None:
    """D58: an engine may have to be opened to writers to say where it is; a prefill worker's
    never is."""
    engine, transport = asked
    region = transport.allocate(64)
    transport.deregister(region)
    transport.allocate(64)
    assert engine.times == 0
    transport.descriptor()
    transport.allocate(64)
    assert engine.times == 2
