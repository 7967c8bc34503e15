"""The consensus contract: one vector reduction per tick (architecture, section 9; D17).

The shell executes ``ReduceVotes`` with one of these and feeds the answer back as
``VotesReduced``. With a real collective the vote is a snapshot and its result binds.
"""

from __future__ import annotations

from typing import Protocol

from pdcore.fsm.effects import ReduceVotes
from pdcore.fsm.events import VotesReduced


class Consensus(Protocol):
    def reduce(self, votes: ReduceVotes) -> VotesReduced | None:
        """MIN over the group, element by element; every rank joins every call, with an
        empty vector too. ``diverged`` when the ids hashes differ. None: the answer follows
        when all ranks have voted."""
        ...


class LocalConsensus:
    """A group of one rank: the identity, never a world group (R43)."""

    def reduce(self, votes: ReduceVotes) -> VotesReduced:
        return VotesReduced(votes.sequence, votes.votes)
