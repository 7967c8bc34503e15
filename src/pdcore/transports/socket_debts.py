"""Transfers that ended while it was not known whether bytes of them still land (G2).

Each is owed a second word, its quiesced mark. It comes when the same life welcomes a newer
session, because it drops the older ones first, or when that life is over.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pdcore.transports.socket_outgoing import Ended
from pdcore.types import Incarnation


class Debts:
    """``tell`` reports one ended transfer to the owner."""

    def __init__(self, tell: Callable[[Ended], None]) -> None:
        self._tell = tell
        #: Per life: (number of the session, its transfers).
        self._owed: dict[Incarnation, list[tuple[int, list[Ended]]]] = {}

    def owe(self, incarnation: Incarnation, number: int, ended: list[Ended]) -> None:
        if ended:
            self._owed.setdefault(incarnation, []).append((number, ended))

    def settle(self, incarnation: Incarnation, below: int | None) -> None:
        """Nothing of its sessions below that number (None: of any) can land any more."""
        kept = []
        for number, ended in self._owed.pop(incarnation, []):
            if below is None or number < below:
                self.pay(ended)
            else:
                kept.append((number, ended))
        if kept:
            self._owed[incarnation] = kept

    def pay(self, ended: list[Ended]) -> None:
        for one in ended:
            self._tell(attrs.evolve(one, quiesced=True))
