from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
from pathlib import Path

import pytest

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.process_proof import (
    ProcessKey,
    boot_id,
    open_pidfd,
    start_ticks,
    this_process,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux")


def sleeper() -> subprocess.Popen[bytes]:
    """A child that lives until its stdin ends."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.kill()
    child.stdin.close()
    child.wait(10)


def test_a_process_is_its_pid_and_start() -> None:
    mine = this_process()
    assert mine == ProcessKey(os.getpid(), start_ticks(os.getpid()))
    child = sleeper()
    try:
        assert start_ticks(child.pid) >= mine.start_ticks
    finally:
        end(child)
    with pytest.raises(PeerGone):
        start_ticks(child.pid)


def test_a_pidfd_is_readable_after_death_only() -> None:
    child = sleeper()
    pidfd = open_pidfd(ProcessKey(child.pid, start_ticks(child.pid)))
    try:
        assert not select.select([pidfd], [], [], 0)[0]
        child.kill()
        assert select.select([pidfd], [], [], 10)[0]
    finally:
        os.close(pidfd)
        end(child)


def test_a_reused_pid_is_another_process() -> None:
    """Rule 2, "dead and fenced": a pid alone proves nothing."""
    child = sleeper()
    try:
        with pytest.raises(PeerGone, match="another process"):
            open_pidfd(ProcessKey(child.pid, start_ticks(child.pid) - 1))
    finally:
        end(child)
    with pytest.raises(PeerGone):
        open_pidfd(ProcessKey(child.pid, 1))


def test_a_pid_of_another_namespace_is_refused() -> None:
    with pytest.raises(TransportError, match="namespace"):
        open_pidfd(ProcessKey(0, 1))


def test_a_number_that_is_no_pid_is_no_process() -> None:
    """D58: a peer says which process it is in 32 bits, and half of them are no pid: an
    OverflowError would end the thread of whoever looks, with all its connections."""
    for pid in (1 << 31, (1 << 32) - 1):
        with pytest.raises(PeerGone, match="does not exist"):
            open_pidfd(ProcessKey(pid, 1))


def test_without_a_descriptor_left_nothing_is_known_and_nothing_stays_open() -> None:
    """G7: the pidfd was the last descriptor; what /proc says cannot be read any more."""
    mine = this_process()
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for room in (0, 1):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + room, hard))
            with pytest.raises(TransportError, match="Too many open files") as caught:
                open_pidfd(mine)
            assert not isinstance(caught.value, PeerGone)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    again = os.dup(0)
    os.close(again)
    assert again == free


def test_a_command_with_spaces_and_parentheses() -> None:
    program = "import sys; open('/proc/self/comm', 'w').write('a) 1 (b'); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        mine = this_process().start_ticks
        while b"a) 1 (b" not in Path(f"/proc/{child.pid}/stat").read_bytes():
            assert child.poll() is None
        assert start_ticks(child.pid) >= mine
    finally:
        assert child.stdout is not None
        child.stdout.close()
        end(child)


def test_boot_id() -> None:
    assert len(boot_id()) == 16
    assert boot_id() == boot_id()
