"""Vendors' engines by themselves, for kv_copy: their calls between two processes, without the
checks, sessions and notifications that pdcore's transports have around them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from benchmarks.common import check
from pdcore.kv.plan import Int64Array
from pdcore.transports import registry
from pdcore.transports.engines import Engine
from pdcore.types import Incarnation


def nixl() -> Engine:
    """UCX chooses: from process to process through the kernel, where that is allowed."""
    module = importlib.import_module("pdcore.transports.nixl")
    engine: Engine = module.NixlEngine(Incarnation(os.urandom(16)))
    return engine


def mooncake() -> Engine:
    module = importlib.import_module("pdcore.transports.mooncake")
    engine: Engine = module.MooncakeEngine("127.0.0.1")
    return engine


#: Peer -> its engine, and the transport of pdcore that is made of it.
ENGINES: Final[Mapping[str, tuple[Callable[[], Engine], str]]] = {
    "nixl": (nixl, "nixl"),
    "mooncake tcp": (mooncake, "mooncake"),
}


def why_not(peer: str) -> str | None:
    """None when it runs here."""
    transport = ENGINES[peer][1]
    if transport not in registry.names():
        return f"pdcore has no transport {transport}"
    return registry.presence(transport).reason


def receive(peer: str, size: int, connection: Connection) -> None:
    """Say where we are; then the checksum of what is there, each time somebody asks."""
    engine = ENGINES[peer][0]()
    target = np.zeros(size, np.uint8)
    engine.register(target.ctypes.data, size)
    connection.send((engine.address(), target.ctypes.data))
    while connection.recv():
        connection.send(zlib.crc32(target))
    engine.close()


@contextmanager
def route(
    peer: str, source: memoryview, size: int, rows: Int64Array
) -> Iterator[tuple[Callable[[], float], Callable[[], int]]]:
    """A copy of ``rows`` into another process, in GiB/s until the vendor says that it is there,
    and what is there then (its crc32)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receive, args=(peer, size, theirs), daemon=True)
    child.start()
    engine = ENGINES[peer][0]()
    src = np.frombuffer(source, np.uint8)[:size]
    try:
        engine.register(src.ctypes.data, size)
        check(ours.poll(60), f"{peer}: the receiver does not start")
        address, base = ours.recv()
        number = engine.open(address)
        local, remote, lengths = rows[:, 0] + src.ctypes.data, rows[:, 1] + base, rows[:, 2]
        step = engine.limits.max_batch

        def copy() -> float:
            start = time.perf_counter()
            for at in range(0, len(rows), step):
                part = slice(at, at + step)
                engine.write(number, local[part], remote[part], lengths[part], never)
            return float(lengths.sum()) / (1 << 30) / (time.perf_counter() - start)

        def arrived() -> int:
            ours.send(True)
            checksum: int = ours.recv()
            return checksum

        yield copy, arrived
        engine.shut(number)
        ours.send(False)
        child.join(10)
    finally:
        child.kill()
        child.join()
        engine.close()


def never() -> bool:
    return False
