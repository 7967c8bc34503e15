"""The ledger of one rank: in which state every KV block and every metadata slot is.

| state | blocks | slots |
|---|---|---|
| free | anybody may have them | anybody may have them |
| reserved | free, but kept for the growth of those who run (R69) | - |
| held | of a request, touched by our own forward passes only | - |
| leased | a peer or a transfer may touch them | of a published handshake |
| quarantined | their request is over, a writer may be alive | the same |

The states always add up to what there is. :func:`audit` recounts everything; at rest, when no
request is left, everything must be free: what is not has leaked. A failed audit means that
ownership is not known any more, and nothing that is computed after it can be trusted.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pdcore.errors import OwnershipError
from pdcore.scheduler.decode_rooms import DecodeRooms
from pdcore.scheduler.prefill_rooms import PrefillRooms

Rooms = PrefillRooms | DecodeRooms

#: The name of the metadata slots among the manager keys of the KV blocks.
SLOTS: Final = "metadata slots"


class Account(NamedTuple):
    """One pool by state; see the module."""

    free: int
    reserved: int
    held: int
    leased: int
    quarantined: int

    @property
    def total(self) -> int:
        return sum(self)


def accounts(rooms: Rooms) -> dict[str, Account]:
    """Manager key -> its blocks (the null block left out); on decode also the slots."""
    keep = rooms.limits.num_reserved_decode_tokens if isinstance(rooms, DecodeRooms) else 0
    budget = rooms.blocks.budget(keep)
    found = {}
    for key, ledger in rooms.blocks.ledger().items():
        reserved = min(ledger.free, budget.reserve[key] * budget.holders)
        found[key] = Account(
            ledger.free - reserved, reserved, ledger.held, ledger.leased, ledger.quarantined
        )
    if isinstance(rooms, DecodeRooms):
        slots = rooms.slots
        leased = slots.capacity - slots.available - slots.num_quarantined
        found[SLOTS] = Account(slots.available, 0, 0, leased, slots.num_quarantined)
    return found


def audit(rooms: Rooms, *, at_rest: bool = False) -> dict[str, Account]:
    """Recount all pools against all tables. Raises OwnershipError with the numbers for any
    difference; ``at_rest`` also for whatever is not free."""
    rooms.blocks.audit()
    if isinstance(rooms, DecodeRooms):
        rooms.slots.audit()
    found = accounts(rooms)
    totals = {key: ledger.total for key, ledger in rooms.blocks.ledger().items()}
    if isinstance(rooms, DecodeRooms):
        totals[SLOTS] = rooms.slots.capacity
    for key, account in found.items():
        if account.total != totals[key] or min(account) < 0:
            raise OwnershipError(f"{key}: {_show(account)} of {totals[key]}")
        if at_rest and account.free != account.total:
            raise OwnershipError(
                f"{key}: {_show(account)} of {account.total} while no request is left"
            )
    return found


def _show(account: Account) -> str:
    return ", ".join(f"{count} {name}" for name, count in account._asdict().items())
