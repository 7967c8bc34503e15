"""The pair worlds of the list: bounds are told, small ones hold here and now."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdcore.fsm.effects import Effect, ReleaseLease
from pdcore.fsm.events import Event
from pdcore.fsm.legs import SenderFacts
from pdcore.fsm.sender import Sender
from pdcore.kv.slots import MetadataSlots
from pdcore.sim.decode_actor import DecodeActor
from pdcore.sim.explore import DEADLOCK
from pdcore.sim.mutants import MUTANTS
from pdcore.sim.pair_configurations import INVARIANTS, PAIR_CONFIGURATIONS

BY_NAME = {c.name: c for c in PAIR_CONFIGURATIONS}


def test_every_configuration_tells_its_bounds_and_invariants() -> None:
    for config in PAIR_CONFIGURATIONS:
        assert config.invariants == INVARIANTS
        assert {
            "faults",
            "writes",
            "ticks",
            "deadlines_counted_on",
            "network",
        } <= config.bounds.keys()
        assert set(config.catches) <= MUTANTS.keys()


def test_one_pair_with_every_fault_of_one_life_holds() -> None:
    """Issue 3, point 8: safety, no deadlock, liveness, explored to the end."""
    found = BY_NAME["pair"].run()
    assert found.violations == ()
    assert found.exhausted
    assert found.states > 10_000


def test_every_configuration_holds_as_far_as_there_is_time() -> None:
    """The first hundreds of states of each; all of them in `nox -s verify`."""
    for config in PAIR_CONFIGURATIONS:
        assert config.run(max_states=300).violations == (), config.name


@pytest.mark.parametrize(
    ("name", "mutant", "words"),
    [
        ("pair", "free-on-abort", "its blocks are not kept"),
        ("pair", "free-while-computing", "a forward pass fills blocks"),
        ("pair", "send-once", "nothing but a fault"),
        ("pair", "done-when-posted", "reads blocks that are back"),
        ("reuse", "free-on-abort", "its blocks are not kept"),
        ("two-ranks", "max-merged-status", "whose KV prefill1 never sent"),
    ],
)
def test_known_bad_variants_are_caught(name: str, mutant: str, words: str) -> None:
    """D2, D3, D4, D26, rule 9: a proof that cannot fail proves nothing, and one that fails for
    another reason than the rule that was undone does not prove that rule. The others are
    caught in `nox -s verify`."""
    assert mutant in BY_NAME[name].catches
    (violation,) = BY_NAME[name].run(mutant).violations
    assert words in violation.problem
    steps = BY_NAME[name].replay(mutant, violation.trace)
    assert [step.label for step in steps[1:]] == list(violation.trace)
    assert steps[-1].state == violation.state


def test_a_metadata_slot_that_is_never_given_back_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MetadataSlots, "free", lambda slots, slot: True)
    (violation,) = BY_NAME["dummy"].run().violations
    assert violation.kind == DEADLOCK


def test_a_lease_that_stays_open_at_the_transport_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carry_out = DecodeActor._carry_out

    def forgetful(actor: DecodeActor, effect: Effect) -> Iterator[Event]:
        return iter(()) if isinstance(effect, ReleaseLease) else carry_out(actor, effect)

    monkeypatch.setattr(DecodeActor, "_carry_out", forgetful)
    (violation,) = BY_NAME["dummy"].run().violations
    assert violation.kind == DEADLOCK


def test_done_with_a_chunk_that_was_never_written_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 9: judged by what the transport ended, not by what the sender remembers."""

    def all_but_the_first(sender: SenderFacts) -> bool:
        return sender.first_token is not None and all(
            leg.granted and not leg.live for leg in sender.legs.values()
        )

    monkeypatch.setattr(SenderFacts, "is_locally_done", property(all_but_the_first))
    monkeypatch.setattr(Sender, "post_ready", lambda sender, payload: ())
    (violation,) = BY_NAME["pair"].run().violations
    assert "is Done with 0 of 4 tokens written" in violation.problem
