"""What happens in one simulated world: data, derived from its seed and nothing else.

A plan can be cut down (:meth:`Plan.only`) without changing what is left of it, which is how
a failing world is shrunk, and written as options of a command.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Final

import attrs

from pdcore.router.limits import OnPrefillLoss
from pdcore.transports.base import Revocation
from pdcore.types import CRC32, NO_CHECKSUMS

#: Requests of one world, and the span in which they arrive, in seconds.
MIN_REQUESTS: Final = 50
MAX_REQUESTS: Final = 60
ARRIVALS_S: Final = 3.0
MIN_FAULTS: Final = 5
MAX_FAULTS: Final = 9
#: The longest prompt that an instance takes; most are shorter than PROMPT.
MAX_PROMPT: Final = 40
PROMPT: Final = 24
#: What a flood adds at one moment.
FLOOD_REQUESTS: Final = 10
VOCABULARY: Final = 997
#: One world in so many has instances of several ranks: (prefill, decode) of these.
GROUPS_EVERY: Final = 5
GROUPS: Final = ((2, 2), (2, 2), (2, 1), (1, 2))
#: One world in so many kills prefill workers in the middle of their writes, which go on landing
#: while a successor has their address: what a successor may not answer for (rule 2, D32).
STRUCK_EVERY: Final = 7
MAX_STRUCK: Final = 4

#: kind -> weight. What each does is :mod:`pdcore.sim.faults`.
FAULT_KINDS: Final[Mapping[str, int]] = {
    "drop": 3,
    "duplicate": 2,
    "reorder": 2,
    "delay": 2,
    "partition": 4,
    "cut_http": 2,
    "crash_worker": 5,
    "crash_leader": 3,
    "crash_router": 2,
    "crash_bootstrap": 1,
    "drain": 2,
    "pause_worker": 4,
    "pause_leader": 2,
    "pause_router": 1,
    "break_http": 3,
    "fail_write": 2,
    "slow_writes": 3,
    "flood": 2,
    "exhaust": 3,
    "abort_leg": 5,
    "isolate": 4,
}
#: Chance that a client leaves before its answer.
LEAVES: Final = 0.12
#: Chance that a client names the room of its request.
NAMED_ROOMS: Final = 0.05


@attrs.frozen
class Fault:
    """``at_s`` counts from the world's start. ``target`` names an instance, ``other`` a second
    one; ``amount`` in [0, 1) is whatever else the kind needs to know."""

    number: int
    kind: str
    at_s: float
    target: str
    other: str
    duration_s: float
    amount: float


@attrs.frozen
class Request:
    """One request of a client, and what it must answer follows from it alone."""

    number: int
    at_s: float
    path: str
    prompt: tuple[int, ...]
    max_tokens: int
    is_streamed: bool
    timeout_s: float
    #: None is greedy.
    seed: int | None
    #: The client closes its connection so long after it asked.
    leaves_after_s: float | None
    #: The client names its room, and asks for it twice (D7).
    room: int | None = None


@attrs.frozen
class WorldOptions:
    """The size of a world, and what never changes in it."""

    num_prefill: int = 2
    num_decode: int = 2
    prefill_blocks: int = 64
    decode_blocks: int = 64
    max_queued: int = 24
    revocation: Revocation = Revocation.SENDER_ACK
    #: A worker that starts again has the address of its predecessor.
    same_address: bool = True
    #: Writes that are cancelled or whose process died still land.
    late_writes: bool = False
    is_shuffled: bool = False
    on_prefill_loss: OnPrefillLoss = OnPrefillLoss.RETRY
    #: Tensor parallel ranks of every prefill and of every decode instance.
    prefill_tp: int = 1
    decode_tp: int = 1
    integrity: str = NO_CHECKSUMS


@attrs.frozen
class Plan:
    seed: int
    options: WorldOptions
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]

    def only(
        self, faults: Collection[int] | None = None, requests: Collection[int] | None = None
    ) -> Plan:
        """This plan with these numbers left, None: all of them."""
        return attrs.evolve(
            self,
            faults=tuple(f for f in self.faults if faults is None or f.number in faults),
            requests=tuple(r for r in self.requests if requests is None or r.number in requests),
        )

    def with_faults(self, faults: tuple[Fault, ...]) -> Plan:
        """This plan with other faults."""
        return attrs.evolve(self, faults=faults)


def make_plan(seed: int) -> Plan:
    """The world of a seed: at least 50 requests, half of them streamed, and 5 faults."""
    rng = random.Random(f"pdcore world {seed}")
    options = _options(rng)
    count = rng.randint(MIN_REQUESTS, MAX_REQUESTS)
    requests = tuple(_request(rng, number) for number in range(count))
    kinds = rng.choices(
        list(FAULT_KINDS), list(FAULT_KINDS.values()), k=rng.randint(MIN_FAULTS, MAX_FAULTS)
    )
    faults = tuple(_fault(rng, number, kind, options) for number, kind in enumerate(kinds))
    for fault in faults:
        requests += _more_requests(rng, fault, len(requests))
    # From a source of its own: what was drawn so far stays what it is.
    more = random.Random(f"pdcore router {seed}")
    options = attrs.evolve(options, on_prefill_loss=more.choice(list(OnPrefillLoss)))
    if seed % GROUPS_EVERY == GROUPS_EVERY - 2:
        prefill_tp, decode_tp = random.Random(f"pdcore groups {seed}").choice(GROUPS)
        options = attrs.evolve(options, prefill_tp=prefill_tp, decode_tp=decode_tp)
    plan = Plan(seed, options, _with_rooms(more, requests), faults)
    return _struck(plan) if seed % STRUCK_EVERY == STRUCK_EVERY - 2 else plan


def _struck(plan: Plan) -> Plan:
    """The same world, in which some prefill workers do not survive their next write."""
    rng = random.Random(f"pdcore struck {plan.seed}")
    options = attrs.evolve(plan.options, same_address=True, late_writes=True)
    prefills, decodes = names(options)
    faults = list(plan.faults)
    for _ in range(rng.randint(2, MAX_STRUCK)):
        fault = _fault(rng, len(faults), "crash_writer", options)
        target, other = rng.choice(prefills), rng.choice(decodes)
        # Long enough for somebody to write.
        duration_s = max(1.0, fault.duration_s)
        faults.append(attrs.evolve(fault, target=target, other=other, duration_s=duration_s))
    return attrs.evolve(plan, options=options, faults=tuple(faults))


def with_corruption(plan: Plan) -> Plan:
    """The same world with checksums, and bytes that arrive wrong: no seed has them by itself, so
    that what a seed once showed stays what it is."""
    rng = random.Random(f"pdcore corruption {plan.seed}")
    options = attrs.evolve(plan.options, integrity=CRC32)
    first = len(plan.faults)
    more = (_fault(rng, first + n, "corrupt", options) for n in range(rng.randint(4, MAX_FAULTS)))
    return attrs.evolve(plan, options=options, faults=(*plan.faults, *more))


def names(options: WorldOptions) -> tuple[list[str], list[str]]:
    """Prefill and decode instances of a world."""
    prefills = [f"p{i}" for i in range(options.num_prefill)]
    return prefills, [f"d{i}" for i in range(options.num_decode)]


def _options(rng: random.Random) -> WorldOptions:
    is_small = rng.random() < 0.4
    revocation = rng.choices(
        (Revocation.SENDER_ACK, Revocation.QUARANTINE, Revocation.RECEIVER_ENFORCED), (8, 1, 2)
    )[0]
    return WorldOptions(
        num_prefill=rng.choice((2, 2, 2, 3)),
        num_decode=rng.choice((2, 2, 2, 3)),
        prefill_blocks=rng.randint(12, 20) if is_small else 64,
        decode_blocks=rng.randint(12, 24) if is_small else 64,
        max_queued=rng.choice((6, 16, 32)),
        revocation=revocation,
        same_address=rng.random() < 0.5,
        late_writes=revocation is Revocation.QUARANTINE or rng.random() < 0.5,
        is_shuffled=rng.random() < 0.5,
    )


def _request(rng: random.Random, number: int) -> Request:
    # Half of them come in bursts: queues fill, pools run dry.
    at_s = rng.random() * ARRIVALS_S
    if rng.random() < 0.5:
        at_s = float(int(at_s * 2)) / 2 + rng.random() * 0.02
    return Request(
        number=number,
        at_s=at_s,
        path=rng.choice(("/v1/completions", "/v1/completions", "/generate")),
        prompt=tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, PROMPT))),
        max_tokens=rng.randint(1, 8),
        is_streamed=number % 2 == 0,
        timeout_s=rng.choice((0.05, 1.0, 4.0, 8.0, 8.0, 8.0)),
        seed=rng.randrange(1 << 30) if rng.random() < 0.3 else None,
        leaves_after_s=rng.random() * rng.choice((0.06, 0.06, 0.3))
        if rng.random() < LEAVES
        else None,
    )


def _more_requests(rng: random.Random, fault: Fault, first: int) -> tuple[Request, ...]:
    """A flood is many requests at one moment; longest ones exhaust the memory."""
    if fault.kind not in ("flood", "exhaust"):
        return ()
    more = [_request(rng, number) for number in range(first, first + FLOOD_REQUESTS)]
    if fault.kind == "exhaust":
        longest = tuple(rng.randrange(3, VOCABULARY) for _ in range(MAX_PROMPT))
        more = [attrs.evolve(r, prompt=longest, max_tokens=8) for r in more]
    return tuple(attrs.evolve(r, at_s=fault.at_s) for r in more)


def _with_rooms(rng: random.Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """Some clients name a room and ask for it again, at once or later."""
    found: list[Request] = []
    twins: list[Request] = []
    for request in requests:
        if rng.random() < NAMED_ROOMS:
            request = attrs.evolve(request, room=rng.getrandbits(62) + 1)
            at_s = request.at_s + rng.choice((0.0, 0.02, 0.5))
            number = len(requests) + len(twins)
            twins.append(attrs.evolve(request, number=number, at_s=at_s, leaves_after_s=None))
        found.append(request)
    return (*found, *twins)


def _moment(rng: random.Random) -> float:
    """Half of the faults come while a burst of requests is being served."""
    if rng.random() < 0.5:
        return rng.randrange(1, int(ARRIVALS_S * 2)) / 2 + rng.random() * 0.1
    return 0.2 + rng.random() * ARRIVALS_S


def _fault(rng: random.Random, number: int, kind: str, options: WorldOptions) -> Fault:
    prefills, decodes = names(options)
    target = rng.choice(prefills + decodes)
    other = rng.choice(decodes if target in prefills else prefills)
    duration_s = rng.choice((0.05, 0.3, 1.0, 2.5)) * (0.5 + rng.random())
    return Fault(
        number=number,
        kind=kind,
        at_s=_moment(rng),
        target=target,
        other=other,
        # Long enough for what is given up meanwhile to be forgotten.
        duration_s=max(2.0, duration_s) if kind == "isolate" else duration_s,
        amount=rng.random(),
    )
