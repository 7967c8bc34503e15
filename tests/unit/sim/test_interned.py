"""States by number: the production entity decides, every step once."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from pdcore.fsm.peer import PEER, DeathProof, Peer, PeerDied
from pdcore.fsm.states import PeerState
from pdcore.sim.interned import Ids, Interned, Stepped
from pdcore.types import Incarnation, PeerRef

WHO = PeerRef("prefill:1", 0, Incarnation(b"p" * 16), "tcp://prefill:1")


def key(peer: Peer) -> Hashable:
    return peer.state, peer.misses, peer.is_fenced


@pytest.fixture
def table() -> Interned[Peer]:
    return Interned(PEER, key)


def test_a_step_leaves_the_entity_it_starts_from_alone(table: Interned[Peer]) -> None:
    start = table.number(Peer(WHO, 2))
    done = table.step(start, "message_received", None, "heard")
    assert table.entity(start).state is PeerState.UNKNOWN
    assert table.entity(done.number).state is PeerState.HEALTHY
    assert done.row == "peer: row Unknown --message_received--> Healthy"


def test_equal_keys_are_one_state(table: Interned[Peer]) -> None:
    start = table.number(Peer(WHO, 2))
    heard = table.step(start, "message_received", None, "heard")
    again = table.step(heard.number, "message_received", None, "heard")
    assert again.number == heard.number
    assert len(table) == 2


def test_a_step_is_made_once(table: Interned[Peer]) -> None:
    start = table.number(Peer(WHO, 2))
    proof = DeathProof("restarted", fenced=True)
    first = table.step(start, "death_proved", proof, "dies")
    assert table.step(start, "death_proved", proof, "dies") is first
    assert isinstance(first.effects[0], PeerDied)


def test_an_ignored_event_says_so_and_is_no_new_state(table: Interned[Peer]) -> None:
    start = table.number(Peer(WHO, 2))
    dead = table.step(start, "death_proved", DeathProof("gone", fenced=True), "dies")
    late = table.step(dead.number, "message_received", None, "heard")
    assert late == Stepped(dead.number, (), "")


def test_names_do_not_depend_on_the_order_in_which_states_are_met() -> None:
    one, two = Interned(PEER, key), Interned(PEER, key)
    suspect = Peer(WHO, 1)
    suspect.heartbeat_missed()
    first, _ = one.number(Peer(WHO, 1)), one.number(suspect)
    two.number(suspect)
    assert one.name(first) == two.name(two.number(Peer(WHO, 1)))


def test_ids_are_copied_with_whoever_mints_them() -> None:
    ids = Ids(5)
    assert iter(ids) is ids
    assert [next(ids), next(ids)] == [5, 6]
    assert ids.next_id == 7
