"""States are plain enums whose values are the words that people read."""

from __future__ import annotations

import enum

import pytest

from pdcore.fsm import states

ENUMS = [
    value
    for value in vars(states).values()
    if isinstance(value, type) and issubclass(value, enum.Enum)
]


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_states_are_not_strings(kind: type[enum.Enum]) -> None:
    """transitions 0.9.3 takes a member of a string enum for a state's name."""
    assert not issubclass(kind, str)


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_names_and_words_belong_together(kind: type[enum.Enum]) -> None:
    for state in kind:
        assert state.name.replace("_", "").lower() == state.value.lower()
        assert state.value[0].isupper()
