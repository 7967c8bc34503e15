"""Free blocks as runs of neighbours, so that a prompt lies together and moves in few pieces.

Blocks that are consecutive at both ends are one descriptor (R79), so what an allocator gives out
decides how many there are. A free queue gives blocks in the order in which they came back, which
after some hours is no order at all: a descriptor for every block. Here a request gets

* the blocks right behind its last one, where they are free: chunks of a prompt go on;
* else the shortest run found that is long enough (best fit by size class; of a class the one
  that has been free longest);
* else the longest runs: as few of them as possible.

Blocks that nobody will send, the one more that a decoding sequence needs every so many steps, fill
the holes: runs of one block first, then the shortest. Long runs are left to prompts.

Runs are kept at their two ends, as boundary tags, and by size class (powers of two): taking and
giving back a run costs a few dictionary operations whatever its length and whatever is free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from pdcore.errors import OwnershipError
from pdcore.types import NULL_BLOCK

#: Runs of one size class that are looked at for the shortest that fits.
LOOKED_AT: Final = 8


class FreeRuns:
    """Which of the blocks 1 .. ``num_blocks`` - 1 are free; all of them at first. It trusts its
    caller, :class:`pdcore.kv.blocks.BlockPool`: it gives back only what it has taken, and never
    takes more than is there."""

    __slots__ = ("_classes", "_filled", "_holes", "_length")

    def __init__(self, num_blocks: int) -> None:
        #: Length of a run, at its first and at its last block; elsewhere 0.
        self._length = [0] * (num_blocks + 1)
        #: Runs of one block.
        self._holes: dict[int, None] = {}
        #: Size class -> first blocks of its runs, oldest first; class c holds 2^c .. 2^(c+1) - 1.
        #: Class 0 stays empty: those are the holes.
        self._classes: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(num_blocks.bit_length() + 1)
        ]
        #: Bit c: class c holds a run.
        self._filled = 0
        if num_blocks > 1:
            self._add(1, num_blocks - 1)

    def take(self, count: int, after: int = NULL_BLOCK) -> list[range]:
        """``count`` blocks in as few runs as there can be cheaply; the first one follows block
        ``after``, which the caller holds, if that place is free."""
        found: list[range] = []
        if after != NULL_BLOCK and count and (length := self._length[after + 1]):
            found.append(self._cut(after + 1, min(count, length)))
            count -= len(found[0])
        while count:
            if self._holes and (count == 1 or not self._filled):
                found.append(self._pop_hole())
            else:
                start = self._fitting(count)
                found.append(self._cut(start, min(count, self._length[start])))
            count -= len(found[-1])
        return found

    def scatter(self, count: int) -> list[int]:
        """``count`` blocks that need not lie together: from holes, then from the shortest runs."""
        holes, length = self._holes, self._length
        # Not by iterating: that would pass by what was taken before, again and again.
        found = [holes.popitem()[0] for _ in range(min(count, len(holes)))]
        for block in found:
            length[block] = 0
        while len(found) < count:
            lowest = (self._filled & -self._filled).bit_length() - 1
            start = next(iter(self._classes[lowest]))
            found.extend(self._cut(start, min(count - len(found), length[start])))
        return found

    def give(self, blocks: Sequence[int]) -> None:
        """These are free again. Quickest where neighbours stand together, in ascending order."""
        first, count = 0, len(blocks)
        if count and blocks == list(range(blocks[0], blocks[0] + count)):
            self._join(blocks[0], count)
            return
        while first < count:
            start = end = blocks[first]
            first += 1
            while first < count and blocks[first] == end + 1:
                end += 1
                first += 1
            self._join(start, end + 1 - start)

    def __iter__(self) -> Iterator[range]:
        """All runs, in no order."""
        for start in self._holes:
            yield range(start, start + 1)
        for starts in self._classes:
            for start in starts:
                yield range(start, start + self._length[start])

    def audit(self) -> None:
        """Raises OwnershipError when tags, classes and runs do not fit together."""
        runs = sorted((run.start, len(run)) for run in self)
        ends: list[int] = [0] * len(self._length)
        last = 0
        for start, length in runs:
            if length < 1 or start <= last:
                raise OwnershipError(f"free run {start}+{length} touches the one before it")
            ends[start] = ends[start + length - 1] = length
            last = start + length
            place = self._holes if length == 1 else self._classes[length.bit_length() - 1]
            if start not in place:
                raise OwnershipError(f"free run {start}+{length} is in another size class")
        filled = sum(1 << c for c, starts in enumerate(self._classes) if starts)
        if ends != self._length or filled != self._filled:
            raise OwnershipError("free runs are tagged where there are none")

    # --- inside -------------------------------------------------------------------------

    def _fitting(self, count: int) -> int:
        """First block of the run to take ``count`` blocks from; a shorter one where none is long
        enough. There is a run that is no hole."""
        own = count.bit_length() - 1
        fits = [s for s in self._oldest(own) if self._length[s] >= count]
        if fits:
            return min(fits, key=self._length.__getitem__)
        longer = self._filled >> (own + 1)
        if longer:
            lowest = own + (longer & -longer).bit_length()
            return next(iter(self._classes[lowest]))
        return max(self._oldest(self._filled.bit_length() - 1), key=self._length.__getitem__)

    def _oldest(self, size_class: int) -> list[int]:
        return list(islice(self._classes[size_class], LOOKED_AT))

    def _pop_hole(self) -> range:
        block, _ = self._holes.popitem()
        self._length[block] = 0
        return range(block, block + 1)

    def _cut(self, start: int, count: int) -> range:
        """Take the first ``count`` blocks of the run that begins here."""
        length = self._length[start]
        self._remove(start, length)
        if count < length:
            self._add(start + count, length - count)
        return range(start, start + count)

    def _join(self, start: int, count: int) -> None:
        """Free again, together with the runs that it touches."""
        before, behind = self._length[start - 1], self._length[start + count]
        if before:
            self._remove(start - before, before)
        if behind:
            self._remove(start + count, behind)
        self._add(start - before, before + count + behind)

    def _add(self, start: int, count: int) -> None:
        self._length[start] = self._length[start + count - 1] = count
        if count == 1:
            self._holes[start] = None
        else:
            size_class = count.bit_length() - 1
            self._classes[size_class][start] = None
            self._filled |= 1 << size_class

    def _remove(self, start: int, count: int) -> None:
        self._length[start] = self._length[start + count - 1] = 0
        if count == 1:
            del self._holes[start]
            return
        size_class = count.bit_length() - 1
        starts = self._classes[size_class]
        del starts[start]
        if not starts:
            self._filled &= ~(1 << size_class)

    def __repr__(self) -> str:
        return f"FreeRuns({sorted((run.start, len(run)) for run in self)})"
