"""Lifecycles alone: every row is taken, and every promise is the table's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdcore.fsm.effects import Effect
from pdcore.fsm.peer import PEER, Peer
from pdcore.fsm.routed import ROUTED, Answer, EndStream, Routed
from pdcore.sim.any_order import AnyOrderWorld, SideBySide, peer_alone, routed_alone
from pdcore.sim.explore import explore
from pdcore.sim.firing import ROW_IDS


def test_a_routed_request_alone_answers_once_and_takes_every_row() -> None:
    """D10, Q5: whatever comes, in whatever order, from whatever attempt."""
    found = explore(routed_alone())
    assert found.violations == ()
    assert found.exhausted
    assert set(ROW_IDS[ROUTED.name]) <= found.rows.keys()


def test_a_peer_alone_takes_every_row() -> None:
    """D3, D25: dead only by proof."""
    found = explore(peer_alone())
    assert found.violations == ()
    assert set(ROW_IDS[PEER.name]) == found.rows.keys()


class AnswersTwice(Routed):
    """The mutant: a second failure is answered as well."""

    __slots__ = ()

    def note_unknown(self, payload: object) -> Sequence[Effect]:
        return (Answer(None),)


def test_a_second_answer_is_noticed() -> None:
    good = routed_alone()
    bad = AnyOrderWorld(
        ROUTED,
        AnswersTwice(),
        lambda routed: (routed.state, routed.attempts),
        good.payloads,
        (Answer, EndStream),
        good.judge,
        good.is_over,
    )
    found = explore(bad)
    with pytest.raises(AssertionError, match="two answers"):
        assert not found.violations, found.violations[0].problem


def test_an_event_without_a_payload_leaves_its_rows_untaken() -> None:
    """A row that somebody adds and no world takes is reported, not overlooked."""
    world = peer_alone()
    world.payloads = [one for one in world.payloads if one[0] != "peer_fenced"]
    taken: set[str] = set()
    states, seen = [world.initial()], set()
    while states:
        state = states.pop()
        for move in world.moves(state) if state not in seen else ():
            taken.update(move.rows)
            states.append(move.state)
        seen.add(state)
    missing = set(ROW_IDS[PEER.name]) - taken
    assert missing
    assert all("peer_fenced" in row for row in missing)


def test_a_peer_shows_itself() -> None:
    world = peer_alone()
    assert repr(Peer.__name__)[1:-1] in world.show(world.initial())


def test_copies_side_by_side_know_nothing_of_each_other() -> None:
    alone = explore(peer_alone())
    both = explore(SideBySide(peer_alone(), 2))
    assert both.violations == ()
    assert both.states == alone.states**2
    assert all(both.rows[row] > count for row, count in alone.rows.items())
