"""Messages of decode ranks that came before their request: kept as a courtesy.

Bounded and expiring (R44, D6): a handshake is sent again, and a cancel that is forgotten leaves
a request to its deadline. Safety depends on no entry.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdcore.config import CoreLimits
from pdcore.fsm.legs import CancelFrom, HandshakeFrom
from pdcore.scheduler.queues import ExpiringTable

#: Early messages kept per room: one per decode rank of the largest group, and the sender of
#: more is no decode instance (D6).
MAX_PARKED_LEGS: Final = 64

Early = HandshakeFrom | CancelFrom


class Parked(ExpiringTable[tuple[Early, ...]]):
    """By room, in order of arrival; of each decode rank its last handshake, or the cancel that
    ended it."""

    __slots__ = ()

    def __init__(self, limits: CoreLimits) -> None:
        super().__init__(limits.parked_handshake_cap, limits.parked_handshake_ttl_s)

    def park_handshake(self, payload: HandshakeFrom, now: float) -> None:
        self._add(payload, now)

    def park_cancel(self, payload: CancelFrom, now: float) -> None:
        """Ends the request when it comes, from a router that may be gone by then. Not that of a
        receiver whose successor has sent its handshake since."""
        lease = payload.message.lease
        for early in self.get(payload.message.key, now) or ():
            is_same_place = _place(early) == _place(payload)
            if is_same_place and isinstance(early, HandshakeFrom) and early.message.lease != lease:
                return
        # Its nonces were answered, and are nobody's.
        bare = msgspec.structs.replace(payload.message, nonces=())
        self._add(CancelFrom(payload.peer, bare), now)

    def _add(self, payload: Early, now: float) -> None:
        key = payload.message.key
        others = tuple(e for e in self.get(key, now) or () if _place(e) != _place(payload))
        self.put(key, (*others, payload)[-MAX_PARKED_LEGS:], now)


def _place(early: Early) -> tuple[str, int]:
    return early.peer.instance, early.peer.rank
