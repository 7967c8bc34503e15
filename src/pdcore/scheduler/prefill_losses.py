"""Which prefill rooms end because a decode rank is out of reach, and which go on (D25).

Only rooms that hold no grant end here: another pair may still serve them, and nothing of
them can be on its way. Who was granted waits on: its own handles, the other end or its
deadline say how it ends, and silence frees nothing (D3).
"""

from __future__ import annotations

from pdcore.errors import failure
from pdcore.fsm.events import ConnectFailed
from pdcore.fsm.states import SenderState
from pdcore.scheduler.peers import name_of
from pdcore.scheduler.prefill_rooms import PrefillRooms


def shed_waiting(rooms: PrefillRooms, now: float) -> None:
    """Peers that get no new work from now on (``rooms.shed``): whoever only waits for a
    handshake or a grant of theirs fails at once, with the reason."""
    peers, rooms.shed = rooms.shed, []
    for peer in peers:
        for record in rooms.records_of(peer.incarnation):
            if record.sender.state is SenderState.BOOTSTRAPPING or peer in record.unheard():
                why = rooms.why_no_work(peer, record.key, now)
                if why is not None:
                    rooms.emit(record, record.sender.failed_locally(why), now)


def fail_unconnected(rooms: PrefillRooms, event: ConnectFailed, now: float) -> None:
    """The data plane to a peer could not be opened: no proof of anything, so the peer is
    told why, and it counts as one failure of that peer."""
    waiting = [
        (record, peer)
        for record in rooms.records_of(event.incarnation)
        for peer in record.peers()
        if peer.incarnation == event.incarnation
        and not record.is_over
        and not any(leg.granted for leg in record.sender.legs.values())
    ]
    if waiting:
        rooms.peer_failed(waiting[0][1], event.detail, now)
    for record, peer in waiting:
        why = failure("unreachable", f"decode {name_of(peer)}: {event.detail}")
        rooms.emit(record, record.sender.failed_locally(why), now)
