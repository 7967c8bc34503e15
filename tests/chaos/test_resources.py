"""What a machine runs out of: memory for a pool, room in a tmpfs, descriptors.

The limits are those of running processes, set from outside, so that they are reached in the
middle of the load; they are lifted again, and the cluster comes back whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.parts import BLOCKS, LOST, REQUEST_S, SILENT, Load, Parts, expect_only
from tests.scenarios.processes import START_S, Program, family

pytestmark = pytest.mark.slow

MIB = 1 << 20


@contextlib.contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """A running process, and what it starts, has less for a while."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


def decode(*more: str) -> Program:
    pool = ("--set", "server_config.max_restarts=0")
    return Program("serve", "--role", "decode", "--simulated", "--port", "0", *pool, *more)


def address_space(transport: str) -> int:
    """Bytes of it that one with next to no pool has had at most, of leader and worker."""
    program = decode("--transport", transport, "--num-blocks", BLOCKS)
    try:
        program.wait_for("ready")
        pids = family(program.pid)
        assert len(pids) > 1
        peaks = [Path(f"/proc/{pid}/status").read_text().split("VmPeak:")[1] for pid in pids]
    finally:
        program.close()
    return max(int(peak.split()[0]) << 10 for peak in peaks)


#: As many blocks need 800 MB. The limit is half of it above what all the rest needs, so that
#: neither a few threads more nor less decide what it hits.
MANY_BLOCKS, ROOM_BYTES = 400_000, 400 * MIB


@pytest.mark.parametrize(
    ("kind", "transport", "said"),
    [
        (resource.RLIMIT_FSIZE, "shm", "cannot reserve"),
        (resource.RLIMIT_AS, "shm", "cannot map"),
        (resource.RLIMIT_AS, "socket", "cannot map"),
        (resource.RLIMIT_AS, "loopback", "not enough memory"),
    ],
    ids=["file size of shm", "shm", "socket", "loopback"],
)
def test_no_memory_for_the_pool_at_the_start(kind: int, transport: str, said: str) -> None:
    """D34, D60: one sentence that names the size and the remedy, no traceback, status 1; of
    every transport that takes its pool in another way."""
    soft = 16 * MIB if kind == resource.RLIMIT_FSIZE else address_space(transport) + ROOM_BYTES
    program = decode("--transport", transport, "--num-blocks", str(MANY_BLOCKS))
    with limited(program.pid, kind, soft):  # its worker is started long after this
        assert program.process.wait(START_S) == 1
    program.close()
    text = "".join(program.said)
    assert "Traceback" not in text
    wanted = re.search(rf"{said}\D*(\d+) bytes", text)
    assert wanted, text
    assert int(wanted[1]) > 2 * ROOM_BYTES - 64 * MIB
    assert "configure fewer KV blocks" in text


@pytest.mark.parametrize("victim", ["prefill-0", "decode-1"])
def test_no_memory_for_the_pool_of_a_restarted_worker(parts: Parts, victim: str) -> None:
    """D34, D45: the memory that a dead worker had is gone when the next one asks for it: its
    leader says why it is not ready, everybody else serves, and when there is memory again
    the instance comes back."""

    async def starve(load: Load) -> None:
        with limited(parts.pid(victim), resource.RLIMIT_FSIZE, 1024):
            os.kill(parts.pid(f"{victim} worker"), signal.SIGKILL)
            await asyncio.to_thread(parts.expect_unready, victim)
            await load.some_ok(60)
        if parts.programs[victim].process.poll() is not None:
            await asyncio.to_thread(parts.restart, victim)

    outcomes = asyncio.run(Load(parts.router, seed=21).run(starve))
    expect_only(outcomes, LOST)
    parts.expect_whole()


@pytest.mark.parametrize(
    "victim", ["router", "prefill-0", "decode-1", "prefill-1 worker", "decode-0 worker"]
)
def test_descriptors_are_exhausted(parts: Parts, victim: str) -> None:
    """D24, D60: with no descriptor left nothing ends and nobody hangs: what needs one fails
    with a reason or waits, and all of it goes on when there are some again."""

    async def exhaust(load: Load) -> None:
        pid = parts.pid(victim)
        with limited(pid, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{pid}/fd"))):
            await load.some(lambda one: True, 100)
        assert parts.pid(victim) == pid, "it lives"

    outcomes = asyncio.run(Load(parts.router, seed=22, timeout_s=REQUEST_S).run(exhaust))
    expect_only(outcomes, SILENT)
    parts.expect_whole()


def test_peers_that_come_while_descriptors_are_exhausted(parts: Parts) -> None:
    """A prefill worker starts again and must reach decode workers that cannot accept: the
    requests fail with a reason or go elsewhere, and the door is not closed for ever."""

    async def exhaust(load: Load) -> None:
        pids = [parts.pid("decode-0 worker"), parts.pid("decode-1 worker")]
        with contextlib.ExitStack() as limits:
            for pid in pids:
                fds = len(os.listdir(f"/proc/{pid}/fd"))
                limits.enter_context(limited(pid, resource.RLIMIT_NOFILE, fds - 1))
            os.kill(parts.pid("prefill-0 worker"), signal.SIGKILL)
            await asyncio.to_thread(parts.expect_unready, "prefill-0")
            await load.some(lambda one: True, 60)
        assert pids == [parts.pid("decode-0 worker"), parts.pid("decode-1 worker")]

    outcomes = asyncio.run(Load(parts.router, seed=23, timeout_s=REQUEST_S).run(exhaust))
    expect_only(outcomes, SILENT)
    parts.expect_whole()


FULL_TMPFS = """
import json, os, sys
from pdcore.errors import TransportError
from pdcore.transports.shm import ShmTransport
from pdcore.types import Incarnation

folder = sys.argv[1]
lives = Incarnation(b"s" * 16), Incarnation(b"r" * 16)
sender, receiver = (ShmTransport(life, named_directory=folder) for life in lives)
small = receiver.allocate(64 << 10)
try:
    receiver.allocate(16 << 20)
    said = ""
except TransportError as error:
    said = str(error)
small.buffer[:] = b"x" * len(small.buffer)
session = sender.connect(receiver.descriptor())
left = os.listdir(folder)
again = receiver.allocate(64 << 10)
again.buffer[-1] = 1
print(json.dumps({"said": said, "left": left, "closed": sender.close() + receiver.close()}))
"""


def run_in_full_tmpfs(folder: Path) -> tuple[dict[str, object], bool]:
    """In a mount of 1 MiB of our own, where user namespaces are allowed (True); else under a
    limit of the size of files."""
    mount = f'mount -t tmpfs -o size=1m tmpfs {folder} && exec "$@"'
    run = [sys.executable, "-c", FULL_TMPFS, str(folder)]
    probe = subprocess.run(["unshare", "-rm", "sh", "-c", mount, "sh", "true"], capture_output=True)
    if is_mounted := probe.returncode == 0:
        run = ["unshare", "-rm", "sh", "-c", mount, "sh", *run]
    else:
        run = ["sh", "-c", 'ulimit -f 1024; exec "$@"', "sh", *run]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), is_mounted


def test_a_full_tmpfs_under_the_named_fallback(tmp_path: Path) -> None:
    """D34: containers give /dev/shm 64 MiB: a pool that does not fit is an error now, never
    a SIGBUS at the first touch; nothing of it is left, and what there was still works."""
    found, is_mounted = run_in_full_tmpfs(tmp_path)
    said = str(found["said"])
    assert "cannot reserve" in said
    assert str(tmp_path) in said
    if is_mounted:
        assert "is too small" in said
    assert found["left"] == []
    assert found["closed"] == []
