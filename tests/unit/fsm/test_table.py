"""The form of a table is checked before a Machine is built of it."""

from __future__ import annotations

import enum

import attrs
import pytest

from pdcore.errors import LifecycleError
from pdcore.fsm.table import Lifecycle, Row, StateInfo, check_table, describe


class Door(enum.Enum):
    OPEN = "Open"
    SHUT = "Shut"
    GONE = "Gone"


class Other(enum.Enum):
    OPEN = "Open"


DOOR = Lifecycle(
    name="door",
    states=Door,
    initial=Door.OPEN,
    terminal=frozenset({Door.GONE}),
    events=("pushed", "burned"),
    rows=(
        Row(Door.OPEN, "pushed", Door.SHUT, ("slam",), "is_light"),
        Row(Door.OPEN, "pushed", Door.OPEN),
        Row(Door.SHUT, "burned", Door.GONE),
        Row(Door.GONE, "burned", Door.GONE, ("count",)),
    ),
    info={state: StateInfo(state.value) for state in Door},
)


def test_a_legal_table_passes() -> None:
    check_table(DOOR)


def test_rows_for_gives_the_rows_of_a_pair_in_order() -> None:
    assert [row.guard for row in DOOR.rows_for(Door.OPEN, "pushed")] == ["is_light", None]
    assert DOOR.rows_for(Door.GONE, "pushed") == ()


def test_a_row_reads_well() -> None:
    assert describe(DOOR.rows[0]) == "row Open --pushed [is_light]--> Shut"
    assert describe(DOOR.rows[2]) == "row Shut --burned--> Gone"


FAULTS = [
    ({"initial": Other.OPEN}, "initial and terminal states"),
    ({"terminal": frozenset({Other.OPEN})}, "initial and terminal states"),
    ({"info": {Door.OPEN: StateInfo("x")}}, "info must describe"),
    ({"events": ("pushed", "burned", "pushed")}, "listed twice"),
    ({"events": ("pushed", "burned", "is it")}, "cannot be a method name"),
    ({"events": ("pushed", "burned", "pass")}, "cannot be a method name"),
    ({"events": ("pushed", "burned", "painted")}, "'painted' has no row"),
    ({"events": ("pushed",)}, "row Shut --burned--> Gone: event not listed"),
    ({"rows": (*DOOR.rows, Row(Other.OPEN, "pushed", Door.OPEN))}, "unknown state"),
    ({"rows": (*DOOR.rows, Row(Door.GONE, "pushed", Door.OPEN))}, "leaves a terminal state"),
    ({"rows": (*DOOR.rows, Row(Door.OPEN, "pushed", Door.GONE))}, "never fires"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_a_fault_is_named_with_the_lifecycle(change: dict[str, object], message: str) -> None:
    with pytest.raises(LifecycleError, match="lifecycle door: ") as caught:
        check_table(attrs.evolve(DOOR, **change))
    assert message in str(caught.value)
