"""From a table to methods: one ``transitions.Machine`` per lifecycle, compiled onto a class.

``transitions`` is the definition. :func:`build_machine` makes one ``Machine(model=None,
auto_transitions=False)`` of a table; the proofs and the diagrams read that Machine. Calling
it per event costs 7-8 us and kilobytes per model, so :func:`lifecycle` walks the Machine at
import and installs plain methods on a slotted class, about 0.3 us an event. What it cannot
reproduce it refuses (:class:`~pdcore.errors.LifecycleError`), and a property test drives both
with the same events and guards and demands the same outcome.

How an entity is written::

    class Light(enum.Enum):
        RED = "Red"
        GREEN = "Green"
        OUT = "Out"

    LIGHT = Lifecycle(name="light", states=Light, initial=Light.RED, ..., rows=(
        Row(Light.RED, "button_pressed", Light.GREEN, ("ring",), "is_day"),
        Row(Light.RED, "bulb_broke", Light.OUT),
        ...
    ))

    @lifecycle(LIGHT)
    class Lamp:
        __slots__ = ("ignored", "rings", "state")

        button_pressed: Event[int]  # only annotations: the methods are installed
        bulb_broke: Event[None]  # an event without payload

        def __init__(self) -> None:
            self.state: Light = Light.RED
            self.ignored = 0
            self.rings = 0

        def is_day(self, payload: int) -> bool:             # a guard: pure
            return payload < 18

        def ring(self, payload: int) -> Sequence[Effect]:  # an action: facts and effects
            self.rings += 1
            return (Bell(payload),)

    lamp.button_pressed(9)      # Sequence[Effect]: the row fired; () where it has no effects
    lamp.button_pressed(20)     # None: ignored and counted in lamp.ignored; never raises
    lamp.may_button_pressed(9)  # bool, changes nothing; typed by ``may_...: Query[int]``

Guards of one (state, event) are asked in the order of the rows; the first row whose guard
holds sets ``state``, then its actions run in order and their effects are concatenated.
Guards and actions are looked up by name when called, so a subclass may override one; their
names, and the arity of both, are checked when the class is decorated. With
``@attrs.define(eq=False)`` put ``@lifecycle`` outermost: attrs makes a new class.
"""

from __future__ import annotations

import enum
import inspect
import linecache
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Generic, Protocol, TypeVar, overload

from transitions import Event as StockEvent
from transitions import Machine
from transitions import State as StockState
from transitions import Transition as StockTransition

from pdcore.errors import LifecycleError
from pdcore.fsm.effects import Effect
from pdcore.fsm.table import Lifecycle, check_table

P = TypeVar("P", contravariant=True)
C = TypeVar("C")
S = TypeVar("S", bound=enum.Enum)


class Event(Protocol[P]):
    """Annotation of an event with a payload of type P. ``Event[None]`` takes no argument
    (its guards and actions are given None)."""

    @overload
    def __call__(self: Event[None]) -> Sequence[Effect] | None: ...

    @overload
    def __call__(self, payload: P, /) -> Sequence[Effect] | None: ...


class Query(Protocol[P]):
    """Annotation of ``may_<event>``: would this event with this payload fire a row now?"""

    @overload
    def __call__(self: Query[None]) -> bool: ...

    @overload
    def __call__(self, payload: P, /) -> bool: ...


class Entity(Protocol[S]):
    """What every compiled class has: its state and how many events it ignored."""

    state: S
    ignored: int


# --- the machine -------------------------------------------------------------------------


def build_machine(table: Lifecycle) -> Machine:
    """The Machine of a lifecycle: no model, no automatic transitions, illegal events ignored.

    A row that stays in its state is an internal transition (dest None). Raises
    LifecycleError for a table that breaks :func:`check_table`.
    """
    check_table(table)
    machine = Machine(
        model=None,
        states=[StockState(s, final=s in table.terminal) for s in table.states],
        initial=table.initial,
        auto_transitions=False,
        ignore_invalid_triggers=True,
        name=table.name,
    )
    for row in table.rows:
        machine.add_transition(
            row.event,
            row.source,
            None if row.dest is row.source else row.dest,
            conditions=row.guard,
            after=list(row.actions) or None,
        )
    return machine


# --- what the compiler does not reproduce ----------------------------------------------


def _unsupported(machine: Machine) -> Iterable[str]:
    """Everything in this Machine whose meaning the compiled methods would not have."""
    if type(machine) is not Machine:
        yield f"machine class {type(machine).__name__}"
    if machine.has_queue:
        yield "queued"
    if machine.send_event:
        yield "send_event"
    if machine.model_attribute != "state":
        yield f"model_attribute {machine.model_attribute!r}"
    if not machine.ignore_invalid_triggers:
        yield "ignore_invalid_triggers off (an illegal event would raise)"
    hooks = {
        "prepare_event": machine.prepare_event,
        "before_state_change": machine.before_state_change,
        "after_state_change": machine.after_state_change,
        "finalize_event": machine.finalize_event,
        "on_exception": machine.on_exception,
        "on_final": machine.on_final,
    }
    yield from (f"machine-wide {name}" for name, callbacks in hooks.items() if callbacks)
    for state in machine.states.values():
        where = f"state {state.name}"
        if type(state) is not StockState:
            yield f"{where}: state class {type(state).__name__}"
        if not isinstance(state.value, enum.Enum) or isinstance(state.value, str):
            yield f"{where}: states must be members of a plain Enum"
        if state.on_enter or state.on_exit:
            yield f"{where}: on_enter or on_exit"
        if state.ignore_invalid_triggers is False:
            yield f"{where}: ignore_invalid_triggers off"
    for event in machine.events.values():
        if type(event) is not StockEvent:
            yield f"event {event.name}: event class {type(event).__name__}"
        for transition in (t for rows in event.transitions.values() for t in rows):
            yield from (f"event {event.name}: {what}" for what in _unsupported_row(transition))


def _unsupported_row(row: StockTransition) -> Iterable[str]:
    if type(row) is not StockTransition:
        yield f"transition class {type(row).__name__}"
    if row.prepare:
        yield "prepare"
    if row.before:
        yield "before"
    if any(not condition.target for condition in row.conditions):
        yield "unless"
    for callback in (*row.after, *(condition.func for condition in row.conditions)):
        if not isinstance(callback, str) or not callback.isidentifier():
            yield f"callback {callback!r} is not the name of a method"


# --- the compiler -----------------------------------------------------------------------


def _find(cls: type, name: str) -> object | None:
    """The attribute as some class of the MRO defines it, without running descriptors."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _check_names(machine: Machine, events: Sequence[str], cls: type) -> None:
    who = f"lifecycle {machine.name.removesuffix(': ')}, class {cls.__qualname__}"
    if cls.__dictoffset__ or any(_find(cls, slot) is None for slot in ("state", "ignored")):
        raise LifecycleError(
            f"{who}: must be slotted in every base, with slots 'state' and 'ignored'"
        )
    methods = [name for event in events for name in (event, f"may_{event}")]
    for name in methods:
        # Inheriting from a compiled class is fine; shadowing some other method is not.
        if name in vars(cls):
            raise LifecycleError(f"{who}: event {name!r} is the name of another attribute")
    for name, annotation in inspect.get_annotations(cls).items():
        if str(annotation).startswith(("Event[", "Query[")) and name not in methods:
            raise LifecycleError(f"{who}: {name!r} is declared but no event of the lifecycle")
    for event in machine.events.values():
        for row in (row for rows in event.transitions.values() for row in rows):
            where = f"{who}, row {row.source} --{event.name}--> {row.dest or row.source}"
            for condition in row.conditions:
                _check_callback(cls, str(condition.func), f"{where}: guard")
            for action in row.after:
                _check_callback(cls, str(action), f"{where}: action")


def _check_callback(cls: type, name: str, where: str) -> None:
    where = f"{where} {name!r}"
    found = _find(cls, name)
    if found is None:
        raise LifecycleError(f"{where} is not a method of the class")
    if not inspect.isfunction(found):
        raise LifecycleError(f"{where} must be a plain method")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise LifecycleError(f"{where} must take (self, payload): {error}") from None


def _event_source(machine: Machine, name: str, constants: dict[str, object]) -> str:
    """Python source of the two methods of one event. ``constants`` receives the states."""
    fire = [f"def {name}(self, payload=None):", "    state = self.state"]
    may = [f"def may_{name}(self, payload=None):", "    state = self.state"]
    branch = "if"
    for source, rows in machine.events[name].transitions.items():
        if not rows:  # transitions keeps an empty list for a source it was asked about
            continue
        constants[f"_{source}"] = machine.get_state(source).value
        fire.append(f"    {branch} state is _{source}:")
        may.append(f"    {branch} state is _{source}:")
        branch = "elif"
        tests = []
        for row in rows:
            test = " and ".join(f"self.{c.func}(payload)" for c in row.conditions)
            tests.append(test)
            margin = "        "
            if test:
                fire.append(f"{margin}if {test}:")
                margin += "    "
            if row.dest is not None:
                constants[f"_{row.dest}"] = machine.get_state(row.dest).value
                fire.append(f"{margin}self.state = _{row.dest}")
            fire += [margin + line for line in _effects_source([str(a) for a in row.after])]
        asked = " or ".join(f"({test})" for test in tests if test)
        may.append("        return True" if "" in tests else f"        return bool({asked})")
    fire += ["    self.ignored += 1", "    return None"]
    may.append("    return False")
    return "\n".join([*fire, "", *may, ""])


def _effects_source(actions: Sequence[str]) -> list[str]:
    if not actions:
        return ["return ()"]
    if len(actions) == 1:
        return [f"return self.{actions[0]}(payload)"]
    lines = [f"effects_{i} = self.{action}(payload)" for i, action in enumerate(actions)]
    return [*lines, f"return ({', '.join(f'*effects_{i}' for i in range(len(actions)))})"]


def compile_machine(machine: Machine, events: Sequence[str], cls: type[C]) -> type[C]:
    """Install ``<event>`` and ``may_<event>`` for every event on ``cls`` and return it.

    Raises LifecycleError, naming lifecycle, row and class, for a Machine with a feature
    that is not reproduced, a guard or action that is not a method ``(self, payload)``, an
    event name that is taken, or a class that is not slotted.
    """
    name = machine.name.removesuffix(": ")
    refused = list(_unsupported(machine))
    strange = sorted({*machine.events} ^ {*events})
    if strange:
        refused.append(f"events of machine and table differ: {', '.join(strange)}")
    if refused:
        raise LifecycleError(f"lifecycle {name}: cannot compile {'; '.join(refused)}")
    _check_names(machine, events, cls)
    constants: dict[str, object] = {}
    text = "\n\n".join(_event_source(machine, event, constants) for event in events)
    filename = f"<lifecycle {name} on {cls.__module__}.{cls.__qualname__}>"
    namespace: dict[str, object] = {**constants, "__name__": cls.__module__}
    exec(compile(text, filename, "exec"), namespace)
    # Tracebacks and debuggers show the generated lines.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    for method in (m for event in events for m in (event, f"may_{event}")):
        function = namespace[method]
        if inspect.isfunction(function):
            function.__qualname__ = f"{cls.__qualname__}.{method}"
        setattr(cls, method, function)
    return cls


def compile_lifecycle(table: Lifecycle, cls: type[C]) -> type[C]:
    """Build the Machine of ``table`` and compile it onto ``cls``, which is returned."""
    return compile_machine(build_machine(table), table.events, cls)


def lifecycle(table: Lifecycle) -> Callable[[type[C]], type[C]]:
    """Class decorator form of :func:`compile_lifecycle`."""

    def decorate(cls: type[C]) -> type[C]:
        return compile_lifecycle(table, cls)

    return decorate


# --- the slow path ----------------------------------------------------------------------


class _StockModel(Generic[S]):
    """What the stock Machine sees of an entity: its state, and one method per callback."""

    def __init__(self, entity: Entity[S]) -> None:
        self.entity = entity
        self.effects: list[Effect] = []

    @property
    def state(self) -> S:
        return self.entity.state

    @state.setter
    def state(self, state: S) -> None:
        self.entity.state = state


def _stock_model(machine: Machine, entity: Entity[S]) -> _StockModel[S]:
    model = _StockModel(entity)
    owner = type(entity)

    def guard(name: str) -> Callable[[object], bool]:
        function = _callback(owner, name)
        return lambda payload: bool(function(entity, payload))

    def action(name: str) -> Callable[[object], None]:
        function = _callback(owner, name)

        def run(payload: object) -> None:
            model.effects.extend(function(entity, payload))

        return run

    for event in machine.events.values():
        for row in (row for rows in event.transitions.values() for row in rows):
            vars(model).update((str(c.func), guard(str(c.func))) for c in row.conditions)
            vars(model).update((str(name), action(str(name))) for name in row.after)
    return model


def _callback(owner: type, name: str) -> FunctionType:
    found = _find(owner, name)
    if not inspect.isfunction(found):
        raise LifecycleError(f"{owner.__qualname__}.{name} is not a method")
    return found


def run_stock(
    machine: Machine, entity: Entity[S], event: str, payload: object = None
) -> Sequence[Effect] | None:
    """Feed one event to an entity through the stock Machine instead of compiled methods.

    The same contract as the compiled method, some hundred times slower: for debugging with
    the Machine's own logging, and the other side of the differential test.
    """
    model = _stock_model(machine, entity)
    if not machine.events[event].trigger(model, payload):
        entity.ignored += 1
        return None
    return model.effects
