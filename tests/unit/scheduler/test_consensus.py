"""A group of one rank needs no collective."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcore.fsm.effects import ReduceVotes
from pdcore.fsm.events import VotesReduced
from pdcore.scheduler.consensus import LocalConsensus


@given(st.integers(1, 1 << 40), st.lists(st.integers(0, 2), max_size=8))
def test_r43_alone_the_vote_is_the_outcome(sequence: int, votes: list[int]) -> None:
    """R43: never a world group; the identity, the empty vector too."""
    reduced = LocalConsensus().reduce(ReduceVotes(sequence, 99, tuple(votes)))
    assert reduced == VotesReduced(sequence, tuple(votes), diverged=False)
