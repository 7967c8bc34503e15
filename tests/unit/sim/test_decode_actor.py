"""What only a decode rank can meet."""

from __future__ import annotations

from pdcore.control.messages import Claim, Stale
from pdcore.sim.actors import Packet, is_at_rest, pack
from pdcore.sim.decode_actor import DecodeActor
from pdcore.sim.places import DECODE, Dispatch, Place, Shape
from pdcore.types import LeaseId, Nonce, RoomKey

PREFILL = Place("prefill0", False, "prefill")
SHAPE = Shape((PREFILL,), (Dispatch(RoomKey(1, 1), "prefill"),))


def test_a_refused_route_fails_who_waits_for_it() -> None:
    actor = DecodeActor(DECODE, 0, SHAPE)
    actor.apply(("submit", 0))
    assert list(actor.fetching) == [PREFILL.bootstrap]
    actor.apply(("route", PREFILL.bootstrap, ()))
    actor.apply(("tick",))
    assert actor.failed == {0}
    assert is_at_rest(actor)


def test_the_lease_is_open_until_it_is_revoked() -> None:
    """RECEIVER_ENFORCED: revoking is enough, the transport says so at once."""
    shape = Shape((PREFILL,), SHAPE.dispatches, is_enforced=True)
    actor = DecodeActor(DECODE, 0, shape)
    actor.apply(("submit", 0))
    actor.apply(("route", PREFILL.bootstrap, (0,)))
    actor.apply(("tick",))
    actor.apply(("tick",))
    assert actor.open_leases == {1}
    actor.apply(("abort", 0))
    actor.apply(("tick",))
    assert actor.open_leases == set()


def said(message: Claim | Stale) -> Packet:
    me = DECODE.ref(0)
    life = PREFILL.ref(0 if isinstance(message, Claim) else 1)
    return Packet(life, me.address, me.incarnation, pack(message))


def aborted(quarantine_s: float, *, is_granted: bool) -> DecodeActor:
    shape = Shape((PREFILL,), SHAPE.dispatches, quarantine_s=quarantine_s)
    actor = DecodeActor(DECODE, 0, shape)
    actor.apply(("submit", 0))
    actor.apply(("route", PREFILL.bootstrap, (0,)))
    for _ in range(2):
        actor.apply(("tick",))
    if is_granted:
        lease = LeaseId(DECODE.ref(0).incarnation, 1)
        nonce = Nonce(PREFILL.ref(0).incarnation, 1)
        actor.apply(("deliver", said(Claim(RoomKey(1, 1), lease, nonce))))
    actor.apply(("abort", 0))
    actor.apply(("tick",))
    return actor


def test_who_was_granted_nothing_is_not_waited_for() -> None:
    actor = aborted(1.0, is_granted=False)
    actor.apply(("tick",))
    assert actor.pinned() == ()


def test_quarantine_is_counted_down_by_looks() -> None:
    actor = aborted(1.0, is_granted=True)
    actor.apply(("deliver", said(Stale(RoomKey(1, 1), PREFILL.ref(0).incarnation))))
    assert actor.pinned() == (1,)
    assert actor.aged() == ()
    actor.apply(("look",))
    assert actor.aged() == (1,)
    actor.apply(("look",))
    actor.apply(("tick",))
    assert actor.pinned() == ()
