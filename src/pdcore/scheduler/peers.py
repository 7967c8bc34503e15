"""Liveness per pair, over the control channel (D48): who still answers.

While rooms depend on a peer, it is asked once per heartbeat interval; any message of that
process life counts as an answer. Silence makes it Suspect: no new work, nothing freed. A
reply from *another* life at the same place proves the restart. Peers without rooms are
forgotten, so the book is bounded by the rooms.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeVar

from pdcore.control.messages import Heartbeat
from pdcore.fsm.effects import Effect, SendMessage
from pdcore.fsm.peer import DeathProof, Peer, PeerDied
from pdcore.fsm.states import PeerState
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.queues import RoomBook, RoomRecord
from pdcore.scheduler.setup import CoreSetup
from pdcore.types import Incarnation, PeerRef


class PeerBook:
    """One entry per process life that some live room depends on."""

    def __init__(self, heartbeat_misses: int) -> None:
        self.peers: dict[Incarnation, Peer] = {}
        self._misses = heartbeat_misses
        self._sequences = itertools.count(1)
        #: Heartbeat sequence -> whom it was meant for; one per peer.
        self._asked: dict[int, Incarnation] = {}
        self._heard: set[Incarnation] = set()

    def heard(self, incarnation: Incarnation) -> None:
        """Any message of this life."""
        if incarnation in self.peers:
            self._heard.add(incarnation)

    def answered(self, sender: PeerRef, sequence: int) -> PeerDied | None:
        """A heartbeat came back. From another life than was asked: that one is over."""
        asked = self._asked.get(sequence)
        peer = self.peers.get(asked) if asked is not None else None
        if peer is None or asked == sender.incarnation:
            return None
        if (peer.peer.instance, peer.peer.rank) != (sender.instance, sender.rank):
            return None
        proof = DeathProof(f"{sender.instance} rank {sender.rank} restarted", fenced=False)
        return _died(peer.death_proved(proof))

    def died(self, incarnation: Incarnation, detail: str, fenced: bool) -> None:
        """The transport saw the end of this life."""
        peer = self.peers.get(incarnation)
        if peer is not None:
            peer.death_proved(DeathProof(detail, fenced))

    def beat(self, needed: Iterable[PeerRef]) -> tuple[list[Effect], list[PeerRef]]:
        """One interval has passed: (heartbeats to send, peers newly suspected).

        ``needed`` are the peers that live rooms depend on; others are forgotten."""
        wanted = {ref.incarnation: ref for ref in needed}
        for incarnation in [i for i in self.peers if i not in wanted]:
            del self.peers[incarnation]
        suspects: list[PeerRef] = []
        for incarnation, ref in wanted.items():
            peer = self.peers.get(incarnation)
            if peer is None:
                self.peers[incarnation] = Peer(ref, self._misses)
            elif incarnation in self._heard:
                peer.message_received()
            elif peer.state is not PeerState.DEAD:
                was_suspect = peer.state is PeerState.SUSPECT
                peer.heartbeat_missed()
                if peer.state is PeerState.SUSPECT and not was_suspect:
                    suspects.append(ref)
        self._heard.clear()
        self._asked.clear()
        beats: list[Effect] = []
        for peer in self.peers.values():
            if peer.state is not PeerState.DEAD:
                sequence = next(self._sequences)
                self._asked[sequence] = peer.peer.incarnation
                beats.append(SendMessage(peer.peer, Heartbeat(sequence)))
        return beats, suspects

    def suspects(self) -> list[PeerRef]:
        """For health reports: who is silent now."""
        return [p.peer for p in self.peers.values() if p.state is PeerState.SUSPECT]


def _died(effects: Iterable[Effect] | None) -> PeerDied | None:
    return next((e for e in effects or () if isinstance(e, PeerDied)), None)


R = TypeVar("R", bound=RoomRecord)


class PeeredRooms(RoomBook[R]):
    """Rooms of either role, as seen from the ranks at their other end."""

    def __init__(self, setup: CoreSetup, blocks: KVBlocks) -> None:
        super().__init__(setup.limits, setup.group_size)
        self.setup = setup
        self.blocks = blocks
        self.peers = PeerBook(setup.limits.heartbeat_misses)

    def needed_peers(self) -> list[PeerRef]:
        """Peers that rooms which are not over depend on."""
        return [peer for r in self.records.values() if not r.is_over for peer in r.peers()]

    def records_of(self, incarnation: Incarnation) -> list[R]:
        """Records that depend on that process life."""
        return [
            record
            for record in self.records.values()
            if any(peer.incarnation == incarnation for peer in record.peers())
        ]

    def is_place_of(self, peer: PeerRef, incarnation: Incarnation) -> bool:
        """Is this another life at the place (instance and rank) where that life was?"""
        return peer.incarnation != incarnation and any(
            (known.instance, known.rank) == (peer.instance, peer.rank)
            for record in self.records_of(incarnation)
            for known in record.peers()
            if known.incarnation == incarnation
        )
