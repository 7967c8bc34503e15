"""Breakers against an adversary: any order of failures, silence, words, successes and ends.

A plain model beside it keeps only what the rule is about: when a peer was shut out, why, and
who tries it. It must agree on every question at every moment, for two peers that never touch
each other.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pdcore.scheduler.breaker import Breakers
from pdcore.types import Incarnation, PeerRef, RoomKey

PEERS = [PeerRef(f"p{i}", 0, Incarnation(bytes([i] * 16)), f"tcp://p{i}:1") for i in (1, 2)]
KEYS = [RoomKey(i, i) for i in range(1, 5)]
MAX_FAILURES, COOLDOWN_S = 3, 10.0
BUDGET = settings(max_examples=120, stateful_step_count=40, deadline=None)


class Model:
    """One peer."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.shut_until_s: float | None = None
        self.is_silence = False
        self.trial: RoomKey | None = None
        self.trial_until_s = 0.0

    def is_tried(self, now: float) -> bool:
        return self.trial is not None and now < self.trial_until_s

    def may_use(self, key: RoomKey, now: float) -> bool:
        if self.shut_until_s is None or self.trial == key:
            return True
        return now >= self.shut_until_s and not self.is_tried(now)

    def shut(self, now: float, *, is_silence: bool) -> None:
        self.shut_until_s, self.is_silence, self.trial = now + COOLDOWN_S, is_silence, None


class BreakerMachine(RuleBasedStateMachine):
    kind: type[Breakers] = Breakers

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.real = self.kind(MAX_FAILURES, COOLDOWN_S)
        self.models = [Model(), Model()]

    @rule(seconds=st.sampled_from([0.5, 4.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(i=st.integers(0, 1))
    def failed(self, i: int) -> None:
        model = self.models[i]
        model.in_a_row += 1
        is_open = model.shut_until_s is not None
        is_half_open = is_open and self.now >= (model.shut_until_s or 0.0)
        is_shut_for_failing = is_open and not model.is_silence
        opens = is_half_open or (model.in_a_row >= MAX_FAILURES and not is_shut_for_failing)
        if opens:
            model.shut(self.now, is_silence=False)
        assert self.real.failed(PEERS[i], "x", self.now) is opens

    @rule(i=st.integers(0, 1))
    def silent(self, i: int) -> None:
        model = self.models[i]
        model.shut(self.now, is_silence=model.shut_until_s is None or model.is_silence)
        self.real.silent(PEERS[i], "silent", self.now)

    @rule(i=st.integers(0, 1))
    def heard(self, i: int) -> None:
        model = self.models[i]
        if model.is_silence:
            model.shut_until_s, model.is_silence, model.trial = None, False, None
        self.real.heard(PEERS[i].incarnation)

    @rule(i=st.integers(0, 1))
    def succeeded(self, i: int) -> None:
        self.models[i] = Model()
        self.real.succeeded(PEERS[i].incarnation)

    @rule(i=st.integers(0, 1), key=st.sampled_from(KEYS))
    def use(self, i: int, key: RoomKey) -> None:
        model = self.models[i]
        if not model.may_use(key, self.now):
            return
        if model.shut_until_s is not None and not model.is_tried(self.now):
            model.trial, model.trial_until_s = key, self.now + COOLDOWN_S
        self.real.begin(PEERS[i].incarnation, key, self.now)

    @rule(key=st.sampled_from(KEYS))
    def ended(self, key: RoomKey) -> None:
        for model in self.models:
            if model.trial == key:
                model.trial = None
        self.real.ended(key)

    @invariant()
    def every_answer_is_the_models(self) -> None:
        for peer, model in zip(PEERS, self.models, strict=True):
            answers = [self.real.refusal(peer.incarnation, key, self.now) is None for key in KEYS]
            assert answers == [model.may_use(key, self.now) for key in KEYS]
            if model.shut_until_s is not None and self.now >= model.shut_until_s:
                assert sum(answers) in (1, len(KEYS)), "one tries, or anybody may be the one"
        named = {peer for peer, _ in self.real.problems(self.now)}
        expected = {
            peer
            for peer, model in zip(PEERS, self.models, strict=True)
            if not model.may_use(RoomKey(99, 99), self.now)
        }
        assert named == expected, "whoever gets no new work is named, and nobody else"


def test_the_breaker_agrees_with_its_model() -> None:
    """D25, R49."""
    run_state_machine_as_test(BreakerMachine, settings=BUDGET)


class ClosesAtAnyMessage(Breakers):
    """The seed's rule."""

    def heard(self, incarnation: Incarnation) -> None:
        self.succeeded(incarnation)


class TriesWithEverybody(Breakers):
    """Half-open for all at once."""

    def begin(self, incarnation: Incarnation, key: RoomKey, now: float) -> None:
        return None


@pytest.mark.parametrize("mutant", [ClosesAtAnyMessage, TriesWithEverybody])
def test_d25_the_model_catches_other_rules(mutant: type[Breakers]) -> None:
    """D25."""

    class Mutated(BreakerMachine):
        kind = mutant

    quick = settings(BUDGET, max_examples=300, phases=[Phase.generate], derandomize=True)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Mutated, settings=quick)
