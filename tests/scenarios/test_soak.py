"""Load on real processes: every answer right, nothing grows, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcore.server.client import HttpClient, Origin
from tests.scenarios.soak_client import load


class Cluster:
    """``pdcore up --simulated`` in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdcore.cli", "up", "--simulated", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.said: list[str] = []
        for line in self.process.stdout:
            self.said.append(line)
            found = re.match(r"ready: http://([\d.]+):(\d+)", line)
            if found:
                self.origin = Origin(found[1], int(found[2]))
                return
        raise AssertionError("the cluster did not become ready:\n" + "".join(self.said))

    def pids(self) -> list[int]:
        """This cluster's processes, from the kernel."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            todo.extend(children.get(pid, ()))
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    running = Cluster()
    yield running
    running.close()


def usage(pids: list[int]) -> dict[int, tuple[int, int]]:
    """pid -> (open descriptors, resident MiB without what is shared)."""
    found = {}
    for pid in pids:
        statm = Path(f"/proc/{pid}/statm").read_text().split()
        resident = (int(statm[1]) - int(statm[2])) * os.sysconf("SC_PAGE_SIZE") >> 20
        found[pid] = (len(os.listdir(f"/proc/{pid}/fd")), resident)
    return found


async def get(origin: Origin, target: str) -> bytes:
    client = HttpClient()
    response = await client.request("GET", origin, target)
    body = await response.read()
    await client.aclose()
    return body


def ledgers(origin: Origin) -> list[dict[str, float]]:
    """The worker counters of every instance behind a router."""
    stats = json.loads(asyncio.run(get(origin, "/stats")))
    found = []
    for backend in stats["prefill_backends"] + stats["decode_backends"]:
        host, _, port = backend["address"].removeprefix("http://").partition(":")
        text = asyncio.run(get(Origin(host, int(port)), "/metrics")).decode()
        counters = re.findall(r'name="(kv_\w+|running|transfer|draining)"[^}]*\} ([\d.e+]+)', text)
        found.append({name: float(value) for name, value in counters})
    return found


def wait_until_idle(origin: Origin, free: list[float]) -> list[dict[str, float]]:
    """Health reports come once a second: look until the pools are whole, bounded."""
    until = time.monotonic() + 20
    while True:
        now = ledgers(origin)
        if [one.get("kv_free") for one in now] == free or time.monotonic() > until:
            return now


def test_500_requests_at_32_leave_no_trace(cluster: Cluster) -> None:
    """Spine: mixed lengths at concurrency 32 through real processes and shared memory: all
    correct, pools back to full, no growth of descriptors or memory, no process left."""
    free = [one["kv_free"] for one in ledgers(cluster.origin)]
    warm = asyncio.run(load(cluster.origin, 100, 32, seed=1))
    assert warm == {"ok": 100}
    pids = cluster.pids()
    before = usage(pids)
    outcomes = asyncio.run(load(cluster.origin, 500, 32, seed=2))
    assert outcomes == {"ok": 500}
    after = wait_until_idle(cluster.origin, free)
    assert [one["kv_free"] for one in after] == free
    for one in after:
        assert one["kv_quarantined"] == one["kv_held"] == one["kv_leased"] == 0
    for pid, (fds, resident) in usage(pids).items():
        assert fds <= before[pid][0] + 8, f"{pid}: {before[pid][0]} -> {fds} descriptors"
        assert resident <= before[pid][1] + 24, f"{pid}: {before[pid][1]} -> {resident} MiB"
    assert cluster.stop() == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
