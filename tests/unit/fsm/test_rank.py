"""Rank registration: leases, restarts, and old packets that must not undo them."""

from __future__ import annotations

import pytest

from pdcore.control.messages import RankRegistration
from pdcore.fsm.rank import REPLACED_CAP, Rank, RouteChanged
from pdcore.fsm.states import RankState as S

PLACE = "0,0,1"
OLD, NEW = "a" * 32, "b" * 32


def registration(incarnation: str = OLD, port: int = 35123) -> RankRegistration:
    return RankRegistration(
        attn_tp_size=2,
        attn_tp_rank=1,
        rank_ip="10.0.0.1",
        rank_port=port,
        block_sizes={"full": 16},
        kv_cache_dtype="bfloat16",
        incarnation=incarnation,
        layout_digest="d",
        fingerprint="f",
        transport="shm",
        protocol_min=1,
        protocol_max=1,
    )


def test_a_registration_enters_the_route() -> None:
    """D34: a rank is in the route only from its registration on, which it does last."""
    rank = Rank(PLACE)
    assert (rank.state, rank.registration) == (S.ABSENT, None)
    assert rank.registered(registration()) == (RouteChanged(PLACE, "", OLD),)
    assert rank.state is S.REGISTERED
    assert rank.registration == registration()


def test_renewing_changes_no_route() -> None:
    rank = Rank(PLACE)
    rank.registered(registration())
    assert rank.registered(registration()) == ()
    assert rank.ignored == 0


def test_a_new_endpoint_of_the_same_life_replaces_the_old_one() -> None:
    """R24: re-registration of the same key replaces the endpoint."""
    rank = Rank(PLACE)
    rank.registered(registration())
    assert rank.registered(registration(port=35124)) == (RouteChanged(PLACE, OLD, OLD),)
    assert rank.registration == registration(port=35124)


def test_a_lease_that_runs_out_leaves_the_route_and_may_come_back() -> None:
    """D32: in the seed a dead rank stayed in the route for ever."""
    rank = Rank(PLACE)
    rank.registered(registration())
    assert rank.lease_expired() == (RouteChanged(PLACE, OLD, ""),)
    assert rank.state is S.STALE
    assert rank.registered(registration()) == (RouteChanged(PLACE, "", OLD),)
    assert rank.state is S.REGISTERED


def test_a_stale_rank_is_forgotten_in_the_end() -> None:
    rank = Rank(PLACE)
    rank.registered(registration())
    rank.lease_expired()
    assert rank.retention_expired() == ()
    assert (rank.state, rank.registration) == (S.ABSENT, None)
    # Nobody replaced that life: should it still live, it is welcome.
    assert rank.registered(registration()) == (RouteChanged(PLACE, "", OLD),)


@pytest.mark.parametrize("stale", [False, True])
def test_only_the_holder_can_say_goodbye(stale: bool) -> None:
    rank = Rank(PLACE)
    rank.registered(registration(NEW))
    if stale:
        rank.lease_expired()
    assert rank.deregistered(OLD) is None
    assert rank.deregistered(NEW) == (() if stale else (RouteChanged(PLACE, NEW, ""),))
    assert (rank.state, rank.ignored) == (S.ABSENT, 1)
    assert rank.registered(registration(NEW)) is None, "a goodbye is final"


def test_memory_of_replaced_lives_is_bounded() -> None:
    rank = Rank(PLACE)
    for i in range(100):
        rank.registered(registration(f"{i:032x}"))
    assert len(rank.replaced) == REPLACED_CAP
    assert rank.registered(registration(f"{98:032x}")) is None
    assert repr(rank) == f"Rank({PLACE}, Registered, incarnation=00000000)"


# --- D32: a restart cannot be undone ----------------------------------------------------


def check_an_old_packet_does_not_undo_a_restart(rank: Rank) -> None:
    rank.registered(registration(OLD))
    effects = rank.registered(registration(NEW))
    assert effects == (RouteChanged(PLACE, OLD, NEW),), "decode must learn whom to fence"
    assert not rank.may_registered(registration(OLD))
    assert rank.registered(registration(OLD)) is None
    assert rank.registration == registration(NEW)
    rank.lease_expired()
    assert rank.registered(registration(OLD)) is None
    assert rank.state is S.STALE


def test_d32_a_delayed_registration_of_a_replaced_life_is_ignored() -> None:
    """D32: the seed has no incarnation, so the last packet to arrive wins."""
    check_an_old_packet_does_not_undo_a_restart(Rank(PLACE))


def test_d32_mutant_last_packet_wins_is_found() -> None:
    class LastPacketWins(Rank):
        def is_not_replaced(self, payload: RankRegistration) -> bool:
            return True

    with pytest.raises(AssertionError):
        check_an_old_packet_does_not_undo_a_restart(LastPacketWins(PLACE))


def test_who_was_forgotten_and_then_replaced_never_comes_back() -> None:
    """D32, found by the rank world: a life that was silent beyond its retention was no longer
    known as replaced when its successor came, and an old registration threw that one out."""
    rank = Rank(PLACE)
    rank.registered(registration(OLD))
    rank.lease_expired()
    rank.retention_expired()
    rank.registered(registration(NEW))
    assert rank.registered(registration(OLD)) is None
    assert rank.in_route == NEW


def test_a_goodbye_is_final_also_after_the_retention() -> None:
    """Found by the rank world: forgotten, goodbye, and then a registration that was late."""
    rank = Rank(PLACE)
    rank.registered(registration(OLD))
    rank.lease_expired()
    rank.retention_expired()
    assert rank.deregistered(NEW) is None
    assert rank.deregistered(OLD) == ()
    assert rank.registered(registration(OLD)) is None
    assert rank.state is S.ABSENT
