"""The compiler: what it installs, what it refuses, and what it says about a typo."""

from __future__ import annotations

import enum
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence

import attrs
import pytest
from transitions import Machine, State
from transitions.core import Transition
from transitions.extensions import HierarchicalMachine, LockedMachine

from pdcore.errors import LifecycleError
from pdcore.fsm.effects import Effect
from pdcore.fsm.machine import (
    Event,
    Query,
    build_machine,
    compile_lifecycle,
    compile_machine,
    lifecycle,
    run_stock,
)
from pdcore.fsm.table import Lifecycle, Row, StateInfo


class Light(enum.Enum):
    RED = "Red"
    GREEN = "Green"
    OUT = "Out"


class Bell(Effect, frozen=True):
    rings: int


LIGHT = Lifecycle(
    name="light",
    states=Light,
    initial=Light.RED,
    terminal=frozenset({Light.OUT}),
    events=("button_pressed", "bulb_broke"),
    rows=(
        Row(Light.RED, "button_pressed", Light.GREEN, ("ring",), "is_day"),
        Row(Light.RED, "button_pressed", Light.RED, ("note",), "is_late"),
        Row(Light.GREEN, "button_pressed", Light.GREEN, ("ring", "note", "ring")),
        Row(Light.RED, "bulb_broke", Light.OUT),
        Row(Light.GREEN, "bulb_broke", Light.OUT),
    ),
    info={state: StateInfo(state.value) for state in Light},
)


class Lamp:
    """Not compiled; every test makes its own compiled subclass."""

    __slots__ = ("ignored", "rings", "saw", "state")

    button_pressed: Event[int]
    bulb_broke: Event[None]
    may_button_pressed: Query[int]

    def __init__(self) -> None:
        self.state: Light = Light.RED
        self.ignored = 0
        self.rings = 0
        self.saw: list[Light] = []

    def is_day(self, payload: int) -> bool:
        return payload < 18

    def is_late(self, payload: int) -> bool:
        return payload > 22

    def ring(self, payload: int) -> Sequence[Effect]:
        self.saw.append(self.state)
        self.rings += 1
        return (Bell(self.rings),)

    def note(self, payload: int) -> Sequence[Effect]:
        return ()


def lamp_class(**changes: object) -> type[Lamp]:
    return type("SmallLamp", (Lamp,), {"__slots__": (), **changes})


def lamp() -> Lamp:
    return compile_lifecycle(LIGHT, lamp_class())()


# --- what it installs -------------------------------------------------------------------


def test_the_first_row_whose_guard_holds_fires() -> None:
    entity = lamp()
    assert entity.button_pressed(9) == (Bell(1),)
    assert entity.state is Light.GREEN
    other = lamp()
    assert other.button_pressed(23) == ()
    assert other.state is Light.RED
    assert other.ignored == 0


def test_no_row_means_ignored_and_counted() -> None:
    entity = lamp()
    assert entity.button_pressed(20) is None
    entity.bulb_broke()
    assert entity.state is Light.OUT
    assert entity.bulb_broke() is None
    assert entity.button_pressed(9) is None
    assert (entity.state, entity.ignored, entity.rings) == (Light.OUT, 3, 0)


def test_effects_of_all_actions_are_concatenated_in_order() -> None:
    entity = lamp()
    entity.button_pressed(9)
    assert entity.button_pressed(9) == (Bell(2), Bell(3))


def test_actions_run_after_the_state_has_changed() -> None:
    entity = lamp()
    entity.button_pressed(9)
    assert entity.saw == [Light.GREEN]


def test_an_event_without_effects_returns_the_empty_tuple() -> None:
    assert lamp().bulb_broke() == ()


def test_may_asks_guards_and_changes_nothing() -> None:
    entity = lamp()
    asked = [entity.may_button_pressed(hour) for hour in (9, 20, 23)]
    assert asked == [True, False, True]
    assert (entity.state, entity.ignored, entity.rings) == (Light.RED, 0, 0)
    entity.bulb_broke()
    assert not entity.may_button_pressed(9)


def test_a_subclass_may_override_a_guard() -> None:
    class NightLamp(compile_lifecycle(LIGHT, lamp_class())):
        __slots__ = ()

        def is_day(self, payload: int) -> bool:
            return True

    assert NightLamp().button_pressed(20) == (Bell(1),)


def test_the_decorator_and_slotted_attrs_classes() -> None:
    @lifecycle(LIGHT)
    @attrs.define(eq=False)
    class AttrsLamp:
        state: Light = Light.RED
        ignored: int = 0

        def is_day(self, payload: int) -> bool:
            return True

        def is_late(self, payload: int) -> bool:
            return False

        def ring(self, payload: int) -> Sequence[Effect]:
            return (Bell(payload),)

        def note(self, payload: int) -> Sequence[Effect]:
            return ()

    entity = AttrsLamp()
    assert entity.button_pressed(4) == (Bell(4),)
    assert entity.state is Light.GREEN


def test_an_entity_stays_small() -> None:
    entity = lamp()
    assert not hasattr(entity, "__dict__")
    assert sys.getsizeof(entity) <= 80


def test_a_traceback_shows_the_generated_line() -> None:
    def broken(self: Lamp, payload: int) -> Sequence[Effect]:
        raise ValueError("a bug in an action")

    entity = compile_lifecycle(LIGHT, lamp_class(ring=broken))()
    with pytest.raises(ValueError, match="a bug in an action") as caught:
        entity.button_pressed(9)
    text = "".join(traceback.format_exception(caught.value))
    assert "return self.ring(payload)" in text
    assert "<lifecycle light on " in text


# --- the slow path ----------------------------------------------------------------------


def test_run_stock_keeps_the_same_contract() -> None:
    machine, entity = build_machine(LIGHT), lamp()
    assert run_stock(machine, entity, "button_pressed", 20) is None
    assert list(run_stock(machine, entity, "button_pressed", 9) or ()) == [Bell(1)]
    assert list(run_stock(machine, entity, "button_pressed", 9) or ()) == [Bell(2), Bell(3)]
    assert run_stock(machine, entity, "bulb_broke") == []
    assert run_stock(machine, entity, "bulb_broke") is None
    assert (entity.state, entity.ignored, entity.rings) == (Light.OUT, 2, 3)
    assert machine.models == []


def test_run_stock_needs_a_class_with_the_callbacks() -> None:
    class Bare:
        __slots__ = ("ignored", "state")

        def __init__(self) -> None:
            self.state = Light.RED
            self.ignored = 0

    with pytest.raises(LifecycleError, match=r"Bare\.is_day is not a method"):
        run_stock(build_machine(LIGHT), Bare(), "button_pressed")


def test_the_machine_has_no_model_and_no_automatic_events() -> None:
    machine = build_machine(LIGHT)
    assert machine.models == []
    assert sorted(machine.events) == ["bulb_broke", "button_pressed"]
    internal = machine.events["button_pressed"].transitions["GREEN"][0]
    assert internal.dest is None
    assert machine.get_state("OUT").final
    assert not machine.get_state("RED").final


# --- a typo fails at import, and says where ---------------------------------------------


def not_a_method(self: Lamp) -> bool:
    return True


TYPOS: list[tuple[dict[str, object], tuple[Row, ...], str]] = [
    ({}, (Row(Light.RED, "bulb_broke", Light.OUT, (), "is_brokn"),), "guard 'is_brokn' is not"),
    ({}, (Row(Light.RED, "bulb_broke", Light.OUT, ("rnig",)),), "action 'rnig' is not a method"),
    ({"is_day": not_a_method}, LIGHT.rows, "guard 'is_day' must take (self, payload)"),
    ({"ring": property(not_a_method)}, LIGHT.rows, "action 'ring' must be a plain method"),
]


@pytest.mark.parametrize(("changes", "rows", "message"), TYPOS, ids=[t[2] for t in TYPOS])
def test_a_typo_names_lifecycle_row_and_class(
    changes: dict[str, object], rows: tuple[Row, ...], message: str
) -> None:
    pressed = tuple(row for row in LIGHT.rows if row.event == "button_pressed")
    table = attrs.evolve(LIGHT, rows=(*pressed, *(r for r in rows if r not in pressed)))
    with pytest.raises(LifecycleError) as caught:
        compile_lifecycle(table, lamp_class(**changes))
    text = str(caught.value)
    assert message in text
    assert text.startswith("lifecycle light, class SmallLamp, row RED --")


def test_a_declared_event_that_the_table_lacks_is_refused() -> None:
    class Wrong(Lamp):
        __slots__ = ()

        buton_pressed: Event[int]

    with pytest.raises(LifecycleError, match="'buton_pressed' is declared but no event"):
        compile_lifecycle(LIGHT, Wrong)


@pytest.mark.parametrize("name", ["bulb_broke", "may_bulb_broke"])
def test_an_event_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(LifecycleError, match=f"event '{name}' is the name of another attribute"):
        compile_lifecycle(LIGHT, lamp_class(**{name: not_a_method}))


def test_compiling_twice_is_refused() -> None:
    compiled = compile_lifecycle(LIGHT, lamp_class())
    with pytest.raises(LifecycleError, match="another attribute"):
        compile_lifecycle(LIGHT, compiled)


def test_a_class_with_a_dict_or_without_the_slots_is_refused() -> None:
    class Unslotted(Lamp):
        pass

    class Stateless:
        __slots__ = ("ignored",)

    for cls in (Unslotted, Stateless):
        with pytest.raises(LifecycleError, match="must be slotted"):
            compile_lifecycle(LIGHT, cls)


# --- what it does not reproduce it refuses ----------------------------------------------


def call(name: str) -> Callable[[Machine], None]:
    """Add one callback to a machine-wide list."""

    def change(machine: Machine) -> None:
        vars(machine)[name if name in vars(machine) else f"_{name}"].append("note")

    return change


def first_row(machine: Machine) -> Transition:
    return machine.events["button_pressed"].transitions["RED"][0]


CHANGES: dict[str, Callable[[Machine], None]] = {
    "send_event": lambda m: setattr(m, "send_event", True),
    "model_attribute": lambda m: setattr(m, "model_attribute", "mode"),
    "machine-wide prepare_event": call("prepare_event"),
    "machine-wide before_state_change": call("before_state_change"),
    "machine-wide after_state_change": call("after_state_change"),
    "machine-wide finalize_event": call("finalize_event"),
    "machine-wide on_exception": call("on_exception"),
    "machine-wide on_final": call("on_final"),
    "ignore_invalid_triggers off": lambda m: setattr(m, "ignore_invalid_triggers", False),
    "state RED: on_enter": lambda m: m.get_state("RED").add_callback("enter", "note"),
    "state OUT: on_enter or on_exit": lambda m: m.get_state("OUT").add_callback("exit", "note"),
    "state RED: ignore_invalid": lambda m: setattr(
        m.get_state("RED"), "ignore_invalid_triggers", False
    ),
    "event button_pressed: prepare": lambda m: first_row(m).add_callback("prepare", "note"),
    "event button_pressed: before": lambda m: first_row(m).add_callback("before", "note"),
    "event button_pressed: unless": lambda m: setattr(first_row(m).conditions[0], "target", False),
    "callback <function": lambda m: first_row(m).after.append(not_a_method),
    "callback 'os.getcwd'": lambda m: first_row(m).after.append("os.getcwd"),
    "events of machine and table differ: extra": lambda m: m.add_transition(
        "extra", Light.RED, Light.GREEN
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_feature_that_is_not_reproduced_is_refused(what: str) -> None:
    machine = build_machine(LIGHT)
    CHANGES[what](machine)
    with pytest.raises(LifecycleError, match="lifecycle light: cannot compile") as caught:
        compile_machine(machine, LIGHT.events, lamp_class())
    assert what in str(caught.value)


def stock(cls: type[Machine], states: object = Light, **options: object) -> Machine:
    return cls(
        model=None,
        states=states,
        initial=Light.RED if states is Light else "RED",
        auto_transitions=False,
        **({"ignore_invalid_triggers": True} | options),
    )


class NamedState(State):
    pass


class LoudTransition(Transition):
    pass


class LoudMachine(Machine):
    transition_cls = LoudTransition


MACHINES: dict[str, Callable[[], Machine]] = {
    "queued": lambda: stock(Machine, queued=True),
    "machine class HierarchicalMachine": lambda: stock(HierarchicalMachine),
    "machine class LockedMachine": lambda: stock(LockedMachine),
    "transition class LoudTransition": lambda: stock(LoudMachine),
    "state class NamedState": lambda: stock(Machine, [NamedState(s) for s in Light]),
    "members of a plain Enum": lambda: stock(Machine, ["RED", "GREEN", "OUT"]),
    "ignore_invalid_triggers off": lambda: stock(Machine, ignore_invalid_triggers=None),
}


@pytest.mark.parametrize("what", MACHINES)
def test_another_kind_of_machine_is_refused(what: str) -> None:
    machine = MACHINES[what]()
    machine.add_transition("button_pressed", "RED", "GREEN")
    with pytest.raises(LifecycleError, match="cannot compile") as caught:
        compile_machine(machine, ("button_pressed",), lamp_class())
    assert what in str(caught.value)


def test_automatic_events_are_refused() -> None:
    machine = Machine(model=None, states=Light, initial=Light.RED, ignore_invalid_triggers=True)
    with pytest.raises(LifecycleError, match=r"differ: .*to_GREEN"):
        compile_machine(machine, (), lamp_class())


def test_states_may_not_be_string_enums() -> None:
    """transitions 0.9.3 takes a StrEnum member for a name."""

    class Words(enum.StrEnum):
        RED = "RED"

    machine = stock(Machine, [State(Words.RED)])
    machine.add_transition("button_pressed", "RED", None)
    with pytest.raises(LifecycleError, match="plain Enum"):
        compile_machine(machine, ("button_pressed",), lamp_class())


def test_importing_the_compiler_opens_no_socket_or_thread() -> None:
    """Layers 0-3 import no asyncio: not even through transitions."""
    code = "import sys, pdcore.fsm.machine; print(sorted({'asyncio', 'zmq'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
