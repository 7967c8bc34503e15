"""The block pool: who owns each physical KV block (R93, invariant 3).

Theory. A block is in exactly one state, and the states always add up to the pool:

* FREE: nobody refers to it; kept in runs of neighbours (:mod:`pdcore.kv.runs`);
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

from collections.abc import Sequence
from typing import Final, NamedTuple

from pdcore.errors import OwnershipError
from pdcore.kv.runs import FreeRuns
from pdcore.types import NULL_BLOCK

FREE: Final = 0
HELD: Final = 1
LEASED: Final = 2
QUARANTINED: Final = 3
_NULL: Final = 4
_HELD_BYTE: Final = bytes([HELD])

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
        self._free = FreeRuns(num_blocks)
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

    def allocate(
        self, num_blocks: int, after: int = NULL_BLOCK, *, is_scattered: bool = False
    ) -> list[int]:
        """Take ``num_blocks`` blocks that lie together as far as possible, right behind block
        ``after`` (which the caller holds) if that place is free. ``is_scattered``: one for each
        of so many sequences that decode on. Nobody will send these, so they fill the gaps and
        leave the long runs to prompts."""
        if num_blocks < 0 or num_blocks > self._counts[FREE]:
            raise OwnershipError(
                f"cannot allocate {num_blocks} blocks: {self._counts[FREE]} of "
                f"{self.num_usable} are free"
            )
        state = self._state
        ids: list[int] = []
        if is_scattered:
            ids = self._free.scatter(num_blocks)
            for block in ids:
                state[block] = HELD
        else:
            for run in self._free.take(num_blocks, after):
                state[run.start : run.stop] = _HELD_BYTE * len(run)
                ids.extend(run)
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

    def those_in(self, state: int, ids: Sequence[int]) -> list[int]:
        """The blocks of ``ids``, all of this pool, that are in this state (not for null)."""
        states = self._state
        return [block for block in ids if states[block] == state]

    def ledger(self) -> Ledger:
        return Ledger(*self._counts[:4])

    def audit(self) -> Ledger:
        """Recount everything; raises OwnershipError when a counter or the free runs lie. By runs:
        a worker at rest does it once a second, and the next request waits behind it."""
        recount = Ledger(*(self._state.count(state) for state in range(4)))
        if recount != self.ledger() or recount.total != self.num_usable:
            raise OwnershipError(f"block ledger {self.ledger()} but a recount gives {recount}")
        self._free.audit()
        num_listed = 0
        for run in self._free:
            num_listed += len(run)
            if self._state.count(FREE, run.start, run.stop) != len(run):
                raise OwnershipError(f"a block of the free run {run} is not free")
        if num_listed != recount.free:
            raise OwnershipError(f"free runs hold {num_listed}, states say {recount.free}")
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
            self._free.give(moved)
        return len(moved)

    def __repr__(self) -> str:
        return f"BlockPool(blocks={self.num_blocks}, {self.ledger()})"
