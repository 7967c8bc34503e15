"""The world of two cores: what may be counted on, what the transport promises, what is bad."""

from __future__ import annotations

from pdcore.fsm.receiver import RECEIVER, Receiver
from pdcore.fsm.sender import SENDER, Sender
from pdcore.sim.explore import Move, explore
from pdcore.sim.firing import ROWS, watching
from pdcore.sim.pair_book import Book, Outlive, Rules
from pdcore.sim.pair_world import PairWorld, State
from pdcore.sim.places import Dispatch, Place, Shape
from pdcore.types import RoomKey

ONE = (Place("prefill0", False, "prefill"),)
FIRST = Dispatch(RoomKey(1, 1), "prefill")
AGAIN = Dispatch(RoomKey(1, 2), "prefill", replaces=1)


def world(
    faults: str = "", *, outlive: Outlive = Outlive.NO, crashes: str = "", again: bool = False
) -> PairWorld:
    return PairWorld(
        Book(
            Rules(
                Shape(ONE, (FIRST, AGAIN) if again else (FIRST,)),
                frozenset(faults.split()),
                crashes=frozenset(crashes.split()),
                outlive=outlive,
                fair_deadlines=frozenset({"prefill0", "decode"} if crashes else ()),
                is_tick_eager=True,
                is_retry=again,
            )
        )
    )


def go(pair: PairWorld, *labels: str) -> State:
    """Take the moves whose labels contain these words, one after the other."""
    state = pair.initial()
    for words in labels:
        state = find(pair, state, words).state
    return state


def find(pair: PairWorld, state: State, words: str) -> Move[State]:
    offered = list(pair.moves(state))
    found = [move for move in offered if words in move.label]
    assert found, (words, [move.label for move in offered])
    return found[0]


WRITING = (
    "prefill0: request 1.1 arrives",
    "decode: request 1.1 arrives",
    "the route",
    "gets Handshake",
    "gets Claim",
    "gets Grant",
    "a forward pass begins",
    "a forward pass ends",
)


def test_a_message_that_nobody_resends_may_be_late_but_is_not_counted_on() -> None:
    """Rule 4: only what is resent, and answers to it, may be needed for the end."""
    with watching(ROWS, (SENDER, Sender), (RECEIVER, Receiver)):
        pair = world()
        assert not find(pair, go(pair, *WRITING[:5]), "gets Grant").is_fault
        state = go(pair, *WRITING)
        assert find(pair, state, "gets Handshake").is_fault
        assert find(pair, state, "gets Claim").is_fault


def test_a_write_of_a_dead_process_lands_late_where_transports_let_it() -> None:
    pair = world(outlive=Outlive.REPORTED, crashes="prefill0")
    state = go(pair, *WRITING, "prefill0.0 dies")
    assert state[pair.late]
    assert not pair.is_goal(state)
    labels = [move.label for move in pair.moves(state)]
    assert "decode: prefill0.0 is dead" in labels
    assert "decode: prefill0.0 is dead and fenced" not in labels
    landed = find(pair, state, "lands late").state
    assert "decode: prefill0.0 is dead and fenced" in [m.label for m in pair.moves(landed)]


def test_a_write_dies_with_its_process_where_death_fences() -> None:
    pair = world(crashes="prefill0")
    state = go(pair, *WRITING, "prefill0.0 dies")
    assert not state[pair.late]


def test_a_write_under_a_lease_that_is_not_pinned_is_the_corruption() -> None:
    """D3: the blocks of a request are kept while somebody may write them."""
    pair = world("abort")
    state = go(pair, *WRITING)
    assert list(pair.problems(state)) == []
    empty = pair.book.born(1, 0).number
    (problem,) = pair.problems((state[0], empty, *state[2:]))
    assert "may still write under lease 1 of decode.0" in problem


def test_the_second_attempt_cancels_the_first_on_both_sides() -> None:
    pair = world(again=True)
    state = go(pair, "prefill0: request 1.1 arrives", "the router dispatches again")
    assert not find(pair, state, "prefill0: request 1.1 is aborted").is_fault
    find(pair, state, "prefill0: request 1.2 arrives")


def test_a_decode_failure_cancels_prefill() -> None:
    """CD: the router cancels the other half, and goes on until it is heard."""
    pair = world("route")
    state = go(pair, "prefill0: request 1.1 arrives", "decode: request 1.1 arrives", "refused")
    assert not find(pair, state, "prefill0: request 1.1 is aborted").is_fault


def test_labels_of_one_state_are_distinct() -> None:
    """A trace is a list of labels: it must name one way."""
    pair = world("abort transfer", outlive=Outlive.REPORTED, crashes="prefill0 decode")
    seen = [pair.initial()]
    known = set(seen)
    for state in seen:
        moves = list(pair.moves(state))
        labels = [move.label for move in moves]
        assert len(set(labels)) == len(labels), labels
        fresh = [m.state for m in moves if m.state not in known]
        known.update(fresh)
        seen += dict.fromkeys(fresh)
        if len(seen) > 1500:
            return


def test_the_smallest_world_is_explored_to_its_end() -> None:
    found = explore(world("abort"))
    assert found.exhausted
    assert found.states > 500
