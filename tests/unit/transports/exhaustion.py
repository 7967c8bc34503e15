"""A process that has only so many descriptors left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """``count`` more can be opened, and no more, until the end of the context."""
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    # One of them was the listing's own.
    used = {fd for fd in listed if os.path.exists(f"/proc/self/fd/{fd}")}
    free = [fd for fd in range(max(used) + count + 2) if fd not in used]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
