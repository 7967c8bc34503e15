"""The router as a sans-IO core: requests in flight, their attempts, cancels and deadlines.

In: :meth:`RouterCore.submit`, :meth:`~RouterCore.handle_event`,
:meth:`~RouterCore.handle_timeout`. Out: :meth:`~RouterCore.poll_effects` (carry out in order),
:meth:`~RouterCore.poll_deadline` (when to call ``handle_timeout``). Time and randomness are
arguments; nothing here blocks or does I/O. Which outcome counts is decided by the lifecycle of
:mod:`pdcore.fsm.routed`; this module adds what spans requests: which instances, whether a
failure is worth another attempt, cancels that outlive their request, the bound on all.

Another attempt (D47b) is made at most ``max_retries`` times, only before anything was
answered, only after a connection that was refused or a 503, and only if another instance can
take the place of the one that failed. It names the attempt it ``replaces``, which is cancelled.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
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
from pdcore.router.events import (
    Answer,
    CancelAnswered,
    DropLegs,
    EndStream,
    LegAnswered,
    LegLost,
    RouterEffect,
    RouterEvent,
    StreamBegan,
    StreamEnded,
)
from pdcore.router.fleet import Fleet, Health, Member
from pdcore.router.limits import RouterLimits
from pdcore.router.live import Live, dispatch
from pdcore.router.outbox import CancelKey, Outbox, SendCancel
from pdcore.router.policies import (
    ClientFields,
    Rng,
    choose_dp_rank,
    choose_pair,
    find_bootstrap,
    new_id,
)
from pdcore.types import Failure

__all__ = ["RouterCore", "RouterLimits"]

_OVER: Final = frozenset({RoutedState.DONE, RoutedState.FAILED, RoutedState.CANCELLED})


class RouterCore:
    def __init__(self, fleet: Fleet, limits: RouterLimits, rng: Rng) -> None:
        self.fleet = fleet
        self.limits = limits
        self.counters: Counter[str] = Counter()
        self._rng = rng
        self._next_ticket = 1
        self._live: dict[int, Live] = {}
        self._rooms: dict[int, int] = {}
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._deadlines: list[tuple[float, int]] = []
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
        pair = self._choose(room, fields, None)
        if pair is not None:
            choose_dp_rank(room, pair[0].dp_size, fields.dp_rank)
        replaces = self._replaced(room, fields.replaces, now_s)
        budget_s = limits.budget_s(fields)
        live = Live(self._next_ticket, room, fields, replaces)
        live.expires_at_s = unix_s + budget_s
        live.deadline_s = now_s + budget_s
        self._next_ticket += 1
        self._live[live.ticket] = live
        self._rooms[room] = live.ticket
        heapq.heappush(self._deadlines, (live.deadline_s + limits.grace_s, live.ticket))
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
            self._outbox.answer(event.key, is_known=event.is_known, now_s=now_s)
            return
        live = self._live.get(event.ticket)
        if live is None:
            self.counters["late"] += 1
        elif isinstance(event, LegAnswered):
            self._on_answer(live, event, now_s)
        elif isinstance(event, LegLost):
            self._on_lost(live, event, now_s)
        elif isinstance(event, StreamBegan):
            self._apply(live, live.routed.first_token(LegReport(event.attempt)), now_s)
        elif isinstance(event, StreamEnded):
            self._apply(live, live.routed.decode_finished(LegReport(event.attempt)), now_s)
        else:
            self._apply(live, live.routed.client_gone(), now_s)

    def handle_timeout(self, now_s: float) -> None:
        """Deadlines that are due, and cancels to send again."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            live = self._live.get(heapq.heappop(self._deadlines)[1])
            if live is not None:
                why = failure("deadline_exceeded", "no result within the request's time")
                self._apply(live, live.routed.deadline_expired(RouterFailure(why)), now_s)
        gone = {m.target for _, m in self.fleet.members() if m.stays_unreachable}
        self._effects.extend(self._outbox.due(now_s, gone))

    # --- out -----------------------------------------------------------------------------

    def poll_effects(self) -> list[RouterEffect]:
        effects, self._effects = self._effects, []
        return effects

    def poll_deadline(self) -> float | None:
        """When ``handle_timeout`` has something to do; None: not before another event."""
        while self._deadlines and self._deadlines[0][1] not in self._live:
            heapq.heappop(self._deadlines)
        first = self._deadlines[0][0] if self._deadlines else None
        due = self._outbox.next_due_s()
        return due if first is None else first if due is None else min(first, due)

    def snapshot(self) -> dict[str, object]:
        """For /stats."""
        return {
            "in_flight": len(self._live),
            "cancels": len(self._outbox),
            "cancels_given_up": self._outbox.num_given_up,
            "counters": dict(sorted(self.counters.items())),
        }

    def __repr__(self) -> str:
        return f"RouterCore(live={len(self._live)}, cancels={len(self._outbox)})"

    # --- events --------------------------------------------------------------------------

    def _on_answer(self, live: Live, event: LegAnswered, now_s: float) -> None:
        is_ok = 200 <= event.status < 300
        if is_ok and event.leg is Leg.PREFILL:
            self._apply(live, live.routed.prefill_accepted(LegReport(event.attempt)), now_s)
            return
        if event.status == 503 and self._retry(live, event.leg, event.attempt, now_s):
            return
        live.answered = event.leg
        if is_ok:
            effects = live.routed.decode_finished(LegReport(event.attempt))
        else:
            why = Failure("leg_answered", f"{event.leg.value} answered", event.status)
            report = LegFailure(event.attempt, why)
            is_prefill = event.leg is Leg.PREFILL
            fail = live.routed.prefill_failed if is_prefill else live.routed.decode_failed
            effects = fail(report)
        self._apply(live, effects, now_s)
        live.answered = None

    def _on_lost(self, live: Live, event: LegLost, now_s: float) -> None:
        is_prefill = event.leg is Leg.PREFILL
        if not event.sent:
            member = live.member(event.leg)
            if member is not None and event.attempt == live.routed.attempt:
                self.fleet.mark_down(member, event.detail)
            if self._retry(live, event.leg, event.attempt, now_s):
                return
        detail = f"the {event.leg.value} instance is unavailable: {event.detail}"
        why = failure("unavailable", detail)
        report = LegFailure(event.attempt, why)
        routed = live.routed
        if event.sent:
            effects = routed.prefill_unknown(report) if is_prefill else routed.decode_lost(report)
        else:
            effects = routed.prefill_failed(report) if is_prefill else routed.decode_failed(report)
        self._apply(live, effects, now_s)

    def _retry(self, live: Live, leg: Leg, attempt: int, now_s: float) -> bool:
        """Another attempt on other instances, if one is allowed and would help."""
        routed = live.routed
        retry = Retry(attempt, new_id(self._rng))
        if live.retries >= self.limits.max_retries or now_s >= live.deadline_s:
            return False
        if attempt != routed.attempt or routed.state is not RoutedState.DISPATCHED:
            return False
        pair = self._choose(live.room, live.fields, live.member(leg))
        if pair is None:
            return False
        self.counters["retried"] += 1
        live.retries += 1
        live.replaces = attempt
        why = failure("unavailable", f"the {leg.value} leg was lost")
        lost = routed.attempt_lost(LegFailure(attempt, why)) or ()
        effects = (*lost, *(routed.retried(retry) or ()))
        self._effects.append(DropLegs(live.ticket, attempt))
        # The leg that refused needs no cancel; the others' cancels name the former pair.
        cancels = [e for e in effects if isinstance(e, CancelLeg) and e.leg is not leg]
        self._apply(live, cancels, now_s)
        live.take(pair)
        self._apply(live, [e for e in effects if not isinstance(e, CancelLeg)], now_s)
        return True

    # --- inside --------------------------------------------------------------------------

    def _choose(
        self, room: int, fields: ClientFields, failed: Member | None
    ) -> tuple[Member, Member] | None:
        prefills, decodes = self.fleet.prefills, self.fleet.decodes
        if fields.bootstrap_host is not None or fields.bootstrap_port is not None:
            known = [(m.target.host, m.bootstrap_port) for m in prefills]
            found = find_bootstrap(fields.bootstrap_host, fields.bootstrap_port, known)
            prefills = [prefills[i] for i in found]
        prefills = [m for m in prefills if m.health is Health.UP and m is not failed]
        decodes = [m for m in decodes if m.health is Health.UP and m is not failed]
        if not prefills or not decodes:
            return None
        i, k = choose_pair(room, len(prefills), len(decodes))
        return prefills[i], decodes[k]

    def _replaced(self, room: int, wanted: int | None, now_s: float) -> int:
        """The attempt that a dispatch of this room takes the place of; 0: none."""
        ticket = self._rooms.get(room)
        if ticket is None:
            return wanted or self._recent.get(room, 0)
        live = self._live[ticket]
        if wanted != live.routed.attempt:
            raise RoomInUse(
                f"bootstrap_room {room} is in use: wait for its result, choose another room, or "
                "send the attempt it replaces"
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
                self._effects.append(answer)
            elif isinstance(effect, FinishStream):
                self._effects.append(EndStream(live.ticket, effect.failure))
            elif isinstance(effect, CancelLeg):
                member = live.member(effect.leg)
                if member is not None:
                    key = CancelKey(live.room, effect.attempt, effect.leg)
                    cancel = SendCancel(key, member.target, effect.unless_received)
                    until_s = live.deadline_s + self.limits.grace_s
                    first = self._outbox.add(cancel, until_s)
                    if first is not None:
                        self._effects.append(first)
        if live.routed.state in _OVER:
            self._finish(live)

    def _finish(self, live: Live) -> None:
        del self._live[live.ticket]
        if self._rooms.get(live.room) == live.ticket:
            del self._rooms[live.room]
        live.take((None, None))
        state = live.routed.state
        self.counters[state.value.lower()] += 1
        if live.routed.attempt:
            self._effects.append(DropLegs(live.ticket, live.routed.attempt))
            if state is not RoutedState.DONE:
                self._recent[live.room] = live.routed.attempt
                while len(self._recent) > self.limits.max_recent_rooms:
                    self._recent.popitem(last=False)
