"""Both actors, driven by hand through one request; each event is one of the real core's."""

from __future__ import annotations

from pdcore.sim.actors import Actor, Connected, Output, Packet, is_at_rest, pack, unpack
from pdcore.sim.decode_actor import DecodeActor
from pdcore.sim.places import DECODE, Dispatch, Place, Shape
from pdcore.sim.prefill_actor import PrefillActor
from pdcore.types import RoomKey

PREFILL = Place("prefill0", False, "prefill")
SHAPE = Shape((PREFILL,), (Dispatch(RoomKey(1, 1), "prefill"),))


def settle(*actors: Actor, sent: list[Output]) -> None:
    """Deliver everything once, tick everything, until nothing is left."""
    while True:
        packets = [p for p in sent if isinstance(p, Packet)]
        sent.clear()
        for actor in actors:
            for packet in packets:
                if packet.address == actor.me.address:
                    sent += actor.apply(("deliver", packet))
            while actor.core.wants_tick:
                sent += actor.apply(("tick",))
        if not packets and not sent:
            return


def started() -> tuple[PrefillActor, DecodeActor]:
    """A request that is at both, granted."""
    prefill, decode = PrefillActor(PREFILL, 0, SHAPE), DecodeActor(DECODE, 0, SHAPE)
    sent = [*prefill.apply(("submit", 0)), *decode.apply(("submit", 0))]
    sent += decode.apply(("route", PREFILL.bootstrap, (0,)))
    settle(prefill, decode, sent=sent)
    return prefill, decode


def test_one_request_from_arrival_to_rest() -> None:
    prefill, decode = started()
    assert decode.pinned() == (1,)
    prefill.apply(("compute",))
    settle(prefill, decode, sent=prefill.apply(("computed", True)))
    ((handle, write),) = prefill.writes.items()
    assert (write.source, write.target) == (prefill.me.incarnation, decode.me.incarnation)
    settle(prefill, decode, sent=prefill.apply(("ended", handle, "done")))
    for actor in (prefill, decode):
        assert is_at_rest(actor)
        assert actor.results == [1]
        assert actor.problems == []


def test_what_changes_no_lifecycle_is_taken_out_of_messages() -> None:
    """Texts and times would make endlessly many states of one."""
    prefill, decode = started()
    sent = prefill.apply(("abort", 0))
    (packet,) = (p for p in sent if isinstance(p, Packet))
    assert pack(unpack(packet.data)) == packet.data
    assert decode.me.address == packet.address


def test_a_session_is_opened_before_a_claim() -> None:
    prefill, decode = PrefillActor(PREFILL, 0, SHAPE), DecodeActor(DECODE, 0, SHAPE)
    prefill.apply(("submit", 0))
    decode.apply(("submit", 0))
    decode.apply(("route", PREFILL.bootstrap, (0,)))
    sent = decode.apply(("tick",)) + decode.apply(("tick",))
    (handshake,) = (p for p in sent if isinstance(p, Packet))
    prefill.apply(("deliver", handshake))
    session, claim = prefill.apply(("tick",))
    assert session == Connected(prefill.me.incarnation, decode.me.incarnation)
    assert isinstance(claim, Packet)


def test_a_problem_of_the_core_is_a_problem_of_the_world_not_a_crash() -> None:
    prefill, _ = started()
    prefill.core.blocks.allocate_slots(99, 0, 4)
    prefill.core.blocks._by_key["full"].pool.free(prefill.core.blocks.get_block_ids(99)["full"])
    prefill.apply(("tick",))
    (problem,) = prefill.problems
    assert problem.startswith("prefill0: OwnershipError")


def test_deadlines_and_aborts_are_offered_while_there_is_a_request() -> None:
    prefill, _ = started()
    kinds = {offer.event[:2] for offer in prefill.offers()}
    assert {("timer", "deadline"), ("abort", 0), ("compute",)} <= kinds
    assert not is_at_rest(prefill)
