"""The conformance suite on pdcore's own transports, and on broken ones it must catch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import attrs
import pytest

from pdcore.errors import TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.testing import transport_checks_data as data
from pdcore.testing import transport_checks_growth as growth
from pdcore.testing import transport_checks_lease as lease
from pdcore.testing import transport_checks_process as process
from pdcore.testing.conformance import (
    CHECKS,
    Check,
    capability_matrix,
    run_check,
    run_conformance,
)
from pdcore.testing.transport_caps import MINIMUM_CAPS
from pdcore.testing.transport_harness import LoopbackHarness, RegistryHarness
from pdcore.testing.transport_watch import Watched, pump
from pdcore.transports import registry
from pdcore.transports.base import (
    Completion,
    HandleStatus,
    Notification,
    PeerSession,
    Region,
    RemoteLease,
    Revocation,
    Transport,
    TransportCaps,
    TransportEvent,
)
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.loopback import LoopbackTransport, loopback_caps
from pdcore.transports.shm import CAPS
from pdcore.types import Incarnation

IDS = [check.name for check in CHECKS]
linux = pytest.mark.skipif(sys.platform != "linux", reason="shm is Linux")


@pytest.mark.parametrize("kind", list(Revocation))
@pytest.mark.parametrize("check", CHECKS, ids=IDS)
def test_loopback(check: Check, kind: Revocation) -> None:
    harness = LoopbackHarness(kind, cycles=50)
    assert run_check(check, harness, loopback_caps(kind)) is None


@linux
@pytest.mark.parametrize("check", CHECKS, ids=IDS)
def test_shm(check: Check) -> None:
    """Pairs within this process, and peers in another one that are killed and stopped."""
    harness = RegistryHarness("shm", cycles=20, connect_timeout_s=0.3)
    assert run_check(check, harness, CAPS) is None


class Broken(LoopbackHarness):
    """Loopback whose transports are made by ``cls``."""

    def __init__(self, cls: type[LoopbackTransport], kind: Revocation) -> None:
        super().__init__(kind, cycles=30)
        self._cls = cls

    def create(self) -> Transport:
        incarnation = Incarnation(os.urandom(16))
        return self._cls(incarnation, self._fabric, revocation=self.revocation)


class NoLease(LoopbackTransport):
    """Checks bounds only, as one-sided writes by raw address do."""

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        import numpy as np

        whole = {
            batch.remote_region: np.array([[0, size]], np.int64)
            for batch in batches
            for size in [
                self._links[session.session_id].receiver.regions.sizes[batch.remote_region]
            ]
        }
        return super().submit(session, batches, attrs.evolve(lease, ranges=whole), notify)


class FirstEntryOnly(LoopbackTransport):
    """Reports a handle done when the first descriptor is (Mooncake's status call)."""

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        first = [attrs.evolve(batch, descriptors=batch.descriptors[:1]) for batch in batches[:1]]
        return super().submit(session, first, lease, notify)


class TwiceDone(LoopbackTransport):
    """Reports completions again on the next poll."""

    def poll(self) -> list[TransportEvent]:
        events = super().poll()
        return [*events, *(e for e in events if isinstance(e, Completion))]


class NoFifo(LoopbackTransport):
    def poll(self) -> list[TransportEvent]:
        return sorted(super().poll(), key=lambda e: isinstance(e, Notification), reverse=True)[::-1]


class SilentWhenEmpty(LoopbackTransport):
    """Never completes what moves no byte (vllm-ascend #10098)."""

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        if not sum(batch.num_bytes for batch in batches):
            return 10**6
        return super().submit(session, batches, lease, notify)


class GivesAway(LoopbackTransport):
    """Deregisters in flight, as mooncake's unregister does."""

    def deregister(self, region: Region) -> None:
        regions = self._endpoint.regions
        regions._pins.clear()
        regions._grants.clear()
        super().deregister(region)


class AnyIncarnation(LoopbackTransport):
    """Reconnects by address."""

    def connect(self, descriptor: bytes) -> PeerSession:
        try:
            return super().connect(descriptor)
        except TransportError:
            return PeerSession(1, self.incarnation)


class Leaks(LoopbackTransport):
    def connect(self, descriptor: bytes) -> PeerSession:
        os.dup(self.fileno() or 0)
        return super().connect(descriptor)


class KeepsRegions(LoopbackTransport):
    kept: ClassVar[list[Region]] = []

    def allocate(self, size_bytes: int) -> Region:
        self.kept.append(super().allocate(size_bytes))
        return self.kept[-1]


class KeepsRecords(LoopbackTransport):
    """Remembers everybody who ever connected."""

    kept: ClassVar[list[list[int]]] = []

    def connect(self, descriptor: bytes) -> PeerSession:
        self.kept += ([number] for number in range(500))
        return super().connect(descriptor)


class OneQueue(LoopbackTransport):
    """Whoever is behind a peer that is stopped waits with it."""

    def poll(self) -> list[TransportEvent]:
        peers = [link.receiver.incarnation for link in self._links.values()]
        if any(self.fabric.faults(peer).stopped for peer in peers):
            return []
        return super().poll()


class ForgetsTheDead(LoopbackTransport):
    """Transfers to a peer that died never end."""

    def poll(self) -> list[TransportEvent]:
        return [
            event
            for event in super().poll()
            if not (isinstance(event, Completion) and event.status is HandleStatus.FAILED)
        ]


class CallsItDone(LoopbackTransport):
    """What the receiver did not take is called a success."""

    def poll(self) -> list[TransportEvent]:
        return [
            attrs.evolve(event, status=HandleStatus.DONE)
            if isinstance(event, Completion)
            else event
            for event in super().poll()
        ]


class Reconnects(LoopbackTransport):
    """What is at the address will do, whichever life it is."""

    def connect(self, descriptor: bytes) -> PeerSession:
        found = decode(descriptor, self.name)
        now = self.fabric._endpoints.get(found.blob.decode(errors="replace"))
        if now is None:
            return super().connect(descriptor)
        regions = now.regions.targets()
        fresh = EndpointDescriptor(self.name, now.incarnation, regions, found.blob)
        return super().connect(fresh.encode())


class SaysLess(LoopbackTransport):
    """Declares less than pinned, to have checks skipped."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.caps = attrs.evolve(self.caps, detects_peer_death=False, death_fences=False)


class ReadsLate(LoopbackTransport):
    """Keeps the caller's descriptor array and looks at it when the bytes move."""

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        self._late = (session, batches, lease, notify)
        return 10**6

    def poll(self) -> list[TransportEvent]:
        late = vars(self).pop("_late", None)
        if late is not None:
            handle = super().submit(*late)
            return [
                attrs.evolve(e, handle=10**6) if isinstance(e, Completion) else e
                for e in super().poll()
                if handle
            ]
        return super().poll()


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mutant never does is not waited for: loopback does everything when polled."""
    for module in (data, growth, lease, process):
        monkeypatch.setattr(module, "pump", waits_less)


def waits_less(*watched: Watched, **options: object) -> None:
    pump(*watched, **{**options, "timeout_s": 0.2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cls", "caught_by"),
    [
        (NoLease, "lease_before_byte_0"),
        (FirstEntryOnly, "tiny_and_huge"),
        (TwiceDone, "one_completion_each"),
        (NoFifo, "notifications_are_fifo"),
        (SilentWhenEmpty, "zero_bytes"),
        (GivesAway, "deregister_in_flight"),
        (AnyIncarnation, "foreign_descriptors"),
        (AnyIncarnation, "hostile_descriptors"),
        (AnyIncarnation, "wrong_incarnation"),
        (Reconnects, "wrong_incarnation"),
        (Reconnects, "restarted_peer"),
        (OneQueue, "stopped_peer_is_alone"),
        (ForgetsTheDead, "partial_failure"),
        (SaysLess, "minimum_capabilities"),
        (ReadsLate, "changed_descriptors"),
    ],
)
def test_the_suite_catches(
    cls: type[LoopbackTransport], caught_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants, one broken promise each: the check named for it fails, and passes without. D23:
    one queue for all is one of them."""
    with monkeypatch.context() as patch:
        impatient(patch)
        report = run_conformance(Broken(cls, Revocation.SENDER_ACK), only=[caught_by])
    assert set(report.failed) == {caught_by}
    assert not report.ok
    good = run_conformance(Broken(LoopbackTransport, Revocation.SENDER_ACK), only=[caught_by])
    assert good.passed == (caught_by,)


def test_growth_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    opened: list[int] = []
    dup = os.dup
    monkeypatch.setattr(os, "dup", lambda fd: opened.append(dup(fd)))
    report = run_conformance(Broken(Leaks, Revocation.SENDER_ACK), only=["cycles_without_growth"])
    for fd in opened:
        os.close(fd)
    assert set(report.failed) == {"cycles_without_growth"}


def test_a_success_without_its_bytes_is_caught() -> None:
    """G2 where the receiver enforces leases: what it dropped has failed."""
    report = run_conformance(
        Broken(CallsItDone, Revocation.RECEIVER_ENFORCED), only=["revoke_ends_writes"]
    )
    assert "DONE of which bytes are missing" in report.failed["revoke_ends_writes"]
    good = Broken(LoopbackTransport, Revocation.RECEIVER_ENFORCED)
    assert run_conformance(good, only=["revoke_ends_writes"]).ok


@linux
@pytest.mark.parametrize(("cls", "what"), [(KeepsRegions, "MiB of memory"), (KeepsRecords, "obj")])
def test_growth_of_memory_is_caught(
    cls: type[KeepsRegions | KeepsRecords], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "LEAKED_BYTES", 128 << 20)
    monkeypatch.setattr(growth, "ALLOWED_BYTES", 32 << 20)
    report = run_conformance(Broken(cls, Revocation.SENDER_ACK), only=["cycles_without_growth"])
    cls.kept.clear()
    assert what in report.failed["cycles_without_growth"]


def test_hasty_quiesced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """G2, public report I24527: "cancelled" is not "quiesced" when writes land late."""
    from pdcore.transports import loopback_fabric

    def hasty(handle: int, status: HandleStatus, quiesced: bool, detail: str = "") -> Completion:
        return Completion(handle, status, True, detail)

    monkeypatch.setattr(loopback_fabric, "Completion", hasty)
    report = run_conformance(LoopbackHarness(Revocation.QUARANTINE), only=["cancel_quiesces"])
    assert set(report.failed) == {"cancel_quiesces"}


def test_a_check_is_skipped_only_for_a_declared_gap() -> None:
    class NoNotify(LoopbackTransport):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self.caps = attrs.evolve(self.caps, native_notify=False)

    harness = Broken(NoNotify, Revocation.SENDER_ACK)
    report = run_conformance(harness, only=["zero_bytes", "odd_offsets", "minimum_capabilities"])
    assert report.skipped == {"zero_bytes": "declares no native_notify"}
    assert report.passed == ("odd_offsets",)
    assert "native_notify" in report.failed["minimum_capabilities"]
    for check in CHECKS:
        assert all(need in attrs.fields_dict(TransportCaps) for need in check.needs)


def test_every_guarantee_has_a_check() -> None:
    named = {part for check in CHECKS for part in check.guarantee.split(", ")}
    assert {f"G{i}" for i in range(1, 8)} <= named
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize("name", registry.built_in())
def test_every_transport_of_pdcore_is_pinned_and_run(name: str) -> None:
    """None may pass by declaring less, or by not being asked."""
    assert name in MINIMUM_CAPS
    suites = (Path(__file__).parents[2] / "conformance").glob("test_*.py")
    assert any(name in suite.read_text(encoding="utf-8").lower() for suite in suites)


def test_unknown_check() -> None:
    with pytest.raises(ValueError, match="no such check: nonsense"):
        run_conformance(LoopbackHarness(), only=["nonsense"])


def test_the_matrix() -> None:
    only = ["odd_offsets"]
    reports = [run_conformance(LoopbackHarness(kind), only=only) for kind in Revocation]
    text = capability_matrix(reports)
    lines = text.splitlines()
    assert lines[0] == "|  | loopback | loopback | loopback |"
    assert "| revocation | receiver_enforced | sender_ack | quarantine |" in lines
    assert "| odd_offsets (data) | passed | passed | passed |" in lines
    assert "| zero_bytes (G2) | not run | not run | not run |" in lines
    assert len({line.count("|") for line in lines}) == 1
