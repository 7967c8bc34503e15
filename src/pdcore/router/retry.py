"""Which losses are worth another attempt, and which instances it should avoid. Pure.

A loss is worth one when other instances could do better. What would repeat anywhere is not:
a request that is wrong (4xx), a deadline, a cancel, an error of the model (``internal``). Never
after a token, past the deadline or beyond ``max_attempts``: those rules are the core's.

Who is to blame is not always known: a peer that decode calls lost may be well, and the
connection between them broken. So a loss lists alternatives of what to avoid, best first,
and the first one that leaves a pair of instances is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from pdcore.errors import InvalidRequest, failure
from pdcore.fsm.effects import Effect
from pdcore.fsm.routed import CancelLeg, Leg
from pdcore.fsm.states import RoutedState
from pdcore.router.events import LegAnswered, LegLost
from pdcore.router.fleet import Fleet, Health, Member
from pdcore.router.limits import OnPrefillLoss, RouterLimits
from pdcore.router.live import Fallback, Live
from pdcore.router.policies import ClientFields, choose_pair, find_bootstrap
from pdcore.types import Failure

_P: Final = frozenset({Leg.PREFILL})
_D: Final = frozenset({Leg.DECODE})
_BOTH: Final = _P | _D
_NOBODY: Final[frozenset[Leg]] = frozenset()


class Loss(NamedTuple):
    """``avoid``: the legs whose instances the next attempt should not use, alternatives, best
    first. ``is_of_prefill``: prefill had accepted, and its half is what was lost."""

    avoid: tuple[frozenset[Leg], ...]
    is_of_prefill: bool = False


#: What decode may answer, by code. Any other 503 is decode's own.
_BY_CODE: Final = {
    "prefill_failed": Loss((_P,), True),
    "handshake_rejected": Loss((_P,), True),
    "transfer_failed": Loss((_BOTH, _P, _D), True),
    "corrupted": Loss((_BOTH, _P, _D), True),
    "bad_metadata": Loss((_BOTH, _P, _D), True),
    # These two do not fit together; each may fit others.
    "incompatible": Loss((_BOTH, _D, _P)),
    "peer_lost": Loss((_BOTH, _P, _D), True),
    "unreachable": Loss((_P,), True),
    # Nobody's fault and nothing lost: decode asks for the route anew, so the same pair will do.
    "stale_route": Loss((_NOBODY,)),
    "unavailable": Loss((_BOTH, _D, _P)),
    "shutting_down": Loss((_BOTH, _D, _P)),
    "worker_lost": Loss((_D,)),
    "out_of_memory": Loss((_D,)),
}
PREFILL_EVICTED: Final = Loss((_P,), True)


def loss_of(
    event: LegAnswered | LegLost, *, is_prefill_evicted: bool = False, is_again: bool = False
) -> Loss | None:
    """None: another attempt would not help, or nothing is lost. ``is_prefill_evicted``: decode
    was asked to give up unless it has its KV, so that its ``cancelled`` means that it has not.
    ``is_again``: it is not the first attempt.
    """
    own = frozenset({event.leg})
    if is_again and _is_room_in_use(event):
        return Loss((own,))
    if isinstance(event, LegLost):
        # A broken connection to prefill is no failure of prefill: decode decides (Q5 UNK).
        return None if event.sent and event.leg is Leg.PREFILL else Loss((own,))
    if event.leg is Leg.PREFILL:
        return Loss((own,)) if event.status == 503 else None
    if is_prefill_evicted and event.code == "cancelled":
        return PREFILL_EVICTED
    if event.status not in (502, 503):
        return None
    return _BY_CODE.get(event.code, Loss((_D,)) if event.status == 503 else None)


def _is_room_in_use(event: LegAnswered | LegLost) -> bool:
    """Said to another attempt of ours, it means one before the last, which that leg has not
    ended yet: ``replaces`` names the last one only. Its client knows of no attempts."""
    return isinstance(event, LegAnswered) and event.code == "room_in_use"


def needed_cancels(event: LegAnswered | LegLost, effects: Iterable[Effect]) -> list[Effect]:
    """A leg that has answered, or never got the request, needs no cancel; one that broke off
    does: it may be alive."""
    is_over = isinstance(event, LegAnswered) or not event.sent
    over = event.leg if is_over else None
    return [e for e in effects if not (isinstance(e, CancelLeg) and e.leg is over)]


def choose(
    room: int,
    prefills: Iterable[Member],
    decodes: Iterable[Member],
    avoid: Iterable[Member] = (),
) -> tuple[Member, Member] | None:
    """The pair that serves this room, out of what is up and not avoided; None: there is none.

    A pair that one of its ends calls broken is left out while another one works: each of the
    two may be well (vllm PR #55471). Where every pair is, its legs say why."""
    up = Health.UP
    usable_p = [m for m in prefills if m.health is up]
    usable_d = [m for m in decodes if m.health is up]
    if avoided := list(avoid):
        usable_p = [m for m in usable_p if m not in avoided]
        usable_d = [m for m in usable_d if m not in avoided]
    if not usable_p or not usable_d:
        return None
    i, k = choose_pair(room, len(usable_p), len(usable_d))
    pairs = (
        (prefill, decode)
        for prefill in (*usable_p[i:], *usable_p[:i])
        for decode in (*usable_d[k:], *usable_d[:k])
    )
    working = (pair for pair in pairs if pair[0].works_with(pair[1]))
    return next(working, (usable_p[i], usable_d[k]))


def named(fleet: Fleet, fields: ClientFields) -> tuple[list[Member], list[Member]]:
    """The instances that a client's bootstrap address leaves. Raises InvalidRequest (D41)."""
    prefills = fleet.prefills
    if fields.bootstrap_host is not None or fields.bootstrap_port is not None:
        known = [(m.target.host, m.bootstrap_port) for m in prefills]
        found = find_bootstrap(fields.bootstrap_host, fields.bootstrap_port, known)
        prefills = [prefills[i] for i in found]
    return prefills, fleet.decodes


def _fit_for_retry(fleet: Fleet, live: Live) -> tuple[list[Member], list[Member]]:
    """As above, without the prefills that lack the dp rank that the client named."""
    try:
        prefills, decodes = named(fleet, live.fields)
    except InvalidRequest:  # the instance has come back at another bootstrap port
        return [], []
    wanted = live.fields.dp_rank
    if wanted is not None:
        prefills = [m for m in prefills if m.dp_size is None or wanted < m.dp_size]
    return prefills, decodes


#: (prefill, decode); no prefill: local prefill, decode computes the prompt itself.
Pair = tuple[Member | None, Member]


def pair_after_pause(fleet: Fleet, live: Live, now_s: float) -> Pair | None:
    """The pair for the attempt that a back-off was before. None: nobody is up any more but
    those that lost the last one, or the pause was longer than planned (a stopped router) and
    the deadline is over."""
    if now_s >= live.budget.deadline_s:
        return None
    prefills, decodes = _fit_for_retry(fleet, live)
    recovery = live.recovery
    if recovery.is_local:
        return _local(fleet, live)
    return choose(live.room, prefills, decodes, recovery.avoided) or choose(
        live.room, prefills, decodes, recovery.blamed
    )


class Plan(NamedTuple):
    """Another attempt: whom to blame for the last one, the pair for the next, and the pause
    before it (0: at once)."""

    blamed: list[Member]
    pair: Pair
    delay_s: float


def plan_retry(
    fleet: Fleet, live: Live, loss: Loss | None, limits: RouterLimits, now_s: float
) -> Plan | None:
    """None: no other attempt is allowed, or it would not help."""
    num = len(live.routed.attempts)
    delay_s = limits.retry_delay_s(num)
    if (
        loss is None
        or live.routed.state is not RoutedState.DISPATCHED
        or (loss.is_of_prefill and limits.on_prefill_loss is OnPrefillLoss.FAIL)
        or num >= limits.max_attempts
        or now_s + delay_s >= live.budget.deadline_s
    ):
        return None
    may_local = limits.on_prefill_loss is OnPrefillLoss.LOCAL_PREFILL and live.prefill is not None
    found: tuple[list[Member], Pair] | None = None
    if not (may_local and loss.is_of_prefill):
        found = _alternative(fleet, live, loss)
    if found is None and may_local and Leg.PREFILL in loss.avoid[0]:
        pair, blamed = _local(fleet, live), [m for m in (live.prefill,) if m is not None]
        found = None if pair is None else (blamed, pair)
    return None if found is None else Plan(*found, delay_s)


def _local(fleet: Fleet, live: Live) -> Pair | None:
    """Local prefill, by the decode instance that the request was at if it is up."""
    up = [m for m in fleet.decodes if m.health is Health.UP]
    if not up:
        return None
    last = live.decode
    return None, last if last is not None and last in up else up[live.room % len(up)]


def _alternative(fleet: Fleet, live: Live, loss: Loss) -> tuple[list[Member], Pair] | None:
    """(whom to blame, the pair without them). Who lost an earlier attempt is taken again
    only where nobody else is left."""
    prefills, decodes = _fit_for_retry(fleet, live)
    for former in (live.recovery.avoided, []):
        for legs in loss.avoid:
            blamed = [m for leg in legs if (m := live.member(leg)) is not None]
            pair = choose(live.room, prefills, decodes, [*former, *blamed])
            if pair is not None:
                return blamed, pair
    return None


def fallback_of(live: Live, event: LegAnswered | LegLost) -> Fallback:
    """What the client hears if no other attempt makes this good."""
    if isinstance(event, LegLost):
        why = failure(
            "unavailable", f"the {event.leg.value} instance is unavailable: {event.detail}"
        )
        return Fallback(why, event.attempt, None)
    if live.recovery.evicted and event.leg is Leg.DECODE and event.code == "cancelled":
        why = failure("unavailable", f"the prefill instance is gone: {live.recovery.evicted}")
        return Fallback(why, event.attempt, None)
    if len(live.routed.attempts) > 1 and _is_room_in_use(event):
        where = f"the {event.leg.value} instance"
        why = failure("unavailable", f"{where} still ends an earlier attempt of this request")
        return Fallback(why, event.attempt, None)
    why = Failure("leg_answered", f"{event.leg.value} answered", event.status)
    return Fallback(why, event.attempt, event.leg)
