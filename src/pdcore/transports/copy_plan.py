"""What a submit leaves to copy, and the usual submit of one piece, told without arrays.

The blocks of most requests are one run on both sides, hence one piece under a lease of one
range. All checks of :mod:`pdcore.transports.check` on it are a few comparisons, which as
arrays of one element take ten times as long.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.transports.base import RemoteLease


@attrs.frozen(eq=False)
class PairCopy:
    """Checked copies from one local into one remote region: ``pieces`` (n, 6) int64 as
    in :class:`WriteBatch`, none empty, contiguous ones with ``rows`` = 1."""

    local_region: int
    remote_region: int
    pieces: Int64Array


@attrs.frozen(eq=False)
class CopyPlan:
    """All copies of one submit; remote ranges are pairwise disjoint."""

    pairs: tuple[PairCopy, ...]
    num_bytes: int


def plan_one(
    batch: WriteBatch,
    local_sizes: Mapping[int, int],
    remote_sizes: Mapping[int, int],
    lease: RemoteLease,
) -> CopyPlan | None:
    """The plan of one contiguous piece inside both regions and the only range of its lease.
    None: it is something else, or something is wrong, which
    :func:`~pdcore.transports.check.plan_copies` tells."""
    d, ranges = batch.descriptors, lease.ranges.get(batch.remote_region)
    if ranges is None or d.shape != (1, 6) or ranges.shape != (1, 2):
        return None
    if d.dtype != np.int64 or ranges.dtype != np.int64:
        return None
    local, remote, width, rows, _, _ = d[0].tolist()
    first, end = ranges[0].tolist()
    if rows != 1 or width <= 0 or local < 0:
        return None
    if local + width > local_sizes.get(batch.local_region, 0):
        return None
    if not 0 <= first <= remote < remote + width <= end <= remote_sizes.get(batch.remote_region, 0):
        return None
    return CopyPlan((PairCopy(batch.local_region, batch.remote_region, d.copy()),), width)
