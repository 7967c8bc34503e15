"""A leader with a real worker process: ready, unhealthy when it dies, ready again, drained."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path

import attrs
import pytest

from pdcore.config import DisaggConfig, InstanceConfig, ModelConfig, SchedulerConfig, ServerConfig
from pdcore.errors import ConfigError
from pdcore.server.client import HttpClient, Origin
from pdcore.server.leader import Leader, Place
from pdcore.server.process import EXIT_USAGE, Bound, Failed, Health, Ready, Report

BOUND_S = 60.0
CONFIG = InstanceConfig(
    model=ModelConfig(model_path="simulated"),
    disagg=DisaggConfig(role="prefill", http_port=0, bootstrap_port=0),
    server=ServerConfig(restart_initial_s=0.01, drain_s=1.0, log_level="error"),
)


class Rig:
    """One leader in this process, whose reports can be waited for."""

    def __init__(self, config: InstanceConfig, folder: Path) -> None:
        self.reports: list[Report] = []
        self._news = asyncio.Event()
        self.stopping = asyncio.Event()
        self.leader = Leader(config, Place(folder, folder), self._on_report)
        self.running = asyncio.ensure_future(self.leader.run(self.stopping))

    def _on_report(self, report: Report) -> None:
        self.reports.append(report)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def get(self, address: str, path: str) -> tuple[int, dict[str, object]]:
        host, _, port = address.rpartition(":")
        client = HttpClient()
        try:
            reply = await client.request("GET", Origin(host, int(port)), path)
            return reply.status, json.loads(await reply.read())
        finally:
            await client.aclose()


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await main()

    asyncio.run(bounded())


async def health(rig: Rig) -> tuple[int, dict[str, object]]:
    return await rig.get(rig.leader.instance, "/health")


def test_the_life_of_an_instance(tmp_path: Path) -> None:
    """R8 (bootstrap listens first), R10 (ready when its ranks are), D45 (a dead worker is
    seen, and started again), D59 (drained), D44 (every port 0)."""

    async def main() -> None:
        rig = Rig(CONFIG, tmp_path)
        await rig.until(lambda: bool(rig.reports))
        assert rig.reports[0] == Bound(rig.leader.instance, rig.leader.bootstrap)
        await rig.until(lambda: Ready() in rig.reports)
        status, body = await health(rig)
        assert status == 200
        assert body["bootstrap"] == rig.leader.bootstrap
        status, route = await rig.get(rig.leader.bootstrap, "/bootstrap/route")
        assert status == 200
        assert list(route["ranks"]) == ["0,0,0"]

        (pid,) = rig.leader.supervisor.pids().values()
        num_reports = len(rig.reports)
        os.kill(pid, signal.SIGKILL)
        await rig.until(lambda: len(rig.reports) > num_reports)
        lost = rig.reports[num_reports]
        assert isinstance(lost, Health)
        assert "killed by SIGKILL" in lost.problems[0]
        status, body = await health(rig)
        assert (status, body["status"]) == (503, "UnHealthy")
        await rig.until(lambda: rig.reports[-1] == Health([]))
        status, body = await health(rig)
        assert status == 200, body

        rig.stopping.set()
        assert await rig.running == 0
        assert rig.leader.supervisor.pids() == {}
        assert (tmp_path / "log_0.log").exists()

    run(main)


def test_a_worker_that_cannot_be_configured_ends_the_instance(tmp_path: Path) -> None:
    """D33: it does not look alive for ever; the message is the worker's own sentence."""

    async def main() -> None:
        small = SchedulerConfig(kv_cache_bytes=1)
        rig = Rig(attrs.evolve(CONFIG, scheduler=small), tmp_path)
        assert await rig.running == EXIT_USAGE
        failed = rig.reports[-1]
        assert isinstance(failed, Failed)
        assert failed.message.startswith("worker 0: the KV pool holds 0 tokens")
        assert not [r for r in rig.reports if isinstance(r, Ready)]

    run(main)


def test_stop_before_ready_is_clean(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(CONFIG, tmp_path)
        await rig.until(lambda: bool(rig.reports))
        rig.stopping.set()
        assert await rig.running == 0
        assert rig.leader.supervisor.pids() == {}

    run(main)


def test_what_is_not_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async def main() -> None:
        config = attrs.evolve(CONFIG, model=ModelConfig(model_path="simulated", next_n=2))
        with pytest.raises(ConfigError, match=r"model_config\.next_n"):
            Leader(config, Place(tmp_path, tmp_path), lambda report: None)

    run(main)
