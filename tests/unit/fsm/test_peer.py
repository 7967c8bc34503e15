"""Peer: silence makes suspect, only proof makes dead, and dead is not fenced."""

from __future__ import annotations

import attrs
import pytest

from pdcore.fsm.effects import FencePeer, ForgetPeer
from pdcore.fsm.machine import compile_lifecycle
from pdcore.fsm.peer import PEER, DeathProof, Peer, PeerDied, PeerRecovered, PeerSuspected
from pdcore.fsm.states import PeerState as S
from pdcore.fsm.table import Row
from pdcore.types import Incarnation, PeerRef

REF = PeerRef("prefill:8001", 3, Incarnation(b"p" * 16), "tcp://prefill:9001")


def peer(cls: type[Peer] = Peer, misses: int = 3) -> Peer:
    return cls(REF, misses)


def silence(entity: Peer, intervals: int) -> list[object]:
    return [e for _ in range(intervals) for e in entity.heartbeat_missed() or ()]


def test_a_message_makes_it_healthy() -> None:
    entity = peer()
    assert entity.message_received() == ()
    assert entity.state is S.HEALTHY


@pytest.mark.parametrize("heard", [False, True])
def test_the_last_of_several_misses_makes_it_suspect_once(heard: bool) -> None:
    entity = peer()
    if heard:
        entity.message_received()
    assert silence(entity, 2) == []
    assert entity.state is (S.HEALTHY if heard else S.UNKNOWN)
    assert silence(entity, 1) == [PeerSuspected(REF)]
    assert entity.state is S.SUSPECT
    assert silence(entity, 100) == []


def test_a_message_in_between_starts_the_count_again() -> None:
    entity = peer()
    silence(entity, 2)
    entity.message_received()
    assert silence(entity, 2) == []
    assert entity.state is S.HEALTHY


def test_suspect_is_reversible() -> None:
    entity = peer(misses=1)
    silence(entity, 1)
    assert entity.message_received() == (PeerRecovered(REF),)
    assert (entity.state, entity.misses) == (S.HEALTHY, 0)


def test_a_death_without_fence_asks_for_the_fence_before_the_peer_is_forgotten() -> None:
    entity = peer()
    assert entity.death_proved(DeathProof("pidfd", fenced=False)) == (
        PeerDied(REF, "pidfd"),
        FencePeer(REF),
    )
    assert entity.state is S.DEAD
    assert not entity.is_fenced
    assert entity.peer_fenced() == (ForgetPeer(REF),)
    assert entity.is_fenced
    assert entity.peer_fenced() is None


def test_a_death_that_fences_forgets_at_once() -> None:
    entity = peer()
    effects = entity.death_proved(DeathProof("connection closed", fenced=True))
    assert effects == (PeerDied(REF, "connection closed"), ForgetPeer(REF))


def test_a_living_peer_may_be_fenced() -> None:
    """A peer that does not finish draining loses its session; it is not dead by that."""
    entity = peer()
    entity.message_received()
    assert entity.peer_fenced() == ()
    assert (entity.state, entity.is_fenced) == (S.HEALTHY, True)
    effects = entity.death_proved(DeathProof("later", fenced=False))
    assert effects == (PeerDied(REF, "later"), ForgetPeer(REF))


def test_late_messages_of_a_dead_peer_are_counted() -> None:
    entity = peer()
    entity.death_proved(DeathProof("STALE", fenced=True))
    assert entity.message_received() is None
    assert entity.death_proved(DeathProof("again", fenced=True)) is None
    assert (entity.state, entity.ignored) == (S.DEAD, 2)
    assert "Dead" in repr(entity)
    assert "fenced" in repr(entity)


# --- D3 ---------------------------------------------------------------------------------


def check_silence_frees_nothing(entity: Peer) -> None:
    effects = silence(entity, 1_000)
    assert entity.state is not S.DEAD
    assert not [e for e in effects if isinstance(e, (PeerDied, ForgetPeer))]


def test_d3_silence_never_gives_dead() -> None:
    """D3: a time-out is no proof; a peer declared dead by silence may still write."""
    check_silence_frees_nothing(peer())


def test_d3_mutant_a_peer_dead_by_time_out_is_found() -> None:
    rows = tuple(
        Row(S.SUSPECT, "heartbeat_missed", S.DEAD)
        if (row.source, row.event) == (S.SUSPECT, "heartbeat_missed")
        else row
        for row in PEER.rows
    )
    base = type("Impatient", (Peer,), {"__slots__": ()})
    with pytest.raises(AssertionError):
        check_silence_frees_nothing(peer(compile_lifecycle(attrs.evolve(PEER, rows=rows), base)))
