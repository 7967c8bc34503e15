"""The block pool: who owns each physical KV block (R93, invariant 3).

Theory. A block is in exactly one state, and the states always add up to the pool:

* FREE: in the FIFO queue, nobody refers to it;
* HELD: belongs to a request, only our own forward passes touch it;
* LEASED: a peer or a transfer may touch it (published handshake, live handle);
* QUARANTINED: its request is over, but a writer may still be alive.

``allocate`` FREE -> HELD, ``lease`` HELD -> LEASED, ``unlease`` LEASED -> HELD,
``quarantine`` HELD or LEASED -> QUARANTINED, ``free`` HELD -> FREE, ``release`` LEASED
or QUARANTINED -> FREE (the caller has proof that nothing can touch them any more).
So no block is free and inside a lease (D3, D4). Block 0 is the null block: it pads
position-aligned tables, is never allocated, and every operation skips it.

Each operation checks every id before the first change: a refused call changed nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from pdcore.errors import OwnershipError
from pdcore.types import NULL_BLOCK

FREE: Final = 0
HELD: Final = 1
LEASED: Final = 2
QUARANTINED: Final = 3
_NULL: Final = 4

_NAMES: Final = ("free", "held", "leased", "quarantined", "null")


class Ledger(NamedTuple):
    """Blocks per state, the null block left out."""

    free: int
    held: int
    leased: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.held + self.leased + self.quarantined


class BlockPool:
    """``num_blocks`` physical blocks, ids 0 .. num_blocks - 1, of which 0 is null.

    Raises OwnershipError for a double free, an id out of range, a negative count or
    more blocks than are free: all of them bugs of the caller, who checks first.
    """

    __slots__ = ("_counts", "_free", "_state", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks <= 0:
            raise OwnershipError(f"num_blocks must be > 0, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks))
        self._state = bytearray(num_blocks)
        self._state[NULL_BLOCK] = _NULL
        self._counts = [num_blocks - 1, 0, 0, 0, 1]

    @property
    def num_free(self) -> int:
        return self._counts[FREE]

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be allocated: all but the null block."""
        return self.num_blocks - 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take the ``num_blocks`` blocks that have been free longest."""
        if num_blocks < 0 or num_blocks > self._counts[FREE]:
            raise OwnershipError(
                f"cannot allocate {num_blocks} blocks: {self._counts[FREE]} of "
                f"{self.num_usable} are free"
            )
        pop = self._free.popleft
        state = self._state
        ids = [pop() for _ in range(num_blocks)]
        for block in ids:
            state[block] = HELD
        self._counts[FREE] -= num_blocks
        self._counts[HELD] += num_blocks
        return ids

    def free(self, ids: Sequence[int]) -> int:
        """HELD -> FREE; returns how many. A leased block must be released instead."""
        return self._move(ids, (HELD,), FREE, "free")

    def lease(self, ids: Sequence[int]) -> int:
        """HELD -> LEASED: from now on a peer or a transfer handle may touch them."""
        return self._move(ids, (HELD,), LEASED, "lease")

    def unlease(self, ids: Sequence[int]) -> int:
        """LEASED -> HELD: every writer reported Done, the request keeps the blocks."""
        return self._move(ids, (LEASED,), HELD, "unlease")

    def quarantine(self, ids: Sequence[int]) -> int:
        """HELD or LEASED -> QUARANTINED: the request is over, its writers perhaps not."""
        return self._move(ids, (HELD, LEASED), QUARANTINED, "quarantine")

    def release(self, ids: Sequence[int]) -> int:
        """LEASED or QUARANTINED -> FREE, on proof that nothing can touch them."""
        return self._move(ids, (LEASED, QUARANTINED), FREE, "release")

    def state_of(self, block: int) -> int:
        """FREE, HELD, LEASED or QUARANTINED. Raises OwnershipError out of range or for 0."""
        if not 0 < block < self.num_blocks:
            raise OwnershipError(f"block {block} is outside 1..{self.num_blocks - 1}")
        return self._state[block]

    def ledger(self) -> Ledger:
        return Ledger(*self._counts[:4])

    def audit(self) -> Ledger:
        """Recount everything; raises OwnershipError when a counter or the queue lies. In numpy:
        a worker at rest does it once a second, and the next request waits behind it."""
        recount = Ledger(*(self._state.count(state) for state in range(4)))
        queued = np.fromiter(self._free, np.int64, len(self._free))
        is_queued = np.zeros(self.num_blocks, np.bool_)
        is_queued[queued] = True
        if recount != self.ledger() or recount.total != self.num_usable:
            raise OwnershipError(f"block ledger {self.ledger()} but a recount gives {recount}")
        if not len(queued) == np.count_nonzero(is_queued) == recount.free:
            raise OwnershipError(f"free queue holds {len(self._free)}, states say {recount.free}")
        if np.frombuffer(self._state, np.uint8)[queued].any():  # FREE is 0
            raise OwnershipError("a block in the free queue is not free")
        return recount

    def _move(self, ids: Sequence[int], sources: tuple[int, ...], target: int, verb: str) -> int:
        state, size, counts = self._state, self.num_blocks, self._counts
        moved = [block for block in ids if block != NULL_BLOCK]
        before: list[int] = []
        for block in moved:
            if not 0 < block < size or state[block] not in sources:
                for done, old in zip(moved, before, strict=False):
                    state[done] = old
                what = _NAMES[state[block]] if 0 < block < size else "out of range"
                raise OwnershipError(f"cannot {verb} block {block}: it is {what}")
            before.append(state[block])
            state[block] = target
        for source in sources:
            counts[source] -= before.count(source)
        counts[target] += len(moved)
        if target == FREE:
            self._free.extend(moved)
        return len(moved)

    def __repr__(self) -> str:
        return f"BlockPool(blocks={self.num_blocks}, {self.ledger()})"
