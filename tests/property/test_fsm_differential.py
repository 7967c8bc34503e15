"""The compiled methods against the stock Machine: same events, same guards, same outcome."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transitions import Machine

from pdcore.fsm.machine import build_machine, compile_lifecycle, run_stock
from pdcore.fsm.table import Lifecycle, Row, StateInfo
from tests.property.fsm_probe import REAL, Ran, guards_of, probe_class

MACHINES: dict[str, tuple[Lifecycle, Machine, type, type]] = {
    name: (
        table,
        build_machine(table),
        compile_lifecycle(table, probe_class(table)),
        probe_class(table),
    )
    for name, (table, _) in REAL.items()
}


class Steps(enum.Enum):
    A = "A"
    B = "B"
    C = "C"
    D = "D"


EVENTS = ("e1", "e2", "e3")


@st.composite
def tables(draw: st.DrawFn) -> Lifecycle:
    """Any legal table of four states: internal rows, guard chains, actions named twice."""
    actions = st.lists(st.sampled_from(("a1", "a2", "quiet1")), max_size=3).map(tuple)
    guards = st.lists(st.sampled_from(("g1", "g2")), max_size=2, unique=True)
    rows: list[Row] = []
    for event in EVENTS:
        sources = draw(st.lists(st.sampled_from(Steps), min_size=1, unique=True))
        for source in sources:
            dest = st.just(source) if source is Steps.D else st.sampled_from(Steps)
            chain: list[str | None] = [*draw(guards)]
            if not chain or draw(st.booleans()):
                chain.append(None)
            rows += [Row(source, event, draw(dest), draw(actions), guard) for guard in chain]
    return Lifecycle(
        name="any",
        states=Steps,
        initial=Steps.A,
        terminal=frozenset({Steps.D}),
        events=EVENTS,
        rows=tuple(draw(st.permutations(rows))) if rows_are_free(rows) else tuple(rows),
        info={step: StateInfo("a step") for step in Steps},
    )


def rows_are_free(rows: Sequence[Row]) -> bool:
    """Whether no pair has an unguarded row behind guarded ones, so that any order is legal."""
    pairs = [(row.source, row.event) for row in rows]
    return all(row.guard is not None or pairs.count((row.source, row.event)) == 1 for row in rows)


def run_both(
    table: Lifecycle, machine: Machine, compiled: type, plain: type, script: Sequence[tuple]
) -> None:
    """Three entities, one script: compiled, the stock Machine on the bare entity, and the
    stock Machine behind run_stock."""
    fast, stock, slow = compiled(), plain(), plain()
    for event, true_guards, payload in script:
        answers = {name: name in true_guards for name in guards_of(table)}
        for entity in (fast, stock, slow):
            entity.answers = answers
            entity.log.clear()
        before = (fast.state, fast.ignored)
        effects = getattr(fast, event)(payload)
        accepted = machine.events[event].trigger(stock, payload)
        slow_effects = run_stock(machine, slow, event, payload)
        assert (effects is not None) == accepted == (slow_effects is not None)
        assert fast.state is stock.state is slow.state
        assert fast.log == stock.log == slow.log
        if effects is None or slow_effects is None:
            assert (fast.state, fast.ignored) == (before[0], before[1] + 1)
            assert fast.ignored == slow.ignored
        else:
            assert list(effects) == list(slow_effects)
            ran = [line.split("!")[0] for line in stock.log if "!" in line]
            loud = [name for name in ran if not name.startswith("quiet")]
            assert list(effects) == [Ran(name, payload) for name in loud]


def script_of(table: Lifecycle) -> st.SearchStrategy[list[tuple]]:
    guards = guards_of(table)
    subset = st.sets(st.sampled_from(guards)) if guards else st.just(set())
    # Half of the steps find a friendly world, else long walks would be rare.
    friendly = st.one_of(subset, st.just(set(guards)))
    step = st.tuples(st.sampled_from(table.events), friendly, st.integers(0, 3))
    return st.lists(step, max_size=25)


@pytest.mark.parametrize("name", MACHINES)
@given(data=st.data())
def test_compiled_class_and_stock_machine_agree(name: str, data: st.DataObject) -> None:
    """Every lifecycle of pdcore: state, guards asked, actions run, effects, refusals."""
    table, machine, compiled, plain = MACHINES[name]
    run_both(table, machine, compiled, plain, data.draw(script_of(table)))


@given(data=st.data())
def test_they_agree_for_any_legal_table(data: st.DataObject) -> None:
    table = data.draw(tables())
    machine = build_machine(table)
    compiled = compile_lifecycle(table, probe_class(table))
    run_both(table, machine, compiled, probe_class(table), data.draw(script_of(table)))


def test_mutant_a_compiler_that_swaps_rows_is_found() -> None:
    """The differential test must see a compiler that asks guards in another order."""
    table, machine, _, plain = MACHINES["receiver"]
    swapped = attrs.evolve(table, rows=tuple(r for r in table.rows if r.guard != "may_grant"))
    wrong = compile_lifecycle(swapped, probe_class(table))
    script = [
        ("advanced", set(), 0),
        ("advanced", set(), 0),
        ("claim_received", {"may_grant"}, 0),
    ]
    with pytest.raises(AssertionError):
        run_both(table, machine, wrong, plain, script)
