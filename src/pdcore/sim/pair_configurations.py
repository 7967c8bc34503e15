"""The pair worlds of the fixed list: one decode rank, one or two prefill ranks.

Each says what it may meet. What it may not meet another one does; mixes that are larger than
any of these are not explored to the end by anybody (docs/verification.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from pdcore.fsm.receiver import RECEIVER, Receiver
from pdcore.fsm.sender import SENDER, Sender
from pdcore.sim.configurations import Configuration, configuration
from pdcore.sim.firing import ROWS, watching
from pdcore.sim.pair_book import Book, Outlive, Rules
from pdcore.sim.pair_world import PairWorld
from pdcore.sim.places import Dispatch, Place, Shape
from pdcore.types import RoomKey

INVARIANTS: Final = (
    "every request has exactly one result per half",
    "no block can be written by two, and none is reused while an old write may land",
    "a request runs or is answered only with all of its KV",
    "source blocks are held while a write or a forward pass may read them",
    "pools add up after every event, and everything is back at rest",
    "no deadlock",
    "from every state the end can be reached without another fault",
)

#: Longer than blocks wait for writers that have acknowledged (decision 25), in looks of a second.
QUARANTINE_S: Final = 3.0
_ONE: Final = (Place("prefill0", False, "prefill"),)
_TWO: Final = (
    Place("prefill0", False, "prefill", 0, 2),
    Place("prefill1", False, "prefill", 1, 2),
)
_LEGS: Final = (
    Place("decode0", True, "decode", 0, 2),
    Place("decode1", True, "decode", 1, 2),
)
_OTHER: Final = (*_ONE, Place("other0", False, "other"))
_FIRST: Final = Dispatch(RoomKey(1, 1), "prefill")
_AGAIN: Final = Dispatch(RoomKey(1, 2), "prefill", replaces=1)
_ELSEWHERE: Final = Dispatch(RoomKey(1, 2), "other", replaces=1)
_STRANGER: Final = Dispatch(RoomKey(2, 2), "prefill")

_BOTH_GRANTED: Final = (
    "prefill0: request",
    "prefill1: request",
    "decode: request",
    "the route",
    "prefill0: gets Handshake",
    "prefill1: gets Handshake",
    "decode: gets Claim 1.1 lease 1 nonce prefill0",
    "decode: gets Claim 1.1 lease 1 nonce prefill1",
)
_ONE_WAITS: Final = (
    "prefill0: request 1.1",
    "decode: request 1.1",
    "the route",
    "prefill0: gets Handshake",
    "decode: gets Claim 1.1",
    "prefill0: request 2.2",
    "decode: request 2.2",
)


def _watch() -> AbstractContextManager[None]:
    return watching(ROWS, (SENDER, Sender), (RECEIVER, Receiver))


def _pair(name: str, covers: str, rules: Rules, *catches: str) -> Configuration:
    shape = rules.shape
    places = {place.name for place in (*shape.prefill, *shape.decode)}
    bounds: dict[str, int | str] = {
        "prefill_ranks": len(shape.prefill),
        "decode_ranks": len(shape.decode),
        "dispatches": len(shape.dispatches),
        "chunks": shape.num_chunks,
        "output_tokens": shape.num_outputs,
        "decode_rooms": shape.decode_rooms,
        "entities_per_dispatch": shape.num_entities,
        "lives_per_place": 2 if rules.crashes else 1,
        "crashing": " ".join(sorted(rules.crashes & places)) or "none",
        "faults": " ".join(sorted(rules.faults)),
        "writes": rules.outlive.value,
        "ticks": "after every event" if rules.is_tick_eager else "at any time",
        "deadlines_counted_on": " ".join(sorted(rules.fair_deadlines)) or "none",
        "begins": "after " + ", ".join(rules.prologue) if rules.prologue else "with nothing",
        "network": "any loss, duplication, reordering and delay",
    }
    return configuration(
        name,
        covers,
        lambda mutant: PairWorld(Book(rules)),
        bounds=bounds,
        invariants=INVARIANTS,
        catches=catches,
        context=_watch,
    )


def _kinds(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Deaths of either side, for each way in which a transport lets writes end.
_DEATHS: Final = tuple(
    _pair(
        f"death-{name}",
        f"crash and restart of either side; writes {outlive.value}",
        Rules(
            Shape(_ONE, (_FIRST,), quarantine_s=quarantine_s, is_enforced=is_enforced),
            _kinds("abort transfer"),
            crashes=_kinds("prefill0 decode"),
            outlive=outlive,
            fair_deadlines=_kinds("prefill0 decode"),
            is_tick_eager=True,
        ),
        *catches,
    )
    for name, outlive, quarantine_s, is_enforced, catches in (
        ("fences", Outlive.NO, 0.0, False, ()),
        (
            "sender-ack",
            Outlive.REPORTED,
            0.0,
            False,
            ("no-incarnation", "restart-acks-for-predecessor"),
        ),
        ("quarantine", Outlive.UNREPORTED, QUARANTINE_S, False, ("short-period",)),
        ("receiver-enforced", Outlive.REPORTED, 0.0, True, ()),
    )
)

PAIR_CONFIGURATIONS: Final[tuple[Configuration, ...]] = (
    _pair(
        "pair",
        "one prefill rank, every fault of one life, ticks between any two events",
        Rules(
            Shape(_ONE, (_FIRST,)),
            _kinds("abort deadline drain engine transfer unsure route refuse"),
        ),
        "free-on-abort",
        "failed-is-ack",
        "done-when-posted",
        "free-while-computing",
        "send-once",
    ),
    _pair(
        "chunks",
        "a request sent in two chunks, early",
        Rules(Shape(_ONE, (_FIRST,), num_chunks=2), _kinds("abort engine transfer unsure")),
        "ack-between-chunks",
    ),
    _pair(
        "dummy",
        "decode also sends its handshakes as if to a dummy target",
        Rules(Shape(_ONE, (_FIRST,)), _kinds("abort"), has_dummies=True),
    ),
    _pair(
        "two-ranks",
        "two prefill ranks write one request",
        Rules(Shape(_TWO, (_FIRST,)), _kinds("abort transfer"), is_tick_eager=True),
        "max-merged-status",
    ),
    _pair(
        "two-ranks-death",
        "two prefill ranks at work, one of which dies and starts again",
        Rules(
            Shape(_TWO, (_FIRST,)),
            _kinds(""),
            prologue=_BOTH_GRANTED,
            crashes=_kinds("prefill0"),
            outlive=Outlive.REPORTED,
            fair_deadlines=_kinds("decode"),
            is_tick_eager=True,
        ),
    ),
    _pair(
        "two-legs",
        "one prefill rank writes to two decode ranks",
        Rules(
            Shape(_ONE, (_FIRST,), decode=_LEGS),
            _kinds("abort@decode0 abort@decode1 transfer"),
            is_tick_eager=True,
        ),
    ),
    _pair(
        "running",
        "the request runs at decode while late messages about its transfer come",
        Rules(Shape(_ONE, (_FIRST,), num_outputs=4), _kinds("abort deadline drain transfer")),
    ),
    _pair(
        "prefill-forgets",
        "prefill forgets what ended, tombstones and parked handshakes; its dispatch comes twice",
        Rules(
            Shape(_ONE, (_FIRST,), num_entities=2),
            _kinds("forget@prefill0 evict@prefill0 unpark"),
            fair_deadlines=_kinds("prefill0 decode"),
            duplicates=_kinds("prefill0"),
        ),
        "no-claim-tombstones",
        "one-live-claim",
    ),
    _pair(
        "decode-forgets",
        "decode forgets what ended and its tombstones; its dispatch comes twice",
        Rules(
            Shape(_ONE, (_FIRST,), num_entities=2),
            _kinds("forget@decode evict@decode"),
            fair_deadlines=_kinds("decode"),
            duplicates=_kinds("decode"),
        ),
        "claim-without-lease",
    ),
    _pair(
        "retry-same",
        "a second attempt at the same two instances while the first drains",
        Rules(Shape(_ONE, (_FIRST, _AGAIN)), _kinds("transfer"), is_retry=True, is_tick_eager=True),
    ),
    _pair(
        "retry-elsewhere",
        "a second attempt with another prefill instance while the first drains",
        Rules(
            Shape(_OTHER, (_FIRST, _ELSEWHERE)),
            _kinds("transfer"),
            is_retry=True,
            is_tick_eager=True,
        ),
    ),
    _pair(
        "reuse",
        "two requests, room for one: the second takes over blocks and metadata slot",
        Rules(
            Shape(_ONE, (_FIRST, _STRANGER), decode_rooms=1, prefill_rooms=1),
            _kinds("abort@decode"),
            is_tick_eager=True,
        ),
        "free-on-abort",
    ),
    _pair(
        "queue-death",
        "prefill dies and starts again while one request is written and another waits for its room",
        Rules(
            Shape(_ONE, (_FIRST, _STRANGER), decode_rooms=1),
            _kinds(""),
            prologue=_ONE_WAITS,
            crashes=_kinds("prefill0"),
            outlive=Outlive.REPORTED,
            fair_deadlines=_kinds("decode"),
            is_tick_eager=True,
        ),
    ),
    *_DEATHS,
)

_EVERYTHING: Final = _kinds(
    "abort deadline drain engine transfer unsure route refuse forget evict unpark"
)
_EVERYWHERE: Final = _kinds("prefill0 prefill1 other0 decode")


def _mix(name: str, covers: str, shape: Shape, outlive: Outlive) -> Configuration:
    rules = Rules(
        shape,
        _EVERYTHING,
        crashes=_EVERYWHERE,
        outlive=outlive,
        fair_deadlines=_EVERYWHERE,
        is_retry=True,
        duplicates=_EVERYWHERE,
    )
    return _pair(name, covers, rules)


#: Too large to be explored: everything at once. Walked through at random.
PAIR_MIXES: Final[tuple[Configuration, ...]] = (
    _mix(
        "mix-ranks",
        "two prefill ranks, two chunks, two attempts, deaths, tables that forget",
        Shape(_TWO, (_FIRST, _AGAIN), num_chunks=2, num_outputs=2, num_entities=2),
        Outlive.REPORTED,
    ),
    _mix(
        "mix-elsewhere",
        "two prefill instances, a retry at the other, deaths, tables that forget",
        Shape(_OTHER, (_FIRST, _ELSEWHERE), num_chunks=2, decode_rooms=1, num_entities=2),
        Outlive.REPORTED,
    ),
    _mix(
        "mix-quarantine",
        "as mix-elsewhere, where only time frees blocks",
        Shape(
            _OTHER, (_FIRST, _ELSEWHERE), num_chunks=2, quarantine_s=QUARANTINE_S, num_entities=2
        ),
        Outlive.UNREPORTED,
    ),
)
