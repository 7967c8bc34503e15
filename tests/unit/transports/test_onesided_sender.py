"""The sending half: what is checked before the vendor hears of it, and who is let go when."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import attrs
import pytest

from pdcore.errors import PeerGone, TransportError
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_harness import Pair
from pdcore.testing.transport_watch import is_zero, pump
from pdcore.transports import onesided_sender
from pdcore.transports.base import HandleStatus
from pdcore.transports.descriptor import decode
from pdcore.transports.onesided_side import SideOptions
from tests.unit.transports.attach_engine import LIMITS, NAME, AttachHarness, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
DONE, FAILED = HandleStatus.DONE, HandleStatus.FAILED
MIB = 1 << 20


@pytest.fixture
def harness() -> AttachHarness:
    return AttachHarness()


@pytest.fixture
def pair(harness: AttachHarness) -> Iterator[Pair]:
    with Pair(harness, 32 * MIB) as pair:
        yield pair


def test_calls_are_bounded(harness: AttachHarness, pair: Pair) -> None:
    """The vendor's limits, and ours, so that a cancel waits for one call only."""
    finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 32 * MIB))))
    rows = [(i * 16, i * 32, 8) for i in range(3000)]
    finish(pair, pair.submit(pair.lease(), pair.batch(*rows)))
    assert harness.engines[0].faults.calls == [
        *[(1, 8 * MIB)] * 4,
        (1024, 8192),
        (1024, 8192),
        (952, 7616),
    ]


def no_lease_check(pair: Pair) -> int:
    """The seed's rule, which trusts whoever submits: the lease is what is written."""
    return pair.submit(pair.lease(), pair.batch((0, 64, 128)))


def refuses_outside_the_lease(pair: Pair, submit: object) -> None:
    assert callable(submit)
    try:
        handle = submit(pair)
    except TransportError:
        assert is_zero(pair.target.buffer)
        return
    finish(pair, handle)
    raise AssertionError("a write outside the lease was made")


def test_the_lease_is_checked_before_the_vendor_hears_of_it(
    harness: AttachHarness, pair: Pair
) -> None:
    """G3, D58: no vendor checks a lease."""
    lease = pair.lease((0, 64))
    refuses_outside_the_lease(pair, lambda p: p.submit(lease, p.batch((0, 0, 8), (0, 63, 2))))
    assert harness.engines[0].faults.calls == []
    with pytest.raises(AssertionError):
        refuses_outside_the_lease(pair, no_lease_check)


def test_a_source_is_pinned_until_its_handle_is_quiesced() -> None:
    """G5: a call that came back late still reads it."""
    harness = AttachHarness(options=SideOptions(stall_timeout_s=0.05))
    with Pair(harness) as pair:
        faults = harness.engines[0].faults
        faults.hang = True
        handle = pair.submit(pair.lease(), pair.batch((0, 0, 64)))
        record = pair.sender.record
        pump(pair.sender, until=lambda: handle in record.ended)
        assert record.ended[handle] is FAILED
        assert handle not in record.quiesced
        with pytest.raises(TransportError, match="in flight"):
            pair.sender.transport.deregister(pair.source)
        faults.release.set()
        pump(pair.sender, until=lambda: handle in record.quiesced)
        with pytest.raises(PeerGone, match="did not return"):
            pair.submit(pair.lease(), pair.batch((0, 0, 64)))
        pair.sender.transport.deregister(pair.source)
        assert harness.engines[0].registered == set()


def test_a_session_that_stalled_is_replaced_by_a_new_one() -> None:
    """D23: with a thread of its own, though the other is still in the vendor's call."""
    harness = AttachHarness(options=SideOptions(stall_timeout_s=0.05))
    with Pair(harness) as pair:
        faults = harness.engines[0].faults
        faults.hang = True
        stuck = pair.submit(pair.lease(), pair.batch((0, 0, 64)))
        pump(pair.sender, until=lambda: stuck in pair.sender.record.ended)
        faults.hang = False
        old, pair.session = (
            pair.session,
            pair.sender.transport.connect(pair.receiver.transport.descriptor()),
        )
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 64, 64)), notify=b"n"))
        pair.sender.transport.disconnect(old)
        faults.release.set()
        pump(pair.sender, until=lambda: stuck in pair.sender.record.quiesced)


def test_a_peer_of_another_engine_is_refused(harness: AttachHarness, pair: Pair) -> None:
    other = attrs.evolve(decode(pair.receiver.transport.descriptor(), NAME), transport="other")
    with pytest.raises(TransportError, match="data plane is 'other'"):
        pair.sender.transport.connect(other.encode())


def test_an_engine_that_cannot_meet_the_peer_refuses_in_time() -> None:
    """Mooncake: a peer that stops in that moment. Its thread stays until the vendor lets it."""
    harness = AttachHarness(options=SideOptions(connect_timeout_s=0.2))
    with Pair(harness) as pair:
        faults = harness.engines[0].faults
        faults.hang_at_open = True
        with pytest.raises(PeerGone, match="did not answer in time"):
            pair.sender.transport.connect(pair.receiver.transport.descriptor())
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64))))
        faults.release.set()
        faults.hang_at_open = False
        harness.engines[1].address = lambda: b"nonsense"  # type: ignore[method-assign]
        with pytest.raises(PeerGone, match="malformed address"):
            pair.sender.transport.connect(pair.receiver.transport.descriptor())


def test_sessions_whose_threads_the_vendor_keeps_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G7: a worker tries again for as long as the peer's engine is silent; each try kept a
    thread and a connection."""
    monkeypatch.setattr(onesided_sender, "MAX_LEAVING", 3)
    harness = AttachHarness(options=SideOptions(connect_timeout_s=0.2))
    with Pair(harness) as pair:
        faults = harness.engines[0].faults
        faults.hang_at_open = True
        before = threading.active_count()
        why = []
        for _ in range(6):
            with pytest.raises(PeerGone) as refused:
                pair.sender.transport.connect(pair.receiver.transport.descriptor())
            why.append("3 earlier sessions" in str(refused.value))
        assert why[3:] == [True] * 3
        assert threading.active_count() - before <= 4
        faults.release.set()
        pump(pair.sender, until=lambda: threading.active_count() <= before)
        faults.hang_at_open = False
        session = pair.sender.transport.connect(pair.receiver.transport.descriptor())
        pair.sender.transport.disconnect(session)


def test_threads_come_and_go_with_sessions(pair: Pair) -> None:
    before = threading.active_count()
    for _ in range(20):
        session = pair.sender.transport.connect(pair.receiver.transport.descriptor())
        pair.sender.transport.disconnect(session)
    pump(pair.sender, until=lambda: threading.active_count() <= before)


def test_what_close_leaves_is_named() -> None:
    harness = AttachHarness(attrs.evolve(LIMITS, lands_late_s=600.0))
    pair = Pair(harness)
    harness.engines[0].faults.late = True
    handle = pair.submit(pair.lease(), pair.batch((0, 0, 64)))
    pump(pair.sender, until=lambda: handle in pair.sender.record.ended)
    assert pair.sender.transport.close(0.2) == ["a write that may still land"]
    pair.sender.poll()
    assert handle not in pair.sender.record.quiesced
    assert pair.receiver.transport.close() == []
    assert [engine.is_closed for engine in harness.engines] == [True, True]
