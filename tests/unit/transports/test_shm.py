from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdcore.errors import TransportError
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_checks_process import one_piece, whole_lease
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import Watched, pump, same
from pdcore.transports import shm
from pdcore.transports.registry import create
from pdcore.transports.shm import ShmTransport, why_unavailable
from pdcore.types import Incarnation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is Linux")
US = Incarnation(b"u" * 16)


def test_elsewhere_the_reason_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module imports everywhere; making a transport says why it cannot."""
    assert why_unavailable() is None
    monkeypatch.setattr(shm.sys, "platform", "darwin")
    reason = why_unavailable()
    assert reason is not None
    assert "needs Linux" in reason
    assert "darwin" in reason
    with pytest.raises(TransportError, match="needs Linux"):
        ShmTransport(US)
    with pytest.raises(TransportError, match="does not work on this machine"):
        create("shm", US)


def test_it_imports_where_nothing_of_linux_exists() -> None:
    """Elsewhere the package imports, and doctor says what does not work."""
    program = f"""
import sys; sys.path[:] = {sys.path!r}
import mmap, os, select, socket
sys.modules["fcntl"] = None
sys.platform = "darwin"
for module, names in (
    (os, "memfd_create eventfd eventfd_read eventfd_write pidfd_open posix_fallocate EFD_CLOEXEC"),
    (select, "epoll EPOLLIN EPOLLOUT"),
    (socket, "SOCK_SEQPACKET SO_PEERCRED MSG_CMSG_CLOEXEC"),
    (mmap, "MADV_DONTFORK MAP_POPULATE"),
):
    for name in names.split():
        delattr(module, name)
from pdcore.transports.registry import available
assert available()["loopback"] is None
print(available()["shm"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "shm needs Linux (memfd, pidfd, epoll); this is darwin\n"


def test_the_named_fallback_moves_bytes(tmp_path: Path) -> None:
    """Without memfd: the same transport over files that have no name any more."""
    with Pair(RegistryHarness("shm", named_directory=str(tmp_path))) as pair:
        finish(pair, pair.submit(pair.lease(), pair.batch((5, 7, 60_000))))
        assert same(pair.target.buffer[7:60_007], pair.source.buffer[5:60_005])
        assert os.listdir(tmp_path) == []


def test_a_forked_child_has_no_transport() -> None:
    """Trap: a child that inherits the sockets would hide its parent's death, and one that
    uses or frees the mappings would crash or unmap something else. In the child the
    transport is closed; the parent's goes on."""
    with Pair(RegistryHarness("shm")) as pair:
        fd = pair.receiver.transport.fileno()
        assert fd is not None
        child = os.fork()
        if child == 0:
            closed = pair.receiver.transport.fileno() is None and not pair.receiver.transport.poll()
            try:
                os.fstat(fd)
            except OSError:
                os._exit(0 if closed else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 4096)), notify=b"alive"))
        pump(pair.receiver, until=lambda: pair.receiver.record.payloads == [b"alive"])


def test_death_is_seen_although_a_forked_child_lives(tmp_path: Path) -> None:
    """Trap: pidfd says dead, but a forked child keeps the mapping and the sockets. With
    DONTFORK and close-in-child the death is prompt and is a fence."""
    pipe = str(tmp_path / "until")
    os.mkfifo(pipe)
    harness = RegistryHarness("shm")
    mine = Watched(harness.create())
    peer = harness.peer()
    try:
        local = mine.transport.allocate(16 << 20)
        source = peer.allocate(16 << 20)
        peer.connect(mine.transport.descriptor())
        lease = whole_lease(mine, local.region_id)
        mine.transport.grant(lease)
        peer.request("fork", until=pipe)
        for _ in range(20):
            peer.submit(source, local.region_id, one_piece(1 << 20, 16 << 20), lease, b"n")
        peer.kill()
        pump(mine, until=lambda: bool(mine.record.deaths), timeout_s=5.0)
        assert mine.record.deaths[0].fenced
    finally:
        with open(pipe, "wb"):
            pass
        peer.close()
        mine.transport.close()


def test_no_tracker_process_and_no_name() -> None:
    """Trap: the resource tracker of multiprocessing unlinks live segments. It must not
    even be started."""
    program = f"""
import sys; sys.path[:] = {sys.path!r}
import os
from pdcore.transports.shm import ShmTransport
before = sorted(os.listdir("/dev/shm"))
t = ShmTransport(b"u" * 16)
t.allocate(1 << 16)
assert sorted(os.listdir("/dev/shm")) == before
assert "multiprocessing" not in sys.modules, "multiprocessing was imported"
assert not open(f"/proc/self/task/{{os.getpid()}}/children").read()
t.descriptor()
assert t.close() == []
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_transport_that_is_not_closed_does_not_keep_the_interpreter() -> None:
    program = f"""
import sys; sys.path[:] = {sys.path!r}
from pdcore.testing.transport_harness import Pair, RegistryHarness
pair = Pair(RegistryHarness("shm"), 1 << 24)
pair.submit(pair.lease(), pair.batch((0, 0, 1 << 24)))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
