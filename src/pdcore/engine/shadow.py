"""The KV cache of the simulated runner: words that prove what was computed before them.

The row of a position holds, for every entry and head, the prefix sum ``g`` of a hash over
(token, position), then token and position, each plus a constant of that entry, head and
word; see :mod:`pdcore.engine.simulated` for what that is good for.

Whether rows are right follows from their bytes alone, so rows that were found right once and
have not changed are not hashed again: :meth:`ShadowCache.holds` compares, and anything else
is checked word by word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdcore.engine.paging import Int64Array
from pdcore.engine.sampling import mix64
from pdcore.types import Batch

Words = NDArray[np.uint64]

WORD_BYTES: Final = 8
START: Final = 0x5EED0FA11C0FFEE5
GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)
#: Fewer new tokens than this are summed one by one: an array costs as much as so many.
_FEW: Final = 48
#: Sequences whose rows are remembered, the latest that ran.
_MAX_KNOWN: Final = 64


def hash_token(token: int, position: int) -> int:
    """What one token adds to ``g``."""
    return mix64(token + (position + 1) * GOLDEN)


def prefix_sum(tokens: Sequence[int], start: int = START, first: int = 0) -> int:
    """``g`` after ``tokens``, which stand at positions ``first`` and after."""
    if not len(tokens):
        return start
    return _sums(tokens, start, first)[-1]


def _sums(tokens: Sequence[int], start: int, first: int) -> list[int]:
    """``g`` after each of the tokens."""
    if len(tokens) < _FEW:
        sums = []
        for position, token in enumerate(tokens, first):
            # hash_token, without two calls for each token of every step.
            mixed = (token + (position + 1) * GOLDEN) & _MASK
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
            start = (start + (mixed ^ (mixed >> 31))) & _MASK
            sums.append(start)
        return sums
    positions = np.arange(first, first + len(tokens), dtype=np.uint64)
    steps = _hash(np.array(tokens, np.uint64), positions)
    found: list[int] = (np.cumsum(steps, dtype=np.uint64) + np.array([start], np.uint64)).tolist()
    return found


def _mix(values: Words) -> Words:
    """splitmix64's finaliser over an array (wraps without a warning, unlike scalars)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hash(tokens: Words, positions: Words) -> Words:
    return _mix(tokens + (positions + np.uint64(1)) * np.uint64(GOLDEN))


class ShadowCache:
    """The rows of every (block, entry, offset), and what they must be.

    A *slot* is the row of a position's entry 0; entry e is ``e * block_size`` rows further.
    ``heads`` of ``all_heads`` lie here, from ``first_head`` on; each has ``words`` words.
    """

    def __init__(
        self,
        buffer: memoryview,
        *,
        entries: int,
        block_size: int,
        words: int,
        heads: int,
        first_head: int,
        all_heads: int,
    ) -> None:
        self._shape = entries, heads, words
        self._rows: Words = np.frombuffer(buffer, np.uint64).reshape(-1, heads * words)
        self._spread: Int64Array = np.arange(entries, dtype=np.int64) * block_size
        # A different constant for each word of each entry and head of the whole group, so
        # that KV of the wrong layer or head is as wrong as KV of the wrong position.
        counter = np.arange(entries * all_heads * words, dtype=np.uint64)
        salt = _mix(counter * np.uint64(GOLDEN) + np.uint64(1)).reshape(entries, all_heads, words)
        self._salt: Words = salt[:, first_head : first_head + heads]
        self._first_salt = int(self._salt[0, 0, 0])
        self._row_bytes = entries * heads * words * WORD_BYTES
        #: Sequence id -> the rows of its first positions, once they were found right.
        self._known: dict[int, bytes] = {}

    def append(self, batch: Batch, slots: Sequence[Int64Array], *, learn: bool) -> list[int]:
        """Write the rows of the new tokens; returns ``g`` at the end of each sequence.

        ``slots``: of all positions of each sequence. ``learn``: the rows before the new ones
        were found right in this step, so all of them are right now."""
        sums: list[int] = []
        tags: list[int] = []
        ends: list[int] = []
        new: list[Int64Array] = []
        spans = list(batch.spans())
        for i, start, end in spans:
            tokens, computed, own = (
                batch.input_ids[start:end],
                batch.num_computed_tokens[i],
                slots[i],
            )
            before = self._prefix(own[computed - 1]) if computed else START
            sums += _sums(tokens, before, computed)
            tags += [token | (position << 32) for position, token in enumerate(tokens, computed)]
            new.append(own[computed:])
            ends.append(sums[-1])
        content = self._content(np.array((sums, tags), np.uint64))
        rows = content.reshape(len(sums), len(self._spread), -1)
        self._rows[np.concatenate(new)[:, None] + self._spread] = rows
        if learn:
            written, width = content.tobytes(), self._row_bytes
            for i, start, end in spans:
                known = self._known.get(batch.seq_ids[i], b"")
                known = known[: batch.num_computed_tokens[i] * width]
                self._learn(batch.seq_ids[i], known + written[start * width : end * width])
        return ends

    def holds(self, seq_ids: Sequence[int], slots: Sequence[Int64Array]) -> bool:
        """Whether these slots, from position 0 on, have what was found right before."""
        known: list[bytes] = []
        for seq_id, own in zip(seq_ids, slots, strict=True):
            size = len(own) * self._row_bytes
            rows = self._known.get(seq_id, b"")
            if len(rows) < size:
                return False
            known.append(rows[:size])
        return self._bytes_of(np.concatenate(slots)) == b"".join(known)

    def learn(self, seq_id: int, slots: Int64Array) -> None:
        """What these slots have, from position 0 on, was found right."""
        self._learn(seq_id, self._bytes_of(slots))

    def wrong(
        self, slots: Int64Array, previous: Int64Array, positions: Words
    ) -> tuple[int, int] | None:
        """(index, entry) of the first position that is not what was computed; None if all are.

        ``previous[i]`` is the slot of the position before; unused for position 0.
        """
        found = self._rows[slots[:, None] + self._spread].reshape(len(slots), *self._shape)
        g = found[:, 0, 0, 0] - self._salt[0, 0, 0]
        tokens = (found[:, 0, 0, 1] - self._salt[0, 0, 1]) & _LOW_HALF
        same = found == self._content(np.array((g, tokens | (positions << np.uint64(32)))))
        column: Words = self._rows[previous, 0] - self._salt[0, 0, 0:1]
        before = np.where(positions == 0, np.uint64(START), column)
        follows = g - before == _hash(tokens, positions)
        if same.all() and follows.all():
            return None
        same = same.all(axis=(2, 3))
        same[:, 0] &= follows
        index = int(np.argmin(same.all(axis=1)))
        return index, int(np.argmin(same[index]))

    def _prefix(self, slot: int) -> int:
        """``g`` as entry 0 holds it."""
        return (int(self._rows[slot, 0]) - self._first_salt) & _MASK

    def _bytes_of(self, slots: Int64Array) -> bytes:
        """The rows of these positions, one position after the other."""
        rows: Words = self._rows[slots[:, None] + self._spread]
        return rows.tobytes()

    def _content(self, low: Words) -> Words:
        """Words of positions, shape (n, entries, heads, words); ``low``: ``g``, and token and
        position in one word, shape (2, n)."""
        more = range(2, self._shape[2])
        if more:
            low = np.stack((low[0], low[1], *(_mix(low[0] + np.uint64(i)) for i in more)))
        content: Words = low.T[:, None, None, :] + self._salt
        return content

    def _learn(self, seq_id: int, rows: bytes) -> None:
        self._known.pop(seq_id, None)
        self._known[seq_id] = rows
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
