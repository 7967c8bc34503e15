"""Mutants are planted for a while and leave nothing behind."""

from __future__ import annotations

import pytest

from pdcore.errors import ConfigError
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.targets import ReceiverFacts
from pdcore.scheduler.decode_rooms import DecodeRooms
from pdcore.sim.mutants import MUTANTS, find_mutant, planted


@pytest.mark.parametrize("name", list(MUTANTS))
def test_the_product_is_whole_again_afterwards(name: str) -> None:
    patches = MUTANTS[name].patches
    before = [dict(vars(cls)) for cls, _, _ in patches]
    with planted(name):
        for cls, attribute, value in patches:
            assert vars(cls)[attribute] is value
    assert [dict(vars(cls)) for cls, _, _ in patches] == before


def test_it_is_taken_out_even_when_the_world_breaks() -> None:
    original = DecodeRooms.quarantine

    def break_it() -> None:
        with planted("free-on-abort"):
            assert DecodeRooms.quarantine is not original
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        break_it()
    assert DecodeRooms.quarantine is original


def test_what_was_inherited_is_inherited_again() -> None:
    assert "unanswered" not in vars(Receiver)
    with planted("send-once"):
        assert "unanswered" in vars(Receiver)
    assert "unanswered" not in vars(Receiver)


def test_nothing_is_planted_without_a_name() -> None:
    with planted(""):
        assert isinstance(vars(ReceiverFacts)["is_locally_done"], property)


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no mutant 'x'; there are: free-on-abort"):
        find_mutant("x")
