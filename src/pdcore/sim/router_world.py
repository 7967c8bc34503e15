"""One client request at the production router core, with both legs of every attempt.

What is checked (architecture, section 10; protocol models, Q5): one answer to the client,
whatever is lost, late, double or out of order; a healthy answer is never thrown away; another
attempt only before anything was answered, and only beside cancels of the last one; every
weight that was put on an instance is taken off; every leg ends.

Two kinds of worlds. *Prompt*: nothing is lost and no deadline ever fires, so everything must
end by deliveries alone. *Lossy*: no delivery can be counted on (each is a fault that may or may
not happen), connections break; only the deadlines are sure, first the legs', then the router's.

What makes worlds with several attempts small enough is ``max_faults``, a bound on the faults
of one history; there, legs of a replaced attempt have no faults any more (no outcome of theirs
counts). A world without that bound also has every answer come twice and cancels answered.

The clock: 0 running; 1 the pause before a third attempt is over; 2 the legs' deadline is
reached; 3 the router's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from pdcore.fsm.effects import Effect
from pdcore.fsm.routed import Leg
from pdcore.fsm.states import RoutedState
from pdcore.router.events import (
    ClientLeft,
    LegAnswered,
    LegLost,
    RouterEvent,
    StreamBegan,
    StreamEnded,
)
from pdcore.router.limits import OnPrefillLoss
from pdcore.sim.explore import Move
from pdcore.sim.router_legs import (
    ANSWERS,
    LOCAL,
    Attempt,
    LegMove,
    known_cancels,
    leg_moves,
    settled,
    uncancelled,
    unsent,
)
from pdcore.sim.router_steps import GRACE_S, TIMEOUT_S, Outcome, RouterSteps, TracedRouted, traced

_TICKET: Final = 1
_PAUSE_S: Final = 1.0
#: Seconds at each position of the clock.
_TIMES: Final = (0.0, _PAUSE_S, TIMEOUT_S, TIMEOUT_S + GRACE_S)
_LEGS_LATE, _ROUTER_LATE = 2, 3


class RouterState(NamedTuple):
    """``client``: "w" waits, "s" reads a stream, "o" got its answer, "e" an error, "g" left.
    ``wrong`` is the first thing that should not have happened."""

    core: int
    clock: int
    client: str
    answers: int
    attempts: tuple[Attempt, ...]
    faults_left: int
    wrong: str = ""


class RouterWorld:
    """See the module. ``is_lossy`` chooses the kind; ``max_faults`` 0 is no bound."""

    def __init__(
        self,
        *,
        is_lossy: bool,
        max_attempts: int,
        max_faults: int = 0,
        faults: frozenset[str] | None = None,
        routed_type: type[TracedRouted] = TracedRouted,
        on_prefill_loss: OnPrefillLoss = OnPrefillLoss.RETRY,
    ) -> None:
        """``faults``: only these (labels without the attempt); None: every one there is."""
        self.is_lossy = is_lossy
        self.is_full = max_faults == 0
        self.max_faults = max_faults
        self.faults = faults
        self.steps = RouterSteps(max_attempts, routed_type, on_prefill_loss)
        self._legs: dict[tuple[Attempt, int], tuple[LegMove, ...]] = {}

    def initial(self) -> RouterState:
        start = self.steps.start
        assert start.dispatched == ((1, False),)
        return RouterState(start.core, 0, "w", 0, (Attempt(),), self.max_faults)

    def moves(self, state: RouterState) -> Iterable[Move[RouterState]]:
        if self.is_full:
            return self._moves(state)
        return self._counted(state)

    def _counted(self, state: RouterState) -> Iterator[Move[RouterState]]:
        for move in self._moves(state):
            if not move.is_fault:
                yield move
            elif state.faults_left and (
                self.faults is None or move.label.partition(" #")[0] in self.faults
            ):
                left = move.state._replace(faults_left=state.faults_left - 1)
                yield move._replace(state=left)

    def _moves(self, state: RouterState) -> Iterator[Move[RouterState]]:
        if state.wrong:
            return
        current = self.steps.attempt(state.core)
        for index, attempt in enumerate(state.attempts):
            for move in self._leg_moves(attempt, state.clock):
                if move.is_fault and not self.is_full and index + 1 < current:
                    continue
                # In a lossy world only what a leg does by itself at its deadline is sure.
                is_fault = move.is_fault or (self.is_lossy and state.clock < _LEGS_LATE)
                after = _with(state, index, move.after)
                yield Move(f"{move.label} #{index + 1}", is_fault, after)
            yield from self._answers(state, index, attempt)
            yield from self._cancel_answers(state, index, attempt)
            yield from self._evictions(state, index, attempt)
        if state.client in "ws":
            done = self.steps.step(state.core, ClientLeft(_TICKET), _TIMES[state.clock])
            yield self._move(state, done, "the client leaves", is_fault=True, client="g")
        yield from self._time(state)

    def problems(self, state: RouterState) -> Iterable[str]:
        if state.wrong:
            yield state.wrong
        if state.answers > 1:
            yield "the client got two answers"
        if min(self.steps.loads(state.core)) < 0:
            yield "an instance is thought to have less than no requests"
        routed = self.steps.state(state.core)
        if routed is None:
            if state.client in "ws":
                yield "the router closed its books and the client still waits"
            if any(self.steps.loads(state.core)):
                yield "a request that is over still weighs on an instance"
        current = self.steps.attempt(state.core)
        for number, attempt in enumerate(state.attempts, 1):
            if state.clock < _LEGS_LATE and number < current:
                yield from uncancelled(attempt, number)
            if state.clock < _LEGS_LATE:
                yield from unsent(attempt, number, self.steps.resent(state.core))
            if self.is_lossy and state.clock == _ROUTER_LATE and not attempt.is_quiet:
                yield f"a leg of attempt {number} outlives its deadline"

    def is_goal(self, state: RouterState) -> bool:
        """The client has its answer or is gone, the router's books are closed, every leg has
        ended; in a lossy world: by the router's deadline at the latest."""
        if state.client in "ws" or self.steps.state(state.core) is not None:
            return False
        if self.is_lossy:
            return state.clock == _ROUTER_LATE
        return all(attempt.is_quiet for attempt in state.attempts)

    def show(self, state: RouterState) -> str:
        routed = self.steps.state(state.core)
        legs = "; ".join(
            f"#{n} prefill {a.prefill} ({a.prefill_http}), decode {a.decode} ({a.decode_http}), "
            f"sent {a.sent:07b}"
            for n, a in enumerate(state.attempts, 1)
        )
        where = "closed" if routed is None else routed.value
        return f"clock {state.clock}, client {state.client}, router {where}; {legs} {state.wrong}"

    # --- inside -------------------------------------------------------------------------

    def _leg_moves(self, attempt: Attempt, clock: int) -> tuple[LegMove, ...]:
        known = self._legs.get((attempt, clock))
        if known is None:
            known = tuple(
                move._replace(after=settled(move.after))
                for move in leg_moves(attempt, clock, is_lossy=self.is_lossy)
            )
            self._legs[attempt, clock] = known
        return known

    def _answers(self, state: RouterState, index: int, a: Attempt) -> Iterator[Move[RouterState]]:
        """What is on its way to the router, and what was there already, once more."""
        for leg, code in ((Leg.PREFILL, a.prefill_http), (Leg.DECODE, a.decode_http)):
            event = _event(leg, index + 1, code[:1])
            if event is None:
                continue
            was = "s" if code[:1] == "t" else code[:1] + "." if self.is_full else "f"
            is_prefill = leg is Leg.PREFILL
            after = a._replace(prefill_http=was) if is_prefill else a._replace(decode_http=was)
            is_again = code.endswith(".")
            done = self.steps.step(state.core, event, _TIMES[state.clock])
            how = "again" if is_again else "at the router"
            yield self._move(
                _with(state, index, settled(after)),
                done,
                f"{leg.value}'s answer {code[:1]} {how} #{index + 1}",
                is_fault=is_again or self.is_lossy,
                heard_of=index + 1,
            )

    def _cancel_answers(
        self, state: RouterState, index: int, a: Attempt
    ) -> Iterator[Move[RouterState]]:
        for leg, is_weak, after in known_cancels(a) if self.is_full else ():
            now_s = _TIMES[state.clock]
            done = self.steps.answered(state.core, index + 1, leg, now_s, unless_received=is_weak)
            word = "weaker cancel" if is_weak else "cancel"
            label = f"{leg.value} answers its {word} #{index + 1}"
            yield self._move(
                _with(state, index, settled(after)), done, label, is_fault=self.is_lossy
            )

    def _evictions(self, state: RouterState, index: int, a: Attempt) -> Iterator[Move[RouterState]]:
        now_s = _TIMES[state.clock]
        for leg, its in ((Leg.PREFILL, a.prefill), (Leg.DECODE, a.decode)):
            if its == "K" and not self._is_back(state, index, leg):
                known = a._replace(prefill="k") if leg is Leg.PREFILL else a._replace(decode="k")
                done = self.steps.evict(state.core, leg, index + 1, now_s)
                label = f"{leg.value} is evicted #{index + 1}"
                yield self._move(_with(state, index, known), done, label, is_fault=self.is_lossy)

    def _is_back(self, state: RouterState, index: int, leg: Leg) -> bool:
        """A later attempt has been there since: then it was started again, and is not evicted."""
        places = self.steps.places(state.core)
        here = places[index][leg is Leg.DECODE]
        for later in range(index + 1, len(state.attempts)):
            its = (
                state.attempts[later].prefill
                if leg is Leg.PREFILL
                else state.attempts[later].decode
            )
            if places[later][leg is Leg.DECODE] == here and its not in "-N":
                return True
        return False

    def _time(self, state: RouterState) -> Iterator[Move[RouterState]]:
        if state.clock == 0 and self.steps.state(state.core) is RoutedState.RETRYING:
            done = self.steps.expire(state.core, _PAUSE_S)
            yield self._move(state._replace(clock=1), done, "the pause is over")
            done = self.steps.expire(state.core, _TIMES[_ROUTER_LATE])
            after = state._replace(clock=_ROUTER_LATE)
            yield self._move(after, done, "the router is stopped for long", is_fault=True)
            done = self.steps.lose_fleet(state.core)
            yield self._move(state, done, "all probes fail", is_fault=True)
        if not self.is_lossy:
            return
        if state.clock < _LEGS_LATE:
            after = state._replace(clock=_LEGS_LATE)
            done = self.steps.expire(state.core, _TIMES[_LEGS_LATE])
            yield self._move(after, done, "the legs' deadline is reached")
        elif state.clock < _ROUTER_LATE and all(a.is_quiet for a in state.attempts):
            after = state._replace(clock=_ROUTER_LATE)
            done = self.steps.expire(state.core, _TIMES[_ROUTER_LATE])
            yield self._move(after, done, "the router's deadline is reached")

    def _move(
        self,
        state: RouterState,
        done: Outcome,
        label: str,
        *,
        is_fault: bool = False,
        client: str = "",
        heard_of: int = 0,
    ) -> Move[RouterState]:
        """Carry out what the core decided. ``heard_of``: the attempt that it heard of."""
        wrong = _judge(self.steps, state, done, heard_of)
        attempts = list(state.attempts)
        for number in done.dropped:
            attempts[number - 1] = settled(attempts[number - 1].dropped())
        for number, leg, unless in done.cancels:
            attempts[number - 1] = attempts[number - 1].cancelled(leg, unless_received=unless)
        for number, is_local in done.dispatched:
            if number != len(attempts) + 1:
                wrong = wrong or f"attempt {number} is not fresh"
            attempts.append(LOCAL if is_local else Attempt())
        for failed, whose in done.answers:
            client = client or ("e" if failed else "s" if whose is None else "o")
        for failed in done.ends:
            client = client or ("e" if failed else "o")
        after = RouterState(
            done.core,
            state.clock,
            client or state.client,
            min(2, state.answers + len(done.answers)),
            tuple(attempts),
            state.faults_left,
            wrong,
        )
        return Move(label, is_fault, after, done.rows)


#: What loses an attempt, and what may happen in the pause before the third.
LOSSES: Final = frozenset(
    {
        "prefill is overloaded",
        "decode's port refuses",
        "decode's process dies",
        "the client leaves",
        "the router is stopped for long",
        "all probes fail",
    }
)


# --- known-bad variants ------------------------------------------------------------------


class UnknownIsFailure(TracedRouted):
    """``unknown-is-failure``: a broken connection to prefill counts as its failure (Q5 UNK)."""

    __slots__ = ()


for _replaced in ("prefill_unknown",):
    setattr(UnknownIsFailure, _replaced, traced("prefill_failed"))


class AnyAttempt(TracedRouted):
    """``any-attempt``: outcomes of a replaced attempt count, too."""

    __slots__ = ()

    def is_current(self, payload: object) -> bool:
        return True


class NoCancels(TracedRouted):
    """``no-retry-cancels``: another attempt goes out, the lost one is not cancelled."""

    __slots__ = ()

    def cancel_both(self, payload: object) -> Sequence[Effect]:
        return ()


ROUTER_MUTANTS: Final[dict[str, type[TracedRouted]]] = {
    "unknown-is-failure": UnknownIsFailure,
    "any-attempt": AnyAttempt,
    "no-retry-cancels": NoCancels,
}


def _judge(steps: RouterSteps, state: RouterState, done: Outcome, heard_of: int) -> str:
    """What the core decided, against what is known of the legs."""
    if done.dispatched and state.answers:
        return "another attempt after something was answered"
    if done.answers and state.client == "g":
        return "an answer to a client that is gone"
    if done.ends and not state.answers:
        return "a stream is ended that never began"
    failed = any(failed for failed, _ in done.answers) or any(done.ends)
    number = steps.attempt(state.core)
    if 0 < heard_of < number and (done.answers or done.ends or done.dispatched):
        return "an outcome of a replaced attempt counted"
    if failed and number and state.clock < _LEGS_LATE and state.client in "ws":
        current = state.attempts[number - 1]
        # Its KV has arrived, its stream or connection is whole: decode decides.
        if current.decode in "SD" and current.decode_http in "ostAe":
            return "a healthy answer was thrown away"
    return ""


def _with(state: RouterState, index: int, attempt: Attempt) -> RouterState:
    attempts = (*state.attempts[:index], attempt, *state.attempts[index + 1 :])
    return state._replace(attempts=attempts)


def _event(leg: Leg, attempt: int, code: str) -> RouterEvent | None:
    if code in ANSWERS:
        status, word = ANSWERS[code]
        return LegAnswered(_TICKET, attempt, leg, status, word)
    if code in ("b", "r"):
        return LegLost(_TICKET, attempt, leg, code == "b", "lost")
    if code == "t":
        return StreamBegan(_TICKET, attempt)
    return StreamEnded(_TICKET, attempt) if code == "e" else None
