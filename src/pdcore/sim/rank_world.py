"""A bootstrap server with two places, and the processes that come and go at one of them.

The table is the production one (:mod:`pdcore.control.rank_table`). At place 0 life A registers,
moves to another port, falls silent, says goodbye or dies; then life B takes its place, and may
be delayed as well. Place 1 is held by one life that may fall silent. Requests arrive late,
twice, or never, also those of lives that are over. Time is counted in whole seconds since each
place was renewed, no further than everything has expired.

Taken as given: the first registration of a life does not arrive after that life has ended (its
worker waits for the answer before it says goodbye, and a server takes connections in order);
that a *repeated* one may is in the world. A registration names no order of lives, so a table
could not tell.

Checked: whoever was replaced or said goodbye never comes back into the route; a route is
served only when every place is registered; its epoch grows with every change of it, and with
nothing else; from every state the living get into the route.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from pdcore.control.messages import RankRegistration
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.errors import RegistrationConflict
from pdcore.fsm.rank import RANK, Rank
from pdcore.fsm.states import RankState
from pdcore.sim.explore import Move
from pdcore.sim.firing import ROWS, watching
from pdcore.sim.interned import Cores
from pdcore.topology import ParallelLayout

PLACES: Final = ("0,0,0", "0,0,1")
LEASE_S: Final = 4.0
RETENTION_S: Final = 21.0
_EXPIRED_S: Final = LEASE_S + RETENTION_S
#: Life -> its incarnation; C is the one at place 1.
LIVES: Final = {"A": "a" * 32, "B": "b" * 32, "C": "c" * 32}
_PORT, _OTHER_PORT = 1, 2


class Clocked:
    """The table and the time it is used at."""

    def __init__(self, table: RankTable) -> None:
        self.table = table
        self.now_s = 0.0

    def ranks(self) -> dict[str, Rank]:
        found: dict[str, Rank] = operator.attrgetter("_ranks")(self.table)
        return found


class RankWorldState(NamedTuple):
    """``a``: "", "up", "gone" (said goodbye), "dead", "lost" (dead, and the leader said so).
    ``has_moved``: A has listened at another port since; ``landed``: the ports it has
    registered. ``over``: lives that must not be in
    the route any more. ``b``: "", "up", "in" (has registered once)."""

    table: int
    a: str
    has_moved: bool
    landed: tuple[int, ...]
    b: str
    over: str
    wrong: str = ""


def rank_watching() -> AbstractContextManager[None]:
    """Open it around a :class:`RankWorld`."""
    return watching(ROWS, (RANK, Rank))


def _new_table() -> RankTable:
    layout = ParallelLayout(world_size=2, tp_size=2, cp_size=1, pp_size=1)
    config = RankTableConfig("prefill:1", layout, lease_s=LEASE_S, retention_s=RETENTION_S)
    return RankTable(config)


def _key(clocked: Clocked) -> Hashable:
    renewed_s: dict[str, float] = operator.attrgetter("_renewed_s")(clocked.table)
    return tuple(
        (
            rank.state,
            None if rank.registration is None else rank.registration.incarnation,
            None if rank.registration is None else rank.registration.rank_port,
            rank.in_route,
            tuple(rank.replaced),
            rank.forgotten,
            0.0
            if rank.state is RankState.ABSENT
            else min(clocked.now_s - renewed_s[place], _EXPIRED_S),
        )
        for place, rank in clocked.ranks().items()
    )


class RankWorld:
    """See the module. ``table`` makes the table: a known-bad variant is another one."""

    def __init__(self, table: Callable[[], RankTable] = _new_table) -> None:
        self.tables = Cores(Clocked(table()), _key)

    def initial(self) -> RankWorldState:
        return RankWorldState(0, "up", False, (), "", "")

    def moves(self, state: RankWorldState) -> Iterable[Move[RankWorldState]]:
        if state.wrong:
            return
        yield self._step(state, "a second passes", _second)
        yield from self._registrations(state)
        yield from self._lives(state)

    def problems(self, state: RankWorldState) -> Iterable[str]:
        if state.wrong:
            yield state.wrong
        ranks = self.tables.core(state.table).ranks()
        shown = {rank.in_route for rank in ranks.values()}
        for life in state.over:
            if LIVES[life] in shown:
                yield f"life {life} is in the route again, after another one took its place"

    def is_goal(self, state: RankWorldState) -> bool:
        """Everybody who lives is in the route, and nobody else."""
        ranks = self.tables.core(state.table).ranks()
        wanted = "A" if state.a == "up" else "B"
        shown = [rank.in_route for rank in ranks.values()]
        return shown == [LIVES[wanted], LIVES["C"]]

    def show(self, state: RankWorldState) -> str:
        ranks = list(self.tables.core(state.table).ranks().values())
        return f"A {state.a}, B {state.b or '-'}, {ranks} {state.wrong}".rstrip()

    # --- inside -------------------------------------------------------------------------

    def _registrations(self, state: RankWorldState) -> Iterator[Move[RankWorldState]]:
        for port in (_PORT, _OTHER_PORT)[: 1 + state.has_moved]:
            # Late ones, of an old port or an old life, are what a network may still bring.
            is_late = state.a != "up" or (state.has_moved and port == _PORT)
            if is_late and port not in state.landed:
                continue
            after = state._replace(landed=tuple(sorted({*state.landed, port})))
            register = _register("A", 0, port)
            yield self._step(after, f"A registers port {port}", register, is_fault=is_late)
        if state.b:
            after = state._replace(b="in")
            done = self._step(after, "B registers", _register("B", 0, _PORT))
            if done.state.wrong == "" and self._holds(done.state, "B"):
                done = done._replace(state=done.state._replace(over=_and(state.over, "A")))
            yield done
        yield self._step(state, "C registers", _register("C", 1, _PORT))

    def _lives(self, state: RankWorldState) -> Iterator[Move[RankWorldState]]:
        if state.a == "up":
            if not state.has_moved:
                yield Move("A listens elsewhere", True, state._replace(has_moved=True))
            yield Move("A dies", True, state._replace(a="dead"))
            after = state._replace(a="gone", over=_and(state.over, "A"))
            yield self._step(after, "A says goodbye", _deregister("A", 0), is_fault=True)
        if state.a == "gone":
            yield self._step(state, "A's goodbye comes again", _deregister("A", 0), is_fault=True)
        if state.a == "dead" and not state.b:
            after = state._replace(a="lost")
            yield self._step(after, "the leader takes A's place back", _lose)
        if state.a != "up" and not state.b:
            yield Move("B starts", False, state._replace(b="up"))

    def _holds(self, state: RankWorldState, life: str) -> bool:
        registration = self.tables.core(state.table).ranks()[PLACES[0]].registration
        return registration is not None and registration.incarnation == LIVES[life]

    def _step(
        self,
        state: RankWorldState,
        label: str,
        change: Callable[[Clocked], None],
        *,
        is_fault: bool = False,
    ) -> Move[RankWorldState]:
        """Change the table and judge what became of its route."""

        def judged(clocked: Clocked) -> str:
            table = clocked.table
            before, epoch = _served(clocked), table.epoch
            change(clocked)
            after = _served(clocked)
            if before != after and table.epoch <= epoch:
                return "the route changed and its epoch did not grow"
            is_ready = table.route(clocked.now_s) is not None
            all_in = all(rank.state is RankState.REGISTERED for rank in clocked.ranks().values())
            return "" if is_ready is all_in else "a route is served though a place is not held"

        done = self.tables.step(state.table, label, judged)
        after = state._replace(table=done.number, wrong=done.note)
        return Move(label, is_fault, after, done.rows)


def _served(clocked: Clocked) -> tuple[str, ...]:
    return tuple(
        f"{rank.in_route}:{rank.registration.rank_port if rank.registration else 0}"
        for rank in clocked.ranks().values()
        if rank.in_route
    )


def _and(lives: str, life: str) -> str:
    return lives if life in lives else lives + life


def _second(clocked: Clocked) -> None:
    clocked.now_s += 1.0
    clocked.table.missing(clocked.now_s)


def _register(life: str, tp_rank: int, port: int) -> Callable[[Clocked], None]:
    registration = RankRegistration(
        attn_tp_size=2,
        attn_tp_rank=tp_rank,
        rank_ip="10.0.0.1",
        rank_port=port,
        block_sizes={"full": 16},
        kv_cache_dtype="bfloat16",
        incarnation=LIVES[life],
        layout_digest="d",
        fingerprint="f",
        transport="shm",
        protocol_min=1,
        protocol_max=1,
    )

    def register(clocked: Clocked) -> None:
        # A conflict is told to its process, which stops.
        with contextlib.suppress(RegistrationConflict):
            clocked.table.register(registration, clocked.now_s)

    return register


def _deregister(life: str, place: int) -> Callable[[Clocked], None]:
    def deregister(clocked: Clocked) -> None:
        clocked.table.deregister(PLACES[place], LIVES[life], clocked.now_s)

    return deregister


def _lose(clocked: Clocked) -> None:
    clocked.table.lose(PLACES[0], clocked.now_s)
