from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.transports.base import DeviceBuffer, Region, RemoteLease
from pdcore.transports.check import MAX_REGION_BYTES, check_lease
from pdcore.transports.regions import RegionTable, is_plainly_sound, zeroed_pages
from pdcore.types import Incarnation, LeaseId

US = Incarnation(b"u" * 16)


def lease(counter: int, region: int, *ranges: tuple[int, int]) -> RemoteLease:
    return RemoteLease(LeaseId(US, counter), {region: np.array(ranges, np.int64)})


def test_a_region_is_flat_bytes_that_share_memory() -> None:
    table = RegionTable()
    words = np.arange(8, dtype=np.int32)
    region = table.add(memoryview(words), target=True)
    assert region.size_bytes == 32
    table.arrays[region.region_id][0] = 7
    assert words[0] == 7
    assert table.targets() == {region.region_id: 32}


def test_what_is_no_region() -> None:
    table = RegionTable()
    for buffer, target in (
        (memoryview(b""), False),
        (memoryview(b"read only"), True),
        (memoryview(np.zeros((4, 4), np.uint8)[:, :2]), False),
    ):
        with pytest.raises(TransportError):
            table.add(buffer, target=target)
    assert table.add(memoryview(b"read only"), target=False).buffer.readonly
    assert table.targets() == {}


def test_memory_of_a_device_says_where_it_lies() -> None:
    """Its array is never looked into: there is nothing at that address."""
    table = RegionTable()
    region = table.add_device(DeviceBuffer(1 << 40, 4096), target=True)
    assert (region.size_bytes, bytes(region.buffer)) == (4096, b"")
    assert table.arrays[region.region_id].ctypes.data == 1 << 40
    assert table.targets() == {region.region_id: 4096}
    table.remove(region)
    assert table.targets() == {}


@pytest.mark.parametrize(
    "buffer",
    [
        DeviceBuffer(0, 4096),
        DeviceBuffer(-4096, 4096),
        DeviceBuffer(4096, 0),
        DeviceBuffer(4096, -1),
        DeviceBuffer(4096, MAX_REGION_BYTES + 1),
        DeviceBuffer((1 << 62) - 4095, 4096),
    ],
)
def test_no_memory_of_a_device(buffer: DeviceBuffer) -> None:
    table = RegionTable()
    with pytest.raises(TransportError, match=r"data_ptr\(\) and nbytes"):
        table.add_device(buffer, target=True)
    assert table.targets() == {}


def test_a_transport_of_host_memory_refuses_a_devices() -> None:
    """A look into it would end the process; the remedy is named."""
    with pytest.raises(TransportError, match=r"nixl with mem_type VRAM.*copy to the host"):
        RegionTable().add(DeviceBuffer(4096, 4096), target=True)


def test_remove_refuses_while_somebody_holds_it() -> None:
    """G5: leases and pins each hold a region, and each alone is enough."""
    table = RegionTable()
    region = table.add(memoryview(bytearray(64)), target=True)
    table.grant(lease(1, region.region_id, (0, 8)))
    table.pin([region.region_id, region.region_id])
    with pytest.raises(TransportError, match="lease"):
        table.remove(region)
    table.revoke(LeaseId(US, 1))
    with pytest.raises(TransportError, match="lease"):
        table.remove(region)
    table.release(LeaseId(US, 1))
    table.unpin([region.region_id])
    with pytest.raises(TransportError, match="in flight"):
        table.remove(region)
    table.unpin([region.region_id])
    table.remove(region)
    with pytest.raises(TransportError, match="not registered"):
        table.remove(region)


def test_an_equal_region_of_another_table_is_not_ours() -> None:
    table, other = RegionTable(), RegionTable()
    mine = table.add(memoryview(bytearray(8)), target=True)
    theirs = other.add(memoryview(bytearray(8)), target=True)
    assert mine == theirs
    with pytest.raises(TransportError):
        table.remove(theirs)
    with pytest.raises(TransportError):
        table.remove(Region(99, 8, memoryview(bytearray(8))))


def test_a_lease_is_granted_once() -> None:
    """Rule 1: a lease id is never used twice, revoked or not."""
    table = RegionTable()
    region = table.add(memoryview(bytearray(64)), target=True)
    one = lease(1, region.region_id, (0, 8))
    assert table.granted(one.lease) is None
    table.grant(one)
    assert table.granted(one.lease) is one
    for again in (one, lease(1, region.region_id, (8, 16))):
        with pytest.raises(TransportError, match="granted already"):
            table.grant(again)
    table.revoke(one.lease)
    assert table.granted(one.lease) is None
    with pytest.raises(TransportError):
        table.grant(one)
    table.release(one.lease)
    table.release(one.lease)
    table.revoke(one.lease)


RANGES = st.lists(st.tuples(st.integers(-1, 40), st.integers(-1, 40)), max_size=4)


@given(
    first=st.one_of(RANGES, RANGES.map(sorted)),
    other=RANGES.map(lambda ranges: sorted((min(r), max(r)) for r in ranges)),
    dtype=st.sampled_from([np.int64, np.int64, np.int32]),
)
def test_a_few_ranges_are_judged_as_many_are(
    first: list[tuple[int, int]], other: list[tuple[int, int]], dtype: type[np.int64 | np.int32]
) -> None:
    """What is told without arrays is what the check with arrays says."""
    ranges = {
        region: np.array(found, dtype).reshape(-1, 2)
        for region, found in ((1, first), (2, other))
        if found
    }
    agree(RemoteLease(LeaseId(US, 1), ranges))


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 32)],
        [(0, 33)],
        [(-1, 3)],
        [(4, 4)],
        [(0, 8), (8, 16)],
        [(0, 8), (7, 16)],
        [(8, 16), (0, 8)],
        [(0, 2**63 - 1)],
        [(2 * i, 2 * i + 1) for i in range(16)],
    ],
)
def test_edges_of_a_few_ranges(ranges: list[tuple[int, int]]) -> None:
    agree(lease(1, 1, *ranges))


def test_ranges_of_another_shape_or_region_are_not_plainly_sound() -> None:
    agree(lease(1, 3, (0, 8)))
    for shape in ((0,), (2,), (2, 3), (1, 2, 2)):
        agree(RemoteLease(LeaseId(US, 1), {1: np.ones(shape, np.int64)}))


def agree(one: RemoteLease) -> None:
    sizes = {1: 32, 2: 40}
    try:
        check_lease(one, sizes)
    except TransportError:
        assert not is_plainly_sound(one, sizes)
    else:
        assert is_plainly_sound(one, sizes)


def test_many_ranges_are_left_to_the_check() -> None:
    assert not is_plainly_sound(lease(1, 1, *((2 * i, 2 * i + 1) for i in range(17))), {1: 64})


def test_sources_cannot_be_granted() -> None:
    table = RegionTable()
    source = table.add(memoryview(bytearray(64)), target=False)
    with pytest.raises(TransportError, match="not registered"):
        table.grant(lease(1, source.region_id, (0, 8)))


def test_clear_keeps_others_views() -> None:
    table = RegionTable()
    region = table.add(memoryview(bytearray(b"kept")), target=True)
    table.clear()
    assert bytes(region.buffer) == b"kept"
    assert repr(table) == "RegionTable(regions=0, leases=0, pins=0)"


def test_pages_are_zero_there_and_aligned() -> None:
    for alignment in (1, 64, 4096, 1 << 21):
        pages = zeroed_pages(5000, alignment)
        array = np.frombuffer(pages, np.uint8)
        assert len(array) == 5000
        assert not array.any()
        assert array.ctypes.data % alignment == 0
        pages[:] = b"x" * 5000
    for size in (0, -1, 1 << 50, 1 << 70):
        with pytest.raises(TransportError):
            zeroed_pages(size)


NO_ROOM = """
import resource
from pdcore.errors import TransportError
from pdcore.transports import regions
from pdcore.transports.loopback import LoopbackTransport

loopback = LoopbackTransport(b"u" * 16)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for take in (regions.zeroed_pages, loopback.allocate):
    try:
        take(64 << 20)
    except TransportError as error:
        print(error)
regions.available_bytes = lambda: 1 << 20
try:
    regions.zeroed_pages(2 << 20)
except TransportError as error:
    print(error)
"""


def test_d60_no_room_names_the_size_and_the_remedy() -> None:
    """D60: whatever says no, a limit of the address space, or what the machine has left."""
    run = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{NO_ROOM}"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "cannot map 67108864 bytes: Cannot allocate memory; configure fewer KV blocks",
        "not enough memory for 67108864 bytes; configure fewer KV blocks",
        "not enough memory: 2097152 bytes wanted, 1048576 available; configure fewer KV blocks",
    ]
