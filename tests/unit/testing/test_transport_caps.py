"""What is pinned of the capabilities, and that a transport which declares less, or more than is
so, does not pass."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs
import pytest

from pdcore.testing.conformance import minimum_capabilities, run_conformance
from pdcore.testing.transport_caps import (
    MINIMUM_CAPS,
    AtLeast,
    Including,
    broken_pins,
    pins_of,
)
from pdcore.testing.transport_harness import LoopbackHarness, RegistryHarness
from pdcore.transports import registry, shm_attach, socket_wire
from pdcore.transports.base import Revocation, Transport, TransportCaps
from pdcore.transports.loopback import LoopbackTransport
from pdcore.types import Incarnation

FIELDS = set(attrs.fields_dict(TransportCaps))
#: Of loopback these go by the kind of revocation that it plays.
LEFT_OPEN = {"loopback": {"one_sided", "death_fences"}}


def declared(name: str) -> TransportCaps:
    caps = registry.load(name).caps
    assert caps is not None
    return caps


@pytest.mark.parametrize("name", registry.built_in())
def test_what_is_pinned_is_what_is_declared(name: str) -> None:
    """The declaration of each transport of pdcore, made or not, is within its pins."""
    assert broken_pins(declared(name), MINIMUM_CAPS[name]) == []


@pytest.mark.parametrize("name", registry.built_in())
def test_every_field_is_pinned(name: str) -> None:
    """A capability that comes to the contract is pinned for each, or the suite does not hold it."""
    assert set(MINIMUM_CAPS[name]) | LEFT_OPEN.get(name, set()) == FIELDS


def test_one_that_is_not_ours_has_no_pins() -> None:
    assert pins_of("mine", {"families": ["unix"]}) == {}


#: A lie each: less than there is, or more than is so.
LIES: list[tuple[str, str, object]] = [
    *((name, "cross_host", False) for name in ("socket", "torchdist", "nixl", "mooncake")),
    ("memfabric", "cross_host", False),
    ("shm", "cross_host", True),
    ("loopback", "cross_host", True),
    ("nixl", "quarantine_s", 0.001),
    ("mooncake", "quarantine_s", 2.0),
    ("memfabric", "quarantine_s", 1.0),
    ("loopback", "quarantine_s", 0.5),
    ("shm", "quarantine_s", 1.0),
    *((name, "max_batch", 1 << 21) for name in MINIMUM_CAPS),
    *((name, "max_batch", 1) for name in MINIMUM_CAPS),
    *((name, "alignment", 4096) for name in MINIMUM_CAPS),
    *((name, "device_kinds", ("cuda",)) for name in MINIMUM_CAPS),
    *((name, "device_kinds", ()) for name in MINIMUM_CAPS),
    *((name, "doorbell", False) for name in MINIMUM_CAPS),
    *((name, "native_notify", False) for name in MINIMUM_CAPS),
    *((name, "detects_peer_death", False) for name in MINIMUM_CAPS),
    *((name, "death_fences", True) for name in ("nixl", "mooncake", "memfabric")),
    *((name, "death_fences", False) for name in ("shm", "socket", "torchdist")),
]


@pytest.mark.parametrize(("name", "field", "value"), LIES)
def test_a_lie_breaks_its_pin(name: str, field: str, value: object) -> None:
    """Mutants: the declaration with one field changed, and no other field named for it."""
    (said,) = broken_pins(with_lie(declared(name), field, value), MINIMUM_CAPS[name])
    assert said.startswith(f"{field} is {value}, must be ")


def with_lie(caps: TransportCaps, field: str, value: object) -> TransportCaps:
    changes: dict[str, object] = {field: value}
    return attrs.evolve(caps, **changes)  # type: ignore[arg-type]


class Lying(LoopbackHarness):
    """Loopback whose transports declare one field differently."""

    def __init__(self, field: str, value: object) -> None:
        super().__init__(Revocation.QUARANTINE)
        self._lie = field, value

    def create(self) -> Transport:
        made = LoopbackTransport(
            Incarnation(os.urandom(16)), self._fabric, revocation=self.revocation
        )
        made.caps = with_lie(made.caps, *self._lie)
        return made


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cross_host", True),
        ("quarantine_s", 0.001),
        ("max_batch", 512),
        ("alignment", 64),
        ("device_kinds", ("npu",)),
        ("doorbell", False),
    ],
)
def test_the_suite_asks_for_the_pins(field: str, value: object) -> None:
    with pytest.raises(AssertionError, match=f"{field} is "):
        minimum_capabilities(Lying(field, value))
    minimum_capabilities(Lying("quarantine_s", 30.0))


def test_a_doorbell_is_there_if_it_is_declared() -> None:
    """Of whoever has no pins, too: neither a bell that nobody declares nor one that is none."""

    class Mute(LoopbackTransport):
        def fileno(self) -> int | None:
            return None

    class Strangers(LoopbackHarness):
        def __init__(self, made_by: type[LoopbackTransport], *, doorbell: bool) -> None:
            super().__init__()
            self.name = "mute"
            self._made_by = made_by
            self._doorbell = doorbell

        def create(self) -> Transport:
            made = self._made_by(Incarnation(os.urandom(16)), self._fabric)
            made.name = self.name
            made.caps = attrs.evolve(made.caps, doorbell=self._doorbell)
            return made

    only = ["minimum_capabilities", "doorbell_rings"]
    silent = run_conformance(Strangers(Mute, doorbell=False), only=only)
    assert silent.skipped == {"doorbell_rings": "declares no doorbell"}
    assert silent.ok
    assert run_conformance(Strangers(LoopbackTransport, doorbell=True), only=only).passed == (
        *only,
    )
    lies = run_conformance(Strangers(Mute, doorbell=True), only=only)
    assert set(lies.failed) == set(only)
    assert "doorbell True, fileno() None" in lies.failed["minimum_capabilities"]
    shy = run_conformance(Strangers(LoopbackTransport, doorbell=False), only=only)
    assert set(shy.failed) == {"minimum_capabilities"}


def test_what_one_call_takes_is_what_the_code_gives_it() -> None:
    """``max_batch`` is a number of the code that cuts, and not one beside it."""
    assert declared("shm").max_batch == shm_attach.MAX_ROWS
    assert declared("socket").max_batch == socket_wire.MAX_PIECES


@pytest.mark.parametrize("families", [["unix"], ["tcp"], ["unix", "tcp"]])
def test_a_socket_that_stays_on_its_host_says_so(families: list[str]) -> None:
    harness = RegistryHarness("socket", families=families)
    minimum_capabilities(harness)
    transport = harness.create()
    try:
        assert transport.caps.cross_host == ("tcp" in families)
        elsewhere = attrs.evolve(transport.caps, cross_host="tcp" not in families)
    finally:
        transport.close()
    assert broken_pins(elsewhere, pins_of("socket", harness.options))


@pytest.mark.parametrize(
    ("name", "options", "holds", "breaks"),
    [
        ("mooncake", {"protocol": "ascend"}, {"alignment": 2 << 20}, {"alignment": 1}),
        ("memfabric", {"lands_late_s": 5}, {"quarantine_s": 5.0}, {"quarantine_s": 4.0}),
        (
            "memfabric",
            {"lands_late_s": 0.0},
            {"revocation": Revocation.SENDER_ACK, "death_fences": True, "quarantine_s": 0.0},
            {"death_fences": False},
        ),
        ("nixl", {"families": ["unix"]}, {"cross_host": False}, {"cross_host": True}),
    ],
)
def test_options_that_change_what_is_so(
    name: str, options: Mapping[str, object], holds: dict[str, object], breaks: dict[str, object]
) -> None:
    caps = attrs.evolve(declared(name), **holds)  # type: ignore[arg-type]
    assert broken_pins(caps, pins_of(name, options)) == []
    assert broken_pins(caps, MINIMUM_CAPS[name])
    assert broken_pins(attrs.evolve(caps, **breaks), pins_of(name, options))  # type: ignore[arg-type]


def test_sets_by_a_rule() -> None:
    assert 2.0 in AtLeast(2.0)
    assert 1.9 not in AtLeast(2.0)
    assert None not in AtLeast(2.0)
    assert ("npu", "cpu") in Including("cpu")
    assert "cpu" not in Including("cpu")
