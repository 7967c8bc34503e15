"""Moving the bytes of a checked plan, a bounded step at a time.

A step copies at most about one chunk, so that whoever drives the steps can look at a
cancel flag, or serve another peer, in between. numpy's copies release the GIL; slices
of memoryview and mmap do not (measured), so nothing here uses those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from pdcore.kv.plan import (
    LOCAL_OFFSET,
    LOCAL_STRIDE,
    REMOTE_OFFSET,
    REMOTE_STRIDE,
    ROW_BYTES,
    ROWS,
    Int64Array,
)
from pdcore.transports.check import CopyPlan

ByteArray = NDArray[np.uint8]

#: About 30-100 us of copying: the longest a cancel or another peer has to wait.
CHUNK_BYTES = 1 << 20
#: Below this, preparing a tighter loop takes longer than it saves.
_FEW = 64


def copy_steps(
    plan: CopyPlan,
    local: Mapping[int, ByteArray],
    remote: Mapping[int, ByteArray],
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[int]:
    """Each ``next`` copies up to ``chunk_bytes`` (one row at least, rows longer than
    that are cut) and yields the bytes it copied."""
    for pair in plan.pairs:
        src, dst = local[pair.local_region], remote[pair.remote_region]
        yield from copy_pieces(pair.pieces, src, dst, chunk_bytes)


def copy_pieces(
    pieces: Int64Array, src: ByteArray, dst: ByteArray, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[int]:
    """The steps of one pair's ``pieces``, as :class:`PairCopy` has them."""
    plain = pieces[:, ROWS] == 1
    if np.count_nonzero(plain) < len(plain):
        yield from _strided(pieces[~plain], src, dst, chunk_bytes)
        pieces = pieces[plain]
    if len(pieces) <= _FEW:
        yield from _few(pieces, src, dst, chunk_bytes)
    else:
        yield from _runs(pieces, src, dst, chunk_bytes)


def written_byte(plan: CopyPlan, index: int) -> tuple[int, int]:
    """Remote region and offset of byte ``index`` (modulo) of all that a plan writes, counted
    piece by piece, for who wants to damage one. Raises ZeroDivisionError for an empty plan."""
    sizes = [pair.pieces[:, ROW_BYTES] * pair.pieces[:, ROWS] for pair in plan.pairs]
    index %= sum(int(size.sum()) for size in sizes)
    for pair, size in zip(plan.pairs, sizes, strict=True):
        ends = np.cumsum(size)
        if index < ends[-1]:
            at = int(np.searchsorted(ends, index, "right"))
            row, inside = divmod(index - int(ends[at] - size[at]), int(pair.pieces[at, ROW_BYTES]))
            start, step = pair.pieces[at, REMOTE_OFFSET], pair.pieces[at, REMOTE_STRIDE]
            return pair.remote_region, int(start + row * step) + inside
        index -= int(ends[-1])
    raise AssertionError("a byte that no pair has")


def _few(pieces: Int64Array, src: ByteArray, dst: ByteArray, chunk_bytes: int) -> Iterator[int]:
    copied = 0
    for lo, ro, width, _, _, _ in pieces.tolist():
        while width:
            take = min(width, chunk_bytes - copied)
            dst[ro : ro + take] = src[lo : lo + take]
            lo, ro, width, copied = lo + take, ro + take, width - take, copied + take
            if copied >= chunk_bytes:
                yield copied
                copied = 0
    if copied:
        yield copied


def _runs(pieces: Int64Array, src: ByteArray, dst: ByteArray, chunk_bytes: int) -> Iterator[int]:
    widths = pieces[:, ROW_BYTES]
    middle = len(widths) // 2
    width = int(np.partition(widths, middle)[middle])
    alike = widths == width
    # Most blocks have the usual size; a few neighbours were joined into longer runs.
    if width <= chunk_bytes and 2 * np.count_nonzero(alike) > len(widths):
        mixed = np.count_nonzero(alike) < len(widths)
        usual = pieces[alike] if mixed else pieces
        source = _grid(src, usual[:, LOCAL_OFFSET], width)
        target = _grid(dst, usual[:, REMOTE_OFFSET], width)
        if source is not None and target is not None:
            yield from _blocks(*source, *target, chunk_bytes // width, width)
            pieces = pieces[~alike] if mixed else pieces[:0]
    if len(pieces):
        yield from _slices(pieces, src, dst, chunk_bytes)


def _grid(array: ByteArray, offsets: Int64Array, width: int) -> tuple[ByteArray, list[int]] | None:
    """``array`` as rows of ``width`` bytes and the row of each offset, or None when the
    offsets do not lie on one such grid."""
    phase = int(offsets[0]) % width
    from_phase = offsets - phase if phase else offsets
    index = from_phase // width
    if np.count_nonzero(index * width != from_phase):
        return None
    rows = (len(array) - phase) // width
    return array[phase : phase + rows * width].reshape(rows, width), index.tolist()


def _blocks(
    src: ByteArray,
    from_rows: list[int],
    dst: ByteArray,
    to_rows: list[int],
    per_step: int,
    width: int,
) -> Iterator[int]:
    # The hot loop: two row views and one copy a block, about 0.3 us above the memcpy.
    for at in range(0, len(from_rows), per_step):
        chosen = from_rows[at : at + per_step]
        for i, j in zip(chosen, to_rows[at : at + per_step], strict=True):
            dst[j] = src[i]
        yield len(chosen) * width


def _slices(pieces: Int64Array, src: ByteArray, dst: ByteArray, chunk_bytes: int) -> Iterator[int]:
    start, into, width = cut_pieces(pieces, chunk_bytes)
    done = np.cumsum(width)
    # Steps end where the next row would exceed the chunk; a row is never longer than one.
    step_of = (done - 1) // chunk_bytes
    ends = [*(np.flatnonzero(np.diff(step_of)) + 1).tolist(), len(width)]
    bounds = start.tolist(), (start + width).tolist(), into.tolist(), (into + width).tolist()
    at, copied = 0, 0
    for end in ends:
        for a, b, c, d in zip(*(column[at:end] for column in bounds), strict=True):
            dst[c:d] = src[a:b]
        yield int(done[end - 1]) - copied
        at, copied = end, int(done[end - 1])


def few_rows(pieces: Int64Array, count: int) -> Iterator[Int64Array]:
    """The same rows, ``count`` at a time, so that each part can be expanded: a long prompt
    between ranks of different TP sizes has millions, and everybody would wait for all (D23)."""
    parts = -(-pieces[:, ROWS] // count)
    if parts.max(initial=0) > 1:
        index = np.repeat(np.arange(len(parts)), parts)
        skip = (np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)) * count
        pieces = pieces[index]
        pieces[:, LOCAL_OFFSET] += skip * pieces[:, LOCAL_STRIDE]
        pieces[:, REMOTE_OFFSET] += skip * pieces[:, REMOTE_STRIDE]
        pieces[:, ROWS] = np.minimum(pieces[:, ROWS] - skip, count)
    done = np.cumsum(pieces[:, ROWS])
    at = 0
    while at < len(done):
        before = int(done[at - 1]) if at else 0
        end = int(np.searchsorted(done, before + count, side="right"))
        yield pieces[at:end]
        at = end


def cut_pieces(pieces: Int64Array, chunk_bytes: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Local offset, remote offset and bytes of rows no longer than a chunk; ``pieces`` (n, 6)
    of one row each."""
    width = pieces[:, ROW_BYTES]
    parts = -(-width // chunk_bytes)
    if parts.max() == 1:
        return pieces[:, LOCAL_OFFSET], pieces[:, REMOTE_OFFSET], width
    index = np.repeat(np.arange(len(parts)), parts)
    skip = (np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)) * chunk_bytes
    left = np.minimum(width[index] - skip, chunk_bytes)
    return pieces[index, LOCAL_OFFSET] + skip, pieces[index, REMOTE_OFFSET] + skip, left


def _strided(pieces: Int64Array, src: ByteArray, dst: ByteArray, chunk_bytes: int) -> Iterator[int]:
    copied = 0
    for lo, ro, width, rows, lstride, rstride in pieces.tolist():
        per_step = max(1, chunk_bytes // width)
        for at in range(0, rows, per_step):
            n = min(per_step, rows - at)
            shape = (n, width)
            into = np.ndarray(shape, np.uint8, dst, ro + at * rstride, (rstride, 1))
            into[...] = np.ndarray(shape, np.uint8, src, lo + at * lstride, (lstride, 1))
            copied += n * width
            if copied >= chunk_bytes:
                yield copied
                copied = 0
    if copied:
        yield copied
