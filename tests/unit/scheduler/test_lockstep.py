"""Rounds of a group: one exchange for everything a tick needs, the same on every rank."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.control.ballots import Ballot, Begin, Closed, GroupMessage, StepDone
from pdcore.control.messages import Abort, LeaderMessage
from pdcore.errors import GroupBroken, failure
from pdcore.fsm.effects import ReduceVotes
from pdcore.scheduler.lockstep import HUB, Lockstep, Outgoing, Voting, merge_steps
from pdcore.types import RoomKey, StepOutput


def ballot(
    lockstep: Lockstep,
    votes: bytes = b"",
    messages: list[LeaderMessage] | None = None,
    ids_hash: int = 0,
) -> Ballot:
    return Ballot(
        lockstep.round,
        lockstep.rank,
        ids_hash,
        votes,
        [],
        [],
        0.0,
        0.0,
        messages or [],
        None,
        False,
    )


class Ranks:
    """Ranks and their links: each pair's messages arrive in order, pairs in any order."""

    def __init__(self, size: int) -> None:
        self.ranks = [Lockstep(rank, size) for rank in range(size)]
        self.links: dict[tuple[int, int], deque[GroupMessage]] = {}
        self.played: list[list[list[Ballot]]] = [[] for _ in range(size)]
        self.num_sent = 0

    def send(self, sender: int, messages: Outgoing) -> None:
        for to, message in messages:
            self.num_sent += 1
            self.links.setdefault((sender, to), deque()).append(message)

    def cast(self, rank: int, messages: list[LeaderMessage] | None = None) -> None:
        lockstep = self.ranks[rank]
        if not lockstep.has_cast:
            self.send(rank, lockstep.cast(ballot(lockstep, messages=messages)))
            self.take(rank)

    def take(self, rank: int) -> None:
        round_ = self.ranks[rank].take_round()
        if round_ is not None:
            self.played[rank].append(round_)

    def deliver(self, pair: tuple[int, int]) -> None:
        sender, to = pair
        self.send(to, self.ranks[to].receive(sender, self.links[pair].popleft()))

    def come_to_rest(self) -> None:
        seen = -1
        while seen != (seen := self.num_sent) or self.waiting():
            for pair in self.waiting():
                self.deliver(pair)
            for rank, lockstep in enumerate(self.ranks):
                self.take(rank)
                if lockstep.is_asked:
                    self.cast(rank)
                    self.take(rank)

    def waiting(self) -> list[tuple[int, int]]:
        return sorted(pair for pair, queue in self.links.items() if queue)


@given(data=st.data(), size=st.integers(2, 4))
def test_every_rank_plays_the_same_rounds(data: st.DataObject, size: int) -> None:
    """R40, D16, D17: whoever has news, however messages overtake each other between pairs and
    however late a rank looks: the same ballots in the same rounds, none lost, none twice."""
    group = Ranks(size)
    told = 0
    for _ in range(data.draw(st.integers(1, 60))):
        pairs = group.waiting()
        steps = ["news", "look", *(["deliver"] * 3 if pairs else [])]
        step = data.draw(st.sampled_from(steps))
        rank = data.draw(st.integers(0, size - 1))
        if step == "deliver":
            group.deliver(data.draw(st.sampled_from(pairs)))
        elif step == "news" and not group.ranks[rank].has_cast:
            told += 1
            group.cast(rank, [Abort(RoomKey(told, 1), "news", False)])
        else:
            group.take(rank)
            if group.ranks[rank].is_asked:
                group.cast(rank)
    group.come_to_rest()
    assert all(played == group.played[HUB] for played in group.played)
    heard = [m for round_ in group.played[HUB] for b in round_ for m in b.messages]
    assert sorted(m.key.room for m in heard if isinstance(m, Abort)) == list(range(1, told + 1))
    assert all([b.rank for b in round_] == list(range(size)) for round_ in group.played[HUB])


def test_a_round_costs_the_hub_two_messages_a_rank_when_all_vote_by_themselves() -> None:
    group = Ranks(3)
    for rank in (1, 2, HUB):
        group.cast(rank)
        for pair in group.waiting():
            group.deliver(pair)
    assert group.num_sent == 4, "two ballots in, two rounds out; nobody had to be asked"


def test_a_group_without_news_says_nothing() -> None:
    group = Ranks(4)
    for rank in range(4):
        group.take(rank)
    assert (group.num_sent, [r.is_asked for r in group.ranks]) == (0, [False] * 4)


def test_it_is_told_for_whom_a_rank_waits() -> None:
    group = Ranks(3)
    assert [r.missing for r in group.ranks] == [[], [], []]
    group.cast(HUB)
    assert group.ranks[HUB].missing == [1, 2]
    group.deliver((HUB, 1))
    group.cast(1)
    assert group.ranks[1].missing == [HUB]
    group.deliver((1, HUB))
    assert group.ranks[HUB].missing == [2]


@pytest.mark.parametrize(
    ("rank", "sender", "message"),
    [
        (1, HUB, Begin(7)),
        (1, HUB, Closed(1, [])),
        (1, 2, Begin(1)),
        (1, 2, Closed(1, [])),
        (HUB, 1, Begin(1)),
        (HUB, 1, Closed(1, [])),
        (HUB, 1, Ballot(3, 1, 0, b"", [], [], 0.0, 0.0, [], None, False)),
        (HUB, 1, Ballot(1, 2, 0, b"", [], [], 0.0, 0.0, [], None, False)),
        (1, 2, Ballot(1, 2, 0, b"", [], [], 0.0, 0.0, [], None, False)),
    ],
)
def test_who_is_out_of_step_breaks_the_group(rank: int, sender: int, message: GroupMessage) -> None:
    """Nothing can be decided with it: the group is restarted, no vote is guessed (D17)."""
    lockstep = Lockstep(rank, 3)
    with pytest.raises(GroupBroken, match="out of step"):
        lockstep.receive(sender, message)


def test_a_second_vote_in_one_round_is_refused() -> None:
    group = Ranks(2)
    hub = group.ranks[HUB]
    group.cast(HUB)
    with pytest.raises(GroupBroken, match="twice"):
        hub.cast(ballot(hub))
    one = Lockstep(1, 2)
    (sent,) = one.cast(ballot(one))
    hub.receive(1, sent[1])
    with pytest.raises(GroupBroken, match="out of step"):
        hub.receive(1, sent[1])


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (2, 2), (-1, 2)])
def test_a_group_has_two_ranks_or_more(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="two ranks"):
        Lockstep(rank, size)


# --- what a round decides -----------------------------------------------------------------


def votes(*vectors: tuple[int, bytes]) -> list[Ballot]:
    return [
        Ballot(1, rank, ids, vector, [], [], 0.0, 0.0, [], None, False)
        for rank, (ids, vector) in enumerate(vectors)
    ]


def test_the_outcome_is_the_least_of_all_votes() -> None:
    """Section 9: MIN, so that a failure anywhere ends it everywhere and no rank is left
    behind by those that are ready."""
    voting = Voting()
    assert voting.reduce(ReduceVotes(5, 9, (2, 0, 1))) is None
    outcome = voting.outcome(votes((9, bytes([2, 0, 1])), (9, bytes([1, 2, 1]))))
    assert outcome is not None
    assert (outcome.sequence, outcome.votes, outcome.diverged) == (5, (1, 0, 1), False)


@pytest.mark.parametrize("other", [(8, bytes([1])), (9, bytes([1, 1]))])
def test_other_ids_are_a_divergence(other: tuple[int, bytes]) -> None:
    voting = Voting()
    voting.reduce(ReduceVotes(5, 9, (1,)))
    outcome = voting.outcome(votes((9, bytes([1])), other))
    assert outcome is not None
    assert outcome.diverged


OUT = StepOutput([[7]])
OK = StepDone(4, 77, None, [])
WHY = failure("internal", "boom")


def test_a_step_is_done_when_it_is_done_everywhere() -> None:
    assert merge_steps(None, [None, None]) is None
    done = merge_steps(OUT, [OK, OK])
    assert done is not None
    assert (done.batch_id, done.output, done.failure) == (4, OUT, None)


def test_a_step_that_fails_on_one_rank_fails_on_all() -> None:
    """D16: no exception path may skip what is decided together."""
    done = merge_steps(OUT, [OK, StepDone(4, 0, WHY, [3])])
    assert done is not None
    assert (done.output, done.failure, done.blamed) == (None, WHY, {3})


def test_whoever_cannot_tell_whose_fault_it_was_fails_the_batch() -> None:
    done = merge_steps(None, [StepDone(4, 0, WHY, [3]), StepDone(4, 0, WHY, [])])
    assert done is not None
    assert done.blamed == frozenset()


def test_ranks_that_sampled_different_tokens_fail_the_batch() -> None:
    done = merge_steps(OUT, [OK, StepDone(4, 78, None, [])])
    assert done is not None
    assert done.output is None
    assert done.failure is not None
    assert "different tokens" in done.failure.detail


@pytest.mark.parametrize("other", [None, StepDone(5, 77, None, [])])
def test_ranks_that_ran_different_batches_are_no_group(other: StepDone | None) -> None:
    with pytest.raises(GroupBroken, match="different batches"):
        merge_steps(OUT, [OK, other])


def test_the_first_rank_s_reason_counts() -> None:
    voting = Voting()
    voting.reduce(ReduceVotes(5, 9, (0, 0)))
    ballots = votes((9, bytes([0, 0])), (9, bytes([0, 0])))
    late = failure("deadline_exceeded", "late")
    ballots[0].failures.append((1, WHY))
    ballots[1].failures.extend([(0, late), (1, late)])
    outcome = voting.outcome(ballots)
    assert outcome is not None
    assert dict(outcome.failures) == {1: WHY, 0: late}


def test_ranks_that_received_different_first_tokens_fail_that_request_alone() -> None:
    """D18, D16: each decode rank has its token from another prefill rank. Going on with two
    would fail the batch of everybody else at the next step."""
    voting = Voting()
    voting.reduce(ReduceVotes(5, 9, (2, 2)))
    ballots = votes((9, bytes([2, 2])), (9, bytes([2, 2])))
    for ballot, token in zip(ballots, (7, 8), strict=True):
        ballot.tokens.extend([(0, token), (1, 5)])
    outcome = voting.outcome(ballots)
    assert outcome is not None
    assert outcome.votes == (0, 2)
    ((place, why),) = outcome.failures
    assert (place, why.code) == (0, "bad_metadata")
    assert "7 and 8" in why.detail
