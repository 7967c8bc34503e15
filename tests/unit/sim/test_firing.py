"""Rows are named once, and the row that is counted is the one that the product took."""

from __future__ import annotations

import itertools

import attrs
import pytest

from pdcore.errors import LifecycleError, failure
from pdcore.fsm.sender import SENDER, Sender
from pdcore.fsm.states import SenderState
from pdcore.sim.firing import ROW_IDS, TABLES, RowLog, fire, row_taken, watching
from pdcore.types import Incarnation, RoomKey


def sender() -> Sender:
    return Sender(RoomKey(1, 1), Incarnation(b"p" * 16), itertools.count(1))


def test_every_row_of_every_table_has_a_name_of_its_own() -> None:
    names = [name for names in ROW_IDS.values() for name in names]
    assert len(names) == len(set(names)) == sum(len(t.rows) for t in TABLES.values())


def test_fire_says_which_row_let_the_event_through() -> None:
    entity = sender()
    gone = failure("cancelled", "gone")
    assert fire(SENDER, entity, "failed_locally", gone).row == (
        "sender: row Bootstrapping --failed_locally [has_no_failure]--> Bootstrapping"
    )
    assert fire(SENDER, entity, "failed_locally", gone).row is None
    assert entity.ignored == 1
    assert fire(SENDER, entity, "failed").row == "sender: row Bootstrapping --failed--> Failed"


def test_asking_for_the_row_changes_nothing() -> None:
    entity = sender()
    row = row_taken(SENDER, entity, "failed")
    assert row is not None
    assert row.dest is SenderState.FAILED
    assert entity.state is SenderState.BOOTSTRAPPING
    assert entity.ignored == 0


def test_an_entity_that_leaves_its_table_is_noticed() -> None:
    rows = tuple(row for row in SENDER.rows if row.event != "failed")
    shortened = attrs.evolve(SENDER, rows=rows)
    with pytest.raises(LifecycleError, match="does not follow its table"):
        fire(shortened, sender(), "failed")


def test_watched_classes_log_the_rows_they_take_and_are_given_back() -> None:
    log = RowLog()
    original = vars(Sender)["failed"]
    with watching(log, (SENDER, Sender)):
        entity = sender()
        assert not entity.failed()
        assert entity.failed() is None
    assert log.taken() == ("sender: row Bootstrapping --failed--> Failed",)
    assert vars(Sender)["failed"] is original
    log.clear()
    assert log.taken() == ()
