"""The vote vector: one a tick, the same ids on all ranks of a group."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdcore.config import CoreLimits
from pdcore.errors import RoomInUse, failure
from pdcore.fsm.effects import ReduceVotes
from pdcore.fsm.events import VotesReduced
from pdcore.fsm.legs import FAILED
from pdcore.scheduler.votes import NO_OUTCOME, hash_keys
from pdcore.types import FinishReason, RoomKey
from tests.unit.scheduler.books import Book, Record, State, add, answered, make_book, vector
from tests.unit.scheduler.kit import make_request


def check_one_vector_for_everything(book: Book) -> None:
    """D16, D17: a group reduces one vector per tick over every id it holds."""
    for room in range(1, 6):
        add(book, room, vote=room % 3)
    first = vector(book)
    assert first is not None
    assert first.votes == (1, 2, 0, 1, 2)
    assert vector(book) is None, "one vector is on its way"
    outcomes = list(book.end_tick(answered(first)))
    assert [(r.key.room, o) for r, o in outcomes] == [(1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
    second = vector(book)
    assert second is not None, "nothing changed here, but another rank may have news"
    assert len(second.votes) == 5
    assert second.ids_hash == first.ids_hash


def test_d16_d17_a_group_votes_on_every_id_in_one_vector() -> None:
    check_one_vector_for_everything(make_book(group_size=2))


class OnePerRequest(Book):
    """D17, the seed's rule: one collective per queued request and tick."""

    def begin_tick(self) -> None:
        for key, record in self.records.items():
            self._sequence += 1
            self._voting = (key,)
            votes = (record.entity.vote(),)
            self.out.append(ReduceVotes(self._sequence, hash_keys(self._voting), votes))


class OnlyWhatChangedHere(Book):
    """D16, the seed's rule: a rank decides locally whether it takes part."""

    def begin_tick(self) -> None:
        size, self.group_size = self.group_size, 1
        super().begin_tick()
        self.group_size = size


@pytest.mark.parametrize("mutant", [OnePerRequest, OnlyWhatChangedHere])
def test_d16_d17_mutants_are_caught(mutant: type[Book]) -> None:
    with pytest.raises(AssertionError):
        check_one_vector_for_everything(mutant(CoreLimits(), 2))


def test_d16_a_group_joins_the_reduction_with_an_empty_vector_too() -> None:
    """SGLang PR36928, InferenceX I2151: a rank that left out a collective would make its peers
    hang."""
    book = make_book(group_size=4)
    assert not book.wants_tick, "a group without news exchanges nothing"
    sent = vector(book)  # but this rank was asked
    assert sent is not None
    assert sent.votes == ()
    assert vector(book) is None, "the empty vector is on its way like any other"
    assert list(book.end_tick(answered(sent))) == []
    add(book, 1)
    assert book.wants_tick


def settle(book: Book, record: Record) -> int:
    """The tick that ends it, as a core's commit does; returns the hash of its vector."""
    sent = vector(book)
    assert sent is not None
    for one, _ in book.end_tick(answered(sent)):
        if one is record:
            one.entity.state = State.OVER
    return sent.ids_hash


def test_ids_leave_the_vector_of_a_group_by_the_tick_that_settles_them() -> None:
    """Decision 18's missing half: what lingers on one rank (an answer it still waits for) is
    out of the vector on all of them in the same tick, and has its own news without a vote."""
    books = [make_book(group_size=2) for _ in range(2)]
    lingering, quiet = [add(book, 1) for book in books]
    for book in books:
        add(book, 2)
    assert settle(books[0], lingering) == settle(books[1], quiet)
    books[1].forget(quiet.key)
    books[0].touch(lingering.key)
    sent = [vector(book) for book in books]
    assert [one and (one.ids_hash, len(one.votes)) for one in sent] == [
        (sent[0].ids_hash, 1),
        (sent[0].ids_hash, 1),
    ]
    assert [
        [(r.key.room, o) for r, o in book.end_tick(answered(one))]
        for book, one in zip(books, sent, strict=True)
    ] == [[(2, 1), (1, NO_OUTCOME)], [(2, 1)]]
    assert books[0].records.keys() != books[1].records.keys()


def test_all_ranks_hear_why_it_failed_on_one() -> None:
    """A client must read the cause, whichever rank of the group answers it."""
    book, why = make_book(group_size=2), failure("transfer_failed", "the link broke")
    good, bad = add(book, 1), add(book, 2, vote=FAILED)
    bad.entity.failure = why
    sent = vector(book)
    assert sent is not None
    assert sent.failures == ((1, why),)
    told = VotesReduced(sent.sequence, sent.votes, failures=((0, why), (7, why)))
    assert list(book.failures_of(told)) == [(good, why)]
    assert list(book.failures_of(VotesReduced(0, sent.votes, failures=told.failures))) == []


def test_a_group_takes_the_same_arrivals_whatever_lingers_on_one_rank() -> None:
    """A dispatch that is repeated after its tombstone has gone: every rank gives one answer."""
    books = [make_book(group_size=2, tombstone_cap=1) for _ in range(2)]
    records = [add(book, 1) for book in books]
    for book, record in zip(books, records, strict=True):
        book.report(record, FinishReason.STOP, None, 0.0)
        settle(book, record)
        book.report(add(book, 2), FinishReason.STOP, None, 0.0)  # pushes the tombstone out
    books[1].forget(records[1].key)
    for book in books:
        book.check_new(make_request(key=RoomKey(1, 1)), 0.0)
        fresh = add(book, 1)
        assert book.records[fresh.key] is fresh
        with pytest.raises(RoomInUse):
            book.check_new(make_request(key=RoomKey(1, 1)), 0.0)


def test_a_rank_that_missed_a_commit_is_noticed_in_the_next_vote() -> None:
    """D17: the same ids in other states are not the same question."""
    books = [make_book(group_size=2) for _ in range(2)]
    for book in books:
        add(book, 1)
    states = [next(iter(book.records.values())).entity for book in books]
    hashes = [vector(book) for book in books]
    assert hashes[0] == hashes[1]
    for book, one in zip(books, hashes, strict=True):
        assert one is not None
        list(book.end_tick(answered(one)))
    states[0].state = State.OVER
    again = [vector(book) for book in books]
    assert again[0] is not None
    assert again[1] is not None
    assert again[0].ids_hash != again[1].ids_hash


def test_a_single_rank_votes_only_on_what_changed() -> None:
    """Cost follows change: nothing happens, nothing is reduced."""
    book = make_book()
    for room in (1, 2, 3):
        add(book, room)
    first = vector(book)
    assert first is not None
    assert len(first.votes) == 3
    list(book.end_tick(answered(first)))
    assert not book.wants_tick
    assert vector(book) is None
    book.touch(RoomKey(2, 1))
    book.touch(RoomKey(9, 9))
    second = vector(book)
    assert second is not None
    assert second.votes == (1,)
    assert [r.key.room for r, _ in book.end_tick(answered(second))] == [2]


def test_a_foreign_or_repeated_answer_changes_nothing() -> None:
    book = make_book()
    add(book, 1)
    sent = vector(book)
    assert sent is not None
    assert list(book.end_tick(VotesReduced(sent.sequence + 1, sent.votes))) == []
    assert len(list(book.end_tick(answered(sent)))) == 1
    assert list(book.end_tick(answered(sent))) == []
    assert not book.is_diverged


def test_what_happens_during_a_reduction_is_voted_next() -> None:
    """Section 9: the vote is a snapshot and its result binds."""
    book = make_book(group_size=2)
    one, gone = add(book, 1), add(book, 2)
    sent = vector(book)
    assert sent is not None
    one.entity.answer = 0
    book.touch(one.key)
    add(book, 3)
    book.forget(gone.key)
    assert [(r.key.room, o) for r, o in book.end_tick(answered(sent))] == [(1, 1)]
    after = vector(book)
    assert after is not None
    assert after.votes == (0, 1)


def check_divergence_commits_nothing(book: Book) -> None:
    """D17: mismatch detection instead of silent misalignment."""
    for room in (1, 2):
        add(book, room)
    sent = vector(book)
    assert sent is not None
    diverged = VotesReduced(sent.sequence, (0, 0), diverged=True)
    assert list(book.end_tick(diverged)) == []
    assert book.is_diverged
    assert not book.wants_tick
    assert vector(book) is None


def test_d17_a_divergence_commits_nothing_and_stays() -> None:
    check_divergence_commits_nothing(make_book(group_size=2))


def test_d17_mutant_that_applies_a_misaligned_vector_is_caught() -> None:
    class Trusting(Book):
        def end_tick(self, reduced: VotesReduced):
            return super().end_tick(VotesReduced(reduced.sequence, reduced.votes))

    with pytest.raises(AssertionError):
        check_divergence_commits_nothing(Trusting(CoreLimits(), 2))


def test_a_vector_of_another_length_is_a_divergence() -> None:
    book = make_book(group_size=2)
    add(book, 1)
    sent = vector(book)
    assert sent is not None
    assert list(book.end_tick(answered(sent, (1, 1)))) == []
    assert book.is_diverged


def test_the_hash_of_the_ids_sees_order_and_attempt() -> None:
    a, b = RoomKey(1, 2), RoomKey(3, 4)
    assert hash_keys([a, b]) == hash_keys((RoomKey(1, 2), RoomKey(3, 4)))
    others = ([b, a], [a], [], [a, RoomKey(3, 5)], [RoomKey(2, 1), b])
    assert len({hash_keys(keys) for keys in ([a, b], *others)}) == 6
    assert all(0 <= hash_keys(keys) < 1 << 63 for keys in others)


def test_the_hash_of_the_ids_is_the_same_in_every_process() -> None:
    """D17: ranks are processes, and each has its own PYTHONHASHSEED."""
    code = (
        "from pdcore.scheduler.votes import hash_keys\n"
        "from pdcore.types import RoomKey\n"
        "print(hash_keys([RoomKey(2**62 + 5, 7), RoomKey(1, 2**61)]))"
    )
    keys = [RoomKey(2**62 + 5, 7), RoomKey(1, 2**61)]
    out = subprocess.run(
        [sys.executable, "-R", "-c", code], check=True, capture_output=True, timeout=60
    )
    assert int(out.stdout) == hash_keys(keys)
