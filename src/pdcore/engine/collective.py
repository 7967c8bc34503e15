"""Sums over the ranks of a tensor parallel group: the contract, and ranks as threads.

A group is one object per rank. All ranks make the same calls in the same order; a rank that
cannot go on closes its end, which ends the call that the others wait in. Nothing here knows
what is summed: that the ranks run the same step is checked one level up
(:mod:`pdcore.engine.step_group`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from pdcore.engine.base import GroupLost
from pdcore.engine.shard import TPRank

if TYPE_CHECKING:
    import torch


class Collective(Protocol):
    """One rank's end of a group. Called from one thread."""

    @property
    def rank(self) -> TPRank: ...

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks, in place: the same bits on
        all of them, and x + 0 is x. Shape and dtype are equal on all ranks.

        Raises GroupLost, within the group's timeout, when another rank has closed, died or
        does not come; every later call then raises it too.
        """
        ...

    def close(self) -> None:
        """Leave the group: calls that others wait in, or make later, raise GroupLost.
        Idempotent."""
        ...


class InProcessGroup:
    """All ranks in one process, a thread each. Sums in rank order, so that a run repeats to
    the bit; for tests, and for whoever wants the split without processes."""

    def __init__(self, tp_size: int, timeout_s: float = 60.0) -> None:
        self.tp_size = tp_size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._parts: dict[int, torch.Tensor] = {}
        self._num_done = 0
        self._total: torch.Tensor | None = None
        #: Why no further sum will be finished; empty while the group is whole.
        self._broken = ""

    def join(self, tp_rank: int) -> InProcessCollective:
        """One rank's end. Raises EngineError for a rank outside the group."""
        return InProcessCollective(self, TPRank(self.tp_size, tp_rank))

    def add_up(self, tp_rank: int, values: torch.Tensor) -> None:
        """What :meth:`Collective.all_reduce` promises, for one rank."""
        with self._changed:
            mine = self._num_done
            self._parts[tp_rank] = values
            if len(self._parts) == self.tp_size and not self._broken:
                self._finish()
            elif not self._changed.wait_for(
                lambda: self._broken or self._num_done > mine, self._timeout_s
            ):
                self._break(f"{self.tp_size - len(self._parts)} of its ranks did not come")
            # A sum that was finished before somebody left counts.
            if self._num_done == mine or self._total is None:
                raise GroupLost(
                    f"tp_rank {tp_rank} of {self.tp_size} lost its group, restart all ranks of "
                    f"the instance: {self._broken}"
                )
            # Nobody can finish the next one before this rank has come to it.
            total = self._total
        values.copy_(total)

    def leave(self, tp_rank: int) -> None:
        """One rank will not come again."""
        with self._changed:
            self._break(f"tp_rank {tp_rank} closed it")

    def _finish(self) -> None:
        parts = [self._parts.pop(rank) for rank in range(self.tp_size)]
        kinds = sorted({f"{part.dtype} {tuple(part.shape)}" for part in parts})
        if len(kinds) > 1:
            self._break(f"its ranks are out of step, they add up {' and '.join(kinds)}")
            return
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        self._total = total
        self._num_done += 1
        self._changed.notify_all()

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        self._changed.notify_all()


class InProcessCollective:
    """One thread's end of an :class:`InProcessGroup`."""

    def __init__(self, group: InProcessGroup, rank: TPRank) -> None:
        self.rank = rank
        self._group = group

    def all_reduce(self, values: torch.Tensor) -> None:
        self._group.add_up(self.rank.tp_rank, values)

    def close(self) -> None:
        self._group.leave(self.rank.tp_rank)
