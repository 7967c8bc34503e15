"""The transport, over the vendor's stand-in: what its faults become. The whole suite runs over
it in tests/conformance/test_memfabric.py, the engine alone in test_memfabric_engine.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest

from pdcore.errors import ConfigError, TransportError
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import is_zero, pump, settle
from pdcore.transports import registry
from pdcore.transports.base import HandleStatus, Revocation
from pdcore.transports.memfabric import NAME, PLUGIN, create
from pdcore.types import Incarnation
from tests.unit.transports.memfabric_rig import vendor


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with vendor("1.3.0", monkeypatch) as module:
        yield module


def pair(**options: object) -> Pair:
    return Pair(RegistryHarness(NAME, **({"lands_late_s": 0.0} | options)))


def test_bytes_and_their_notification(fake: ModuleType) -> None:
    """R75: registered, written, reported; G1."""
    with pair() as two:
        handle = two.submit(two.lease(), two.batch((0, 4096, 8192)), notify=b"there")
        record = two.receiver.record
        pump(two.sender, two.receiver, until=lambda: record.payloads == [b"there"])
        assert two.target.buffer[4096:12288] == two.source.buffer[:8192]
        assert is_zero(two.target.buffer[:4096])
        pump(two.sender, until=lambda: handle in two.sender.record.quiesced)


def test_a_batch_is_cut_to_calls(fake: ModuleType) -> None:
    """A call that cannot be ended moves a bounded part."""
    with pair() as two:
        pieces = [(8 * i, 16 * i, 4) for i in range(3000)]
        handle = two.submit(two.lease(), two.batch(*pieces))
        pump(two.sender, until=lambda: handle in two.sender.record.quiesced)
        assert [count for _, count, _ in fake.FAULTS.batches] == [1024, 1024, 952]


def test_a_code_fails_its_transfer_alone(fake: ModuleType) -> None:
    """G4: partly landed, no notification; the session goes on."""
    with pair() as two:
        fake.FAULTS.codes.append(-1)
        fake.FAULTS.lands_first = 1
        lease = two.lease((0, 4096))
        record = two.sender.record
        lost = two.submit(lease, two.batch((0, 0, 100), (200, 200, 100)), notify=b"lost")
        pump(two.sender, until=lambda: lost in record.quiesced)
        assert record.ended[lost] is HandleStatus.FAILED
        assert two.target.buffer[:100] == two.source.buffer[:100]
        assert is_zero(two.target.buffer[100:])
        settle(two.sender, two.receiver, quiet_s=0.03)
        assert not two.receiver.record.notes


def test_late_bytes_end_before_the_quiesced_mark(fake: ModuleType) -> None:
    """G2: a failed call's bytes come after it returned. Its handle is failed at once, and
    quiesced after the declared time, so the blocks are not reused before."""
    with pair(lands_late_s=0.5) as two:
        assert two.sender.transport.caps.revocation is Revocation.QUARANTINE
        assert two.sender.transport.caps.quarantine_s == 0.5
        fake.FAULTS.codes.append(-1)
        fake.FAULTS.late = threading.Event()
        record = two.sender.record
        handle = two.submit(two.lease(), two.batch((0, 0, 4096)))
        pump(two.sender, until=lambda: handle in record.ended)
        assert record.ended[handle] is HandleStatus.FAILED
        assert handle not in record.quiesced
        fake.FAULTS.late.set()
        assert fake.FAULTS.landed_late.wait(10.0)
        pump(two.sender, until=lambda: handle in record.quiesced)
        assert two.target.buffer[:4096] == two.source.buffer[:4096]


def test_a_call_that_hangs_fails_in_our_time(fake: ModuleType) -> None:
    """Our own time limit above the vendor's; not quiesced before the call is back."""
    with pair(stall_timeout_s=0.2) as two:
        fake.FAULTS.hold = threading.Event()
        record = two.sender.record
        handle = two.submit(two.lease(), two.batch((0, 0, 4096)))
        pump(two.sender, until=lambda: handle in record.ended)
        assert record.ended[handle] is HandleStatus.FAILED
        settle(two.sender, quiet_s=0.05)
        assert handle not in record.quiesced
        assert two.sender.transport.poll() == []
        fake.FAULTS.hold.set()
        pump(two.sender, until=lambda: handle in record.quiesced)


def test_the_first_write_waits_until_the_sender_has_heard(fake: ModuleType) -> None:
    """What the receiver registers later is no failure of the first request that needs it."""
    with pair() as two:
        fake.FAULTS.unknown_for = 2
        handle = two.submit(two.lease(), two.batch((0, 0, 4096)))
        pump(two.sender, until=lambda: handle in two.sender.record.quiesced)
        assert two.sender.record.ended[handle] is HandleStatus.DONE


def test_prefill_opens_none_of_its_memory(fake: ModuleType) -> None:
    """D58: who is never written to keeps no engine that could be."""
    with pair() as two:
        handle = two.submit(two.lease(), two.batch((0, 0, 4096)))
        pump(two.sender, until=lambda: handle in two.sender.record.quiesced)
        sender, receiver = two.sender.transport, two.receiver.transport
        assert list(sender._engine._sides) == ["Prefill"]  # type: ignore[attr-defined]
        assert set(receiver._engine._sides) == {"Prefill", "Decode"}  # type: ignore[attr-defined]


def test_memory_between_pages_is_a_source_only(fake: ModuleType) -> None:
    with pair() as two:
        odd = two.receiver.transport.register(memoryview(bytearray(8192)))
        with pytest.raises(TransportError):
            two.lease((0, 100), region=odd)


def test_what_it_declares() -> None:
    """Without a vendor, too: nothing of it is imported."""
    assert PLUGIN.caps is not None
    assert PLUGIN.caps.revocation is Revocation.QUARANTINE
    assert PLUGIN.caps.quarantine_s == 30.0
    assert not PLUGIN.caps.death_fences
    assert PLUGIN.caps.alignment == 1
    assert PLUGIN.caps.cross_host
    assert "pdcore[memfabric]" in PLUGIN.remedy


def test_a_worker_tells_it_where_it_stands() -> None:
    assert PLUGIN.options_at is not None
    place = registry.WorkerPlace("0.0.0.0", "10.0.0.5", "a secret of enough bytes")
    assert PLUGIN.options_at(place) == {
        "host": "0.0.0.0",
        "advertise": "10.0.0.5",
        "secret": "a secret of enough bytes",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_id": -1}, "memfabric: 'device_id' must be >= 0: -1"),
        ({"lands_late_s": -1.0}, "'lands_late_s' must be >= 0"),
        ({"start_timeout_s": 0.0}, "'start_timeout_s' must be > 0"),
        ({"advertise": "prefill.example"}, "host: 'prefill.example' is not a numeric IPv4"),
        ({"secret": "short"}, "secret"),
    ],
)
def test_options_that_cannot_be(fake: ModuleType, options: dict[str, object], message: str) -> None:
    with pytest.raises(TransportError, match=message):
        create(Incarnation(os.urandom(16)), **options)  # type: ignore[arg-type]
    assert not fake._PLACE.is_up


def test_an_unknown_option(fake: ModuleType) -> None:
    with pytest.raises((ConfigError, TransportError), match="colour"):
        registry.create(NAME, Incarnation(os.urandom(16)), colour="blue")
