"""What the transports that come with pdcore must declare, field by field: none may pass the
suite by declaring less, and none may declare what is not so."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

import attrs

from pdcore.transports.base import Revocation, TransportCaps

#: Field of the capabilities -> what it may be.
Pins = Mapping[str, Container[object]]


@attrs.frozen
class AtLeast:
    """Numbers from ``least`` on."""

    least: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and value >= self.least


@attrs.frozen
class Including:
    """Tuples with ``item`` in them."""

    item: object

    def __contains__(self, value: object) -> bool:
        return isinstance(value, tuple) and self.item in value


#: The suite moves memory of its own process, at any address, and waits for doorbells.
_ALL: Final[Pins] = {
    "native_notify": (True,),
    "submit_blocks": (False,),
    "alignment": (1,),
    "detects_peer_death": (True,),
    "device_kinds": Including("cpu"),
    "doorbell": (True,),
}
_FENCED: Final[Pins] = {"death_fences": (True,), "quarantine_s": (0.0,)}
#: A vendor's engine of one-sided writes whose late bytes nobody can call back.
_VENDOR: Final[Pins] = {
    **_ALL,
    "one_sided": (True,),
    "revocation": (Revocation.QUARANTINE,),
    "death_fences": (False,),
    "cross_host": (True,),
}

#: Name -> its pins, as it is made without options. ``max_batch`` is what one call really takes;
#: ``quarantine_s`` at least how long bytes may land (docs/transports.md has what was measured).
MINIMUM_CAPS: Final[Mapping[str, Pins]] = {
    # Whether it is one-sided and fenced depends on the kind of revocation that it plays.
    "loopback": {
        **_ALL,
        "revocation": tuple(Revocation),
        "max_batch": (1 << 20,),
        "quarantine_s": (0.0, 30.0),
        "cross_host": (False,),
    },
    "shm": {
        **_ALL,
        **_FENCED,
        "one_sided": (True,),
        "revocation": (Revocation.SENDER_ACK,),
        "max_batch": (1015,),
        "cross_host": (False,),
    },
    "socket": {
        **_ALL,
        **_FENCED,
        "one_sided": (True,),
        "revocation": (Revocation.RECEIVER_ENFORCED,),
        "max_batch": (1000,),
        "cross_host": (True,),
    },
    "torchdist": {
        **_ALL,
        **_FENCED,
        "one_sided": (False,),
        "revocation": (Revocation.RECEIVER_ENFORCED,),
        "max_batch": (8192,),
        "cross_host": (True,),
    },
    "nixl": {**_VENDOR, "max_batch": (4096,), "quarantine_s": AtLeast(2.0)},
    "mooncake": {**_VENDOR, "max_batch": (512,), "quarantine_s": AtLeast(30.0)},
    "memfabric": {**_VENDOR, "max_batch": (1024,), "quarantine_s": AtLeast(30.0)},
}
#: Those whose peers meet over a socket transport's connections: ``families`` says which.
_MEET_BY_SOCKET: Final = ("socket", "nixl", "mooncake", "memfabric")


def pins_of(name: str, options: Mapping[str, object]) -> Pins:
    """What the transport ``name``, made with ``options``, must declare; nothing for one that is
    not pdcore's."""
    pins = dict(MINIMUM_CAPS.get(name, {}))
    families = options.get("families")
    if name in _MEET_BY_SOCKET and isinstance(families, (list, tuple)) and "tcp" not in families:
        pins["cross_host"] = (False,)
    if name == "mooncake" and options.get("protocol") == "ascend":
        pins["alignment"] = (2 << 20,)
    late_s = options.get("lands_late_s")
    if name == "memfabric" and isinstance(late_s, (int, float)):
        # Whoever says how long bytes land is believed.
        pins["quarantine_s"] = (late_s,)
        if late_s == 0:
            pins["revocation"], pins["death_fences"] = (Revocation.SENDER_ACK,), (True,)
    return pins


def broken_pins(caps: TransportCaps, pins: Pins) -> list[str]:
    """A sentence for each field that is none of what it may be."""
    declared = attrs.asdict(caps, recurse=False)
    return [
        f"{field} is {declared[field]}, must be {allowed}"
        for field, allowed in pins.items()
        if declared[field] not in allowed
    ]
