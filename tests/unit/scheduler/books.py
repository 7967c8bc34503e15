"""Rooms of a made-up lifecycle, for tests of the book that keeps them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from pdcore.config import CoreLimits
from pdcore.fsm.effects import Effect, ReduceVotes
from pdcore.fsm.events import VotesReduced
from pdcore.scheduler.queues import RoomBook, RoomRecord
from pdcore.types import Failure, GenerateRequest, RoomKey
from tests.unit.scheduler.kit import make_request


class State(enum.Enum):
    GOES_ON = "goes on"
    OVER = "over"


class Entity:
    def __init__(self, vote: int = 1) -> None:
        self.state = State.GOES_ON
        self.failure: Failure | None = None
        self.token: int | None = None
        self.answer = vote
        self.open: list[Effect] = []

    def vote(self) -> int:
        return self.answer

    def received_token(self) -> int | None:
        return self.token

    @property
    def is_unanswered(self) -> bool:
        return bool(self.open)

    def unanswered(self) -> Sequence[Effect]:
        return self.open


class Record(RoomRecord):
    def __init__(self, request: GenerateRequest, now: float = 0.0, vote: int = 1) -> None:
        super().__init__(request, now)
        self._entity = Entity(vote)

    @property
    def is_settled(self) -> bool:
        return self._entity.state is State.OVER

    @property
    def entity(self) -> Entity:
        return self._entity


Book = RoomBook[Record]


def make_book(group_size: int = 1, **limits: float) -> Book:
    return RoomBook(CoreLimits(**limits), group_size)


def add(book: Book, room: int, attempt: int = 1, vote: int = 1) -> Record:
    record = Record(make_request(key=RoomKey(room, attempt)), vote=vote)
    book.add(record)
    return record


def vector(book: Book) -> ReduceVotes | None:
    book.begin_tick()
    found = [e for e in book.poll_effects() if isinstance(e, ReduceVotes)]
    assert len(found) <= 1
    return found[0] if found else None


def answered(sent: ReduceVotes, votes: Iterable[int] | None = None) -> VotesReduced:
    return VotesReduced(sent.sequence, tuple(sent.votes if votes is None else votes))
