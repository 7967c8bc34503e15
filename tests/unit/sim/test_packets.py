"""Labels are what a trace consists of: two packets never have the same."""

from __future__ import annotations

from pdcore.control.messages import Cancel, Claim, Status, StatusKind
from pdcore.sim.actors import Packet, pack
from pdcore.sim.packets import describe
from pdcore.sim.places import Place
from pdcore.types import LeaseId, Nonce, RoomKey

SENDER = Place("prefill0", False, "prefill").ref(0)
DECODE = Place("decode", True, "decode").ref(1)
KEY, LEASE = RoomKey(1, 2), LeaseId(DECODE.incarnation, 3)
NONCE = Nonce(SENDER.incarnation, 4)


def packet(message: Claim | Cancel | Status) -> Packet:
    return Packet(SENDER, DECODE.address, DECODE.incarnation, pack(message))


def test_a_claim_in_words() -> None:
    assert describe(packet(Claim(KEY, LEASE, NONCE))) == (
        "Claim 1.2 lease 3 nonce prefill0.0/4 (prefill0.0 -> decode.1)"
    )


def test_kinds_and_nonces_are_told_apart() -> None:
    words = {
        describe(packet(message))
        for message in (
            Cancel(KEY, LEASE, ()),
            Cancel(KEY, LEASE, (NONCE,)),
            Status(KEY, LEASE, StatusKind.FAILED),
            Status(KEY, LEASE, StatusKind.DONE, NONCE),
        )
    }
    assert len(words) == 4
