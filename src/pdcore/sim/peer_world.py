"""One place with two process lives after each other, as the other side's peer book sees it.

The book is the production one (:mod:`pdcore.scheduler.peers`). Life A serves rooms, may be
stopped and go on, or die; then life B starts at the same address. Heartbeats reach whoever
lives there; answers come late, twice, or never, those of a life that is over included; the
transport may see the death, or not, and may fence what the dead had posted, or not.

Checked: Dead is proved, never guessed from silence, and never wrong; A's death becomes known,
or nobody needs A any more and it is forgotten; B, which is needed then, is Healthy in the end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from pdcore.control.messages import Heartbeat
from pdcore.fsm.effects import Effect, SendMessage
from pdcore.fsm.peer import PEER, Peer
from pdcore.fsm.states import PeerState
from pdcore.scheduler.peers import PeerBook
from pdcore.sim.explore import Move
from pdcore.sim.firing import ROWS, watching
from pdcore.sim.interned import Cores
from pdcore.types import Incarnation, PeerRef

A: Final = PeerRef("prefill:1", 0, Incarnation(b"a" * 16), "tcp://prefill:1")
B: Final = PeerRef("prefill:1", 0, Incarnation(b"b" * 16), "tcp://prefill:1")
_MISSES: Final = 2
_LIVES: Final = {"A": A, "B": B}


class PeerWorldState(NamedTuple):
    """``a``: "up", "stopped", "dead", "seen" (dead, and the transport said so), "fenced".
    ``b``: "", "up". ``needed`` and ``asked``: letters of the lives that rooms depend on, and
    of those that a heartbeat of this interval is on its way to."""

    book: int
    a: str
    b: str
    needed: str
    asked: str


def peer_watching() -> AbstractContextManager[None]:
    """Open it around a :class:`PeerWorld`."""
    return watching(ROWS, (PEER, Peer))


def _key(book: PeerBook) -> Hashable:
    """The numbers of heartbeats grow for ever; whom they were sent to is what counts."""
    heard: set[Incarnation] = operator.attrgetter("_heard")(book)
    asked: dict[int, Incarnation] = operator.attrgetter("_asked")(book)
    peers = tuple(
        (life, peer.state, min(peer.misses, _MISSES), peer.is_fenced, peer.proof is None)
        for life, peer in sorted(book.peers.items())
    )
    return peers, tuple(sorted(heard)), tuple(sorted(set(asked.values())))


class PeerWorld:
    """See the module."""

    def __init__(self, book: Callable[[int], PeerBook] = PeerBook) -> None:
        self.books = Cores(book(_MISSES), _key)

    def initial(self) -> PeerWorldState:
        return PeerWorldState(0, "up", "", "A", "")

    def moves(self, state: PeerWorldState) -> Iterable[Move[PeerWorldState]]:
        yield from self._interval(state)
        yield from self._answers(state)
        yield from self._lives(state)
        yield from self._proofs(state)

    def problems(self, state: PeerWorldState) -> Iterable[str]:
        book = self.books.core(state.book)
        if book.state_of(A.incarnation) is PeerState.DEAD and state.a in ("up", "stopped"):
            yield "a process that lives was declared dead"
        if book.state_of(B.incarnation) is PeerState.DEAD:
            yield "the successor was declared dead"

    def is_goal(self, state: PeerWorldState) -> bool:
        book = self.books.core(state.book)
        of_a, of_b = book.state_of(A.incarnation), book.state_of(B.incarnation)
        if state.b:
            settled = of_a is PeerState.DEAD or A.incarnation not in book.peers
            return settled and "B" in state.needed and of_b is PeerState.HEALTHY
        if state.a == "up":
            return "A" not in state.needed or of_a is PeerState.HEALTHY
        return False

    def show(self, state: PeerWorldState) -> str:
        peers = list(self.books.core(state.book).peers.values())
        return f"A {state.a}, B {state.b or '-'}, needed {state.needed}, {peers}"

    # --- inside -------------------------------------------------------------------------

    def _interval(self, state: PeerWorldState) -> Iterator[Move[PeerWorldState]]:
        needed = [_LIVES[life] for life in state.needed]

        def beat(book: PeerBook) -> str:
            effects, _ = book.beat(needed)
            sent = [e for e in effects if isinstance(e, SendMessage)]
            to = {e.to.incarnation for e in sent if isinstance(e.message, Heartbeat)}
            return "".join(life for life, ref in _LIVES.items() if ref.incarnation in to)

        done = self.books.step(state.book, ("beat", state.needed), beat)
        after = state._replace(book=done.number, asked=done.note)
        yield Move("an interval passes", False, after, done.rows)

    def _answers(self, state: PeerWorldState) -> Iterator[Move[PeerWorldState]]:
        if state.a != "stopped":
            for asked in state.asked:
                # A's answer may have been on its way when it died.
                if asked == "A":
                    is_late = state.a != "up"
                    yield self._answer(state, "A", A, "A answers", is_fault=is_late)
                if state.b:
                    yield self._answer(state, asked, B, f"B answers what was sent to {asked}")
        if state.a != "up":
            done = self.books.step(state.book, "old", lambda book: _hear(book, A))
            after = state._replace(book=done.number)
            yield Move("an old message of A comes", True, after, done.rows)

    def _answer(
        self,
        state: PeerWorldState,
        asked: str,
        sender: PeerRef,
        label: str,
        *,
        is_fault: bool = False,
    ) -> Move[PeerWorldState]:
        def answer(book: PeerBook) -> str:
            sequences: dict[int, Incarnation] = operator.attrgetter("_asked")(book)
            book.heard(sender.incarnation)
            for sequence, incarnation in list(sequences.items()):
                if incarnation == _LIVES[asked].incarnation:
                    book.answered(sender, sequence)
            return ""

        done = self.books.step(state.book, label, answer)
        return Move(label, is_fault, state._replace(book=done.number), done.rows)

    def _lives(self, state: PeerWorldState) -> Iterator[Move[PeerWorldState]]:
        if state.a == "up":
            yield Move("A is stopped", True, state._replace(a="stopped"))
        if state.a == "stopped":
            yield Move("A goes on", False, state._replace(a="up"))
        if state.a in ("up", "stopped"):
            yield Move("A dies", True, state._replace(a="dead"))
        if state.a not in ("up", "stopped") and not state.b:
            yield Move("B starts", False, state._replace(b="up"))
        if state.b and "B" not in state.needed:
            yield Move("a room depends on B", False, state._replace(needed=state.needed + "B"))
        if "A" in state.needed:
            after = state._replace(needed=state.needed.replace("A", ""))
            yield Move("no room depends on A any more", False, after)

    def _proofs(self, state: PeerWorldState) -> Iterator[Move[PeerWorldState]]:
        if state.a in ("dead", "seen"):
            for fenced in (False, True):
                # A transport may see the death before anything is fenced, or with it; it may
                # see nothing at all, so nothing may depend on it.
                word = "and fences" if fenced else "does not fence"
                done = self.books.step(state.book, ("died", fenced), _DEATHS[fenced])
                after = state._replace(book=done.number, a="fenced" if fenced else "seen")
                yield Move(f"the transport sees A's death, {word}", True, after, done.rows)


def _hear(book: PeerBook, sender: PeerRef) -> str:
    book.heard(sender.incarnation)
    return ""


def _die_unfenced(book: PeerBook) -> str:
    book.died(A.incarnation, "exited", fenced=False)
    return ""


def _die_fenced(book: PeerBook) -> str:
    book.died(A.incarnation, "exited", fenced=True)
    return ""


_DEATHS: Final = {False: _die_unfenced, True: _die_fenced}


# --- a known-bad variant -----------------------------------------------------------------


class SilenceKills(PeerBook):
    """``silence-kills``: a suspect is declared dead, as a time-out does elsewhere (D3)."""

    def beat(self, needed: Iterable[PeerRef]) -> tuple[list[Effect], list[PeerRef]]:
        effects, suspects = super().beat(needed)
        for ref in suspects:
            self.died(ref.incarnation, "silent", fenced=False)
        return effects, suspects


PEER_MUTANTS: Final[dict[str, type[PeerBook]]] = {"silence-kills": SilenceKills}
