"""Liveness per pair, over the control channel (D48): who still answers.

While rooms depend on a peer, it is asked once per heartbeat interval; any message of that
process life counts as an answer. Silence makes it Suspect: no new work, nothing freed. A
reply from *another* life at the same place proves the restart. Peers without rooms are
forgotten, so the book is bounded by the rooms; of the dead and the silent among them the
connections go too.

:class:`PeeredRooms` is the one place that says whether a peer gets new work: not while it is
silent, dead, failing (:mod:`pdcore.scheduler.breaker`) or keeping too many blocks out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TypeVar

from pdcore.control.messages import Heartbeat
from pdcore.errors import failure
from pdcore.fsm.effects import Effect, ForgetPeer, SendMessage
from pdcore.fsm.peer import DeathProof, Peer, PeerDied
from pdcore.fsm.states import PeerState
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.breaker import Breakers
from pdcore.scheduler.queues import RoomBook, RoomRecord
from pdcore.scheduler.setup import CoreSetup
from pdcore.types import NULL_BLOCK, Failure, FinishReason, Incarnation, PeerRef, RoomKey


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
        """Any message of this life. A suspect has recovered with it: at once, because work
        may come with the same frame."""
        peer = self.peers.get(incarnation)
        if peer is not None:
            self._heard.add(incarnation)
            if peer.state is PeerState.SUSPECT:
                peer.message_received()

    def state_of(self, incarnation: Incarnation) -> PeerState:
        """Unknown for a life that no room depends on."""
        peer = self.peers.get(incarnation)
        return PeerState.UNKNOWN if peer is None else peer.state

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
        """The transport saw the end of this life, or that nothing more of it can land."""
        peer = self.peers.get(incarnation)
        if peer is None:
            return
        if fenced and peer.state is PeerState.DEAD:
            peer.peer_fenced()
        else:
            peer.death_proved(DeathProof(detail, fenced))

    def beat(self, needed: Iterable[PeerRef]) -> tuple[list[Effect], list[PeerRef]]:
        """One interval has passed: (heartbeats to send, peers newly suspected).

        ``needed`` are the peers that live rooms depend on; others are forgotten, and the
        dead and the silent among them lose their connections (``ForgetPeer``): a process
        that is gone must not cost descriptors or mappings for ever."""
        wanted = {ref.incarnation: ref for ref in needed}
        forgotten = self._forget(wanted)
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
        beats: list[Effect] = list(forgotten)
        for peer in self.peers.values():
            if peer.state is not PeerState.DEAD:
                sequence = next(self._sequences)
                self._asked[sequence] = peer.peer.incarnation
                beats.append(SendMessage(peer.peer, Heartbeat(sequence)))
        return beats, suspects

    def suspects(self) -> list[PeerRef]:
        """For health reports: who is silent now."""
        return [p.peer for p in self.peers.values() if p.state is PeerState.SUSPECT]

    def _forget(self, wanted: Mapping[Incarnation, PeerRef]) -> list[Effect]:
        """Drop whom nobody needs. A successor at the same address keeps its connection."""
        addresses = {ref.address for ref in wanted.values()}
        out: list[Effect] = []
        for incarnation in [i for i in self.peers if i not in wanted]:
            peer = self.peers.pop(incarnation)
            is_gone = peer.state in (PeerState.DEAD, PeerState.SUSPECT)
            if is_gone and peer.peer.address not in addresses:
                out.append(ForgetPeer(peer.peer))
        return out


def _died(effects: Iterable[Effect] | None) -> PeerDied | None:
    return next((e for e in effects or () if isinstance(e, PeerDied)), None)


R = TypeVar("R", bound=RoomRecord)


class PeeredRooms(RoomBook[R]):
    """Rooms of either role, as seen from the ranks at their other end."""

    def __init__(self, setup: CoreSetup, blocks: KVBlocks) -> None:
        super().__init__(setup.limits, setup.group_size)
        self.setup = setup
        self.blocks = blocks
        limits = setup.limits
        self.peers = PeerBook(limits.heartbeat_misses)
        self.breakers = Breakers(limits.peer_failures, limits.peer_cooldown_s)
        #: Peers that get no new work from now on; the core gives up rooms that wait for them.
        self.shed: list[PeerRef] = []
        #: Who has not answered the last words of rooms that are forgotten.
        self.silent: dict[Incarnation, PeerRef] = {}

    # --- who depends on whom ---------------------------------------------------------------

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

    # --- may it get new work? --------------------------------------------------------------

    def why_no_work(self, peer: PeerRef, key: RoomKey, now: float) -> Failure | None:
        """Why this room is not given to that peer (rule 6, D25), or None: it may be."""
        state = self.peers.state_of(peer.incarnation)
        why: str | None = None
        if state is PeerState.DEAD:
            why = "its process is gone"
        elif state is PeerState.SUSPECT:
            why = self._silence()
        elif any(record.is_stuck for record in self.kept_out(peer.incarnation)):
            why = "it does not acknowledge earlier transfers and keeps too many blocks out"
        else:
            why = self.breakers.refusal(peer.incarnation, key, now)
        return None if why is None else failure("unavailable", f"{name_of(peer)}: {why}")

    def kept_out(self, incarnation: Incarnation) -> list[R]:
        """Rule 6: the rooms by which that life keeps more than ``quarantine_share`` of our
        blocks out, or none while it is less."""
        if not self.blocks.num_quarantined:
            return []
        ledgers = self.blocks.ledger().values()
        draining = [record for record in self.records_of(incarnation) if record.is_draining]
        out = sum(
            len(table) - table.count(NULL_BLOCK)
            for record in draining
            for table in self.blocks.get_block_ids(record.seq_id).values()
        )
        total = sum(ledger.total for ledger in ledgers)
        return draining if out > self.limits.quarantine_share * total else []

    def stuck_on(self) -> dict[str, int]:
        """Peer -> rooms that drain for longer than their time and wait for it (rule 6)."""
        found: dict[str, int] = {}
        for record in self.records.values():
            if record.is_stuck and not record.is_over:
                awaited = {name_of(peer) for peer in record.awaited()}
                for name in sorted(awaited) or ["its own engine"]:
                    found[name] = found.get(name, 0) + 1
        return found

    def refused_peers(self, now: float) -> dict[str, str]:
        """Instance -> why it gets no new work from this rank: for routers, which choose
        another pair, and for people."""
        found = {
            peer.instance: f"rank {peer.rank}: {why}" for peer, why in self.breakers.problems(now)
        }
        for peer in self.peers.suspects():
            found[peer.instance] = f"rank {peer.rank}: {self._silence()}"
        return found

    # --- what is heard and seen ------------------------------------------------------------

    def heard(self, incarnation: Incarnation) -> None:
        """Any message of that life."""
        self.peers.heard(incarnation)
        self.breakers.heard(incarnation)

    def peer_failed(self, peer: PeerRef, detail: str, now: float) -> None:
        """A transfer to or from it failed, or a handshake went unanswered."""
        if self.breakers.failed(peer, detail, now):
            self.shed.append(peer)

    def peer_died(self, incarnation: Incarnation, detail: str, fenced: bool) -> None:
        self.peers.died(incarnation, detail, fenced)
        self.breakers.forget(incarnation)

    def beat(self, now: float) -> list[PeerRef]:
        """One heartbeat interval has passed: ask, and return who is newly suspected."""
        beats, suspects = self.peers.beat(self.needed_peers())
        self.out.extend(beats)
        for peer in suspects:
            self.breakers.silent(peer, self._silence(), now)
        self.shed.extend(suspects)
        self.arm_heartbeat(now)
        return suspects

    def arm_heartbeat(self, now: float) -> None:
        """While there are rooms their peers are asked whether they live; once more after the
        last one, so that nothing of a gone peer is kept."""
        if self.peers.peers and not self.timers.is_armed("heartbeat", "peers"):
            self.timers.arm("heartbeat", "peers", now + self.limits.heartbeat_interval_s)
        super().arm_heartbeat(now)

    def report(
        self,
        record: R,
        reason: FinishReason,
        why: Failure | None,
        now: float,
        completion_tokens: int = 0,
    ) -> None:
        super().report(record, reason, why, now, completion_tokens)
        self.breakers.ended(record.key)

    def _silence(self) -> str:
        return f"it has not answered {self.limits.heartbeat_misses} heartbeats in a row"


def name_of(peer: PeerRef) -> str:
    """For people: the same words in every message."""
    return f"{peer.instance} rank {peer.rank}"


def give_up(rooms: PeeredRooms[R], record: R) -> None:
    """Forget a room that has lingered long enough, and remember who did not answer it."""
    rooms.forget(record.key)
    for effect in record.entity.unanswered():
        if isinstance(effect, SendMessage):
            rooms.silent[effect.to.incarnation] = effect.to


def drop_silent(rooms: PeeredRooms[R]) -> None:
    """What was sent again after its peer was forgotten opened their connection once more: it
    goes, unless somebody else's rooms need it. Once for all who gave up together."""
    if not rooms.silent:
        return
    addresses = {peer.address for peer in rooms.needed_peers()}
    gone = (peer for peer in rooms.silent.values() if peer.address not in addresses)
    rooms.out.extend(map(ForgetPeer, gone))
    rooms.silent.clear()
