"""One lifecycle alone: every event of its table, in every state, in any order.

The worlds around real cores take the rows that cores can reach. Here nothing stands between
the events and the entity: what a table promises must not lean on who feeds it. Every row can
be taken, the ones no core reaches today included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from pdcore.errors import failure
from pdcore.fsm.effects import Effect, FencePeer, ForgetPeer
from pdcore.fsm.peer import PEER, DeathProof, Peer, PeerDied
from pdcore.fsm.routed import (
    ROUTED,
    Answer,
    DispatchLegs,
    EndStream,
    LegFailure,
    LegReport,
    Retry,
    Routed,
    RouterFailure,
)
from pdcore.fsm.states import PeerState, RoutedState
from pdcore.fsm.table import Lifecycle
from pdcore.sim.explore import Move, World
from pdcore.sim.firing import Stateful
from pdcore.sim.interned import Interned
from pdcore.types import Incarnation, PeerRef

E = TypeVar("E", bound=Stateful)
T = TypeVar("T", bound=Hashable)

#: Event of a table -> what it may carry, each with a word for it.
Payloads = Sequence[tuple[str, str, object]]


class AnyState(NamedTuple):
    """``told`` counts effects by kind, no further than 2 each; ``wrong`` is the first broken
    promise."""

    entity: int
    told: tuple[int, ...]
    wrong: str = ""


class AnyOrderWorld(Generic[E]):
    """``effects`` are the kinds that are counted. ``judge(before, after, told, counts)`` says
    what is wrong with a step, or "": it sees the effects and the counts after it."""

    def __init__(
        self,
        table: Lifecycle,
        start: E,
        key: Callable[[E], Hashable],
        payloads: Payloads,
        effects: tuple[type[Effect], ...],
        judge: Callable[[E, E, Sequence[Effect], Sequence[int]], str],
        is_over: Callable[[E], bool],
    ) -> None:
        self.entities = Interned(table, key)
        self.start = self.entities.number(start)
        self.payloads = payloads
        self.effects = effects
        self.judge = judge
        self.is_over = is_over

    def initial(self) -> AnyState:
        return AnyState(self.start, (0,) * len(self.effects))

    def moves(self, state: AnyState) -> Iterable[Move[AnyState]]:
        if state.wrong:
            return
        for event, word, payload in self.payloads:
            label = f"{event} {word}".rstrip()
            done = self.entities.step(state.entity, event, payload, label)
            if not done.row:  # ignored: nothing can have changed
                continue
            counts = tuple(
                min(2, count + sum(isinstance(effect, kind) for effect in done.effects))
                for kind, count in zip(self.effects, state.told, strict=True)
            )
            before, after = self.entities.entity(state.entity), self.entities.entity(done.number)
            wrong = self.judge(before, after, done.effects, counts)
            yield Move(label, False, AnyState(done.number, counts, wrong), (done.row,))

    def problems(self, state: AnyState) -> Iterable[str]:
        if state.wrong:
            yield state.wrong

    def is_goal(self, state: AnyState) -> bool:
        return self.is_over(self.entities.entity(state.entity))

    def show(self, state: AnyState) -> str:
        return f"{self.entities.entity(state.entity)!r} told {state.told} {state.wrong}".rstrip()


# --- a routed request --------------------------------------------------------------------

_WHY: Final = failure("unavailable", "gone")
_ATTEMPTS: Final = (1, 2, 3)
_OVER: Final = (RoutedState.DONE, RoutedState.FAILED, RoutedState.CANCELLED)
_LEG_REPORTS: Final = ("prefill_accepted", "first_token", "decode_finished")
_LEG_FAILURES: Final = (
    "attempt_lost",
    "prefill_failed",
    "prefill_unknown",
    "prefill_evicted",
    "decode_failed",
    "decode_lost",
)


def routed_alone() -> AnyOrderWorld[Routed]:
    """Outcomes of any attempt at any time: one answer, one end, nothing after it."""
    payloads: list[tuple[str, str, object]] = [
        ("dispatched", "1", 1),
        ("rejected", "", RouterFailure(_WHY)),
        ("client_gone", "", None),
        ("deadline_expired", "", RouterFailure(_WHY)),
    ]
    payloads += [(e, str(a), LegReport(a)) for e in _LEG_REPORTS for a in _ATTEMPTS]
    payloads += [(e, str(a), LegFailure(a, _WHY)) for e in _LEG_FAILURES for a in _ATTEMPTS]
    payloads += [("retried", f"{a}>{b}", Retry(a, b)) for a in _ATTEMPTS for b in _ATTEMPTS]
    return AnyOrderWorld(
        ROUTED,
        Routed(),
        lambda r: (r.state, r.attempts, r.is_prefill_accepted, r.is_prefill_unknown),
        payloads,
        (Answer, EndStream),
        _judge_routed,
        lambda routed: routed.state in _OVER,
    )


def _judge_routed(
    before: Routed, after: Routed, effects: Sequence[Effect], counts: Sequence[int]
) -> str:
    answers, ends = counts
    if answers > 1 or ends > 1:
        return "the client got two answers, or its stream two ends"
    if before.state in _OVER and (effects or after.state is not before.state):
        return "something happened after the end"
    if after.state in (RoutedState.DONE, RoutedState.FAILED) and not answers:
        return "it is over and nothing was answered"
    if ends and before.state is not RoutedState.STREAMING and after.state is not before.state:
        return "a stream was ended that had not begun"
    if answers and any(isinstance(effect, DispatchLegs) for effect in effects):
        return "another attempt after the answer"
    return ""


# --- a peer ------------------------------------------------------------------------------

_LIFE: Final = PeerRef("prefill:1", 0, Incarnation(b"p" * 16), "tcp://prefill:1")
_MISSES: Final = 2


def peer_alone() -> AnyOrderWorld[Peer]:
    """Silence never proves death; dead is for good; forgotten only dead and fenced."""
    return AnyOrderWorld(
        PEER,
        Peer(_LIFE, _MISSES),
        lambda p: (p.state, min(p.misses, _MISSES), p.is_fenced, p.proof is None),
        (
            ("message_received", "", None),
            ("heartbeat_missed", "", None),
            ("death_proved", "not fenced", DeathProof("restarted", fenced=False)),
            ("death_proved", "fenced", DeathProof("exited", fenced=True)),
            ("peer_fenced", "", None),
        ),
        (PeerDied, ForgetPeer, FencePeer),
        _judge_peer,
        lambda peer: peer.state is PeerState.DEAD and peer.is_fenced,
    )


def _judge_peer(before: Peer, after: Peer, effects: Sequence[Effect], counts: Sequence[int]) -> str:
    died, forgotten, _ = counts
    if max(died, forgotten) > 1:
        return "a peer died or was forgotten twice"
    if after.state is PeerState.DEAD and (not died or after.proof is None):
        return "dead without a proof that was told"
    if before.state is PeerState.DEAD and after.state is not PeerState.DEAD:
        return "a dead peer came back to life"
    if forgotten and not (after.state is PeerState.DEAD and after.is_fenced):
        return "a peer was forgotten whose writes may still land"
    if after.state is PeerState.DEAD and after.is_fenced and not forgotten:
        return "a peer that is dead and fenced is kept for ever"
    return ""


# --- several at once ---------------------------------------------------------------------


class SideBySide(Generic[T]):
    """Copies of one world that know nothing of each other: every row is taken in every
    situation of the others, so the counts of rows say something."""

    def __init__(self, world: World[T], copies: int) -> None:
        self.world = world
        self.copies = copies

    def initial(self) -> tuple[T, ...]:
        return (self.world.initial(),) * self.copies

    def moves(self, state: tuple[T, ...]) -> Iterable[Move[tuple[T, ...]]]:
        for index, one in enumerate(state):
            for move in self.world.moves(one):
                after = (*state[:index], move.state, *state[index + 1 :])
                yield Move(f"{index}: {move.label}", move.is_fault, after, move.rows)

    def problems(self, state: tuple[T, ...]) -> Iterable[str]:
        for one in state:
            yield from self.world.problems(one)

    def is_goal(self, state: tuple[T, ...]) -> bool:
        return all(self.world.is_goal(one) for one in state)

    def show(self, state: tuple[T, ...]) -> str:
        return " || ".join(self.world.show(one) for one in state)
