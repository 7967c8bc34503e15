"""The half-open breaker of a peer: when it bites, whom it lets try, what forgives (D25)."""

from __future__ import annotations

import pytest

from pdcore.scheduler.breaker import MAX_BREAKERS, Breakers
from pdcore.types import Incarnation, PeerRef, RoomKey

ONE, TWO = RoomKey(1, 1), RoomKey(2, 2)


def peer(number: int) -> PeerRef:
    return PeerRef("prefill", number, Incarnation(number.to_bytes(16, "big")), f"tcp://p:{number}")


A, B = peer(1), peer(2)


def make(kind: type[Breakers] = Breakers) -> Breakers:
    """Three failures, ten seconds."""
    return kind(3, 10.0)


def opened(kind: type[Breakers] = Breakers) -> Breakers:
    breakers = make(kind)
    assert [breakers.failed(A, "the write stalled", float(i)) for i in range(3)] == [
        False,
        False,
        True,
    ]
    return breakers


def test_r49_three_failures_in_a_row_open_it_and_the_reason_is_told() -> None:
    """R49."""
    breakers = opened()
    why = breakers.refusal(A.incarnation, ONE, 5.0)
    assert why == (
        "it failed 3 times in a row, the last one: the write stalled; it is tried again in 7.0 s"
    )
    assert breakers.problems(5.0) == [
        (A, "it failed 3 times in a row, the last one: the write stalled")
    ]
    assert breakers.refusal(B.incarnation, ONE, 5.0) is None, "each pair is judged by itself"


def test_a_success_in_between_forgives() -> None:
    breakers = make()
    breakers.failed(A, "x", 0.0)
    breakers.failed(A, "x", 0.0)
    breakers.succeeded(A.incarnation)
    assert not breakers.failed(A, "x", 0.0)
    assert breakers.refusal(A.incarnation, ONE, 0.0) is None
    assert len(breakers) == 1


def check_messages_do_not_close_it(kind: type[Breakers]) -> None:
    """A peer whose transfers fail goes on sending handshakes and heartbeats."""
    breakers = opened(kind)
    for _ in range(5):
        breakers.heard(A.incarnation)
    assert breakers.refusal(A.incarnation, ONE, 5.0) is not None


class ClosesAtAnyMessage(Breakers):
    """The seed's rule."""

    def heard(self, incarnation: Incarnation) -> None:
        self.succeeded(incarnation)


def test_d25_the_breaker_bites_under_traffic() -> None:
    """D25: the seed's closed at any new message."""
    check_messages_do_not_close_it(Breakers)
    with pytest.raises(AssertionError):
        check_messages_do_not_close_it(ClosesAtAnyMessage)


def check_it_is_tried_again(kind: type[Breakers]) -> None:
    breakers = opened(kind)
    assert breakers.refusal(A.incarnation, ONE, 12.0) is None


class Blacklist(Breakers):
    """Never again."""

    def refusal(self, incarnation: Incarnation, key: RoomKey, now: float) -> str | None:
        return super().refusal(incarnation, key, 0.0)


def test_d25_it_is_half_open_after_the_cool_down() -> None:
    """D25: one room tries, the others wait for what becomes of it."""
    check_it_is_tried_again(Breakers)
    with pytest.raises(AssertionError):
        check_it_is_tried_again(Blacklist)
    breakers = opened()
    breakers.begin(A.incarnation, ONE, 12.0)
    assert breakers.refusal(A.incarnation, ONE, 12.0) is None, "its own retries are its trial"
    why = breakers.refusal(A.incarnation, TWO, 12.0)
    assert why is not None
    assert why.endswith("another request is trying it")
    breakers.begin(A.incarnation, TWO, 12.0)
    assert breakers.refusal(A.incarnation, TWO, 12.0) is not None, "there is one trial"
    breakers.succeeded(A.incarnation)
    assert breakers.refusal(A.incarnation, TWO, 12.0) is None
    assert breakers.problems(12.0) == []


def test_a_trial_that_fails_opens_it_again_at_once() -> None:
    breakers = opened()
    breakers.begin(A.incarnation, ONE, 12.0)
    assert breakers.failed(A, "again", 13.0)
    assert breakers.refusal(A.incarnation, TWO, 22.9) is not None
    assert breakers.refusal(A.incarnation, TWO, 23.0) is None


def test_a_trial_that_proves_nothing_leaves_its_place() -> None:
    """Its client went away."""
    breakers = opened()
    breakers.begin(A.incarnation, ONE, 12.0)
    breakers.ended(ONE)
    assert breakers.refusal(A.incarnation, TWO, 12.0) is None


def check_a_slow_trial_locks_nobody_out(kind: type[Breakers]) -> None:
    """It may wait for blocks until its deadline, half an hour."""
    breakers = opened(kind)
    breakers.begin(A.incarnation, ONE, 12.0)
    assert breakers.refusal(A.incarnation, TWO, 21.9) is not None
    assert breakers.refusal(A.incarnation, TWO, 22.0) is None
    assert breakers.problems(22.0) == [], "routers must hear of it too"
    breakers.begin(A.incarnation, TWO, 22.0)
    assert breakers.refusal(A.incarnation, RoomKey(3, 3), 22.0) is not None, "one at a time"
    breakers.ended(ONE)
    assert breakers.refusal(A.incarnation, RoomKey(3, 3), 22.0) is not None
    breakers.succeeded(A.incarnation)
    assert breakers.refusal(A.incarnation, RoomKey(3, 3), 22.0) is None


class WaitsForItsTrial(Breakers):
    def begin(self, incarnation: Incarnation, key: RoomKey, now: float) -> None:
        super().begin(incarnation, key, now)
        self._breakers[incarnation].trial_until_s = float("inf")


def test_d25_a_slow_trial_locks_nobody_out() -> None:
    """D25: found in review."""
    check_a_slow_trial_locks_nobody_out(Breakers)
    with pytest.raises(AssertionError):
        check_a_slow_trial_locks_nobody_out(WaitsForItsTrial)


def test_late_failures_of_old_work_do_not_lengthen_it() -> None:
    breakers = opened()
    assert not breakers.failed(A, "old", 9.0)
    assert breakers.refusal(A.incarnation, ONE, 12.0) is None


def test_silence_opens_it_at_once_and_a_word_ends_silence() -> None:
    breakers = make()
    breakers.silent(A, "it has not answered", 0.0)
    assert breakers.refusal(A.incarnation, ONE, 1.0) is not None
    breakers.heard(A.incarnation)
    assert breakers.refusal(A.incarnation, ONE, 1.0) is None
    assert len(breakers) == 0


def test_a_word_forgives_silence_but_no_failure() -> None:
    breakers = make()
    breakers.failed(A, "x", 0.0)
    breakers.failed(A, "x", 0.0)
    breakers.silent(A, "it has not answered", 0.0)
    breakers.heard(A.incarnation)
    assert breakers.refusal(A.incarnation, ONE, 1.0) is None
    assert breakers.failed(A, "x", 1.0), "it is the third"
    breakers.silent(A, "it has not answered", 2.0)
    breakers.heard(A.incarnation)
    assert breakers.refusal(A.incarnation, ONE, 2.0) is not None


def test_what_is_known_is_bounded() -> None:
    breakers = make()
    for number in range(MAX_BREAKERS + 5):
        breakers.failed(peer(number), "x", 0.0)
    assert len(breakers) == MAX_BREAKERS
    breakers.forget(peer(MAX_BREAKERS).incarnation)
    assert len(breakers) == MAX_BREAKERS - 1


def test_repr_names_who_is_out() -> None:
    assert repr(opened()) == "Breakers(known=1, open=['prefill'])"


def check_it_gets_its_trial(kind: type[Breakers]) -> None:
    """Routers leave out whom an instance names: after the cool-down they must not."""
    breakers = opened(kind)
    assert [peer for peer, _ in breakers.problems(11.9)] == [A]
    assert breakers.problems(12.0) == []
    breakers.begin(A.incarnation, ONE, 12.0)
    assert [peer for peer, _ in breakers.problems(12.0)] == [A], "one at a time"


def test_d25_a_peer_is_named_only_while_it_gets_no_work() -> None:
    """D25: named for ever it would be a blacklist by another way."""
    check_it_gets_its_trial(Breakers)

    class NamedForEver(Breakers):
        def problems(self, now: float) -> list[tuple[PeerRef, str]]:
            return super().problems(0.0)

    with pytest.raises(AssertionError):
        check_it_gets_its_trial(NamedForEver)


def test_work_that_began_before_is_no_trial() -> None:
    """It repeats its handshake while the breaker is open."""
    breakers = opened()
    breakers.begin(A.incarnation, ONE, 5.0)
    assert breakers.refusal(A.incarnation, ONE, 5.0) is not None
    assert breakers.refusal(A.incarnation, TWO, 12.0) is None
