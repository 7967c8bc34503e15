"""Remembered steps are what the core does: equal keys mean an equal future."""

from __future__ import annotations

import pytest

from pdcore.sim.actors import Actor, ActorEvent, common_key, resends
from pdcore.sim.decode_actor import DecodeActor
from pdcore.sim.explore import explore
from pdcore.sim.pair_book import Book, Local, Outlive, Rules, kind_of
from pdcore.sim.pair_world import PairWorld
from pdcore.sim.places import Dispatch, Place, Shape
from pdcore.types import RoomKey

ONE = (Place("prefill0", False, "prefill"),)
FIRST = (Dispatch(RoomKey(1, 1), "prefill"),)
RULES = Rules(
    Shape(ONE, FIRST, quarantine_s=1.0),
    frozenset({"abort", "transfer"}),
    crashes=frozenset({"prefill0"}),
    outlive=Outlive.UNREPORTED,
    fair_deadlines=frozenset({"prefill0", "decode"}),
    is_tick_eager=True,
)


class Remembering(Book):
    """Also keeps another way to each state that has one."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.other_ways: dict[int, tuple[int, ActorEvent]] = {}

    def intern(self, actor: Actor, slot: int, parent: int, event: ActorEvent) -> Local:
        count = len(self.locals)
        local = super().intern(actor, slot, parent, event)
        if len(self.locals) == count and parent >= 0 and parent != local.number:
            self.other_ways.setdefault(local.number, (parent, event))
        return local


def check_futures_agree(book: Remembering) -> int:
    """Every event that was taken from a state, taken again after another way to it, leads to
    the same state with the same messages. Returns how many were compared."""
    compared = 0
    for number, (parent, event) in list(book.other_ways.items()):
        local = book.locals[number]
        other = book.rebuild(book.locals[parent])
        book.feed(other, event)
        offers = tuple(o for o in other.offers() if book._may_happen(o, other.place))
        assert offers == local.offers, event
        assert book.mask_of(resends(other)) == local.resends, event
        for known, step in local.steps.items():
            if not isinstance(known, tuple):
                continue
            actor = book.rebuild(book.locals[parent])
            book.feed(actor, event)
            says = book.mask_of(book.feed(actor, known))
            assert says == step.says, (known, event)
            twin = book.intern(actor, local.slot, number, known)
            assert twin.number == step.target, (known, event)
            compared += 1
    return compared


FORGETFUL = Rules(
    Shape(ONE, FIRST, num_entities=2),
    frozenset({"forget", "evict", "abort"}),
    fair_deadlines=frozenset({"prefill0", "decode"}),
    duplicates=frozenset({"prefill0", "decode"}),
)


@pytest.mark.parametrize("rules", [RULES, FORGETFUL], ids=["dies", "forgets"])
def test_two_ways_to_one_state_have_one_future(rules: Rules) -> None:
    """What may happen next counts, too: whose deadline has passed has none any more."""
    book = Remembering(rules)
    explore(PairWorld(book), max_states=3000)
    assert check_futures_agree(book) > 200


def test_mutant_a_key_that_forgets_a_fact_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what its receiver knows, the key of an actor is not its future."""
    monkeypatch.setattr(DecodeActor, "key", lambda actor: common_key(actor))
    book = Remembering(RULES)
    explore(PairWorld(book), max_states=1000)
    with pytest.raises((AssertionError, KeyError)):
        check_futures_agree(book)


def test_kinds_of_faults() -> None:
    key = RoomKey(1, 1)
    kinds = [
        kind_of(("timer", "deadline", key)),
        kind_of(("computed", False)),
        kind_of(("ended", 1, "unsure")),
        kind_of(("ended", 1, "failed")),
        kind_of(("route", "b:1", ())),
        kind_of(("abort", 0)),
    ]
    assert kinds == ["deadline", "engine", "unsure", "transfer", "route", "abort"]
