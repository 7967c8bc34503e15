"""The conformance suite of KV data planes: what :mod:`pdcore.transports.base` promises, as
named checks that run unchanged on every transport.

A transport's author runs it on an own harness, usually a
:class:`~pdcore.testing.transport_harness.RegistryHarness`::

    report = run_conformance(RegistryHarness("mine"))
    assert report.ok, report

A check is skipped only for a capability the transport declares missing, and the least
that each transport of pdcore must declare is pinned in ``transport_caps``: a transport
cannot pass by declaring less.
"""

from __future__ import annotations

import inspect
import re
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Final, Literal

import attrs

from pdcore.testing import transport_checks_data as data
from pdcore.testing import transport_checks_growth as growth
from pdcore.testing import transport_checks_lease as lease
from pdcore.testing import transport_checks_life as life
from pdcore.testing import transport_checks_process as process
from pdcore.testing.transport_caps import broken_pins, pins_of
from pdcore.testing.transport_harness import RegistryHarness, TransportHarness
from pdcore.transports.base import Revocation, TransportCaps


@attrs.frozen
class Check:
    """``needs`` names the boolean capabilities without which the check has no meaning."""

    name: str
    guarantee: str
    run: Callable[[TransportHarness], None] = attrs.field(repr=False)
    needs: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first sentence of what the check says of itself."""
        text = inspect.cleandoc(self.run.__doc__ or "").replace("\n", " ").replace("``", "`")
        sentence = re.split(r"(?<=[\w`])\.(?= [A-Z]|$)", _SOURCE.sub("", text))[0]
        return sentence[0].upper() + sentence[1:]


#: Where a check's rule comes from: the guarantee is told apart from what is shown.
_SOURCE: Final = re.compile(r"^(?:[DG]\d|[Pp]ublic report|Rule)[^:]*: ")


@attrs.frozen
class Result:
    """How one check ended; ``reason`` says why it failed, or what the transport lacks."""

    check: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str = ""
    seconds: float = 0.0


@attrs.frozen
class Report:
    """What held and what did not; ``skipped`` maps a check to the missing capability."""

    transport: str
    caps: TransportCaps
    passed: tuple[str, ...]
    failed: dict[str, str]
    skipped: dict[str, str]
    seconds: dict[str, float] = attrs.field(factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        return not self.failed


def minimum_capabilities(harness: TransportHarness) -> None:
    """The transport declares at least what the suite pins for its name, and nothing that
    contradicts itself."""
    transport = harness.create()
    try:
        caps, name = transport.caps, transport.name
        assert name == harness.name
        assert len(transport.incarnation) == 16
        options = harness.options if isinstance(harness, RegistryHarness) else {}
        broken = broken_pins(caps, pins_of(name, options))
        assert not broken, "; ".join(broken)
        assert min(caps.max_batch, caps.alignment) > 0
        assert (caps.quarantine_s > 0) == (caps.revocation is Revocation.QUARANTINE)
        assert caps.detects_peer_death or not caps.death_fences
        bell = transport.fileno()
        assert (bell is not None) == caps.doorbell, f"doorbell {caps.doorbell}, fileno() {bell}"
    finally:
        transport.close()


_NOTIFY = ("native_notify",)
_DEATH = ("detects_peer_death",)

CHECKS: Final[tuple[Check, ...]] = (
    Check("minimum_capabilities", "caps", minimum_capabilities),
    Check("notification_after_data", "G1", data.notification_after_data, _NOTIFY),
    Check("notifications_are_fifo", "G1", data.notifications_are_fifo, _NOTIFY),
    Check("tiny_and_huge", "G1", data.tiny_and_huge, _NOTIFY),
    Check("zero_bytes", "G2", data.zero_bytes, _NOTIFY),
    Check("one_completion_each", "G2", data.one_completion_each),
    Check("many_descriptors", "data", data.many_descriptors),
    Check("strided_descriptors", "data", data.strided_descriptors),
    Check("odd_offsets", "data", data.odd_offsets),
    Check("several_regions", "data", data.several_regions),
    Check("registered_source", "data", data.registered_source),
    Check("memory_is_zeroed", "data", data.memory_is_zeroed),
    Check("doorbell_rings", "data", data.doorbell_rings, (*_NOTIFY, "doorbell")),
    Check("both_directions", "data", data.both_directions, _NOTIFY),
    Check("bounds_before_byte_0", "G3", lease.bounds_before_byte_0),
    Check("regions_must_be_known", "G3", lease.regions_must_be_known),
    Check("overlap_is_refused", "G3", lease.overlap_is_refused),
    Check("lease_before_byte_0", "G3", lease.lease_before_byte_0),
    Check("malformed_leases", "G3", lease.malformed_leases),
    Check("changed_descriptors", "G3", lease.transfers_survive_changed_descriptors),
    Check("cancel_quiesces", "G2, G4", lease.cancel_quiesces),
    Check("revoke_ends_writes", "G4", lease.revoke_ends_writes),
    Check("release_ends_notifications", "G4", lease.release_ends_notifications),
    Check("disconnect_ends_handles", "G4", lease.disconnect_ends_handles),
    Check("deregister_in_flight", "G5", lease.deregister_in_flight),
    Check("foreign_descriptors", "G6", life.foreign_descriptors),
    Check("wrong_incarnation", "G6", growth.wrong_incarnation),
    Check("hostile_descriptors", "G6", growth.hostile_descriptors),
    Check("close_is_idempotent", "G7", life.close_is_idempotent),
    Check("receiver_closes", "G7", life.receiver_closes, _DEATH),
    Check("buffers_outlive_close", "G7", life.buffers_outlive_close),
    Check("too_much_memory", "G7", life.too_much_memory),
    Check("cycles_without_growth", "G7", growth.cycles_without_growth),
    Check("writes_arrive", "process", process.writes_arrive),
    Check("sender_killed", "process", process.sender_killed, _DEATH),
    Check("receiver_killed", "process", process.receiver_killed, _DEATH),
    Check("receiver_stopped", "process", process.receiver_stopped),
    Check("sender_stopped", "process", process.sender_stopped),
    Check("stopped_peer_is_alone", "process", process.stopped_peer_is_alone, _NOTIFY),
    Check("partial_failure", "process", process.partial_failure, (*_NOTIFY, *_DEATH)),
    Check("restarted_peer", "process", process.restarted_peer, _DEATH),
)


def run_check(check: Check, harness: TransportHarness, caps: TransportCaps) -> str | None:
    """Run one check; the missing capability when it does not apply. Raises
    AssertionError, or whatever the transport raised, when it fails."""
    declared = attrs.asdict(caps)
    for need in check.needs:
        if not declared[need]:
            return need
    check.run(harness)
    return None


def conduct(check: Check, harness: TransportHarness, caps: TransportCaps) -> Result:
    """Run one check and say how it ended; never raises for a check that fails."""
    started = time.monotonic()
    outcome = _Outcome()
    missing: str | None = None
    with outcome:
        missing = run_check(check, harness, caps)
    took = time.monotonic() - started
    if outcome.failure:
        return Result(check.name, "failed", outcome.failure, took)
    if missing is not None:
        return Result(check.name, "skipped", f"declares no {missing}", took)
    return Result(check.name, "passed", "", took)


def choose(only: Collection[str]) -> list[Check]:
    """The checks named, in their order; all of them for no name. Raises ValueError."""
    unknown = set(only) - {check.name for check in CHECKS}
    if unknown:
        raise ValueError(f"only: no such check: {', '.join(sorted(unknown))}")
    return [check for check in CHECKS if not only or check.name in only]


def run_conformance(harness: TransportHarness, only: Collection[str] = ()) -> Report:
    """Run all checks (or those named in ``only``) and report; never raises for a check
    that fails. Raises ValueError for an unknown name."""
    chosen = choose(only)
    probe = harness.create()
    caps = probe.caps
    probe.close()
    results = [conduct(check, harness, caps) for check in chosen]
    return Report(
        harness.name,
        caps,
        tuple(r.check for r in results if r.outcome == "passed"),
        {r.check: r.reason for r in results if r.outcome == "failed"},
        {r.check: r.reason for r in results if r.outcome == "skipped"},
        {r.check: r.seconds for r in results},
    )


class _Outcome:
    """Whatever a transport raises inside is a finding, not a crash of the suite."""

    def __init__(self) -> None:
        self.failure = ""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        where = traceback.extract_tb(trace)[-1]
        self.failure = f"{type(error).__name__}: {error} ({where.name}:{where.lineno})"
        return True


def capability_matrix(reports: Sequence[Report]) -> str:
    """A Markdown table: one column per transport, one row per capability and check."""
    rows = [["", *(report.transport for report in reports)]]
    rows += [
        [field, *(cell(attrs.asdict(report.caps)[field]) for report in reports)]
        for field in attrs.fields_dict(TransportCaps)
    ]
    for check in CHECKS:
        rows.append([f"{check.name} ({check.guarantee})"])
        for report in reports:
            if check.name in report.passed:
                word = "passed"
            elif check.name in report.failed:
                word = "FAILED"
            else:
                word = report.skipped.get(check.name, "not run")
            rows[-1].append(word)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    """A capability's value as people read it."""
    if isinstance(value, Revocation):
        return value.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return str(value)
