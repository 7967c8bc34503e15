"""Rounds of a group, without I/O: who has voted, when a round is closed, what it decides.

Any rank that has news casts its ballot; the hub then asks the others for theirs, closes the
round when it has all of them, and hands all ballots to all ranks. So there is one exchange for
everything a tick needs (R40, D17), nobody takes part less or more often than another (D16),
and a group without news exchanges nothing.

Links are ordered and lose nothing while both ends live; a rank that dies leaves the others in
an open round, and the leader ends them with it (a group is restarted whole).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcore.control.ballots import Ballot, Begin, Closed, GroupMessage, StepDone
from pdcore.errors import GroupBroken, failure
from pdcore.fsm.effects import ReduceVotes
from pdcore.fsm.events import StepCompleted, VotesReduced
from pdcore.fsm.legs import FAILED
from pdcore.types import Failure, StepOutput

#: The hub's place in a group; it is linked to every other rank.
HUB = 0

Outgoing = list[tuple[int, GroupMessage]]


class Lockstep:
    """One rank's view. ``rank`` counts within the group, 0 is the hub."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size or size < 2:
            raise ValueError(f"rank {rank} of a group of {size}: a group has two ranks or more")
        self.rank = rank
        self.size = size
        self.round = 1
        self.has_cast = False
        #: The latest round in which another rank has voted, or asks for our vote.
        self._asked = 0
        #: round -> rank -> ballot, at the hub: of this round, and of the next one by those
        #: that are faster than we are.
        self._ballots: dict[int, dict[int, Ballot]] = {}
        self._closed: list[Ballot] | None = None

    @property
    def is_asked(self) -> bool:
        """Others vote in this round already."""
        return self._asked >= self.round

    @property
    def missing(self) -> list[int]:
        """Whom the hub waits for; at another rank: the hub, once the own ballot is out."""
        if not self.has_cast or self._closed is not None:
            return []
        if self.rank != HUB:
            return [HUB]
        here = self._ballots.get(self.round, {})
        return [rank for rank in range(self.size) if rank not in here]

    def cast(self, ballot: Ballot) -> Outgoing:
        """Our vote of this round; what must be sent. Once per round."""
        if self.has_cast or (ballot.round, ballot.rank) != (self.round, self.rank):
            raise GroupBroken(f"rank {self.rank} votes twice in round {self.round}")
        self.has_cast = True
        if self.rank != HUB:
            return [(HUB, ballot)]
        here = self._ballots.setdefault(self.round, {})
        here[HUB] = ballot
        asked: Outgoing = [(r, Begin(self.round)) for r in range(self.size) if r not in here]
        return asked + self._close()

    def receive(self, sender: int, message: GroupMessage) -> Outgoing:
        """One message of another rank; what must be sent. Raises GroupBroken for one that no
        rank in step with us sends: nothing can be decided together any more."""
        if isinstance(message, Ballot) and self.rank == HUB and sender == message.rank != HUB:
            here = self._ballots.setdefault(message.round, {})
            if message.round in (self.round, self.round + 1) and sender not in here:
                here[sender] = message
                self._asked = max(self._asked, message.round)
                return self._close()
        elif isinstance(message, Begin) and sender == HUB != self.rank:
            # The next one, when we have not played the one that is closed yet.
            if message.round == self.round + (self._closed is not None):
                self._asked = message.round
                return []
        elif (
            isinstance(message, Closed) and sender == HUB != self.rank and self._may_close(message)
        ):
            self._closed = message.ballots
            return []
        raise GroupBroken(
            f"rank {sender} is out of step: {type(message).__name__} of round {message.round} "
            f"at rank {self.rank}, which is in round {self.round}"
        )

    def take_round(self) -> list[Ballot] | None:
        """The ballots of the round, in order of rank, once it is closed; the next begins."""
        ballots, self._closed = self._closed, None
        if ballots is None:
            return None
        self._ballots.pop(self.round, None)
        self.round += 1
        self.has_cast = False
        return ballots

    def _may_close(self, message: Closed) -> bool:
        return message.round == self.round and self.has_cast and self._closed is None

    def _close(self) -> Outgoing:
        here = self._ballots.get(self.round, {})
        if not self.has_cast or len(here) < self.size or self._closed is not None:
            return []
        self._closed = [here[rank] for rank in range(self.size)]
        return [(r, Closed(self.round, self._closed)) for r in range(self.size) if r != HUB]

    def __repr__(self) -> str:
        return f"Lockstep(rank={self.rank}/{self.size}, round={self.round}, missing={self.missing})"


class Voting:
    """The consensus of a group (:class:`pdcore.scheduler.consensus.Consensus`): the vector of
    the tick is kept for the ballot, its outcome comes with the round."""

    def __init__(self) -> None:
        self._vector: ReduceVotes | None = None

    def reduce(self, votes: ReduceVotes) -> VotesReduced | None:
        self._vector = votes
        return None

    def merge(self, vectors: Sequence[bytes]) -> tuple[int, ...]:
        """One number for each id: the least that any rank votes."""
        return tuple(map(min, *vectors))

    @property
    def vector(self) -> ReduceVotes | None:
        return self._vector

    def outcome(self, ballots: Sequence[Ballot]) -> VotesReduced | None:
        """The MIN of all vectors; ``diverged`` where they are not about the same ids in the
        same states. None: this rank votes no more, because the group diverged before."""
        mine, self._vector = self._vector, None
        if mine is None:
            return None
        first = ballots[0]
        if any((b.ids_hash, len(b.votes)) != (first.ids_hash, len(first.votes)) for b in ballots):
            return VotesReduced(mine.sequence, mine.votes, diverged=True)
        votes = list(self.merge([b.votes for b in ballots]))
        failures: dict[int, Failure] = {}
        tokens: dict[int, int] = {}
        for ballot in ballots:
            for place, token in ballot.tokens:
                if tokens.setdefault(place, token) != token:
                    # Each rank has it from another prefill rank. One request fails, and not the
                    # batch in which these ranks would go on with different tokens (D18).
                    votes[place] = FAILED
                    failures[place] = failure(
                        "bad_metadata",
                        f"the ranks of prefill sampled different first tokens: {tokens[place]} "
                        f"and {token}",
                    )
        for ballot in ballots:
            for place, why in ballot.failures:
                failures.setdefault(place, why)
        return VotesReduced(mine.sequence, tuple(votes), failures=tuple(failures.items()))


def merge_steps(own: StepOutput | None, steps: Sequence[StepDone | None]) -> StepCompleted | None:
    """What the engines of all ranks made of one batch; None: none of them had one.

    A step that failed on one rank failed on all: for the sequences that are blamed, or for all
    of the batch where somebody cannot tell. Ranks that sampled different tokens have nothing
    that could be gone on with. Raises GroupBroken when they did not run the same batch."""
    done = [step for step in steps if step is not None]
    if not done:
        return None
    batch_id = done[0].batch_id
    if len(done) != len(steps) or any(step.batch_id != batch_id for step in done):
        raise GroupBroken(f"the ranks of the group ran different batches: {steps}")
    failed = [step for step in done if step.failure is not None]
    if failed:
        is_told = all(step.blamed for step in failed)
        blamed = {seq_id for step in failed for seq_id in step.blamed} if is_told else set()
        return StepCompleted(batch_id, None, failed[0].failure, frozenset(blamed))
    if len({step.digest for step in done}) > 1:
        why = failure("internal", "the ranks of this group sampled different tokens in one step")
        return StepCompleted(batch_id, None, why)
    return StepCompleted(batch_id, own)
