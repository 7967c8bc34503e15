"""What processes hold, and how much of it is too much: descriptors, threads, orphans."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

#: Sockets come and go with kept-alive connections: up to so many more are no leak.
SOCKETS_MARGIN = 24
#: The router keeps as many idle connections to each of its four instances as were ever busy
#: at once, 16 at most in these tests, and a calm start needs few of them. Stopping workers
#: in turn, without a death, takes it from 42 to 70 and no further. A leak of fewer sockets
#: than this in the router is not seen here.
ROUTER_SOCKETS_MARGIN = 4 * 16
#: Pools that start threads on demand: two for a worker's slow calls and one that copies;
#: asyncio's default executor in the others.
WORKER_THREADS_MARGIN = 3
THREADS_MARGIN = (os.cpu_count() or 1) + 4


class Holding(NamedTuple):
    """What one process has: descriptors by kind, and threads."""

    descriptors: Counter[str]
    threads: int

    def as_json(self) -> dict[str, int]:
        """Descriptors, sockets among them, and threads."""
        return {
            "fds": self.descriptors.total(),
            "sockets": self.descriptors["socket"],
            "threads": self.threads,
        }


def descriptors(pid: int) -> Counter[str]:
    """Open descriptors by kind: "socket", "pipe", "segment", "file",
    "anon_inode:[eventpoll]" and the like."""
    found: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            kind = "file" if target.startswith("/") else target
            if "pdcore-kv" in target:
                kind = "segment"
            elif target.startswith(("socket:", "pipe:")):
                kind = target.partition(":")[0]
            found[kind] += 1
    return found


def holding(pid: int) -> Holding:
    """Raises OSError for a process that is gone."""
    return Holding(descriptors(pid), len(os.listdir(f"/proc/{pid}/task")))


def grown(before: Mapping[str, Holding], now: Mapping[str, Holding]) -> list[str]:
    """What is more than it was, in words; parts are compared by name, so that one that was
    started again must hold no more than the former."""
    found = []
    for part, (fds, threads) in now.items():
        for kind, count in fds.items():
            sockets = ROUTER_SOCKETS_MARGIN if part == "router" else SOCKETS_MARGIN
            margin = sockets if kind == "socket" else 0
            if count > before[part].descriptors[kind] + margin:
                was = before[part].descriptors[kind]
                found.append(f"{part}: {count} {kind} descriptors, {was} before")
        margin = WORKER_THREADS_MARGIN if part.endswith(" worker") else THREADS_MARGIN
        if threads > before[part].threads + margin:
            found.append(f"{part}: {threads} threads, {before[part].threads} before")
    return found


def belonging_to(folder: Path) -> set[int]:
    """Processes, orphans too, that were started with this run folder in their environment."""
    mark, found = str(folder).encode(), set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found - {os.getpid()}
