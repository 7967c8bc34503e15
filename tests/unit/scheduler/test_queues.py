"""bounded tables, the vote vector and the one refusal function."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence

import attrs
import pytest

from pdcore.config import CoreLimits
from pdcore.errors import Overloaded, RoomInUse, failure
from pdcore.fsm.effects import Effect, ReduceVotes, ReportFinished
from pdcore.fsm.events import VotesReduced
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.queues import (
    ExpiringTable,
    RoomBook,
    RoomRecord,
    finish_reason_of,
    hash_keys,
    ledger_totals,
    refusal,
)
from pdcore.types import FinishReason, GenerateRequest, RoomKey
from tests.unit.scheduler.kit import make_decode, make_prefill, make_request, make_setup

# --- tables -----------------------------------------------------------------------------


def test_an_expiring_table_is_bounded_and_forgets_the_oldest() -> None:
    table: ExpiringTable[str] = ExpiringTable(2, 10.0)
    table.put("a", "A", 0.0)
    table.put("b", "B", 1.0)
    table.put("a", "A2", 2.0)
    table.put("c", "C", 3.0)
    assert table.get("b", 3.0) is None, "refreshing made a the younger one"
    assert table.get("a", 3.0) == "A2"
    assert (len(table), table.num_evicted) == (2, 1)


def test_an_entry_expires_at_its_time_and_not_before() -> None:
    table: ExpiringTable[str] = ExpiringTable(8, 10.0)
    table.put("a", "A", 0.0)
    assert table.get("a", 9.999) == "A"
    assert table.get("a", 10.0) is None
    assert table.pop("a", 10.0) is None
    table.put("b", "B", 11.0)
    table.put("c", "C", 22.0)
    assert len(table) == 1, "putting sweeps what has expired"
    assert table.pop("c", 23.0) == "C"
    assert table.pop("c", 23.0) is None


# --- the vote vector --------------------------------------------------------------------


class Entity:
    def __init__(self, vote: int = 1) -> None:
        self.answer = vote
        self.open: list[Effect] = []

    def vote(self) -> int:
        return self.answer

    def unanswered(self) -> Sequence[Effect]:
        return self.open


class Record(RoomRecord):
    def __init__(self, request: GenerateRequest, now: float = 0.0, vote: int = 1) -> None:
        super().__init__(request, now)
        self._entity = Entity(vote)

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
    assert book.wants_tick
    sent = vector(book)
    assert sent is not None
    assert sent.votes == ()
    assert not book.wants_tick, "the empty vector is on its way like any other"
    assert vector(book) is None
    assert list(book.end_tick(answered(sent))) == []
    assert book.wants_tick


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
        "from pdcore.scheduler.queues import hash_keys\n"
        "from pdcore.types import RoomKey\n"
        "print(hash_keys([RoomKey(2**62 + 5, 7), RoomKey(1, 2**61)]))"
    )
    keys = [RoomKey(2**62 + 5, 7), RoomKey(1, 2**61)]
    out = subprocess.run(
        [sys.executable, "-R", "-c", code], check=True, capture_output=True, timeout=60
    )
    assert int(out.stdout) == hash_keys(keys)


# --- coming and going -------------------------------------------------------------------


def test_d7_a_live_room_belongs_to_one_attempt_unless_it_is_replaced() -> None:
    """D7: the same dispatch twice, and another one of a live room, are refused; the dispatch
    that names the attempt it replaces is taken."""
    book = make_book()
    add(book, 1, attempt=10)
    book.check_new(make_request(key=RoomKey(2, 10)), 0.0)
    for key, replaces in ((RoomKey(1, 10), None), (RoomKey(1, 11), None), (RoomKey(1, 11), 99)):
        with pytest.raises(RoomInUse):
            book.check_new(make_request(key=key, replaces=replaces), 0.0)
    book.check_new(make_request(key=RoomKey(1, 11), replaces=10), 0.0)


def test_d7_a_room_is_free_again_when_its_attempt_has_its_result() -> None:
    """Draining goes on beside the next attempt; the same attempt never comes twice."""
    book = make_book(tombstone_ttl_s=50.0)
    record = add(book, 1, attempt=10)
    book.report(record, FinishReason.ERROR, failure("peer_lost", "gone"), 1.0)
    book.check_new(make_request(key=RoomKey(1, 11)), 2.0)
    with pytest.raises(RoomInUse, match="already dispatched"):
        book.check_new(make_request(key=RoomKey(1, 10)), 2.0)
    book.forget(record.key)
    with pytest.raises(RoomInUse, match="already dispatched"):
        book.check_new(make_request(key=RoomKey(1, 10)), 40.0)
    book.check_new(make_request(key=RoomKey(1, 10)), 60.0)


def test_a_full_queue_is_refused_until_somebody_has_a_result() -> None:
    book = make_book(max_queued_requests=2)
    first = add(book, 1)
    add(book, 2)
    with pytest.raises(Overloaded, match="2 requests"):
        book.check_new(make_request(), 0.0)
    book.report(first, FinishReason.STOP, None, 1.0)
    book.check_new(make_request(), 1.0)


def test_a_record_is_reported_once() -> None:
    """Invariant 1: later outcomes change nothing; the deadline is disarmed with the first."""
    book = make_book()
    record = add(book, 1)
    record.mark("admitted", 0.5)
    book.report(record, FinishReason.LENGTH, None, 2.0, completion_tokens=3)
    book.report(record, FinishReason.ERROR, failure("internal", "late"), 3.0)
    (result,) = [e for e in book.poll_effects() if isinstance(e, ReportFinished)]
    assert (result.reason, result.failure) == (FinishReason.LENGTH, None)
    assert (result.prompt_tokens, result.completion_tokens) == (8, 3)
    assert result.timeline == {"admitted": 0.5, "finished": 2.0}
    assert not book.timers.is_armed("deadline", record.key)
    tombstone = book.tombstones.get(record.key, 3.0)
    assert tombstone is not None
    assert tombstone.failure is None


def test_forgetting_a_room_leaves_nothing_of_it() -> None:
    book = make_book()
    record = add(book, 1)
    for kind in ("resend", "drain", "linger"):
        book.timers.arm(kind, record.key, 9.0)
    book.forget(record.key)
    book.forget(record.key)
    assert (len(book.timers), book.records, book._dirty, book._live) == (0, {}, {}, {})


def test_resending_backs_off_and_stops_when_it_is_answered() -> None:
    """Rule 4: 50 ms to 5 s, until answered."""
    book = make_book(resend_initial_s=1.0, resend_max_s=3.0)
    record = add(book, 1)
    book.arm_resend(record, 0.0)
    assert not book.timers.is_armed("resend", record.key), "nothing is open"
    question: Effect = ReportFinished(record.key, FinishReason.STOP, None, 0, 0, {})
    record.entity.open = [question]
    book.arm_resend(record, 0.0)
    book.arm_resend(record, 0.9)
    due, now, sent = [], 0.0, 0
    for _ in range(4):
        moment = book.timers._armed["resend", record.key]
        due.append(moment - now)
        now = moment
        assert list(book.timers.pop_due(now)) == [("resend", record.key)]
        book.resend(record, now)
        sent += len(book.poll_effects())
    assert due == [1.0, 2.0, 3.0, 3.0]
    assert sent == 4
    record.entity.open = []
    list(book.timers.pop_due(1e3))
    book.resend(record, now)
    assert book.poll_effects() == []
    assert not book.timers.is_armed("resend", record.key)


def test_a_base_record_has_no_entity() -> None:
    with pytest.raises(TypeError, match="subclass"):
        _ = RoomRecord(make_request(), 0.0).entity


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (None, FinishReason.ERROR),
        (failure("cancelled", "x"), FinishReason.ABORT),
        (failure("deadline_exceeded", "x"), FinishReason.ERROR),
    ],
)
def test_only_a_cancelled_request_counts_as_aborted(reason, expected: FinishReason) -> None:
    assert finish_reason_of(reason) is expected


# --- the refusal ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "remaining_s", "max_model_len", "num_blocks", "code"),
    [
        (8, 1.0, 512, 64, None),
        (0, 1.0, 512, 64, "invalid_request"),
        (64, 1.0, 512, 64, None),
        (65, 1.0, 512, 64, "prompt_too_long"),
        (9, 1.0, 10, 64, None),
        (10, 1.0, 10, 64, "prompt_too_long"),
        (11, 1.0, 512, 4, None),
        (12, 1.0, 512, 4, "prompt_too_long"),
        (8, 0.0, 512, 64, "deadline_exceeded"),
        (8, -3.0, 512, 64, "deadline_exceeded"),
        (65, -3.0, 512, 64, "prompt_too_long"),
    ],
)
def test_r66_the_refusal_table(
    num_tokens: int, remaining_s: float, max_model_len: int, num_blocks: int, code: str | None
) -> None:
    """R66, D11: max_prefill_tokens 64, one token of the model's length left for output, and
    three usable blocks of four tokens that must hold the prompt and one new token."""
    setup = make_setup(limits=CoreLimits(max_prefill_tokens=64), max_model_len=max_model_len)
    blocks = KVBlocks(setup.spec, num_blocks, max_model_len)
    request = make_request(num_tokens, remaining_s=remaining_s)
    reason = refusal(request, setup, blocks, new_tokens=1)
    assert (None if reason is None else reason.code) == code


def test_r66_both_roles_refuse_before_anything_exists() -> None:
    """One result each, no record, no block, no timer; the attempt is remembered."""
    limits = CoreLimits(max_prefill_tokens=16)
    for core in (make_prefill(limits), make_decode(limits)):
        request = make_request(17)
        core.submit(request, 0.0)
        (result,) = core.poll_effects()
        assert isinstance(result, ReportFinished)
        assert result.failure is not None
        assert (result.failure.code, result.failure.http_status) == ("prompt_too_long", 413)
        assert core.rooms.records == {}
        assert core.poll_deadline() is None
        with pytest.raises(RoomInUse):
            core.submit(attrs.evolve(request, prompt_token_ids=(1, 2)), 1.0)


def test_the_ledger_of_all_keys_is_summed() -> None:
    core = make_prefill(num_blocks=9)
    assert core.blocks.allocate_slots(1, 0, 9)
    assert core.blocks.allocate_slots(2, 0, 4)
    core.blocks.lease(2)
    assert ledger_totals(core.blocks) == {
        "kv_free": 4,
        "kv_held": 3,
        "kv_leased": 1,
        "kv_quarantined": 0,
    }
