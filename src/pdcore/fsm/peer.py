"""Peer: one pair of ranks, seen from one of them, for one incarnation of the other.

Theory
------
  Unknown   an address and an incarnation are known (from a route or a handshake); nothing
            has been heard from that process life yet;
  Healthy   something was heard less than ``heartbeat_misses`` intervals ago;
  Suspect   several heartbeats in a row went unanswered. Reversible: a stopped process, a
            full link and a dead host look the same from here, and a one-sided write of a
            Suspect peer may still land. So Suspect stops new work (no handshake, no cached
            topology, and who only waits for this peer fails while another pair may serve
            it), and frees nothing;
  Dead      proved: the operating system, the transport or a STALE answer of its successor
            says that this process life is over. Terminal; a peer that comes back has
            another incarnation and is another entity.

Silence never gives Dead (D3: freeing on a time-out let a live writer write into blocks of
another request). And dead is not fenced: what was posted before the death may still land.
``is_fenced`` is a fact beside the state, because a living peer that does not finish
draining may be cut off too (architecture, section 3, rule 3).

Who moves it: the core, for every frame of that incarnation (``message_received``), for
every heartbeat interval without one (``heartbeat_missed``), and for what the shell and
STALE answers prove (``death_proved``, ``peer_fenced``). A Suspect is recovered by its first
word at once: work may come with it.

Not modelled here: time (the core owns the interval), the requests that hang on the peer
(they take ``PeerDied`` as their own event), reconnecting, transfers that fail although the
peer speaks (the half-open breaker of :mod:`pdcore.scheduler.breaker`: it judges work, not
life).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdcore.fsm.effects import Effect, FencePeer, ForgetPeer
from pdcore.fsm.machine import Event, lifecycle
from pdcore.fsm.states import PeerState as S
from pdcore.fsm.table import Lifecycle, Row, StateInfo
from pdcore.types import PeerRef


class DeathProof(msgspec.Struct, frozen=True):
    """``fenced``: the proof also says that nothing of it can land any more."""

    detail: str
    fenced: bool


class PeerSuspected(Effect, frozen=True):
    peer: PeerRef


class PeerRecovered(Effect, frozen=True):
    peer: PeerRef


class PeerDied(Effect, frozen=True):
    peer: PeerRef
    detail: str


_LIVE = (S.UNKNOWN, S.HEALTHY, S.SUSPECT)

PEER = Lifecycle(
    name="peer",
    states=S,
    initial=S.UNKNOWN,
    terminal=frozenset({S.DEAD}),
    events=("message_received", "heartbeat_missed", "death_proved", "peer_fenced"),
    rows=(
        Row(S.UNKNOWN, "message_received", S.HEALTHY, ("record_heard",)),
        Row(S.HEALTHY, "message_received", S.HEALTHY, ("record_heard",)),
        Row(S.SUSPECT, "message_received", S.HEALTHY, ("record_heard", "report_recovered")),
        *(
            Row(s, "heartbeat_missed", S.SUSPECT, ("count_miss", "report_suspected"), "is_last")
            for s in (S.UNKNOWN, S.HEALTHY)
        ),
        *(Row(s, "heartbeat_missed", s, ("count_miss",)) for s in _LIVE),
        *(Row(s, "death_proved", S.DEAD, ("record_death",)) for s in _LIVE),
        *(Row(s, "peer_fenced", s, ("record_fenced",)) for s in _LIVE),
        Row(S.DEAD, "peer_fenced", S.DEAD, ("record_fenced", "forget"), "is_not_fenced"),
    ),
    info={
        S.UNKNOWN: StateInfo(
            "known by address and incarnation, not heard yet",
            awaits="the peer's first message",
            deadline="heartbeat_interval_s x heartbeat_misses",
        ),
        S.HEALTHY: StateInfo(
            "heard recently; work may be given to it",
            awaits="the peer's next message",
            deadline="heartbeat_interval_s x heartbeat_misses",
        ),
        S.SUSPECT: StateInfo(
            "silent; no new work, nothing freed",
            awaits="a message of the peer, or a proof of its death",
            deadline="heartbeat_interval_s (asked again; requests keep their own deadlines)",
        ),
        S.DEAD: StateInfo("this process life is over by proof"),
    },
    deadline_events=("heartbeat_missed",),
)


@lifecycle(PEER)
class Peer:
    """See the module's theory. ``heartbeat_misses`` (>= 1) in a row give Suspect."""

    __slots__ = ("heartbeat_misses", "ignored", "is_fenced", "misses", "peer", "proof", "state")

    message_received: Event[None]
    heartbeat_missed: Event[None]
    death_proved: Event[DeathProof]
    peer_fenced: Event[None]

    def __init__(self, peer: PeerRef, heartbeat_misses: int) -> None:
        self.state: S = S.UNKNOWN
        self.ignored = 0
        self.peer = peer
        self.heartbeat_misses = heartbeat_misses
        self.misses = 0
        self.is_fenced = False
        self.proof: DeathProof | None = None

    def __repr__(self) -> str:
        fenced = ", fenced" if self.is_fenced else ""
        return (
            f"Peer({self.peer.instance}/{self.peer.rank} {self.peer.incarnation.hex()[:8]}, "
            f"{self.state.value}, misses={self.misses}{fenced})"
        )

    def is_last(self, payload: None) -> bool:
        return self.misses + 1 >= self.heartbeat_misses

    def is_not_fenced(self, payload: None) -> bool:
        return not self.is_fenced

    def record_heard(self, payload: None) -> Sequence[Effect]:
        self.misses = 0
        return ()

    def count_miss(self, payload: None) -> Sequence[Effect]:
        self.misses += 1
        return ()

    def report_suspected(self, payload: None) -> Sequence[Effect]:
        return (PeerSuspected(self.peer),)

    def report_recovered(self, payload: None) -> Sequence[Effect]:
        return (PeerRecovered(self.peer),)

    def record_death(self, payload: DeathProof) -> Sequence[Effect]:
        self.proof = payload
        self.is_fenced = self.is_fenced or payload.fenced
        after = ForgetPeer(self.peer) if self.is_fenced else FencePeer(self.peer)
        return (PeerDied(self.peer, payload.detail), after)

    def record_fenced(self, payload: None) -> Sequence[Effect]:
        self.is_fenced = True
        return ()

    def forget(self, payload: None) -> Sequence[Effect]:
        return (ForgetPeer(self.peer),)
