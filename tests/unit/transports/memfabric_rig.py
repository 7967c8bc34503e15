"""memfabric engines over the vendor's stand-in, in one process."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pdcore.transports import memfabric_vendor, socket_address
from pdcore.transports.memfabric_engine import PAGE_BYTES, MemFabricEngine, MemFabricOptions

VENDORS = Path(__file__).resolve().parents[2] / "vendors"
#: The first and last of each interface.
VERSIONS = (
    "1.0.0",
    "1.0.3",
    "1.0.4",
    "1.0.8",
    "1.1.0",
    "1.1.2",
    "1.1.3",
    "1.1.6",
    "1.2.0",
    "1.3.0",
)


@contextlib.contextmanager
def vendor(version: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in in this version, as an installed package; gone afterwards."""
    name = "mf_adapter" if version == "mf_adapter" else "memfabric_hybrid"
    folder = "mf_adapter" if version == "mf_adapter" else "memfabric"
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_MEMFABRIC_VERSION", "1.0.0" if version == "mf_adapter" else version)
        patch.syspath_prepend(str(VENDORS / folder))
        # Whatever else is installed.
        patch.setattr(memfabric_vendor, "PACKAGES", {name: f"the stand-in of {name}"})
        patch.delitem(sys.modules, name, raising=False)
        module = __import__(name)
        module.FAULTS.reset()
        try:
            yield module
        finally:
            module.end_stores()
            del sys.modules[name]


def why_unmoved() -> str | None:
    """Why the stand-in cannot write to other processes here, or None."""
    if sys.platform != "linux":
        return "process_vm_writev is Linux"
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    if yama.exists() and int(yama.read_text()) > 1 and os.geteuid() != 0:
        return f"{yama} keeps processes out of each other"
    return None


def free_port() -> int:
    return socket_address.free_port("127.0.0.1")


def has_shared_store(version: str) -> bool:
    """One config store for all engines, which somebody starts."""
    return version == "mf_adapter" or version < "1.1.3"


def options(version: str, **more: Any) -> MemFabricOptions:
    """With a store where the version needs one."""
    if has_shared_store(version):
        more = {"store_url": f"tcp://127.0.0.1:{free_port()}", "creates_store": True} | more
    return MemFabricOptions(**{"settle_timeout_s": 0.0} | more)


class Memory:
    """Bytes in pages of the vendor's that are all ours, or ``off`` bytes behind their begin.
    ``size`` is that of the whole pages, or of the bytes where they do not begin there."""

    def __init__(self, size: int, off: int = 0) -> None:
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        self._map = mmap.mmap(-1, pages + off + 2 * PAGE_BYTES)
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % PAGE_BYTES + off
        self.bytes = whole[start : start + size]
        self.base: int = self.bytes.ctypes.data
        self.size = size if off else pages


class Pair:
    """A writer and its target, one range each of ``size`` bytes, registered and open."""

    def __init__(self, version: str, size: int = 1 << 16, **more: Any) -> None:
        self.options = options(version, **more)
        self.sender = MemFabricEngine(self.options)
        self.receiver = MemFabricEngine(self.options)
        self.source, self.target = Memory(size), Memory(size)
        self.source.bytes[:] = np.arange(size, dtype=np.uint32).view(np.uint8)[:size]
        self.sender.register(self.source.base, self.source.size)
        self.receiver.register(self.target.base, self.target.size)
        self.peer = self.sender.open(self.receiver.address())

    def write(self, *pieces: tuple[int, int, int], is_stopping: bool = False) -> None:
        """(local offset, remote offset, bytes) each."""
        rows = np.array(pieces, np.int64).reshape(-1, 3)
        self.sender.write(
            self.peer,
            rows[:, 0] + self.source.base,
            rows[:, 1] + self.target.base,
            rows[:, 2],
            lambda: is_stopping,
        )

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.receiver.close()
