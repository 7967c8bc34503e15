"""Plans: who writes what where. The lifecycle only counts legs; this module fills them.

A :class:`WriteBatch` is the one form in which bytes are addressed: 2-D descriptors of
(registered region, offset), validated before byte 0, never raw pointers (D58).
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

#: Columns of :attr:`WriteBatch.descriptors`.
LOCAL_OFFSET, REMOTE_OFFSET, ROW_BYTES, ROWS, LOCAL_STRIDE, REMOTE_STRIDE = range(6)

Int64Array = NDArray[np.int64]


@attrs.frozen(eq=False)
class WriteBatch:
    """Copies from one local region into one remote region.

    ``descriptors`` has shape (n, 6), int64, columns as named above: n pieces of
    ``rows`` rows of ``row_bytes`` bytes; ``rows`` = 1 is the plain case (strides unused).
    """

    local_region: int
    remote_region: int
    descriptors: Int64Array

    @property
    def num_bytes(self) -> int:
        d = self.descriptors
        return int((d[:, ROW_BYTES] * d[:, ROWS]).sum())
