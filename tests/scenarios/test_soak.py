"""Load on real processes: every answer right, nothing grows, nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from pdcore.server.client import Origin
from tests.scenarios.processes import Cluster, ledgers, usage, wait_gone
from tests.scenarios.soak_client import load


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    running = Cluster()
    yield running
    running.close()


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
    assert not wait_gone(pids, 0)
