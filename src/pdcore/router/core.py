"""The router as a sans-IO core: requests in flight, their attempts, cancels and deadlines.

In: :meth:`RouterCore.submit`, :meth:`~RouterCore.handle_event`,
:meth:`~RouterCore.handle_timeout`. Out: :meth:`~RouterCore.poll_effects` (carry out in order),
:meth:`~RouterCore.poll_deadline` (when to call ``handle_timeout``). Time and randomness are
arguments; nothing here blocks or does I/O. Which outcome counts is decided by the lifecycle of
:mod:`pdcore.fsm.routed`; this module adds what spans requests: which instances, whether a
failure is worth another attempt, cancels that outlive their request, the bound on all.

Another attempt (D47b) is made only for a loss that another instance could make good
(:mod:`pdcore.router.retry`), only before anything was answered, within the request's deadline,
at most ``max_attempts`` in all, and only if other instances can take the place of those that
lost it. It names the attempt it ``replaces``, which is cancelled and drains beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from pdcore.errors import Overloaded, RoomInUse, failure
from pdcore.fsm.effects import Effect as FsmEffect
from pdcore.fsm.routed import Answer as TakeResponse
from pdcore.fsm.routed import (
    CancelLeg,
    DispatchLegs,
    Leg,
    LegFailure,
    LegReport,
    Retry,
    RouterFailure,
)
from pdcore.fsm.routed import EndStream as FinishStream
from pdcore.fsm.states import RoutedState
from pdcore.router.alarms import Alarms
from pdcore.router.events import (
    Answer,
    CancelAnswered,
    DrainOver,
    DropLegs,
    EndStream,
    InstanceEvicted,
    LegAnswered,
    LegLost,
    RouterEffect,
    RouterEvent,
    StreamBegan,
    StreamEnded,
)
from pdcore.router.fleet import Fleet
from pdcore.router.limits import RouterLimits
from pdcore.router.live import Budget, Fallback, Live, dispatch, late
from pdcore.router.outbox import Outbox
from pdcore.router.policies import ClientFields, Rng, name_dp_rank, new_id
from pdcore.router.retry import (
    Pair,
    choose,
    fallback_of,
    loss_of,
    named,
    needed_cancels,
    pair_after_pause,
    plan_retry,
)
from pdcore.router.rooms import Rooms

__all__ = ["RouterCore", "RouterLimits"]

_OVER: Final = frozenset({RoutedState.DONE, RoutedState.FAILED, RoutedState.CANCELLED})


class RouterCore:
    """``rooms`` are those that clients chose: call :meth:`Rooms.recall` before ``submit``."""

    def __init__(self, fleet: Fleet, limits: RouterLimits, rng: Rng) -> None:
        self.fleet = fleet
        self.limits = limits
        self.counters: Counter[str] = Counter()
        self.rooms = Rooms(limits)
        self._rng = rng
        self._next_ticket = 1
        self._live: dict[int, Live] = {}
        self._alarms = Alarms(self._live)
        self._effects: list[RouterEffect] = []
        self._outbox = Outbox(
            initial_s=limits.cancel_initial_s,
            max_s=limits.cancel_max_s,
            unknown_s=limits.cancel_unknown_s,
            cap=limits.max_cancels,
        )

    # --- in ------------------------------------------------------------------------------

    def submit(self, fields: ClientFields, now_s: float, unix_s: float) -> int:
        """Take one client request; its ticket. The first effect is a Dispatch, or an Answer
        when nothing can serve it (503).

        Raises Overloaded (429), RoomInUse for a live room unless ``replaces`` names its
        attempt (D7), InvalidRequest for a bootstrap address or dp rank that is not
        configured (D41, D21). A request that was raised for changed nothing.
        """
        limits = self.limits
        if len(self._live) >= limits.max_in_flight:
            self.counters["overloaded"] += 1
            raise Overloaded(f"{len(self._live)} requests are in flight, the router's limit")
        room = fields.room or new_id(self._rng)
        prefills, decodes = named(self.fleet, fields)
        pair = choose(room, prefills, decodes)
        if pair is not None:
            name_dp_rank(room, pair[0].dp_size, fields.dp_rank)
        replaces = self._replaced(room, fields.replaces, now_s)
        budget = Budget.begin(limits.budget_s(fields), now_s, unix_s)
        live = Live(self._next_ticket, room, fields, replaces, budget)
        self._next_ticket += 1
        self._live[live.ticket] = live
        self.rooms.enter(room, live.ticket)
        self._alarms.add(live.budget.deadline_s + limits.grace_s, live.ticket)
        self.counters["received"] += 1
        if pair is None:
            detail = self.fleet.problem() or "the instance that was asked for is not ready"
            why = RouterFailure(failure("unavailable", detail))
            self._apply(live, live.routed.rejected(why), now_s)
        else:
            live.take(pair)
            self._apply(live, live.routed.dispatched(new_id(self._rng)), now_s)
        return live.ticket

    def handle_event(self, event: RouterEvent, now_s: float) -> None:
        """What the legs, the client or a cancel's answer brought. An event of a request that
        is over, or of an attempt that was replaced, is counted and changes nothing."""
        if isinstance(event, CancelAnswered):
            self._outbox.answer(*event, now_s=now_s)
            return
        if isinstance(event, InstanceEvicted):
            self._on_evicted(event, now_s)
            return
        if isinstance(event, DrainOver):
            why = RouterFailure(event.failure)
            for each in list(self._live.values()):
                self._apply(each, each.routed.deadline_expired(why), now_s)
            return
        live = self._live.get(event.ticket)
        if live is None:
            self.counters["late"] += 1
        elif isinstance(event, LegAnswered | LegLost):
            self._on_leg(live, event, now_s)
        elif isinstance(event, StreamBegan):
            if event.attempt == live.routed.attempt:
                live.since_s = now_s
            self._apply(live, live.routed.first_token(LegReport(event.attempt)), now_s)
        elif isinstance(event, StreamEnded):
            self._apply(live, live.routed.decode_finished(LegReport(event.attempt)), now_s)
        else:
            self._apply(live, live.routed.client_gone(), now_s)

    def handle_timeout(self, now_s: float) -> None:
        """Deadlines and back-offs that are due, and cancels to send again."""
        while (ticket := self._alarms.pop_due(now_s)) is not None:
            live = self._live[ticket]
            if now_s >= live.budget.deadline_s + self.limits.grace_s:
                why = RouterFailure(late(live, now_s))
                self._apply(live, live.routed.deadline_expired(why), now_s)
            elif live.routed.state is RoutedState.RETRYING and now_s >= live.recovery.retry_at_s:
                self._redispatch(live, pair_after_pause(self.fleet, live, now_s), now_s)
        gone = {m.target for _, m in self.fleet.members() if m.stays_unreachable}
        self._effects.extend(self._outbox.due(now_s, gone))

    # --- out -----------------------------------------------------------------------------

    def poll_effects(self) -> list[RouterEffect]:
        effects, self._effects = self._effects, []
        return effects

    def poll_deadline(self) -> float | None:
        """When ``handle_timeout`` has something to do; None: not before another event."""
        first = self._alarms.next_s()
        due = self._outbox.next_due_s()
        return due if first is None else first if due is None else min(first, due)

    def snapshot(self) -> dict[str, object]:
        """For /stats."""
        return {
            "in_flight": len(self._live),
            "cancels": len(self._outbox),
            "cancels_given_up": self._outbox.num_given_up,
            "rooms": self.rooms.snapshot(),
            "counters": dict(sorted(self.counters.items())),
        }

    def __repr__(self) -> str:
        return f"RouterCore(live={len(self._live)}, cancels={len(self._outbox)})"

    # --- events --------------------------------------------------------------------------

    def _on_leg(self, live: Live, event: LegAnswered | LegLost, now_s: float) -> None:
        is_prefill = event.leg is Leg.PREFILL
        routed = live.routed
        if isinstance(event, LegAnswered) and 200 <= event.status < 300:
            live.answered = event.leg
            ok = routed.prefill_accepted if is_prefill else routed.decode_finished
            self._apply(live, ok(LegReport(event.attempt)), now_s)
            live.answered = None
            return
        member = live.member(event.leg) if event.attempt == routed.attempt else None
        why = fallback_of(live, event)
        if member is not None and isinstance(event, LegLost) and event.is_refused:
            self.fleet.mark_down(member, event.detail)
        if self._retry(live, event, why, now_s):
            return
        report = LegFailure(event.attempt, why.failure)
        if isinstance(event, LegLost) and event.sent:
            fail = routed.prefill_unknown if is_prefill else routed.decode_lost
        else:
            fail = routed.prefill_failed if is_prefill else routed.decode_failed
        live.answered = why.leg
        self._apply(live, fail(report), now_s)
        live.answered = None

    def _on_evicted(self, event: InstanceEvicted, now_s: float) -> None:
        """Nobody is there any more: fails exactly what that instance had. Its prefill half may
        be done, which decode knows: it is asked to give up unless it has the KV."""
        self.counters["evicted"] += 1
        for live in list(self._live.values()):
            attempt = live.routed.attempt
            if live.decode is event.member:
                lost = LegLost(live.ticket, attempt, Leg.DECODE, True, event.detail)
                self._on_leg(live, lost, now_s)
            elif live.prefill is event.member and not live.recovery.evicted:
                live.recovery.evicted = event.detail
                why = failure("unavailable", event.detail)
                effects = live.routed.prefill_evicted(LegFailure(attempt, why))
                self._apply(live, effects, now_s)

    def _retry(self, live: Live, event: LegAnswered | LegLost, why: Fallback, now_s: float) -> bool:
        """Another attempt on other instances, if one is allowed and would help."""
        routed = live.routed
        evicted, is_again = bool(live.recovery.evicted), len(routed.attempts) > 1
        loss = loss_of(event, is_prefill_evicted=evicted, is_again=is_again)
        plan = plan_retry(self.fleet, live, loss, self.limits, now_s)
        if plan is None or event.attempt != routed.attempt:
            return False
        self.counters["retried"] += 1
        effects = routed.attempt_lost(LegFailure(event.attempt, why.failure)) or ()
        self._effects.append(DropLegs(live.ticket, event.attempt))
        self._apply(live, needed_cancels(event, effects), now_s)
        live.take((None, None))
        live.since_s = now_s
        live.recovery.lose_attempt(plan.blamed, why, now_s + plan.delay_s)
        live.recovery.is_local = plan.pair[0] is None
        if plan.delay_s:
            self._alarms.add(live.recovery.retry_at_s, live.ticket)
        else:
            self._redispatch(live, plan.pair, now_s)
        return True

    def _redispatch(self, live: Live, pair: Pair | None, now_s: float) -> None:
        """The end of a back-off: the next attempt, or the answer to what was lost."""
        routed, fallback = live.routed, live.recovery.fallback
        assert fallback is not None
        if pair is None:
            live.answered = fallback.leg
            self._apply(live, routed.rejected(RouterFailure(fallback.failure)), now_s)
            live.answered = None
            return
        live.take(pair)
        live.replaces = routed.attempt
        live.since_s = now_s
        retry = Retry(routed.attempt, new_id(self._rng))
        self._apply(live, routed.retried(retry), now_s)

    # --- inside --------------------------------------------------------------------------

    def _replaced(self, room: int, wanted: int | None, now_s: float) -> int:
        """The attempt that a dispatch of this room takes the place of; 0: none."""
        ticket = self.rooms.ticket(room)
        if ticket is None:
            return wanted or self.rooms.last_lost(room)
        live = self._live[ticket]
        if wanted != live.routed.attempt:
            raise RoomInUse(
                f"bootstrap_room {room} is in use: wait for its result, or choose another room"
            )
        why = failure("room_in_use", "a newer request for the same room replaced this one")
        self._apply(live, live.routed.deadline_expired(RouterFailure(why)), now_s)
        return wanted

    def _apply(self, live: Live, effects: Iterable[FsmEffect] | None, now_s: float) -> None:
        """Carry the lifecycle's effects on, and close the books when the request is over.
        None: the event was ignored there and is counted here."""
        if effects is None:
            self.counters["ignored"] += 1
            return
        for effect in effects:
            if isinstance(effect, DispatchLegs):
                self._effects.append(dispatch(live, effect, now_s))
            elif isinstance(effect, TakeResponse):
                answer = Answer(live.ticket, live.routed.attempt, effect.failure, live.answered)
                live.status = effect.failure.http_status if effect.failure else 200
                self._effects.append(answer)
            elif isinstance(effect, FinishStream):
                self._effects.append(EndStream(live.ticket, effect.failure))
            elif isinstance(effect, CancelLeg):
                cancel = live.cancel(effect)
                until_s = live.budget.deadline_s + self.limits.grace_s
                if cancel is not None and self._outbox.add(cancel, until_s) is not None:
                    self._effects.append(cancel)
        if live.routed.state in _OVER:
            self._finish(live, now_s)

    def _finish(self, live: Live, now_s: float) -> None:
        del self._live[live.ticket]
        live.take((None, None))
        self.counters[live.outcome] += 1
        attempt, is_done = live.routed.attempt, live.routed.state is RoutedState.DONE
        is_clients = live.fields.room is not None
        until_s = now_s + self.limits.result_ttl_s if is_done and is_clients else None
        self.rooms.leave(live.room, live.ticket, until_s)
        if attempt:
            self._effects.append(DropLegs(live.ticket, attempt))
            if is_clients and not is_done:
                self.rooms.lose(live.room, attempt)
