"""What a request whose time is over was waiting for, in one sentence (D23).

The awaited party is the lifecycle's own (:class:`pdcore.fsm.table.StateInfo`), so that a new
state cannot lack an answer; the ranks that are still owed come from the room.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdcore.errors import failure
from pdcore.fsm.table import StateInfo
from pdcore.types import Failure, PeerRef, Role


def overdue(
    role: Role, state: str, info: StateInfo, waited_s: float, owing: Iterable[PeerRef], other: str
) -> Failure:
    """``role`` and ``state`` are ours, ``waited_s`` seconds since this leg was accepted,
    ``owing`` the ranks that have not done their part, ``other`` the other leg's instance.
    """
    ranks = sorted((peer.instance, peer.rank) for peer in owing)
    named = ", ".join(f"{instance} rank {rank}" for instance, rank in ranks)
    who = named or other
    theirs = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    return failure(
        "deadline_exceeded",
        f"{role.value} was in {state} and waited for {info.awaits or 'its own output'}, "
        f"{waited_s:.1f} s after it accepted the request"
        f"{f'; {theirs.value} is {who}' if who else ''}",
    )
