"""Admission on decode: who gets blocks and a metadata slot now (R69, R70, R95).

Rule: a request is admitted iff for every manager key
``need <= free - ceil(num_reserved / block_size) * requests that hold blocks``
(:class:`pdcore.kv.cache.Budget`).
Who does not fit is skipped, not waited for, so no head blocks others that fit. Skipping
alone would starve a large request while small ones keep coming. So who has been passed
over for ``patience`` ticks gets its blocks earmarked: what is free counts for it first,
and it is admitted once enough of the running ones have finished (invariant 6).

Everything is counted in ticks, which all ranks of a group share, never in seconds: equal
ranks offer equal sets. An offer allocates nothing; it is a vote.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final, Generic, TypeVar

from pdcore.kv.cache import Budget

#: Ticks a request may be passed over before its blocks are earmarked. A tick is about one
#: decode step, so this is some seconds: longer than most bursts, shorter than deadlines.
PATIENCE_TICKS: Final = 128

K = TypeVar("K", bound=Hashable)


def choose_admissions(
    candidates: Iterable[tuple[K, Mapping[str, int], int]],
    budget: Budget,
    limit: int,
    *,
    patience: int = PATIENCE_TICKS,
) -> list[K]:
    """Who to admit now, in order, at most ``limit`` (free metadata slots and seats).

    ``candidates`` are (key, need by manager key, ticks passed over), the oldest first.
    ``budget`` is used up by what is chosen. At most one request is earmarked at a time,
    the oldest impatient one.
    """
    chosen: list[K] = []
    earmarked = False
    for key, need, skipped in candidates:
        if len(chosen) >= limit:
            break
        if budget.try_take(need):
            chosen.append(key)
        elif skipped >= patience and not earmarked:
            budget.earmark(need)
            earmarked = True
    return chosen


class _Entry(Generic[K]):
    __slots__ = ("joined", "need")

    def __init__(self, need: Mapping[str, int], joined: int) -> None:
        self.need = need
        self.joined = joined


class AdmissionLine(Generic[K]):
    """The requests that wait for blocks, in order of arrival.

    ``offer`` costs nothing while nothing fits: the smallest need per manager key is
    remembered, so a full pool is not compared with every waiting request every tick.
    """

    __slots__ = ("_entries", "_floor", "_patience", "_tick")

    def __init__(self, patience: int = PATIENCE_TICKS) -> None:
        self._entries: dict[K, _Entry[K]] = {}
        #: Lower bound of every waiting need, by manager key.
        self._floor: dict[str, int] = {}
        self._patience = patience
        self._tick = 0

    def add(self, key: K, need: Mapping[str, int]) -> None:
        """Join the end of the line with ``need`` blocks per manager key (see
        :meth:`pdcore.kv.cache.KVTables.need`); joining twice keeps the first place."""
        if key in self._entries:
            return
        self._lower_floor(need)
        self._entries[key] = _Entry(need, self._tick)

    def discard(self, key: K) -> None:
        """Admitted, failed or gone."""
        self._entries.pop(key, None)
        if not self._entries:
            self._floor.clear()

    def offer(self, budget: Budget, limit: int) -> list[K]:
        """Once per tick: who could be admitted, all of them together. They stay in line
        until ``discard``."""
        self._tick += 1
        if not self._entries or limit <= 0 or not budget.fits(self._floor):
            return []
        tick = self._tick
        chosen = choose_admissions(
            ((key, e.need, tick - e.joined) for key, e in self._entries.items()),
            budget,
            limit,
            patience=self._patience,
        )
        if not chosen:
            # The bound may be that of somebody who left: make it exact again.
            self._floor.clear()
            for entry in self._entries.values():
                self._lower_floor(entry.need)
        return chosen

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __repr__(self) -> str:
        return f"AdmissionLine(waiting={len(self._entries)}, tick={self._tick})"

    def _lower_floor(self, need: Mapping[str, int]) -> None:
        floor = self._floor
        for name, blocks in need.items():
            floor[name] = blocks if not self._entries else min(floor.get(name, blocks), blocks)
