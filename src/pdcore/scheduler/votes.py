"""The vote vector of one tick: which ids are in it, what they vote, what the outcome is for.

Alone, a rank votes only on what changed: cost follows change. A group votes on every id that
all of its ranks hold, in one order: an id enters with its arrival and leaves by the tick that
settles it, whatever lingers on one of the ranks (architecture, section 9; D16, D17).
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from pdcore.fsm.effects import Effect, ReduceVotes
from pdcore.fsm.events import VotesReduced
from pdcore.fsm.legs import FAILED
from pdcore.types import Failure, RoomKey

#: The outcome of a tick for a record that did not vote in it: its lifecycle is over.
NO_OUTCOME: Final = -1


class VotingEntity(Protocol):
    """What a record's lifecycle entity must answer."""

    @property
    def state(self) -> enum.Enum: ...

    @property
    def failure(self) -> Failure | None: ...

    def vote(self) -> int: ...

    def received_token(self) -> int | None:
        """What a rank that votes LOCALLY_DONE would go on with, where that is its own word."""
        ...

    @property
    def is_unanswered(self) -> bool:
        """``unanswered`` has messages."""
        ...

    def unanswered(self) -> Sequence[Effect]: ...


class VotingRecord(Protocol):
    """A record, as far as votes are concerned."""

    @property
    def key(self) -> RoomKey: ...

    @property
    def entity(self) -> VotingEntity: ...

    @property
    def is_settled(self) -> bool:
        """Its lifecycle is over, by a tick: it votes no more, and only lingers."""
        ...


R = TypeVar("R", bound=VotingRecord)


class VoteBook(Generic[R]):
    """The records of one core, and the vector that is being reduced."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.records: dict[RoomKey, R] = {}
        self.out: list[Effect] = []
        #: Records whose facts changed since their last vote, oldest first.
        self._dirty: dict[RoomKey, None] = {}
        #: Everything whose lifecycle goes on, in order of arrival: the vector of a group.
        self._voters: dict[RoomKey, None] = {}
        #: The ids of the vector being reduced, None between ticks; and the settled records that
        #: have news of their own.
        self._voting: tuple[RoomKey, ...] | None = None
        self._settled: tuple[RoomKey, ...] = ()
        self._sequence = 0
        #: The ranks of this group once held different ids: nothing is committed any more,
        #: the instance must be restarted (architecture, section 9).
        self.is_diverged = False

    def touch(self, key: RoomKey) -> None:
        self._dirty[key] = None

    @property
    def wants_tick(self) -> bool:
        """Something changed here since the last vote. In a group the others may have news:
        the group's own lockstep asks for a vote then."""
        return bool(self._dirty) and self._voting is None and not self.is_diverged

    def begin_tick(self) -> None:
        """Emit the vector of this tick."""
        if self._voting is not None or self.is_diverged:
            return
        is_alone = self.group_size == 1
        voting: list[RoomKey] = []
        entities: list[VotingEntity] = []
        ballot: list[int] = []
        for key in self._dirty if is_alone else self._voters:
            record = self.records.get(key)
            if record is not None:
                voting.append(key)
                entities.append(record.entity)
                ballot.append(entities[-1].vote())
        if not is_alone:
            self._settled = tuple(k for k in self._dirty if k not in self._voters)
        self._dirty.clear()
        if not voting and is_alone:
            return
        self._voting = keys = tuple(voting)
        self._sequence += 1
        votes = tuple(ballot)
        if is_alone:
            self.out.append(ReduceVotes(self._sequence, hash_keys(keys), votes))
            return
        failed = ((i, entity.failure) for i, entity in enumerate(entities) if votes[i] == FAILED)
        failures = tuple((i, why) for i, why in failed if why is not None)
        received = ((i, entity.received_token()) for i, entity in enumerate(entities))
        tokens = tuple((i, token) for i, token in received if token is not None)
        digest = hash_states(keys, entities)
        self.out.append(ReduceVotes(self._sequence, digest, votes, failures, tokens))

    def failures_of(self, reduced: VotesReduced) -> Iterator[tuple[R, Failure]]:
        """What failed on any rank of the group, and why: tell the records before their outcome,
        so that every rank ends them with the reason and not with "another rank failed"."""
        keys = self._voting
        if keys is None or reduced.sequence != self._sequence or reduced.diverged:
            return
        for place, why in reduced.failures:
            record = self.records.get(keys[place]) if place < len(keys) else None
            if record is not None:
                yield record, why

    def end_tick(self, reduced: VotesReduced) -> Iterator[tuple[R, int]]:
        """(record, outcome) of the reduced vector, in vector order; in a group then the settled
        records that have news, with ``NO_OUTCOME``. A foreign or repeated sequence is ignored;
        after a divergence nothing is committed, because a vote would hit another request than
        it was cast for (D17)."""
        keys = self._voting
        if keys is None or reduced.sequence != self._sequence:
            return
        self._voting = None
        if reduced.diverged or len(reduced.votes) != len(keys):
            self.is_diverged = True
            return
        records = self.records
        for key, vote in zip(keys, reduced.votes, strict=True):
            record = records.get(key)
            if record is not None:
                yield record, vote
                if record.is_settled:
                    self._voters.pop(key, None)
        settled, self._settled = self._settled, ()
        for key in settled:
            record = records.get(key)
            if record is not None and key not in self._voters:
                yield record, NO_OUTCOME


def hash_keys(keys: Sequence[tuple[int, ...]]) -> int:
    """Order-sensitive hash of the ids in a vote vector (D17). Python's tuple hash of ints
    is the same in every process."""
    return hash(tuple(keys)) & ((1 << 63) - 1)


def hash_states(keys: Sequence[RoomKey], entities: Iterable[VotingEntity]) -> int:
    """The same with the committed state of each: a rank that missed a commit is noticed in the
    next vote, not when its answer to another question has done harm."""
    states = [zlib.crc32(str(entity.state.value).encode()) for entity in entities]
    return hash_keys([(*key, state) for key, state in zip(keys, states, strict=True)])
